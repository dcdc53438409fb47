"""launch.serve, over real sockets: the unmodified openai client, clients that misbehave, load, failures, shutdown."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

import launch.serve
from inference.answers import Answer
from inference.api import MAKES, Door
from inference.engine import Engine
from inference.errors import ApiError
from inference.front import AsyncEngine
from inference.protocol import Limits
from inference.text import Detokenizer
from inference.types import Completion, FinishReason, Request, Tokens
from launch.serve import Server, bind, make_door, make_engine, settings
from models.routes import from_json
from models.tokenizer import CHATML, ByteTokenizer
from sharding.deltas import checksums
from sharding.store import WeightStore

pytestmark = pytest.mark.plain_code

REPO = Path(__file__).parents[1]
MODEL = REPO / "runs/models/smollm2-135m-instruct"
TINY = str(REPO / "configs/tiny.py")
SMALL = [
    f"--config.{item}"
    for item in (
        *("model.shape.num_layers=1", "engine.max_context=256", "engine.num_pages=400", "engine.token_buckets=(128,)"),
        *("engine.slot_buckets=(32,)", "engine.context_buckets=(256,)"),
    )
]
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HELLO: Any = [{"role": "user", "content": "hello"}]
DEADLINE = 20.0


@pytest.fixture(scope="module")
def engine() -> Engine:
    what = settings(Namespace(model=None, config=TINY), SMALL)
    made, tokenizer = make_engine(what.model, what.engine, what.seed)
    tokenizer.chat_template = TOOLS
    made.warm_up()
    return made


@pytest.fixture
def unhurried(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long answers take seconds: on a busy machine they would end before the test's own thread gets to leave."""
    step = engine.step

    def slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return step(*args)

    monkeypatch.setattr(engine, "step", slowly)


def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


