"""The forest: layout invariants, equality with plain causal attention on each branch alone (float64), bits in bfloat16.

Legend: B rows, T tokens of a row, S branches of a batch, L trained tokens of the longest branch, H query heads,
K kv heads, h head dim, G query heads of a kv head.
"""

from collections.abc import Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from models.attention import KEY_BLOCK, ForestContext
from models.config import ModelConfig
from models.logprobs import token_log_probs
from models.numerics import Numerics
from models.transformer import Definition, describe
from rl.branches import Branch
from rl.forest import Layout, MicroBatch, pack

VOCAB = 12


def branch(ids: Sequence[int], trained: Sequence[int] = ()) -> Branch:
    mask = np.zeros(len(ids), bool)
    mask[list(trained)] = True
    return Branch(np.asarray(ids, np.int32), mask)


@st.composite
def tries(draw: Any, longest: int, most: int) -> list[Branch]:
    """Branches that grow out of each other: forks at any depth (the first token too), prefixes, duplicates, masks."""
    token = st.integers(0, 2)
    paths: list[list[int]] = []
    branches = []
    for _ in range(draw(st.integers(1, most))):
        ids: list[int] = []
        if paths:
            parent = draw(st.sampled_from(paths))
            ids = parent[: draw(st.integers(0, len(parent)))]
        ids = ids + draw(st.lists(token, min_size=0 if ids else 1, max_size=longest - len(ids)))
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        paths.append(ids)
        branches.append(Branch(np.asarray(ids, np.int32), np.asarray(mask)))
    return branches


