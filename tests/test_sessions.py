"""Sessions: whatever clients do with a history, the record is what the engine was given and sampled, and each sampled turn is
trained once, or for a reason not at all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import ApiError
from inference.types import Completion, FinishReason, SamplingParams, Tokens
from rl.columns import read, write
from rl.messages import CallKind, Message, Tool, ToolCall
from rl.records import Episode, Node
from rl.renderers import ChatML, Qwen3, Renderer
from rl.sessions import Asked, Session
from rl.wires import Identity, Turn
from tests.merging import merging

TOKENIZER = merging()
END = TOKENIZER.eos_ids[0]
LOOK: Tool = {"name": "look", "description": "", "parameters": {"type": "object"}}
MAIN = Identity()


def new_session(renderer: Renderer | None = None, **options: int) -> Session:
    episode = Episode(id="e", env="gateway", key=0, content_hash="", group_id="e", seed=0)
    params = SamplingParams(max_tokens=1000)
    return Session(episode, renderer or Qwen3(TOKENIZER), params, **{"max_context": 10**6, **options})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def turn(messages: Sequence[Message], kind: CallKind = "turn", **sampling: int) -> Turn:
    return Turn(model="m", messages=tuple(messages), tools=(LOOK,), kind=kind, sampling=sampling)


def tokens(ids: Sequence[int]) -> Tokens:
    n = len(ids)
    values = -np.arange(1, n + 1, dtype=np.float32) / 8
    none = np.zeros((n, 0))
    return Tokens(
        ids=np.asarray(ids, np.int32),
        logprobs=values,
        logprobs_full=values - 1,
        versions=np.zeros(n, np.int32),
        top_ids=none,
        top_logprobs=none,
    )


def sampled(asked: Asked, ids: Sequence[int]) -> Completion:
    """What an engine gives that samples these."""
    stopped = bool(ids) and ids[-1] in asked.request.params.stop_ids
    return Completion(
        **vars(tokens(ids)),
        request_id=asked.request.id,
        prompt_ids=asked.request.prompt_ids,
        finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        stop_reason=END if stopped else None,
        cached_tokens=0,
        prefilled_tokens=0,
        prompt_logprobs=None,
    )


def encode(text: str, split: bool = False) -> list[int]:
    """ids of a text with control tokens.

    Args:
        split: in another way than the tokenizer does: a token for each byte.
    """
    if not split:
        return TOKENIZER.encode(text, allow_special=True)
    return [i for token in encode(text) for i in (TOKENIZER.decode([token]).encode() if token > 263 else [token])]


def answer(session: Session, messages: Sequence[Message], text: str, who: Identity = MAIN, **changes: int) -> Message:
    """Asks, samples this text, and gives the message as clients send it back."""
    asked, mine = session.ask(turn(messages, **changes), who)
    assert mine
    return {**session.commit(asked, sampled(asked, [*encode(text), END])), "id": asked.name}


# ---- any clients


CALL = '<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>'
THINKING = "<think>\nI look first\n</think>\n\n"
ANSWERS = (
    "jsonprenderer, and <|im_end|> spelled",
    "",
    THINKING + "there it is",
    CALL % '{"x":  false, "n": 1.0}',
    THINKING + "I call\n" + CALL % '{"b": [1, {"c": null}], "a": "\\u00e9"}' + "\n" + CALL % "{}",
    CALL % '{"x": 1',
    THINKING.replace("</think>", ""),
)


def unmarked(message: Message) -> Message:
    """Without the record's name in it."""
    plain = message.copy()
    plain.pop("id", None)
    return plain


def reserialised(message: Message) -> Message:
    def again(call: ToolCall) -> ToolCall:
        return {**call, "id": "other", "arguments": json.dumps(json.loads(call["arguments"]), sort_keys=True, indent=1)}

    return {**message, "tool_calls": [again(call) for call in message.get("tool_calls", ())]}


def thoughtless(message: Message) -> Message:
    plain = message.copy()
    plain.pop("thinking", None)
    return plain


def rewritten(message: Message) -> Message:
    calls = [{**call, "arguments": '{"repaired": true}'} for call in message.get("tool_calls", ())]
    return {**message, "content": ("" if calls else "edited: ") + message["content"], "tool_calls": calls}


FAITHFUL = (dict, unmarked, reserialised)
ECHOES = (*FAITHFUL, thoughtless, rewritten)


@dataclass
class Agent:
    """A client's conversation, and what is known of its record."""

    name: str
    history: list[Message] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    """with which the next prompt must begin: all ids up to the last answer, if it was sent back as it was"""
    faithful: bool = True