@dataclass
class Live:
    """A server in a thread."""

    url: str
    door: Door
    server: Server
    thread: threading.Thread
    http: httpx.Client

    @property
    def front(self) -> AsyncEngine:
        front: Any = self.door.front
        return front

    @property
    def engine(self) -> Engine:
        return self.front.engine

    def call(self, work: Any) -> Any:
        """Awaits it in the server's loop."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self.server.loop)
        return future.result(DEADLINE)

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


@contextmanager
def serving(
    engine: Engine, *, key: str | None = None, front: Any = None, store: str | None = None, **limits: Any
) -> Iterator[Live]:
    assert isinstance(engine.tokenizer, ByteTokenizer)
    door = make_door(engine, engine.tokenizer, "tiny", Limits(**limits), key, store)
    door.front = front or door.front
    listener = bind("127.0.0.1", 0, key)
    listener.listen()  # from now on clients can connect; they wait until the server accepts
    server = Server(door)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until(lambda: server.started)
        with httpx.Client(base_url=url, timeout=DEADLINE) as http:
            yield Live(url, door, server, thread, http)
    finally:
        with suppress(RuntimeError):  # its loop is closed: the test has ended it
            server.loop.call_soon_threadsafe(server.finish)
        thread.join(DEADLINE)
        assert not thread.is_alive()
        listener.close()
    reconcile(engine)


def reconcile(engine: Engine) -> None:
    """Nothing is left in the engine, and every page can be had."""
    until(lambda: engine.num_in_flight == 0)
    assert not engine.scheduler.running and not engine.scheduler.waiting
    engine.scheduler.check()
    engine.forget()
    assert engine.scheduler.pool.num_free == engine.config.num_pages - 1


@pytest.fixture(scope="module")
def live(engine: Engine) -> Iterator[Live]:
    with serving(engine) as made:
        yield made


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.client() as made:
        yield made


class Scripted:
    """Stands where AsyncEngine is: every sequence samples the same text, piece by piece, when `go` lets it."""

    def __init__(self, engine: Engine, text: str = "", size: int = 3) -> None:
        assert isinstance(engine.tokenizer, ByteTokenizer)
        self.engine, self.size = engine, size
        self.ids = [*engine.tokenizer.encode(text, allow_special=True), engine.tokenizer.eos_ids[0]]
        self.error: Exception | None = None
        self.reason = FinishReason.STOP
        self.go = threading.Event()
        self.go.set()
        self.streams = 0
        self.version = engine.version

    async def stream(self, request: Request) -> AsyncIterator[Tokens]:
        self.streams += 1
        try:
            for first in range(0, len(self.ids), self.size):
                yield self._tokens(self.ids[first : first + self.size])
                while not self.go.is_set():
                    await asyncio.sleep(0.005)
                if self.error is not None:
                    raise self.error
            yield Completion(
                **vars(self._tokens(self.ids)),
                request_id=request.id,
                prompt_ids=request.prompt_ids,
                finish_reason=self.reason,
                stop_reason=self.ids[-1],
                cached_tokens=0,
                prefilled_tokens=0,
                prompt_logprobs=None,
            )
        finally:
            self.streams -= 1

    @staticmethod
    def _tokens(ids: list[int]) -> Tokens:
        n, full = len(ids), np.full(len(ids), -0.5, np.float32)
        tops = np.zeros((n, 0))
        return Tokens(
            ids=np.asarray(ids, np.int32),
            logprobs=full,
            logprobs_full=full,
            versions=np.zeros(n),
            top_ids=tops,
            top_logprobs=tops,
        )


def text_of(engine: Engine, ids: list[int]) -> str:
    assert engine.tokenizer is not None
    detokenizer = Detokenizer(engine.tokenizer)
    return detokenizer.add(ids) + detokenizer.flush()


def generate(live: Live, prompt: str, **sampling: Any) -> dict[str, Any]:
    response = live.post("/generate", {"prompt_ids": list(prompt.encode()), "sampling": {"max_tokens": 12, **sampling}})
    assert response.status_code == 200, response.text
    return response.json()


# ---- completions


def test_completion_is_what_the_engine_gives(live: Live, client: OpenAI) -> None:
    tokens = generate(live, "hello", seed=3, stop_ids=[258, 256])
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=12, seed=3)
    assert answer.choices[0].text == text_of(live.engine, tokens["ids"])
    assert answer.choices[0].finish_reason == tokens["finish_reason"] and answer.object == "text_completion"
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == len(tokens["ids"]) and answer.usage.total_tokens == 5 + len(tokens["ids"])
    assert tokens["versions"] == [0] * len(tokens["ids"]) and len(tokens["logprobs"]) == len(tokens["ids"])
    again = client.completions.create(model="tiny", prompt="hello", max_tokens=12, seed=3)
    assert again.choices[0].text == answer.choices[0].text
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 4  # all but the last token, whose logits are wanted


def test_forms_of_a_prompt(live: Live, client: OpenAI) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, seed=1, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    one, other = texts("one"), texts("other")
    assert texts(["one", "other"]) == one + other
    assert texts([*b"one"]) == one and texts([[*b"one"], [*b"other"]]) == one + other
    assert texts(["one", "other"], echo=True) == ["one" + one[0], "other" + other[0]]
    assert texts([*b"one"], echo=True) == ["one" + one[0]]
    special = client.completions.create(model="tiny", prompt="<|im_end|>", max_tokens=1)
    assert special.usage is not None and special.usage.prompt_tokens == 1
    answer = client.completions.create(model="tiny", prompt="one")
    assert answer.usage is not None and answer.usage.completion_tokens <= 16


def test_samples(client: OpenAI) -> None:
    """n samples differ; sample i is the one of seed + i; without a seed each request has its own."""
    options: Any = {"model": "tiny", "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    three = client.completions.create(prompt=["one", "two"], n=3, seed=5, **options)
    assert [choice.index for choice in three.choices] == [0, 1, 2, 3, 4, 5]
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 6
    assert three.usage is not None and three.usage.prompt_tokens == 6
    third = client.completions.create(prompt="two", seed=7, best_of=1, **options)
    assert third.choices[0].text == texts[5]
    two = [client.completions.create(prompt="one", **options).choices[0].text for _ in range(2)]
    assert two[0] != two[1]


def test_stop(live: Live, client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="stop", seed=2, max_tokens=40, extra_body={"ignore_eos": True})
    text = whole.choices[0].text
    stop = next(
        text[i : i + 2] for i in range(6, len(text)) if "\ufffd" not in text[i : i + 2] and i == text.find(text[i : i + 2])
    )
    for given_stop in (stop, ["never", stop]):
        answer = client.completions.create(
            model="tiny", prompt="stop", seed=2, max_tokens=40, stop=given_stop, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == text[: text.find(stop)] and answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens < 40
    token = generate(live, "stop", seed=2, ignore_eos=True)["ids"][4]
    answer = client.completions.create(
        model="tiny", prompt="stop", seed=2, max_tokens=40, extra_body={"stop_token_ids": [token]}
    )
    assert answer.choices[0].finish_reason == "stop" and text.startswith(answer.choices[0].text)
    only = {"allowed_token_ids": [258, 256], "ignore_eos": True}  # a stop string that is a control token
    answer = client.completions.create(model="tiny", prompt="stop", seed=2, max_tokens=40, stop="<|im_end|>", extra_body=only)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].text == ""


def test_sampling_fields(live: Live, client: OpenAI) -> None:
    def sampled(**options: Any) -> str:
        return client.completions.create(model="tiny", prompt="x", max_tokens=8, seed=1, **options).choices[0].text

    def tokens(**sampling: Any) -> str:
        ids = generate(live, "x", max_tokens=8, seed=1, stop_ids=[258, 256], **sampling)["ids"]
        return text_of(live.engine, ids)

    assert sampled(temperature=0) == tokens(temperature=0) == sampled(extra_body={"top_k": 1}) != tokens()
    assert sampled(extra_body={"allowed_token_ids": [65]}) == "A" * 8
    assert sampled(logit_bias={"66": 100}, temperature=0) == "B" * 8
    assert sampled(top_p=0.5, presence_penalty=1, frequency_penalty=-1) == tokens(
        top_p=0.5, presence_penalty=1.0, frequency_penalty=-1.0
    )
    assert sampled(extra_body={"min_p": 0.5, "repetition_penalty": 2, "top_k": -1, "priority": 3}) == tokens(
        min_p=0.5, repetition_penalty=2.0
    )
    unset = dict.fromkeys(("top_p", "stop", "seed", "logit_bias", "user", "stream_options", "suffix", "n"))
    assert live.post("/v1/completions", {"model": "tiny", "prompt": "x", **unset}).status_code == 200


def test_logprobs(live: Live, client: OpenAI) -> None:
    tokens = generate(
        live, "x", seed=1, max_tokens=6, top_logprobs=3, prompt_logprobs=True, temperature=0.5, stop_ids=[258, 256]
    )
    options: Any = {"model": "tiny", "seed": 1, "max_tokens": 6, "temperature": 0.5}
    choice = client.completions.create(prompt="x", logprobs=2, **options).choices[0]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs == tokens["logprobs_full"]
    assert tokens["logprobs"] != tokens["logprobs_full"] and choice.logprobs.text_offset == [*range(len(tokens["ids"]))]
    assert choice.logprobs.tokens is not None and choice.logprobs.top_logprobs is not None
    for text, value, top, best in zip(
        choice.logprobs.tokens, tokens["logprobs_full"], choice.logprobs.top_logprobs, tokens["top_logprobs"], strict=True
    ):
        assert top[text] == value or text == "\ufffd"
        assert "\ufffd" in top or max(top.values()) == best[0]  # tokens of one text have one entry
    echo = client.completions.create(prompt="xyz", logprobs=1, echo=True, **options).choices[0]
    prompt = generate(live, "xyz", prompt_logprobs=True, top_logprobs=1)["prompt_logprobs"]
    assert echo.logprobs is not None and echo.logprobs.token_logprobs is not None and echo.logprobs.tokens is not None
    assert [None, *echo.logprobs.token_logprobs[1:3]] == prompt["logprobs"] and echo.logprobs.tokens[:3] == ["x", "y", "z"]
    body = {"model": "tiny", "prompt": ["xyz", "x"], "n": 2, "seed": 1, "max_tokens": 1, "prompt_logprobs": 1}
    entries = [choice["prompt_logprobs"] for choice in live.post("/v1/completions", body).json()["choices"]]
    assert entries[0] == entries[1] and entries[2] == entries[3] == [None] and entries[0][0] is None
    for place, token in ((1, "y"), (2, "z")):
        own = entries[0][place][str(ord(token))]
        assert own["logprob"] == prompt["logprobs"][place] and own["decoded_token"] == token
        likeliest = entries[0][place][str(prompt["top_ids"][place][0])]
        assert likeliest["rank"] == 1 and likeliest["logprob"] == prompt["top_logprobs"][place][0]
    chat = live.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert list(chat["prompt_logprobs"][1]) == [str(ord("u"))]


# ---- streams


def test_a_stream_is_the_whole_in_pieces(client: OpenAI) -> None:
    for options in ({"logprobs": 1, "echo": False}, {"echo": True}, {"stop": ["e", "\x00"]}):
        body: Any = {"model": "tiny", "prompt": ["one", "three"], "n": 2, "seed": 9, "max_tokens": 24, **options}
        whole = client.completions.create(**body)
        texts, tokens, reasons, usages = [""] * 4, [[] for _ in range(4)], {}, []
        for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
            usages.append(chunk.usage)
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                tokens[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert texts == [choice.text for choice in whole.choices]
        assert [reasons[i] for i in range(4)] == [choice.finish_reason for choice in whole.choices]
        assert tokens == [(choice.logprobs and choice.logprobs.token_logprobs) or [] for choice in whole.choices]
        assert usages[:-1] == [None] * (len(usages) - 1) and usages[-1] is not None and whole.usage is not None
        assert usages[-1].completion_tokens == whole.usage.completion_tokens


def test_chat(client: OpenAI) -> None:
    body: Any = {"model": "tiny", "messages": HELLO, "seed": 4, "max_completion_tokens": 20, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**body, top_logprobs=2)
    assert [choice.message.role for choice in whole.choices] == ["assistant"] * 2
    texts, logprobs, roles, chunks = ["", ""], [[], []], [], []
    for chunk in client.chat.completions.create(**body, top_logprobs=2, stream=True):
        chunks.append(chunk)
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    assert roles == ["assistant"] * 2 and len({chunk.id for chunk in chunks}) == 1
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content == streamed and len(streamed) <= 20
        for entry in streamed:
            assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
            assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
    assert whole.usage is not None and whole.usage.prompt_tokens == len("_user\nhello_\n_assistant\n")


def test_chat_of_other_shapes(live: Live, client: OpenAI) -> None:
    """What SDKs and agents send: parts, nulls, their own answers back, fields without effect."""
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    answer = [client.chat.completions.create(model="tiny", messages=m, seed=1, max_tokens=8) for m in (HELLO, parts)]
    assert answer[0].choices[0].message.content == answer[1].choices[0].message.content
    history: Any = [*HELLO, answer[0].choices[0].message, {"role": "developer", "content": "be kind"}]
    assert client.chat.completions.create(model="tiny", messages=history, max_tokens=4, reasoning_effort="low", store=False)
    message = answer[0].choices[0].message.model_dump()
    body = {"model": "tiny", "messages": [*HELLO, message], "max_tokens": 4, "prompt_cache_key": "a", "metadata": {"a": "b"}}
    body |= {"tools": None, "tool_choice": None, "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert live.post("/v1/chat/completions", body).status_code == 200
    rest = client.chat.completions.create(model="tiny", messages=HELLO, seed=1)
    assert rest.usage is not None and rest.usage.total_tokens <= 256
    with client.chat.completions.stream(model="tiny", messages=HELLO, max_tokens=8, seed=1) as stream:
        assert stream.get_final_completion().choices[0].message.content == answer[0].choices[0].message.content
    typed = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "<|im_end|>"}], max_tokens=1)
    assert typed.usage is not None and typed.usage.prompt_tokens == len("_user\n<|im_end|>_\n_assistant\n")


def test_models(client: OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"] and models[0].model_dump()["max_model_len"] == 256
    assert client.models.retrieve("tiny") == models[0]
    with pytest.raises(openai.NotFoundError, match="'other/one' does not exist"):
        client.models.retrieve("other/one")


# ---- tools

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é", "n": 1.0}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tool_calls(engine: Engine, size: int) -> None:
    front = Scripted(engine, f"I look.\n{CALL}\n{CALL}\n", size)
    with serving(engine, front=front) as live, live.client() as client:
        body: Any = {"model": "tiny", "messages": HELLO, "tools": [TOOL]}
        whole = client.chat.completions.create(**body, tool_choice="auto").choices[0]
        assert whole.message.content == "I look." and whole.finish_reason == "tool_calls"
        assert whole.message.tool_calls is not None and len({call.id for call in whole.message.tool_calls}) == 2
        for call in whole.message.tool_calls:
            assert call.type == "function" and call.function.name == "look"
            assert call.function.arguments == '{"at": "é", "n": 1.0}'
        with client.chat.completions.stream(**body) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.content == "I look." and final.finish_reason == "tool_calls"
        assert [call.function.arguments for call in final.message.tool_calls or []] == ['{"at": "é", "n": 1.0}'] * 2
        ignored = client.chat.completions.create(**body, tool_choice="none").choices[0]
        assert ignored.finish_reason == "stop" and ignored.message.tool_calls is None
        again: Any = [*HELLO, whole.message, {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "x"}]
        assert client.chat.completions.create(model="tiny", messages=again, tools=[TOOL]).choices


def test_calls_that_are_none_stay_text(engine: Engine) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"at": </tool_call> and <tool_call>'
    front = Scripted(engine, text, 2)
    with serving(engine, front=front) as live, live.client() as client:
        body: Any = {"model": "tiny", "messages": HELLO, "tools": [TOOL]}
        choice = client.chat.completions.create(**body).choices[0]
        assert choice.message.content == text and choice.finish_reason == "stop" and choice.message.tool_calls is None
        chunks = client.chat.completions.create(**body, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


# ---- refusals

PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TEXT, TALK, IDS = "/v1/completions", "/v1/chat/completions", "/generate"


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        (TEXT, {"prompt": None}, "prompt", "must be a string, a list"),
        (TEXT, {"prompt": [["a"]]}, "prompt", "must be a string, a list"),
        (TEXT, {"prompt": []}, "prompt", "has no tokens"),
        (TEXT, {"prompt": ""}, "prompt", "has no tokens"),
        (TEXT, {"prompt": [264]}, "prompt", "264 is outside the model's vocabulary of 264"),
        (TEXT, {"prompt": [2**40]}, "prompt", "outside the model's vocabulary"),
        (TEXT, {"prompt": [True]}, "prompt", "must be a string, a list"),
        (TEXT, {"prompt": "x" * 250, "max_tokens": 10}, "max_tokens", "maximum context length is 256 tokens, but 250"),
        (TEXT, {"prompt": "x" * 256}, "prompt", "maximum context length is 256 tokens, but 256"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (TEXT, {"max_tokens": 1.5}, "max_tokens", "valid integer"),
        (TEXT, {"max_tokens": "5"}, "max_tokens", "valid integer"),
        (TEXT, {"temperature": -1}, "temperature", r"must be 0 \(greedy\) or in"),
        (TEXT, {"top_p": 0}, "top_p", r"must be in \(0, 1\]"),
        (TEXT, {"top_k": -2}, "top_k", "greater than or equal to -1"),
        (TEXT, {"n": 0}, "n", "greater than or equal to 1"),
        (TEXT, {"n": 65}, "n", "at most 64 sequences a request, got 65"),
        (TEXT, {"best_of": 2}, "best_of", "only n samples are drawn"),
        (TEXT, {"suffix": "s"}, "suffix", "no text is put in before another; leave it out"),
        (TEXT, {"stop": [""]}, "stop", "an empty string would stop everything"),
        (TEXT, {"stop": ["a"] * 17}, "stop", "at most 16 strings of 256 characters"),
        (TEXT, {"stop": "a" * 257}, "stop", "at most 16 strings of 256 characters"),
        (TEXT, {"stop": 5}, "stop", "valid"),
        (TEXT, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        (TEXT, {"logprobs": 1, "echo": True, "stream": True}, "echo", "cannot be streamed"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        (TEXT, {"logit_bias": {"a": 1}}, "logit_bias", "its keys are token ids"),
        (TEXT, {"logit_bias": {"264": 1}}, "logit_bias", "outside the model's vocabulary"),
        (TEXT, {"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        (TEXT, {"allowed_token_ids": []}, "allowed_token_ids", "needs at least one token id"),
        (TEXT, {"stop_token_ids": list(range(9))}, "stop_token_ids", "at most 8"),
        (TEXT, {"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        (TEXT, {"stream_options": {"chunk": True}}, "stream_options.chunk", "not supported"),
        (TEXT, {"guided_json": {}}, "guided_json", "this field is not supported; leave it out"),
        (TALK, {"messages": []}, "messages", "at least 1 item"),
        (TALK, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "Input should be"),
        (TALK, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "only text parts"),
        (TALK, {"messages": [{"role": "user", "content": "x", "cache": 1}]}, "messages.0.cache", "not supported"),
        (TALK, {"messages": [{"role": "user", "content": "x" * 256}]}, "messages", "maximum context length is 256"),
        (TALK, {"max_completion_tokens": 256}, "max_tokens", "maximum context length is 256"),
        (TALK, {"tool_choice": "required"}, "tool_choice", "calls cannot be forced; use 'auto' or 'none'"),
        (TALK, {"tool_choice": {"type": "function"}}, "tool_choice", "calls cannot be forced"),
        (TALK, {"tools": [{"type": "web_search"}]}, "tools.0", "must be {'type': 'function'"),
        (TALK, {"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict", "not constrained"),
        (TALK, {"parallel_tool_calls": False}, "parallel_tool_calls", "True"),
        (TALK, {"response_format": {"type": "json_object"}}, "response_format", "only {'type': 'text'} is supported"),
        (TALK, {"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        (TALK, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "has no such variable"),
        (TALK, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "has no such variable"),
        (TALK, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        (TALK, {"functions": []}, "functions", "not supported"),
        (IDS, {"prompt_ids": []}, "prompt_ids", "has no tokens"),
        (IDS, {"prompt_ids": "abc"}, "prompt_ids", "valid"),
        (IDS, {"prompt_ids": [-1]}, "prompt", "outside the model's vocabulary"),
        (IDS, {"sampling": {"max_tokens": 300}}, "max_tokens", "maximum context length"),
        (IDS, {"sampling": {"max_tokens": 3, "top_p": 2}}, "sampling", r"top_p: must be in \(0, 1\]"),
        (IDS, {"sampling": {"max_tokens": 3, "beam": 2}}, "sampling.beam", "not supported"),
        (IDS, {"sampling": {"max_tokens": "3"}}, "sampling.max_tokens", "valid integer"),
        (IDS, {"sampling": {"max_tokens": 3, "stop": ["a" * 300]}}, "stop", "at most 16"),
    ],
)
def test_refused(live: Live, path: str, change: dict[str, Any], param: str, words: str) -> None:
    base = {TEXT: PLAIN, TALK: CHAT, IDS: {"prompt_ids": [1], "sampling": {"max_tokens": 1}}}[path]
    response = live.post(path, base | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and re.search(words, error["message"]), error
    assert error["type"] == "invalid_request_error"
    assert (error["code"] == "context_length_exceeded") == ("maximum context" in error["message"])


def test_errors_as_the_client_sees_them(live: Live, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.completions.create(model="tiny", prompt="x", top_p=7)
    assert caught.value.param == "top_p" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="tiny", prompt="x", top_p=7, stream=True)
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist; 'tiny' does") as missing:
        client.chat.completions.create(model="gpt", messages=HELLO)
    assert missing.value.code == "model_not_found"
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405)):
        response = live.http.request(method, path)
        assert response.status_code == status and path in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe{}", b"\x00" * 100, b"[" * 100_000),
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": ' + b"1" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_requests(live: Live, raw: bytes) -> None:
    for path in MAKES:
        response = live.http.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3) | st.just(2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
NAMES = [
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "logit_bias",
    "stream",
    "stream_options",
    "top_k",
    "logprobs",
]
NAMES += ["echo", "prompt", "messages", "tools", "tool_choice", "chat_template_kwargs", "prompt_ids", "sampling", "priority"]


@given(st.sampled_from(sorted(MAKES)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
def test_any_body_is_refused_or_answered(live: Live, path: str, change: dict[str, Any]) -> None:
    ids = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    base = {TEXT: PLAIN, TALK: CHAT, IDS: {"prompt_ids": [1], "sampling": {"max_tokens": 1}}}.get(path, ids)
    raw = json.dumps(base | change).encode()
    try:
        assert isinstance(MAKES[path](live.door.served, raw), Answer)
    except (ApiError, ValueError) as error:
        assert str(error)


# ---- bodies and clients that misbehave


def test_sizes_and_types(engine: Engine) -> None:
    with serving(engine, max_body_bytes=1000) as live:
        big = json.dumps({"model": "tiny", "prompt": "x" * 2000}).encode()
        kind = {"content-type": "application/json"}
        for content in (big, iter([big[:500], big[500:]])):  # with a length, and in chunks
            response = live.http.post(TEXT, content=content, headers=kind)
            assert response.status_code == 413 and "larger than 1000 bytes" in response.json()["error"]["message"]
        for headers in ({"content-type": "text/plain"}, {}):
            response = live.http.post(TEXT, content=b"{}", headers=headers)
            assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]
        assert live.metrics()["twinax_requests_total 413 /v1/completions"] == 2


def raw_request(live: Live, body: bytes, length: int | None = None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2])), timeout=DEADLINE)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {length or len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_slow_body(engine: Engine) -> None:
    with serving(engine, body_seconds=0.1) as live, raw_request(live, b'{"model":', 1000) as connection:
        answer = b"".join(iter(lambda: connection.recv(4096), b""))  # the server closes
        assert answer.startswith(b"HTTP/1.1 408") and b"within 0.1 seconds" in answer


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave(live: Live, stream: bool) -> None:
    """Their sequences end, and all pages come back (`reconcile`)."""
    before = live.metrics().get("twinax_requests_total cancelled /v1/completions", 0)
    body = {**PLAIN, "max_tokens": 250, "n": 8, "stream": stream, "ignore_eos": True}
    for _ in range(4):
        with raw_request(live, json.dumps(body).encode()) as connection:
            if stream:
                assert connection.recv(20).startswith(b"HTTP/1.1 200")
            else:
                until(lambda: live.engine.num_in_flight > 0)
    until(lambda: live.metrics().get("twinax_requests_total cancelled /v1/completions", 0) == before + 4)
    assert live.door.active == 0
    reconcile(live.engine)


def test_clients_that_leave_before_their_body(live: Live) -> None:
    before = live.metrics().get("twinax_requests_total cancelled /v1/completions", 0)
    raw_request(live, b'{"model":', 1000).close()
    until(lambda: live.metrics().get("twinax_requests_total cancelled /v1/completions", 0) == before + 1)


# ---- many at once


def test_200_streams_are_each_what_they_are_alone(live: Live) -> None:
    bodies: list[Any] = [
        {
            "model": "tiny",
            "prompt": f"{'the same beginning ' * (i % 3)}{i}",
            "seed": i,
            "max_tokens": 10 + i,
            "temperature": 0.8,
        }
        for i in range(20)
    ]
    with live.client() as client:
        alone = [client.completions.create(**body).choices[0].text for body in bodies]

    async def one(client: AsyncOpenAI, body: Any) -> str:
        stream = await client.completions.create(**body, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies * 10))

    before = live.metrics()
    assert asyncio.run(all_of_them()) == alone * 10
    reconcile(live.engine)
    after = live.metrics()
    assert after["twinax_requests_total 200 /v1/completions"] - before["twinax_requests_total 200 /v1/completions"] == 200
    assert after["twinax_time_to_first_token_seconds_count"] - before["twinax_time_to_first_token_seconds_count"] == 200
    assert after["twinax_cached_tokens_total"] > before["twinax_cached_tokens_total"]


def test_metrics(live: Live) -> None:
    before = live.metrics()
    tokens = generate(live, "count", max_tokens=9)
    after = live.metrics()
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gained["twinax_sampled_tokens_total"] == len(tokens["ids"]) == 9
    assert gained["twinax_prompt_tokens_total"] == 5 and gained["twinax_inter_token_latency_seconds_count"] == 8
    assert gained["twinax_requests_total 200 /generate"] == 1
    assert after["twinax_running"] == after["twinax_waiting"] == after["twinax_weight_version"] == 0
    assert after["twinax_pages"] == 400 and 0 < after["twinax_free_pages"] < 400 and "twinax_preemptions_total" in after


def test_too_many(engine: Engine) -> None:
    front = Scripted(engine, "abcdef")
    front.go.clear()
    with serving(engine, front=front, max_requests=2) as live, live.client() as client:
        stream = client.completions.create(model="tiny", prompt="x", n=2, stream=True)
        assert next(iter(stream)).choices
        with pytest.raises(openai.RateLimitError, match="2 sequences are in flight already") as caught:
            client.completions.create(model="tiny", prompt="x")
        assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "rate_limit_exceeded"
        front.go.set()
        assert len(list(stream)) > 1
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="x", n=3)
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == "abcdef"


# ---- keys


def test_without_a_key_only_this_machine_is_named(engine: Engine) -> None:
    """A page whose name was rebound to 127.0.0.1 sends its own host."""
    with serving(engine) as live:
        for host, status in (("evil.example", 403), ("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:80", 200)):
            assert live.http.get("/v1/models", headers={"host": host}).status_code == status
        assert "host: 'evil.example'" in live.http.get("/metrics", headers={"host": "evil.example"}).text


def test_keys(engine: Engine) -> None:
    with serving(engine, key="s3cret") as live, live.client("s3cret") as client, live.client("wrong") as stranger:
        assert client.models.list().data[0].id == "tiny"
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError, match="missing or wrong") as caught:
            stranger.completions.create(model="tiny", prompt="x")
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        assert live.http.get("/health").status_code == 200
        for path in ("/metrics", "/v1/models", "/v1/models/tiny"):
            for value in (b"", b"s3cret", b"Basic s3cret", b"Bearer", b"Bearer s3cre\xe9", b"Bearer s3cret2"):
                assert live.http.get(path, headers=[(b"authorization", value)]).status_code == 401
            assert live.http.get(path).status_code == 401
            assert live.http.get(path, headers={"authorization": "bearer s3cret"}).status_code == 200
        assert live.post("/generate", {}).status_code == 401


# ---- updates, failures, shutdown


def test_an_update_in_the_middle(engine: Engine) -> None:
    """Aborted sequences are said to be: text clients get an error, /generate what there is."""
    front = Scripted(engine, "abcdef")
    front.reason = FinishReason.ABORT
    with serving(engine, front=front) as live, live.client() as client:
        with pytest.raises(openai.InternalServerError, match="aborted by an update of the weights; send it again"):
            client.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.APIError, match="aborted by an update"):
            list(client.completions.create(model="tiny", prompt="x", stream=True))
        answer = live.post("/generate", {"prompt_ids": [1], "sampling": {"max_tokens": 9}}).json()
        assert answer["finish_reason"] == "abort" and len(answer["ids"]) == 7


def own_engine(engine: Engine) -> Engine:
    """Another with the same programs, whose weights may change."""
    what = settings(Namespace(model=None, config=TINY), SMALL)
    made, _ = make_engine(what.model, what.engine, what.seed)
    made.runner._programs = engine.runner._programs
    return made


def test_updates_from_a_store(engine: Engine, tmp_path: Path) -> None:
    """While streams run: they go on, under the new version."""
    url = f"file://{tmp_path}/"
    store, weights = WeightStore(url, anchor_every=100), [engine.params]
    for scale in (1.125, 0.875):
        weights.append({name: array * jax.numpy.asarray(scale, array.dtype) for name, array in engine.params.items()})
    store.publish(weights[0], 0)
    store.publish(weights[1], 1, 0, weights[0])
    with serving(own_engine(engine), store=url, key="k") as live, ThreadPoolExecutor(8) as threads:
        follower: Any = live.door.follower
        live.engine.config = replace(live.engine.config, decode_steps=1)
        live.http.headers["authorization"] = "Bearer k"
        assert live.http.get("/health").json() == {"status": "ok", "version": 0}
        running: list[Any] = []
        prepare = follower.prepare

        def staged(*arguments: Any) -> Any:
            """The requests begin when all is staged, and run when it comes to the swap."""
            update = prepare(*arguments)
            body: Any = {"max_tokens": 200, "ignore_eos": True}
            running.extend(threads.submit(generate, live, "x" * (20 + i), **body) for i in range(8))
            until(lambda: live.engine.num_in_flight == 8 and live.engine.stats.sampled_tokens > 16)
            return update

        follower.prepare = staged
        answer = live.post("/update", {"version": 1, "mode": "retract"}).json()
        follower.prepare = prepare
        assert (answer["version"], answer["base"], answer["retracted"]) == (1, 0, 8)
        assert answer["fetch_ms"] > 0 and answer["pause_ms"] > 0 and len(answer) == 5
        for future in running:
            versions = future.result(DEADLINE)["versions"]
            assert len(versions) == 200 and versions == sorted(versions) and set(versions) == {0, 1}
        assert live.http.get("/health").json()["version"] == 1
        assert live.post("/update", {"version": 1}).json()["pause_ms"] == 0
        store.rewind(0)
        store.publish(weights[2], 1, 0, weights[0])
        for body, status, message in (
            ({"version": 1}, 409, "version: 1 is loaded with other bits; set restart"),
            ({"version": 5}, 409, "version: the store does not hold 5; it holds 0, 1"),
            ({"version": 0}, 409, "version: 0 is older than the loaded 1; set restart"),
            ({"version": 1, "mode": "keep", "restart": True}, 400, "mode: 'keep' would read keys of weights that are gone"),
            ({"version": -1}, 400, "version: Input should be greater than or equal to 0"),
            ({"version": 1, "mode": "stop"}, 400, "mode: "),
        ):
            refused = live.post("/update", body)
            assert refused.status_code == status and refused.json()["error"]["message"].startswith(message), refused.text
        assert live.post("/update", {"version": 1, "restart": True}).json()["base"] == 1
        assert checksums(live.engine.params) == checksums(weights[2])
        assert live.http.post("/update", json={"version": 0}, headers={"authorization": ""}).status_code == 401


def test_without_a_store_there_are_no_updates(live: Live) -> None:
    refused = live.post("/update", {"version": 1})
    assert refused.status_code == 409 and "start it with --store URL" in refused.text


def test_the_newest_of_the_store_is_served(tmp_path: Path) -> None:
    """An empty one leaves the config's own weights as version 0."""
    what = settings(Namespace(model=None, config=TINY), SMALL)
    url = f"file://{tmp_path}/"
    first, _ = make_engine(what.model, what.engine, what.seed, url)
    assert first.version == 0
    store, scaled = WeightStore(url), {name: array * 2 for name, array in first.params.items()}
    store.publish(scaled, 3)
    late, _ = make_engine(what.model, what.engine, what.seed, url)
    assert late.version == 3 and checksums(late.params) == checksums(scaled) and not store.head().pins