def params_of(config: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    params = {}
    for name, weight in describe(config).items():
        noise = rng.standard_normal(weight.shape)
        params[name] = (noise * weight.init if weight.init else 1 + 0.1 * noise).astype(dtype)
    return params


def log_probs(definition: Definition, params: Any, forest: Any, chunk: int) -> jax.Array:
    """What the trainer computes, `[S, L]`."""
    model = definition.bind(params)
    hidden = model(forest.tokens, forest.positions, ForestContext(forest.blocks, definition.numerics))
    at_parent = jnp.take_along_axis(hidden, forest.read[..., None], axis=1)
    one, used = jnp.ones((), hidden.dtype), jnp.ones(hidden.shape[:2], bool)
    logp, _ = token_log_probs(model, at_parent, forest.target, one, used, chunk)
    return jnp.where(forest.mask, jnp.take(logp, forest.index), 0)


# ---- layout


def check(branches: list[Branch], batches: list[MicroBatch], layout: Layout) -> int:
    """Every promise that `models.attention` and the trainer rely on; returns the number of tokens in rows."""
    T, kept = layout.tokens, 0
    assert sorted(np.concatenate([batch.order for batch in batches])) == list(range(len(branches)))
    for batch in batches:
        forest, blocks = batch.forest, batch.forest.blocks
        assert len(batch.order) <= layout.branches
        flat_read, flat_target = forest.read.reshape(-1), forest.target.reshape(-1)
        paths: dict[int, set[tuple[int, ...]]] = {b: set() for b in range(layout.rows)}
        for s, number in enumerate(batch.order):
            ids, trained = branches[number].ids, np.nonzero(branches[number].mask)[0]
            np.testing.assert_array_equal(forest.mask[s], np.arange(layout.length) < len(trained))
            entries = forest.index[s, : len(trained)]
            rows = set((entries // T).tolist())
            assert len(rows) <= 1
            for depth, entry in zip(trained, entries, strict=True):
                b, parent = int(entry // T), int(flat_read[entry])
                assert flat_target[entry] == ids[depth]
                seen = np.nonzero((np.arange(T) <= parent) & (parent < blocks.end[b]))[0]
                np.testing.assert_array_equal(forest.tokens[b][seen], ids[:depth])  # the parent sees the prefix, in order
                np.testing.assert_array_equal(forest.positions[b][seen], np.arange(depth))
        assert not forest.mask[len(batch.order) :].any()
        for b in range(layout.rows):
            place = np.arange(T)
            sees = (place[None] <= place[:, None]) & (place[:, None] < blocks.end[b][None])  # [u, v]
            assert sees[place, place].all()
            used = np.zeros(T, bool)
            for n in range(layout.query_blocks):
                queries, keys = blocks.query[b, n], blocks.key[b, n]
                real = queries[queries < T]
                assert (queries[: len(real)] == real).all() and not used[real].any()
                used[real] = True
                at = np.nonzero(keys < T)[0]
                assert len(set(keys[at])) == len(at)  # a key counts once
                np.testing.assert_array_equal(forest.positions[b, keys[at]] // KEY_BLOCK, at // KEY_BLOCK)
                for u in real:  # its keys are its ancestors and itself, all of them, in path order
                    mine = keys[at][sees[u, keys[at]]]
                    np.testing.assert_array_equal(mine, np.nonzero(sees[u])[0])
            n = int(used.sum())
            assert used[:n].all()
            # each place is one path, no path stands twice, and an ancestor's path is a prefix
            for u in range(n):
                path = tuple(forest.tokens[b, sees[u]].tolist())
                assert forest.positions[b, u] == len(path) - 1 and path not in paths[b]
                paths[b].add(path)
            np.testing.assert_array_equal(sees[n:], np.eye(T, dtype=bool)[n:])  # padding sees itself only
            kept += n
        prefixes = set().union(*paths.values())
        for number in batch.order:
            assert tuple(branches[number].ids.tolist()) in prefixes
    return kept


@pytest.mark.parametrize(("rows", "shards"), [(1, 1), (2, 1), (1, 2)])
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_layout_invariants(rows: int, shards: int, data: st.DataObject) -> None:
    branches = data.draw(tries(30, 12))
    layout = Layout(rows=rows, tokens=64 * shards, context=128, branches=12, length=29, shards=shards)
    batches, stats = pack(branches, layout)
    assert check(branches, batches, layout) == stats.tokens_kept <= stats.tokens_in
    assert stats.tokens_in == sum(len(b.ids) for b in branches)
    assert stats.slots == len(batches) * rows * 64 * shards
    for batch in batches:  # each device's part of blocks and reads is of its own tokens
        for part in range(shards):
            mine = np.arange(64 * part, 64 * part + 64)
            blocks = batch.forest.blocks.query[:, part * layout.query_blocks // shards :][:, : layout.query_blocks // shards]
            assert np.isin(blocks, np.append(mine, layout.tokens)).all() and np.isin(batch.forest.read[:, mine], mine).all()


def test_a_fork_with_more_reads_than_its_part_of_the_row_has() -> None:
    """A stem of 60 tokens, all trained, and 40 ends: 99 reads in the first 64 places. The row is cut in halves."""
    stem = np.zeros(60, np.int32)
    branches = [Branch(np.append(stem, n).astype(np.int32), np.arange(61) > 0) for n in range(1, 41)]
    layout = Layout(rows=1, tokens=128, context=128, branches=40, length=60, shards=2)
    batches, _ = pack(branches, layout)
    assert len(batches) > 1 and len(pack(branches, Layout(**{**layout.__dict__, "shards": 1}))[0]) == 1
    check(branches, batches, layout)
    with pytest.raises(ValueError, match=r"tokens \(192\) must be a multiple of 64 x 2 devices on the axis 'context'"):
        Layout(rows=1, tokens=192, context=128, branches=1, length=1, shards=2)


@hypothesis.settings(max_examples=10)
@hypothesis.given(prefix=st.integers(110, 130), tails=st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_layout_invariants_at_a_key_block_end(prefix: int, tails: list[int]) -> None:
    ids = [1] * prefix
    branches = [branch([*ids, *([2 + n] * tail)], [prefix - 1]) for n, tail in enumerate(tails)]
    layout = Layout(rows=1, tokens=256, context=256, branches=12, length=1)
    batches, _ = pack(branches, layout)
    check(branches, batches, layout)


def test_siblings_that_need_many_query_blocks_split_the_row() -> None:
    """With 127 tokens shared, each sibling's first token fills the key block: one query block each, of 4 T / 64."""
    branches = [branch([1] * 127 + [2 + n], [127]) for n in range(40)]
    layout = Layout(rows=1, tokens=256, context=128, branches=40, length=1)
    batches, stats = pack(branches, layout)
    assert len(batches) > 1
    assert stats.tokens_kept == check(branches, batches, layout) == 127 * len(batches) + 40


def test_known_row() -> None:
    a, b, c = branch([5, 6, 7, 8], [2, 3]), branch([5, 6, 9], [2]), branch([4, 4], [1])
    layout = Layout(rows=1, tokens=64, context=128, branches=4, length=2)
    (batch,), stats = pack([a, b, c, a], layout)
    assert (stats.tokens_in, stats.tokens_kept, stats.slots, stats.compression) == (13, 7, 64, 13 / 7)
    forest = batch.forest
    np.testing.assert_array_equal(batch.order, [2, 0, 3, 1])  # sorted, first come first among equals
    np.testing.assert_array_equal(forest.tokens[0, :7], [4, 4, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(forest.positions[0, :7], [0, 1, 0, 1, 2, 3, 2])
    np.testing.assert_array_equal(forest.blocks.end[0, :7], [2, 2, 7, 7, 6, 6, 7])
    np.testing.assert_array_equal(forest.read[0, :4], [0, 3, 4, 3])  # the duplicate reads the same places
    np.testing.assert_array_equal(forest.index, [[0, 0], [1, 2], [1, 2], [3, 0]])
    np.testing.assert_array_equal(forest.mask, [[True, False], [True, True], [True, True], [True, False]])


def test_rows_and_micro_batches() -> None:
    branches = [branch([n] + [3] * 40, [5, 9]) for n in range(7)]  # one a row
    counts = {}
    for rows, most in ((1, 8), (2, 8), (8, 8), (8, 3)):
        layout = Layout(rows=rows, tokens=64, context=128, branches=most, length=2)
        batches, stats = pack(branches, layout)
        check(branches, batches, layout)
        counts[rows, most] = len(batches)
        assert stats.slots == len(batches) * rows * 64
    assert counts == {(1, 8): 7, (2, 8): 4, (8, 8): 1, (8, 3): 3}


def test_nothing_to_pack() -> None:
    batches, stats = pack([], Layout(rows=1, tokens=64, context=128, branches=1, length=1))
    assert batches == [] and stats.compression == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (branch([1, 2], [0]), "branch 1: its first token"),
        (branch([1] * 65), "branch 1: 65 tokens do not fit context 128 and tokens per row 64; raise"),
        (branch([1] * 9, range(1, 9)), "branch 1: 8 trained tokens exceed the layout's 4"),
        (branch([]), "branch 1: ids .0. and mask .0."),
        (Branch(np.ones(3, np.int32), np.zeros(2, bool)), "branch 1: ids .3. and mask .2."),
    ],
)
def test_bad_branches(bad: Branch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([branch([1, 2, 3], [2]), bad], Layout(rows=1, tokens=64, context=128, branches=2, length=4))


def test_bad_layouts() -> None:
    for tokens, context in ((65, 128), (64, 64)):
        with pytest.raises(ValueError, match="layout: tokens"):
            Layout(rows=1, tokens=tokens, context=context, branches=1, length=1)


def test_a_row_has_no_more_branches_than_a_micro_batch() -> None:
    batches, stats = pack([branch([1, n]) for n in range(5)], Layout(rows=2, tokens=64, context=128, branches=2, length=1))
    assert [sorted(batch.order.tolist()) for batch in batches] == [[0, 1], [2, 3], [4]] and stats.tokens_kept == 3 + 3 + 2


# ---- the same numbers as each branch alone, float64

TINY = ModelConfig(
    family="qwen3", vocab_size=VOCAB, model_dim=8, ffn_dim=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=256,
)  # fmt: skip
SMALL_LAYOUT = Layout(rows=2, tokens=64, context=128, branches=6, length=29)


class Causal:
    """Plain causal softmax attention over one sequence, from the definition."""

    def attend(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        T, H, h = q.shape
        k, v = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(jnp.float64(h))
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), scores.shape)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v).reshape(T, -1)


class Float64:
    """Two jitted functions with gradients: a packed micro-batch, and branches alone in plain arrays."""

    def __init__(self) -> None:
        self.definition = Definition(TINY, jnp.float64, True)
        with jax.enable_x64(True):
            self.params = jax.tree.map(jnp.asarray, params_of(TINY, np.float64))
            self._packed = jax.jit(jax.value_and_grad(self._packed_loss, has_aux=True))
            self._alone = jax.jit(jax.value_and_grad(self._alone_loss, has_aux=True))

    def _packed_loss(self, params: Any, forest: Any, weight_SL: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp = log_probs(self.definition, params, forest, 64)
        return (logp * weight_SL).sum(), logp

    def _alone_loss(self, params: Any, ids: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = self.definition.bind(params)

        def one(ids: jax.Array) -> jax.Array:
            logits = model.logits(model(ids, jnp.arange(len(ids)), Causal()))
            return jnp.take_along_axis(jax.nn.log_softmax(logits[:-1], axis=-1), ids[1:, None], axis=-1)[:, 0]

        logp = jax.vmap(one)(ids)
        return (logp * weight).sum(), logp

    def packed(self, branches: list[Branch], weights: list[np.ndarray], layout: Layout):
        """Log-probs of each branch's trained tokens, and gradients of their weighted sum over all micro-batches."""
        logps: list[Any] = [None] * len(branches)
        gradient = jax.tree.map(np.zeros_like, jax.device_get(self.params))
        batches, _ = pack(branches, layout)
        for batch in batches:
            weight_SL = np.zeros((layout.branches, layout.length))
            for s, n in enumerate(batch.order):
                weight_SL[s, : len(weights[n])] = weights[n]
            with jax.enable_x64(True):
                (_, logp), g = jax.device_get(self._packed(self.params, batch.forest, weight_SL))
            gradient = jax.tree.map(np.add, gradient, g)
            for s, n in enumerate(batch.order):
                logps[n] = logp[s, : len(weights[n])]
                assert not logp[s, len(weights[n]) :].any()
        return logps, gradient

    def alone(self, branches: list[Branch], weights: list[np.ndarray], slots: int, length: int):
        """The same from unshared sequences of one padded shape."""
        ids, weight = np.zeros((slots, length), np.int32), np.zeros((slots, length - 1))
        for n, one in enumerate(branches):
            ids[n, : len(one.ids)] = one.ids
            weight[n, np.nonzero(one.mask)[0] - 1] = weights[n]
        with jax.enable_x64(True):
            (_, logp), gradient = jax.device_get(self._alone(self.params, ids, weight))
        return [logp[n, np.nonzero(one.mask)[0] - 1] for n, one in enumerate(branches)], gradient

    def compare(self, branches: list[Branch], layout: Layout, slots: int, length: int) -> None:
        rng = np.random.default_rng(len(branches))
        weights = [rng.standard_normal(int(one.mask.sum())) for one in branches]
        logps, gradient = self.packed(branches, weights, layout)
        expected_logps, expected = self.alone(branches, weights, slots, length)
        for actual, want in zip(logps, expected_logps, strict=True):
            assert actual.dtype == np.float64
            np.testing.assert_allclose(actual, want, rtol=0, atol=1e-9)
        for name, want in expected.items():
            assert want.dtype == np.float64
            np.testing.assert_allclose(gradient[name], want, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.fixture(scope="module")
def float64() -> Float64:
    return Float64()


@hypothesis.settings(max_examples=30)
@hypothesis.given(branches=tries(30, 6))
def test_packed_is_alone(float64: Float64, branches: list[Branch]) -> None:
    """Log-probs, and gradients of a loss that weighs every branch's tokens differently, shared ones too: 1e-9."""
    float64.compare(branches, SMALL_LAYOUT, 6, 30)


def test_packed_is_alone_for_the_named_cases(float64: Float64) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, 30).tolist()
    long, every = branch(ids, range(1, 30)), range(1, 30)
    float64.compare([long, long, long], SMALL_LAYOUT, 6, 30)  # duplicates
    float64.compare([long, branch(ids[:12], range(1, 12)), branch(ids[:1])], SMALL_LAYOUT, 6, 30)  # prefixes
    float64.compare([long, branch([(ids[0] + 1) % VOCAB, *ids[1:]], every)], SMALL_LAYOUT, 6, 30)  # fork at the first token
    middle = branch([*ids[:20], (ids[20] + 1) % VOCAB, *ids[21:]], [3, 4, 22])
    float64.compare([long, branch(ids, [3, 4, 5, 29]), middle], SMALL_LAYOUT, 6, 30)  # masks that differ on shared tokens
    apart = [branch([n, *ids[1:]], every) for n in range(6)]
    assert len(pack(apart, SMALL_LAYOUT)[0]) == 2  # micro-batches add up
    float64.compare(apart, SMALL_LAYOUT, 6, 30)


def test_packed_is_alone_across_key_blocks(float64: Float64) -> None:
    ids = np.random.default_rng(1).integers(0, VOCAB, 126).tolist()
    branches = [branch([*ids, n, *([n] * (3 * n))], [50, 126, *([127] if n else [])]) for n in range(6)]
    float64.compare(branches, Layout(rows=1, tokens=256, context=256, branches=6, length=3), 6, 160)


def test_attention_is_the_mask() -> None:
    """The context against dense softmax over the whole row under `v <= u < end[v]`, in float64."""
    layout = Layout(rows=2, tokens=256, context=256, branches=8, length=1)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 9, 140)
    branches = [branch([*ids[: 120 + n], *rng.integers(0, 9, 8 * n)]) for n in range(5)] + [branch(ids[5:70].tolist())]
    (batch,), stats = pack(branches, layout)
    blocks, H, K, h = batch.forest.blocks, 6, 2, 4
    q, k, v = (rng.standard_normal((2, 256, heads, h)) for heads in (H, K, K))
    with jax.enable_x64(True):
        out = np.asarray(ForestContext(blocks, Numerics(jnp.float64)).attend(0, *(jnp.asarray(x) for x in (q, k, v))))
    place = np.arange(256)
    seen = (place[None, None] <= place[:, None]) & (place[:, None] < blocks.end[:, None])
    k, v = (x.repeat(H // K, axis=2) for x in (k, v))
    scores = np.where(seen[:, None], np.einsum("buhd,bvhd->bhuv", q, k) * h**-0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhuv,bvhd->buhd", p / p.sum(-1, keepdims=True), v).reshape(2, 256, H * h)
    real = np.zeros((2, 256), bool)
    for row, query in zip(real, blocks.query, strict=True):
        row[query[query < 256]] = True
    assert real.sum() == stats.tokens_kept
    np.testing.assert_allclose(out[real], expected[real], rtol=0, atol=1e-12)


# ---- the same bits, bfloat16


@pytest.mark.parametrize("G", [1, 2, 3])
@pytest.mark.parametrize("h", [16, 64])
def test_packed_is_alone_bit_for_bit(h: int, G: int) -> None:
    """Siblings that fill a key block (prefixes near 128), short chains, duplicates; alone in a smaller layout too."""
    config = ModelConfig(
        family="llama", vocab_size=72, model_dim=64, ffn_dim=96, num_layers=2, num_heads=2 * G, num_kv_heads=2,
        head_dim=h, max_positions=512,
    )  # fmt: skip
    definition, params = Definition(config, jnp.bfloat16, True), params_of(config)
    rng = np.random.default_rng(h + G)
    stem = rng.integers(0, 72, 126)
    every = slice(1, None)
    sizes = [(124, 3), (126, 1), (126, 2), (126, 40), (126, 2), (126, 0), (100, 60), (30, 5), (0, 20), (0, 1), (0, 100)]
    branches = []
    for keep, more in sizes:
        ids = np.concatenate([stem[:keep], rng.integers(0, 72, more)]).astype(np.int32)
        mask = np.zeros(len(ids), bool)
        mask[every] = True
        branches.append(Branch(ids, mask))
    branches.append(branches[3])

    function = jax.jit(lambda params, forest: log_probs(definition, params, forest, 128))
    layout = Layout(rows=1, tokens=512, context=256, branches=12, length=170)
    (batch,), stats = pack(branches, layout)
    assert stats.compression > 2
    packed = np.asarray(function(params, batch.forest))
    small = Layout(rows=1, tokens=128, context=128, branches=1, length=127)
    for s, n in enumerate(batch.order):
        ids, count = branches[n].ids, int(branches[n].mask.sum())
        alone = [layout] if len(ids) > 128 or n % 2 else [layout, small]
        for one in alone:
            (single,), _ = pack([branches[n]], one)
            out = np.asarray(function(params, single.forest))[0]
            np.testing.assert_array_equal(out[:count], packed[s, :count], err_msg=f"branch {n}, {len(ids)} tokens")
