"""The message graph: one record, extended token for token, with the rules of records.md asserted on commit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import ByteTokenizer
from rl.graph import Branch, Call, Episode, Graph
from rl.messages import Message
from rl.renderers import ChatML

SAID: Message = {"role": "assistant", "content": "said"}


def new_graph(*calls: Call) -> Graph:
    episode = Episode(id="e", env="arithmetic", key=3, content_hash="00", group_id="g", seed=1)
    return Graph(episode, calls or (Call(id=0),))


def sample(graph: Graph, prompt: list[int], ids: list[int], request_id: str | None = None, **changes) -> int:
    """Extends to the prompt and commits a completion with plain numbers; `changes` replace them."""
    values = {
        "request_id": request_id or f"r{len(graph.nodes)}",
        "prompt_ids": prompt,
        "ids": ids,
        "logprobs": [-0.1] * len(ids),
        "logprobs_full": [-0.2] * len(ids),
        "versions": [0] * len(ids),
        "temperature": 1.0,
        "finish_reason": "stop",
        "message": SAID,
    }
    return graph.add_completion(graph.extend(prompt), **{**values, **changes})


def again(graph: Graph) -> Graph:
    """The graph, restored from its nodes."""
    restored = Graph(graph.episode, graph.calls)
    for node in graph.nodes:
        restored.restore(node)
    return restored


def sampled_ids(branch: Branch) -> list[int]:
    return branch.ids[branch.mask].tolist()


def test_turns_that_extend_are_one_branch() -> None:
    graph = new_graph()
    sample(graph, [1, 2], [3, 4])
    sample(graph, [1, 2, 3, 4, 5], [6])
    (branch,) = graph.branches(advantage=0.7)
    assert branch.node_ids == (0, 1, 2, 3)
    assert branch.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert branch.mask.tolist() == [False, False, True, True, False, True]
    # C17: the scalar stands on every turn's own tokens
    np.testing.assert_array_equal(branch.advantages, np.array([0, 0, 0.7, 0.7, 0, 0.7], np.float32))
    np.testing.assert_array_equal(branch.logprobs, np.array([0, 0, -0.1, -0.1, 0, -0.1], np.float32))
    np.testing.assert_array_equal(branch.logprobs_full, np.array([0, 0, -0.2, -0.2, 0, -0.2], np.float32))
    assert branch.weights.tolist() == branch.mask.tolist()


def test_history_that_changed_forks_at_a_node_boundary() -> None:
    graph = new_graph()
    sample(graph, [1, 2], [3, 4])
    sample(graph, [1, 2, 3, 9, 5], [6])  # differs inside the sampled node: only the prompt node is shared
    assert [node.parent for node in graph.nodes] == [None, 0, 0, 2]
    assert graph.nodes[2].ids == (3, 9, 5) and not any(graph.nodes[2].mask)
    assert [sampled_ids(branch) for branch in graph.branches()] == [[3, 4], [6]]
    sample(graph, [1, 7], [8])  # differs inside the root: a root of its own
    assert graph.nodes[4].parent is None and len(graph.branches()) == 3


def test_a_path_through_sampled_tokens_is_preferred() -> None:
    graph = new_graph()
    graph.extend([1, 2, 3])
    sample(graph, [1, 2], [3])
    assert graph.extend([1, 2, 3]) == 2
    sample(graph, [1, 2, 3, 4], [5])
    assert graph.path(4) == [1, 2, 3, 4]


def test_what_goes_on_from_a_node_stays_below_it() -> None:
    """Also where another path has the same ids, and more of them that were sampled."""
    graph = new_graph()
    first = sample(graph, [1], [2, 3])
    other = sample(graph, [1], [2], "s")
    sample(graph, [1, 2], [3, 4, 5])
    assert graph.path(graph.extend([1, 2, 3, 4], after=first)) == [0, first, len(graph.nodes) - 1]
    assert graph.extend([1, 2, 3, 4], after=first) == len(graph.nodes) - 1 and graph.extend([1, 2], after=other) == other
    graph.mark(first, "abandoned")
    with pytest.raises(AssertionError, match="closed node"):
        graph.extend([1, 2, 3, 5], after=first)


def test_updates_inside_a_turn() -> None:
    """C9: an update lands after token 3 of 5; prompt tokens carry no version, and the oldest is 7."""
    graph = new_graph()
    sample(graph, [1, 2], [3, 4, 5, 6, 7], versions=[7, 7, 7, 8, 8])
    (branch,) = graph.branches()
    assert branch.versions.tolist() == [-1, -1, 7, 7, 7, 8, 8]
    assert branch.oldest_version == 7
    with pytest.raises(AssertionError, match="versions decrease"):
        sample(graph, [1, 2, 3, 4, 5, 6, 7, 0], [9], versions=[7])
    sample(graph, [1, 2], [9], versions=[7])  # a sibling is another path


def test_a_retried_request_is_one_node() -> None:
    graph = new_graph()
    first = sample(graph, [1, 2], [3], "a")
    again = sample(graph, [1, 2], [3], "a", logprobs=[-9.0])
    found = graph.completion("a")
    assert first == again and len(graph.nodes) == 2
    assert found is not None and found is graph.nodes[first] and found.logprobs == (float(np.float32(-0.1)),)
    assert graph.completion("b") is None
    with pytest.raises(ValueError, match=r"^request_id: 'a'"):
        sample(graph, [1, 2], [4], "a")


def test_retried_and_abandoned_nodes_leave_the_branches() -> None:
    graph = new_graph()
    first = sample(graph, [1], [2])
    sample(graph, [1, 2, 3], [4])
    graph.mark(first, "retried")
    assert graph.branches() == []
    second = sample(graph, [1], [2])
    assert second != first and [branch.node_ids for branch in graph.branches()] == [(0, second)]
    cut = sample(graph, [1, 2, 5], [6], finish_reason="length")
    assert graph.nodes[cut].status == "cut" and sampled_ids(graph.branches()[0]) == [2, 6]


def test_a_turn_without_an_answer_adds_no_branch() -> None:
    graph = new_graph()
    sample(graph, [1], [2])
    graph.extend([1, 2, 3])
    assert [branch.ids.tolist() for branch in graph.branches()] == [[1, 2]]
    sample(graph, [1, 2, 4], [5])
    assert [branch.ids.tolist() for branch in graph.branches()] == [[1, 2, 4, 5]]


def test_a_shared_token_weighs_one_in_all() -> None:
    """C15: node A (5 tokens) on 3 branches; over branches the weights of each token add up to 1."""
    graph = new_graph()
    sample(graph, [1], [2] * 5)
    for tool in (10, 11, 12):
        sample(graph, [1, *[2] * 5, tool], [3, 4])
    branches = graph.branches()
    assert len(branches) == 3
    np.testing.assert_allclose(sum(branch.weights[1:6] for branch in branches), np.ones(5), rtol=1e-6)
    np.testing.assert_allclose(sum(branch.weights.sum() for branch in branches), 5 + 3 * 2, rtol=1e-6)


def test_calls_that_are_not_trainable_weigh_nothing() -> None:
    judge = Call(id=1, parent=0, agent="judge", depth=1, position=3, policy="frozen", trainable=False)
    graph = new_graph(Call(id=0), judge)
    sample(graph, [1], [2, 3])
    sample(graph, [7], [8], temperature=0.0, call=1)
    sample(graph, [1, 2, 3, 4], [5], temperature=0.0, call=1)
    sample(graph, [1, 2, 3, 4, 5, 6], [7])
    [branch] = graph.branches()  # what the judge said alone is none; where the policy goes on from it, it is context
    assert branch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7] and branch.weights.tolist() == [0, 1, 1, 0, 0, 0, 1]
    with pytest.raises(ValueError, match=r"^temperature: greedy"):  # C20
        sample(graph, [1], [4], temperature=0.0)


def test_broken_records_are_refused() -> None:
    cases = {
        "log-probs": {"logprobs": [-0.1]},
        "2 versions|1 versions": {"versions": [0]},
        "no version": {"versions": [-1, -1]},
        "not finite": {"logprobs_full": [-0.1, float("-inf")]},
        "not what the engine was given": {"prompt_ids": [1, 3]},
    }
    for words, changes in cases.items():
        graph = new_graph()
        with pytest.raises(AssertionError, match=words):
            sample(graph, [1, 2], [3, 4], **changes)
        assert len(graph.nodes) == 1
    with pytest.raises(ValueError, match=r"^ids: "):
        new_graph().extend([])
    with pytest.raises(AssertionError, match="not empty"):
        sample(new_graph(), [1], [])


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=12))
def test_any_order_of_requests_keeps_the_rules(steps: list[tuple[int, list[int]]]) -> None:
    """Each request continues some earlier path, or none; ids along its path are the request, and weights add up."""
    graph = new_graph()
    for start, ids in steps:
        prompt = [*graph.path_ids(start if start < len(graph.nodes) else None), *ids]
        node = sample(graph, prompt, ids[::-1])
        assert graph.path_ids(node) == prompt + ids[::-1]
        assert graph.extend(prompt) in range(len(graph.nodes))
    sampled = sum(len(node.ids) for node in graph.nodes if node.kind == "sampled")
    branches = graph.branches()
    np.testing.assert_allclose(sum(branch.weights.sum() for branch in branches), sampled, rtol=1e-5)
    for branch in branches:
        assert branch.ids.tolist() == graph.path_ids(branch.node_ids[-1])
        assert branch.ids.shape == branch.mask.shape == branch.versions.shape == branch.weights.shape
    assert again(graph).nodes == graph.nodes


def test_with_a_renderer_turns_extend_and_retokenised_history_forks() -> None:
    """C1: bridged, three turns are one sample; rendered anew from other ids, the history is another branch."""
    tokenizer = ByteTokenizer()
    renderer, graph = ChatML(tokenizer), new_graph()
    end = tokenizer.special_id("<|im_end|>")
    prompt = renderer.render([{"role": "user", "content": "1+1="}])
    for turn in range(3):
        ids = [*tokenizer.encode(f"{turn}"), end]
        sample(graph, prompt, ids)
        bridge = renderer.bridge(prompt + ids, [{"role": "tool", "content": "no"}])
        assert bridge is not None
        prompt = prompt + ids + bridge
    (branch,) = graph.branches()
    assert tokenizer.decode(sampled_ids(branch)) == "0<|im_end|>1<|im_end|>2<|im_end|>"
    assert not branch.mask[branch.ids == ord("\n")].any()
    changed = renderer.render([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "x"}])
    sample(graph, changed, [end])
    assert len(graph.branches()) == 2


# ---- routing


def rows_of(ids: list[int], dtype: type = np.uint8) -> np.ndarray:
    """Two layers, three experts each, that say whose they are."""
    return (np.asarray(ids).reshape(-1, 1, 1) * 6 + np.arange(6).reshape(1, 2, 3)).astype(dtype)


def routed(graph: Graph, prompt: list[int], ids: list[int], **changes) -> int:
    """A completion that brings what the path lacks."""
    known = graph.routing(graph.extend(prompt))
    start = 0 if known is None else len(known)
    rows = rows_of([*prompt, *ids][start:-1])
    return sample(graph, prompt, ids, **{"routing": rows, "routing_start": start, **changes})


def test_rows_of_a_path_are_aligned_across_turns_and_forks() -> None:
    """C22: the token at a boundary is routed when the next turn is; a fork begins with what its own path has."""
    graph = new_graph()
    routed(graph, [1, 2], [3, 4])
    assert graph.routing(0) is None and graph.nodes[1].routing_start == 0
    second = routed(graph, [1, 2, 3, 4, 5], [6])
    assert graph.nodes[second].routing_start == 3
    fork = routed(graph, [1, 2, 3, 4, 7], [8, 9])
    other = routed(graph, [1, 2], [5])
    retried = routed(graph, [1, 2, 3, 4, 5, 6, 7], [8], finish_reason="length")
    graph.mark(retried, "retried")
    assert [graph.nodes[i].routing_start for i in (fork, other, retried)] == [3, 0, 5]
    for branch in [*graph.branches(), *again(graph).branches()]:
        assert branch.routing is not None and branch.routing.dtype == np.uint8
        np.testing.assert_array_equal(branch.routing[:-1], rows_of(branch.ids[:-1].tolist()))
        assert (branch.routing[-1] == 255).all()


def test_paths_without_rows() -> None:
    graph = new_graph()
    sample(graph, [1, 2], [3, 4])
    assert graph.nodes[1].routing is None and graph.branches()[0].routing is None
    routed(graph, [1, 2, 3, 4, 5], [6])  # an engine that records brings all that are missing
    sample(graph, [1, 2, 3, 4, 5, 6, 7], [8])  # and one that does not leaves a gap
    (branch,) = graph.branches()
    assert branch.routing is not None
    np.testing.assert_array_equal(branch.routing[:5], rows_of([1, 2, 3, 4, 5]))
    assert branch.routing.shape == (8, 2, 3) and (branch.routing[5:] == 255).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": rows_of([4, 5, 6])}, "3 . 3 rows are not one for each of 6 tokens but the last"),
        ({"routing": rows_of([4])}, "3 . 1 rows are not one for each of 6 tokens but the last"),
        ({"routing": rows_of([1, 2, 3, 4, 5]), "routing_start": 0}, "start at token 0, but the path has rows of 3"),
        ({"routing": rows_of([4, 5], np.uint16)}, "of different models"),
        ({"routing": rows_of([4, 5])[:, :1]}, "of different models"),
    ],
)
def test_rows_that_are_not_the_paths_are_refused(changes: dict, message: str) -> None:
    graph = new_graph()
    routed(graph, [1, 2], [3, 4])
    with pytest.raises(ValueError, match=f"^routing: episode 'e', node 3: .*{message}"):
        routed(graph, [1, 2, 3, 4, 5], [6], **changes)
    assert len(graph.nodes) == 3