def test_generate_takes_and_gives_routing() -> None:
    """What another process needs to go on: rows of the prompt in, rows of the rest out."""
    what = settings(Namespace(model=None, config=str(REPO / "configs/tiny_moe.py")), SMALL)
    engine, _ = make_engine(what.model, what.engine, what.seed)
    engine.warm_up()
    with serving(engine) as live:
        first = generate(live, "hello", seed=1, max_tokens=4)
        rows = from_json(first["routing"], "routing")
        assert first["routing_start"] == 0 and len(rows) == 8
        turn = {"prompt_ids": [*b"hello", *first["ids"]], "sampling": {"max_tokens": 3}, "routing": first["routing"]}
        second = live.post("/generate", turn).json()
        assert second["routing_start"] == 8 and len(from_json(second["routing"], "routing")) == 3
        broken = {**turn, "routing": {**first["routing"], "crc32": 1}}
        assert "routing: its bytes do not have the checksum" in live.post("/generate", broken).json()["error"]["message"]
        many = {**turn, "prompt_ids": [1, 2]}
        assert live.post("/generate", many).json()["error"]["param"] == "routing"


def test_the_real_front_aborts(live: Live) -> None:
    with live.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(iter(stream)).choices
        live.call(live.front.pause("abort"))
        with pytest.raises(openai.APIError, match="aborted by an update"):
            list(stream)
        live.call(live.front.resume())


