"""What HTTP clients may ask for: the bodies of the OpenAI API and of `/generate`, checked and turned into engine requests.

A field that is not listed here is refused, never ignored. The few that are accepted without effect change no token:
see `Common`.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from inference.errors import ApiError
from inference.types import MAX_TOP_LOGPROBS, SamplingParams

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""stop strings of a request, and characters of each"""

Body = TypeVar("Body", bound="Strict")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes on."""

    max_requests: int = 512
    """sequences in flight, each choice counts; a request beyond them is answered 429"""
    max_choices: int = 64
    """sequences of one request: prompts times n"""
    max_body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    """longest that a client may take to send a body"""
    grace_seconds: float = 30.0
    """how long a shutdown waits for what runs"""

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) > 0:
                raise ValueError(f"server.{item.name}: must be above 0, got {getattr(self, item.name)}")


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """One prompt or several, each a text or token ids."""
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    for prompt in several:
        ids = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
        if not ids and not isinstance(prompt, str):
            raise ValueError("must be a string, a list of token ids, or a list of such prompts")
    return several


def _flat(value: Any) -> Any:
    """A message's content as text; parts that are text are put together."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise ValueError(f"only text parts can be read, got one of type {kind!r}")
        texts.append(part[kind])
    return "".join(texts)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def check(self) -> None:
        """Refuses, with an ApiError, what fields mean together."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Common(Strict):
    """Fields of both routes of the OpenAI API, and vLLM's sampling fields (`extra_body` of the openai client)."""

    prompt_name: ClassVar[str]

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_one_or_more)] = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    priority: int | None = Field(default=None, ge=0)
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # without effect: nothing is stored, priced or shared between clients
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def check(self) -> None:
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs: cannot be streamed; set stream to false", param="prompt_logprobs")

    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams that are what the body says."""
        check_stops(self.stop or ())
        same = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        if self.allowed_token_ids is not None:
            given["allowed_ids"] = tuple(self.allowed_token_ids)
        try:
            given["logit_bias"] = tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())
        except ValueError:
            raise ApiError("logit_bias: its keys are token ids", param="logit_bias") from None
        return given | {"stop": tuple(self.stop or ()), "top_k": max(self.top_k or 0, 0)}


class CompletionBody(Common):
    """POST /v1/completions"""

    prompt_name: ClassVar[str] = "prompt"

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise ApiError("suffix: no text is put in before another; leave it out", param="suffix")
        if self.best_of not in (None, self.n or 1):
            raise ApiError("best_of: only n samples are drawn; leave it out, or set it to n", param="best_of")
        if self.stream and self.echo and self.logprobs is not None:
            raise ApiError("echo: the prompt's logprobs cannot be streamed; set stream to false", param="echo")


class Function(Strict):
    name: str
    arguments: str


class Call(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_flat)] = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what the openai client sends back of an answer
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ChatBody(Common):
    """POST /v1/chat/completions"""

    prompt_name: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """given to the chat template; one that does not know it ignores it"""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: more variables for the chat template"""

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs to be true", param="top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                f"tool_choice: {self.tool_choice!r} is not supported, calls cannot be forced; use 'auto' or 'none'",
                param="tool_choice",
            )
        if (self.response_format or {"type": "text"}).get("type") != "text":
            raise ApiError("response_format: only {'type': 'text'} is supported", param="response_format")
        for i, tool in enumerate(self.tools or ()):
            _check_tool(tool, f"tools.{i}")


def _check_tool(tool: Mapping[str, Any], where: str) -> None:
    """The rest of a tool is its schema, which only the chat template reads."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}: must be {{'type': 'function', 'function': {{'name': ...}}}}", param=where)
    if function.get("strict"):
        raise ApiError(
            f"{where}.function.strict: arguments are not constrained to the schema; leave it out",
            param=f"{where}.function.strict",
        )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _sampling(value: Any) -> Any:
    """JSON's lists as the tuples that SamplingParams has; a fresh seed where none is given."""
    return {"seed": fresh_seed(), **{k: _tuples(v) for k, v in value.items()}} if isinstance(value, dict) else value


class GenerateBody(Strict):
    """POST /generate: token ids in, token ids out."""

    prompt_ids: Annotated[tuple[int, ...], BeforeValidator(_tuples)]
    sampling: Annotated[SamplingParams, BeforeValidator(_sampling)]
    priority: int = Field(default=0, ge=0)
    routing: dict[str, Any] | None = None
    """rows of the first prompt tokens (`models.routes.to_json`)"""

    def check(self) -> None:
        check_stops(self.sampling.stop)


class UpdateBody(Strict):
    """POST /update: the engine is brought to this version of the store."""

    version: Annotated[int, Field(ge=0, lt=2**31)]
    mode: Literal["retract", "keep", "abort"] = "retract"
    restart: bool = False
    """the trainer went back: numbers from now on mean other weights than they did"""

    def check(self) -> None:
        if self.restart and self.mode == "keep":
            raise ApiError("mode: 'keep' would read keys of weights that are gone; use retract or abort", param="mode")


def fresh_seed() -> int:
    return secrets.randbits(32)


def check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise ApiError(f"stop: at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters", param="stop")


def parse(kind: type[Body], raw: bytes, model: str = "") -> Body:
    """A body of that kind from its JSON.

    Args:
        model: that bodies which name one must name.

    Raises:
        ApiError: it is no JSON, is for another model, or names the first field that is unknown, missing, mistyped or out of
            range.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = "this field is not supported; leave it out"
        if first["type"] == "missing":
            message = "this field is required"
        raise ApiError(f"{param}: {message}" if param else f"body: {message}", param=param or None) from None
    if isinstance(body, Common) and body.model != model:
        message = f"model: {body.model!r} does not exist; {model!r} does"
        raise ApiError(message, status=404, param="model", code="model_not_found")
    body.check()
    return body