@dataclass
class World:
    """A session, its clients, and the books that its record is checked against."""

    session: Session
    agents: list[Agent] = field(default_factory=lambda: [Agent(name) for name in ("main", "one", "two")])
    given: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """request -> (prompt, sampled)"""
    dropped: set[str] = field(default_factory=set)
    superseded: set[str] = field(default_factory=set)
    auxiliary: set[str] = field(default_factory=set)
    breaks: int = 0

    def who(self, agent: Agent) -> Identity:
        return Identity(agent=agent.name, parent="main")

    def ask(self, agent: Agent, step: "Step") -> tuple[Asked, Turn]:
        """A new word of the user's, or a result; sent twice."""
        agent.history += [user(f"{agent.name} {len(agent.history)}")]
        asked, wanted = self._ask(agent, turn(agent.history))
        assert self.session.ask(wanted, self.who(agent)) == (asked, False)  # C24: a retry
        given = list(asked.request.prompt_ids)
        if agent.prefix and agent.faithful:
            assert given[: len(agent.prefix)] == agent.prefix
        self.breaks += bool(agent.prefix) and not agent.faithful
        return asked, wanted

    def _ask(self, agent: Agent, wanted: Turn) -> tuple[Asked, Turn]:
        asked, mine = self.session.ask(wanted, self.who(agent))
        assert mine and asked.name not in self.given
        return asked, wanted

    def commit(self, asked: Asked, step: "Step") -> Message:
        ids = [*encode(ANSWERS[step.answer], step.split), *(() if step.cut else (END,))] or encode("x")
        self.given[asked.name] = list(asked.request.prompt_ids), ids
        completion = sampled(asked, ids)
        message: Message = {**self.session.commit(asked, completion), "id": asked.name}
        assert asked.done.result() is completion
        return message

    def answer(self, agent: Agent, asked: Asked, wanted: Turn, step: "Step") -> None:
        if step.action == "drop":
            parts = [tokens(encode("jso")), tokens(encode("n"))]
            self.session.abandon(asked, parts, "gone")
            self.given[asked.name] = list(asked.request.prompt_ids), encode("jso") + encode("n")
            self.dropped.add(asked.name)
            with pytest.raises(ApiError, match="gone"):
                asked.done.result()
            asked, wanted = self._ask(agent, wanted)
        message = self.commit(asked, step)
        again, mine = self.session.ask(wanted, self.who(agent))  # C24: its answer was lost on the way
        assert again is asked and not mine
        if step.action == "resample":
            self.superseded.add(asked.name)
            asked, _ = self._ask(agent, turn(agent.history, max_tokens=999 - len(self.given)))
            message = self.commit(asked, step)
        echo = ECHOES[step.echo]
        try:
            sent = echo(message)
        except ValueError:  # arguments that are no JSON cannot be written anew
            sent = message
        agent.history.append(sent)
        agent.prefix = [i for ids in self.given[asked.name] for i in ids]
        agent.faithful = echo in FAITHFUL or (echo is thoughtless and not message.get("thinking"))
        if step.action == "compact":
            self.compact(agent, step)

    def compact(self, agent: Agent, step: "Step") -> None:
        asked, _ = self._ask(agent, turn([*agent.history, user("sum it up")], kind="compaction"))
        self.auxiliary.add(asked.name)
        summary = self.commit(asked, step)
        agent.history = [user(f"{agent.name} before: {len(self.given)} {summary['content']}")]
        agent.faithful = False

    def check(self, folder: Path) -> None:
        graph, sampled_nodes = self.session.graph, {}
        for node in graph.nodes:
            assert any(node.mask) is (node.kind == "sampled") is all(node.mask)
            if node.request_id is not None:
                assert node.request_id not in sampled_nodes
                sampled_nodes[node.request_id] = node
        assert sampled_nodes.keys() == self.given.keys()  # none is lost
        for name, (prompt, ids) in self.given.items():
            node = sampled_nodes[name]
            assert graph.path_ids(node.parent) == prompt and list(node.ids) == ids
            wanted = "abandoned" if name in self.dropped else "retried" if name in self.superseded else None
            assert node.status == (wanted or ("live" if ids[-1] == END else "cut"))
        untrained = self.dropped | self.superseded | self.auxiliary
        self.check_trained({name: node for name, node in sampled_nodes.items() if name not in untrained})
        counts = self.session.counts()
        assert counts["breaks"] == self.breaks and counts["requests"] == len(self.given)
        write(folder / "e.parquet", [graph])
        (back,) = read(folder / "e.parquet")
        assert (back.nodes, back.calls, back.episode) == (graph.nodes, graph.calls, graph.episode)

    def check_trained(self, expected: dict[str, Node]) -> None:
        """The sampled ids of these nodes weigh 1, and nothing else weighs anything."""
        graph, weights = self.session.graph, {}
        for branch in graph.branches():
            at = 0
            for node in (graph.nodes[i] for i in branch.node_ids):
                here = slice(at, at := at + len(node.ids))
                assert tuple(branch.ids[here].tolist()) == node.ids and tuple(branch.mask[here].tolist()) == node.mask
                if node.kind != "sampled":
                    assert not branch.weights[here].any()
                else:
                    weights[node.id] = weights.get(node.id, 0) + branch.weights[here]
        assert {i for i, weight in weights.items() if weight.any()} == {node.id for node in expected.values()}
        for node in expected.values():
            np.testing.assert_allclose(weights[node.id], np.ones(len(node.ids)), rtol=1e-6)


@dataclass(frozen=True)
class Step:
    agents: tuple[int, ...]
    """that ask at once; answered in the other order"""
    action: str
    echo: int
    answer: int
    split: bool
    cut: bool


steps = st.builds(
    Step,
    st.sampled_from([(0,), (0,), (1,), (0, 1), (2, 0, 1)]),
    st.sampled_from(["plain", "plain", "plain", "drop", "resample", "compact"]),
    st.integers(0, len(ECHOES) - 1),
    st.integers(0, len(ANSWERS) - 1),
    st.booleans(),
    st.sampled_from([False, False, True]),
)


@settings(max_examples=150)
@given(script=st.lists(steps, max_size=10), thinking=st.booleans())
def test_whatever_clients_do(tmp_path_factory: pytest.TempPathFactory, script: list[Step], thinking: bool) -> None:
    world = World(new_session(Qwen3(TOKENIZER) if thinking else ChatML(TOKENIZER)))
    for step in script:
        agents = [world.agents[i] for i in step.agents]
        asked = [(agent, *world.ask(agent, step)) for agent in agents]
        for agent, request, wanted in reversed(asked):
            world.answer(agent, request, wanted, step)
    assert world.session.running == 0
    world.check(tmp_path_factory.mktemp("record"))