def test_other_dialects(engine: Engine) -> None:
    """Responses and Messages; who names no session is alone, so that nobody gets what another was told."""
    assert isinstance(engine.tokenizer, ByteTokenizer)
    with serving(engine) as live:
        launch.serve.add_dialects(live.door, engine.tokenizer)
        asked = {"model": "tiny", "input": "hello", "max_output_tokens": 4, "temperature": 0}  # a sampled one may end sooner
        first, second = (live.post("/v1/responses", asked).json() for _ in range(2))
        assert first["status"] == second["status"] == "incomplete" and first["id"] != second["id"]
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
        said = live.http.post("/v1/messages", json=body, headers={"x-session": "mine"}).json()
        again = live.http.post("/v1/messages", json=body, headers={"x-session": "mine"}).json()
        assert said["stop_reason"] == "max_tokens" and said == again  # a retry
        assert live.post("/v1/chat/completions", {**body, "n": 2}).status_code == 200  # the door's own


def test_an_engine_that_fails(engine: Engine) -> None:
    front = Scripted(engine, "abcdef")
    front.error = RuntimeError("out of memory")
    with serving(engine, front=front) as live, live.client() as client:
        with pytest.raises(openai.APIError, match="the engine has failed: RuntimeError: out of memory"):
            list(client.completions.create(model="tiny", prompt="x", stream=True))
        with pytest.raises(openai.InternalServerError, match="the engine has failed") as caught:
            client.completions.create(model="tiny", prompt="x")
        assert caught.value.status_code == 503
        health = live.http.get("/health")
        assert health.status_code == 503 and "out of memory" in health.json()["status"]


