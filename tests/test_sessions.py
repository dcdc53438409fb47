"""Sessions: whatever clients do with a history, the record is what the engine was given and sampled, and each sampled turn is
trained once, or for a reason not at all."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import ApiError
from inference.types import Completion, FinishReason, SamplingParams, Tokens
from rl.columns import read, write
from rl.graph import Graph
from rl.histories import Histories
from rl.messages import CallKind, Message, Tool, ToolCall
from rl.records import Call, Episode, Node
from rl.renderers import ChatML, Qwen3, Renderer
from rl.sessions import Asked, Session
from rl.wire_chat import WIRE as CHAT
from rl.wire_responses import WIRE as RESPONSES
from rl.wires import Identity, PromptTooLong, Turn
from tests.merging import merging

TOKENIZER = merging()
END = TOKENIZER.eos_ids[0]
LOOK: Tool = {"name": "look", "description": "", "parameters": {"type": "object"}}
MAIN = Identity()


def new_session(renderer: Renderer | None = None, **options: Any) -> Session:
    episode = Episode(id="e", env="gateway", key=0, content_hash="", group_id="e", seed=0)
    params = SamplingParams(max_tokens=1000)
    return Session(Graph(episode), renderer or Qwen3(TOKENIZER), params, **{"max_context": 10**6, **options})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def turn(messages: Sequence[Message], kind: CallKind = "turn", **sampling: Any) -> Turn:
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


def answer(session: Session, messages: Sequence[Message], text: str, who: Identity = MAIN, **changes: Any) -> Message:
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

    plain = message.copy()
    plain["tool_calls"] = [again(call) for call in message.get("tool_calls", ())]
    return plain


def thoughtless(message: Message) -> Message:
    plain = message.copy()
    plain.pop("thinking", None)
    return plain


def rewritten(message: Message) -> Message:
    plain = message.copy()
    calls: list[ToolCall] = [{**call, "arguments": '{"repaired": true}'} for call in message.get("tool_calls", ())]
    plain["content"], plain["tool_calls"] = ("" if calls else "edited: ") + message["content"], calls
    return plain


def verbatim(message: Message) -> Message:
    return message


Echo = Callable[[Message], Message]
FAITHFUL: tuple[Echo, ...] = (verbatim, unmarked, reserialised)
ECHOES: tuple[Echo, ...] = (*FAITHFUL, thoughtless, rewritten)


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
        assert mine and asked.request.id not in self.given
        return asked, wanted

    def commit(self, asked: Asked, step: "Step") -> Message:
        ids = [*encode(ANSWERS[step.answer], step.split), *(() if step.cut else (END,))] or encode("x")
        self.given[asked.request.id] = list(asked.request.prompt_ids), ids
        completion = sampled(asked, ids)
        message: Message = {**self.session.commit(asked, completion), "id": asked.name}
        assert asked.done.result() is completion
        return message

    def answer(self, agent: Agent, asked: Asked, wanted: Turn, step: "Step") -> None:
        if step.action == "drop":
            parts = [tokens(encode("jso")), tokens(encode("n"))]
            self.session.abandon(asked, parts, "gone")
            self.given[asked.request.id] = list(asked.request.prompt_ids), encode("jso") + encode("n")
            self.dropped.add(asked.request.id)
            with pytest.raises(ApiError, match="gone"):
                asked.done.result()
            asked, wanted = self._ask(agent, wanted)
        message = self.commit(asked, step)
        again, mine = self.session.ask(wanted, self.who(agent))  # C24: its answer was lost on the way
        assert again is asked and not mine
        if step.action == "resample":
            self.superseded.add(asked.request.id)
            asked, _ = self._ask(agent, turn(agent.history, max_tokens=999 - len(self.given)))
            message = self.commit(asked, step)
        echo = ECHOES[step.echo]
        try:
            sent = echo(message)
        except ValueError:  # arguments that are no JSON cannot be written anew
            sent = message
        agent.history.append(sent)
        agent.prefix = [i for ids in self.given[asked.request.id] for i in ids]
        agent.faithful = echo in FAITHFUL or (echo is thoughtless and not message.get("thinking"))
        if step.action == "compact":
            self.compact(agent, step)

    def compact(self, agent: Agent, step: "Step") -> None:
        asked, _ = self._ask(agent, turn([*agent.history, user("sum it up")], kind="compaction"))
        self.auxiliary.add(asked.request.id)
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
    assert not world.session.running
    world.check(tmp_path_factory.mktemp("record"))


# ---- cases that have bitten others (C: faults of other systems)


def test_another_split_of_the_text_is_kept() -> None:
    """C1: 64 rollouts of turns that the tokenizer would write otherwise are 64 samples, extended byte for byte."""
    ids = [token for part in ("json", "p", "renderer") for token in TOKENIZER.encode(part)]
    assert TOKENIZER.encode("jsonprenderer") != ids
    samples = 0
    for seed in range(64):
        session = new_session()
        history = [user(f"go {seed}")]
        for number in range(3):
            asked, _ = session.ask(turn(history), MAIN)
            said = [*ids, END]
            message = session.commit(asked, sampled(asked, said))
            assert message["content"] == "jsonprenderer"
            history += [message, {"role": "tool", "content": f"result {number}", "name": "look"}]
            following, _ = session.ask(turn(history), MAIN)
            assert list(following.request.prompt_ids[: len(asked.request.prompt_ids) + len(said)]) == [
                *asked.request.prompt_ids,
                *said,
            ]
            session.abandon(following, (), "looked at only")
        counts = session.counts()
        assert counts["breaks"] == 0 and counts["trained_tokens"] == 3 * (len(ids) + 1)
        samples += counts["samples"]
    assert samples == 64


def test_arguments_and_tools_in_other_forms() -> None:
    """C2: arguments parsed and written again, keys reordered, are the same call; tools of Chat and Responses the same ids."""
    session = new_session()
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}, "y": {"type": "number"}}, "required": ["x"]}
    about = {"name": "look", "description": "Looks.", "parameters": schema}
    chat = {"model": "m", "messages": [user("hi")], "tools": [{"type": "function", "function": about}]}
    flat = {"model": "m", "input": [user("hi")], "tools": [{"strict": False, **about, "type": "function"}]}
    first, _ = session.ask(CHAT.parse(json.dumps(chat).encode(), {}), MAIN)
    other, mine = session.ask(RESPONSES.parse(json.dumps(flat).encode(), {}), MAIN)
    assert other is first and not mine
    session.commit(first, sampled(first, [*encode(CALL % '{"y": 1.0, "x": false}'), END]))
    for arguments in ('{"x":false,"y":1}', '{"y": 1.0, "x": false}', '{ "x": false , "y": 1e0 }'):
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c", "content": f"after {arguments}"}
        body = {**chat, "messages": [user("hi"), said, result]}
        asked, _ = session.ask(CHAT.parse(json.dumps(body).encode(), {}), MAIN)
        assert session.graph.path(asked.node)[1] == 1  # behind the sampled turn
    assert session.breaks == 0
    body["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"x": true, "y": 1}'
    session.ask(CHAT.parse(json.dumps(body).encode(), {}), MAIN)
    assert session.breaks == 1


@pytest.mark.parametrize("who", ["client", "template"])
def test_stripped_thinking_is_a_branch_of_its_own(who: str) -> None:
    """C6: never merged with the one that had it."""
    session = new_session(Qwen3(TOKENIZER, keep_thinking=who == "client"))
    history = [user("hi")]
    for number in range(3):
        message = answer(session, history, THINKING + f"done {number}")
        assert message.get("thinking")
        history += [thoughtless(message) if who == "client" else message, user("go on")]
    counts = session.counts()
    assert counts["samples"] == 3 and counts["breaks"] == 2
    paths = [branch.ids.tolist() for branch in session.graph.branches()]
    think = TOKENIZER.special_id("<think>")
    assert all(path.count(think) == 1 for path in paths)  # its own
    assert all(branch.weights.sum() == branch.mask.sum() for branch in session.graph.branches())


def test_the_name_says_which_of_two_equal_turns() -> None:
    session = new_session()
    history = [user("hi")]
    parts = [["json", "p", "renderer"], ["jsonp", "renderer"]]
    said: list[tuple[str, list[int]]] = []
    for number, texts in enumerate(parts):
        asked, _ = session.ask(turn(history, max_tokens=100 - number), MAIN)
        ids = [*(token for text in texts for token in TOKENIZER.encode(text)), END]
        assert session.commit(asked, sampled(asked, ids))["content"] == "jsonprenderer"
        said.append((asked.name, ids))
    assert session.counts()["nodes"] == {"retried": 1, "live": 1}
    for name, ids in [*said, ("", said[1][1])]:  # who names none, means the last
        back: Message = {"role": "assistant", "content": "jsonprenderer", "id": name}
        asked, _ = session.ask(turn([*history, back, user(f"after {name}")]), MAIN)
        prompt = session.graph.path_ids(asked.node)
        start = len(session.graph.nodes[0].ids)
        assert prompt[start : start + len(ids)] == ids
    # each has been gone on from, so both count
    assert session.counts()["nodes"] == {"live": 2}


def test_an_agents_own_turn_comes_before_anothers() -> None:
    """Two agents that were asked the same and said the same, in other tokens."""
    session = new_session()
    one, two = Identity(agent="one"), Identity(agent="two")
    history = [user("hi")]
    ids = {}
    for who, split in ((one, False), (two, True)):
        asked, mine = session.ask(turn(history), who)
        assert mine
        ids[who.agent] = [*encode("jsonprenderer", split), END]
        message = session.commit(asked, sampled(asked, ids[who.agent]))
    for who in (one, two):
        asked, _ = session.ask(turn([*history, message, user("and now")]), who)
        start = len(session.graph.nodes[0].ids)
        assert list(asked.request.prompt_ids)[start : start + len(ids[who.agent])] == ids[who.agent]
    assert session.breaks == 0


def test_what_is_not_trained() -> None:
    """Summaries and titles, and greedy turns; they are recorded, as calls of their own."""
    session = new_session(client_sampling=True)
    history = [user("hi"), answer(session, [user("hi")], "hello")]
    answer(session, [*history, user("sum it up")], "all", kind="compaction")
    answer(session, [*history, user("be exact")], "exactly", temperature=0)
    counts = session.counts()
    assert counts["samples"] == 1 and counts["trained_tokens"] == len(encode("hello")) + 1
    assert counts["auxiliary"] == ["compaction"] and counts["breaks"] == 0
    assert [(call.role, call.trainable, call.depth, call.parent) for call in session.graph.calls] == [
        ("assistant", True, 0, None),
        ("compaction", False, 0, 0),
        ("assistant", False, 0, 0),
    ]


def test_call_trees() -> None:
    """Parents that are named, or not there yet; where in the parent a child began."""
    session = new_session()
    answer(session, [user("hi")], "I ask two")
    length = len(session.graph.path_ids(1))
    answer(session, [user("one's task")], "done", Identity(agent="one", parent="main"))
    answer(session, [user("two's task")], "done", Identity(agent="two", parent="one"))
    answer(session, [user("three's task")], "done", Identity(agent="three", parent="nobody"))
    calls: list[Call] = session.graph.calls
    assert [(call.agent, call.parent, call.depth) for call in calls] == [
        ("main", None, 0),
        ("one", 0, 1),
        ("two", 1, 2),
        ("nobody", 0, 1),
        ("three", 3, 2),
    ]
    assert calls[1].position == length and calls[3].position == length and calls[4].position == 0
    assert session.counts()["samples"] == 4


def test_limits() -> None:
    session = new_session(max_context=60)
    with pytest.raises(PromptTooLong, match=r"60 tokens.*shorten") as refused:
        session.ask(turn([user("x" * 100)]), MAIN)
    assert refused.value.most == 60 < refused.value.prompt_tokens
    assert session.asked == 0 and not session.graph.nodes
    asked, _ = new_session().ask(turn([user("hi")], max_tokens=7, top_k=3), MAIN)
    assert asked.request.params.max_tokens == 7 and asked.request.params.top_k == 0  # the run's own
    with pytest.raises(ValueError, match="at least one message"):
        Histories(session.graph, session.renderer).prompt([])


def test_the_end_of_a_session() -> None:
    """Nothing is asked after it, and nothing is on its way at it: that would be in no record."""
    session = new_session()
    asked, _ = session.ask(turn([user("hi")]), MAIN)
    with pytest.raises(ApiError, match="requests in flight"):
        session.finish("completed", (), "finished")
    session.commit(asked, sampled(asked, [*encode("ho"), END]))
    session.finish("completed", (), "finished")
    with pytest.raises(ApiError, match="is finished; open another"):
        session.ask(turn([user("more")]), MAIN)
    assert session.asked == 1


def test_tokens_of_older_weights_do_not_follow_newer_ones() -> None:
    """The engine has gone back: its answer is refused, what was sampled of one is noted, and another conversation begins."""
    session = new_session()
    first, _ = session.ask(turn([user("hi")]), MAIN)
    completion = sampled(first, [*encode("ho"), END])
    completion.versions[:] = 3
    history = [user("hi"), session.commit(first, completion), user("and now")]
    asked, _ = session.ask(turn(history), MAIN)
    completion = sampled(asked, [*encode("ho"), END])
    with pytest.raises(ApiError, match="gone back to version 0, and this conversation was sampled up to 3") as refused:
        session.commit(asked, completion)
    assert refused.value.status == 409
    assert "gone back to version 0" in session.counts()["notes"][0]
    session.abandon(asked, [completion], "refused")
    assert session.counts()["nodes"] == {"live": 1} and len(session.counts()["notes"]) == 1
    answer(session, [user("another")], "ho")
    assert session.counts()["nodes"] == {"live": 2} and not session.running


def test_what_cannot_be_recorded_ends_all_the_same() -> None:
    session = new_session()
    asked, _ = session.ask(turn([user("hi")]), MAIN)
    broken = tokens(encode("ho"))
    broken.logprobs[:] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        session.abandon(asked, [broken], "broken")
    assert not session.running and session.counts()["nodes"] == {}
    with pytest.raises(ApiError, match="broken"):
        asked.done.result(0)


def test_a_stop_string_that_ends_another_one() -> None:
    """The message ends where the client's text does, so that it is found again."""
    session = new_session()
    asked, _ = session.ask(turn([user("hi")], stop=("END", "THE END")), MAIN)
    message = session.commit(asked, sampled(asked, encode("so THE END")))
    assert message["content"] == "so "
    session.ask(turn([user("hi"), message, user("more")]), MAIN)
    assert session.breaks == 0