def test_shutdown_finishes_what_runs(engine: Engine) -> None:
    front = Scripted(engine, "abcdef")
    front.go.clear()
    with serving(engine, front=front) as live, live.client() as client:
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        first = next(iter(stream)).choices[0].text
        live.server.handle_exit(signal.SIGTERM, None)
        until(lambda: live.door.draining)
        assert live.http.get("/health").json() == {"status": "shutting down", "version": 0}
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.completions.create(model="tiny", prompt="x")
        assert caught.value.status_code == 503
        with raw_request(live, b"", 1000) as connection:  # its body is not waited for
            assert connection.recv(12) == b"HTTP/1.1 503"
        front.go.set()
        assert first + "".join(chunk.choices[0].text for chunk in stream) == "abcdef"
        live.thread.join(DEADLINE)
        assert not live.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{live.url}/health")


def test_shutdown_does_not_wait_for_ever(engine: Engine) -> None:
    front = Scripted(engine, "abcdef")
    front.go.clear()
    with serving(engine, front=front, grace_seconds=0.1) as live, live.client() as client:
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        assert next(iter(stream)).choices
        late: list[int] = []
        waiting = threading.Thread(target=lambda: late.append(live.post(TEXT, PLAIN).status_code))
        waiting.start()
        until(lambda: front.streams == 2)
        live.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        waiting.join(DEADLINE)
        assert late == [503]
        live.thread.join(DEADLINE)
        assert not live.thread.is_alive() and front.streams == 0


# ---- the command


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        launch.serve.run_main(launch.serve.main)
    captured = capsys.readouterr()
    assert ended.value.code == 2 and not captured.out and captured.err.count("\n") == 1
    return captured.err


def test_the_command_refuses(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        return refused(capsys, monkeypatch, *arguments)

    monkeypatch.delenv(launch.serve.API_KEY, raising=False)
    tiny = ("--config", TINY)
    assert "one of the arguments --model --config is required" in error()
    assert "not allowed with argument" in error("--model", "a", *tiny)
    assert "config.server.max_request: unknown key; did you mean 'max_requests'?" in error(
        *tiny, "--config.server.max_request=1"
    )
    assert "server.grace_seconds: must be above 0" in error(*tiny, "--config.server.grace_seconds=0")
    assert "config.trainr: unknown key" in error(*tiny, "--config.trainr=1")
    assert "with --model there are config.model, .engine and .server" in error("--model", "a", "--config.trainer.rows=1")
    assert "config.server: has keys of its own; override them" in error(*tiny, "--config.server=1")
    assert "--speed=1: unknown argument" in error(*tiny, "--speed=1")
    assert "can be reached from other machines; set TWINAX_API_KEY" in error(*tiny, "--host", "0.0.0.0", "--port", "0")
    assert "--port: must be in [0, 65535], got 70000" in error(*tiny, "--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another" in error(*tiny, "--port", str(taken.getsockname()[1]))
    assert "No such file" in error(*tiny, "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "key").write_text("two words\n")
    assert "a key is printable ASCII without spaces" in error(*tiny, "--api-key-file", str(tmp_path / "key"))
    monkeypatch.setenv(launch.serve.API_KEY, "")
    assert "TWINAX_API_KEY: a key is printable" in error(*tiny)


def test_an_open_address_with_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    bind("0.0.0.0", 0, "key").close()
    assert "unencrypted" in capsys.readouterr().err
    bind("localhost", 0, None).close()
    assert not capsys.readouterr().err


def test_as_a_process() -> None:
    """Starts, answers, and ends with code 0 on SIGTERM."""
    command = [sys.executable, "-m", "launch.serve", "--config", TINY, *SMALL, "--port", "0", "--name", "mine"]
    environment = {**os.environ, "TWINAX_API_KEY": "k"}
    with subprocess.Popen(
        command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), server.communicate(timeout=5)[1]
            with OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
                assert client.chat.completions.create(model="mine", messages=HELLO, max_tokens=3).choices
                server.send_signal(signal.SIGTERM)
                assert server.wait(DEADLINE) == 0
        finally:
            server.kill()


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason="make model has not been run")
def test_the_real_model() -> None:
    small = [
        "max_context=256",
        "max_slots=8",
        "num_pages=64",
        "tokens_per_step=64",
        "token_buckets=(64,)",
        "context_buckets=(256,)",
    ]
    what = settings(Namespace(model=str(MODEL), config=None), [f"--config.engine.{item}" for item in small])
    name = what.name
    assert name == "smollm2-135m-instruct"
    engine, tokenizer = make_engine(what.model, what.engine, what.seed)
    engine.warm_up()
    listener = bind("127.0.0.1", 0, None)
    listener.listen()
    server = Server(make_door(engine, tokenizer, name, what.limits, None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with OpenAI(base_url=url, api_key="none") as client:
        answer = client.chat.completions.create(model=name, messages=question, temperature=0)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(model=name, messages=question, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of France is Paris."
    server.loop.call_soon_threadsafe(server.finish)
    thread.join(DEADLINE)
    listener.close()
    reconcile(engine)
