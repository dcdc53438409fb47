"""Backends of paged attention: who is chosen and why not, and that they compute what a dense model does.

The TPU kernel runs on TPUs only, so a stand-in with its signature takes its place: dense, held to the reference that jax ships
with the kernel, and spoiling what the kernel leaves undefined.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as shipped
from jax.sharding import NamedSharding, PartitionSpec

from launch.aot import tpu_devices
from models import paged
from models.attention import KEY_BLOCK, Ragged
from models.config import ModelConfig
from models.gather import PagedBlocks, Reads
from models.numerics import Numerics
from models.paged import Backend, Gather, Need, PagedContext, RaggedKernel, choose
from sharding.mesh import make_mesh
from sharding.rules import Rules

MODEL = ModelConfig(
    family="llama",
    vocab_size=64,
    model_dim=64,
    ffn_dim=64,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    max_positions=512,
)
TENSOR = Rules({"heads": "tensor", "kv_heads": "tensor"})
PAGE, PAGES, ROWS, ROW_PAGES = 16, 72, 5, 16


def need(tensor: int = 1, **changes: Any) -> Need:
    sizes: dict[str, Any] = {"num_pages": PAGES, "page_size": PAGE, "num_rows": ROWS, "row_pages": ROW_PAGES}
    setting = {"model": MODEL, "numerics": Numerics(jnp.bfloat16), "rules": TENSOR, "mesh": make_mesh({"tensor": tensor})}
    return Need(**sizes | setting | changes)


def on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Need, "platform", "tpu")


# Who is chosen


def test_cpu_gets_gather() -> None:
    assert choose(need()).name == "gather"
    assert choose(need(), "gather").name == "gather"


def test_tpu_gets_the_kernel_where_it_can(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    on_tpu(monkeypatch)
    assert choose(need(4)).name == "ragged"
    assert choose(need(4), "gather").name == "gather"
    logging.set_verbosity(logging.INFO)
    assert choose(need(numerics=Numerics(jnp.float32))).name == "gather"
    logging.set_verbosity(logging.WARNING)
    assert "paged attention on tpu: gather; ragged cannot: it is for model.dtype bfloat16, not float32" in caplog.text


def test_a_gpu_gets_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Need, "platform", "gpu")
    assert choose(need()).name == "gather"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"numerics": Numerics(jnp.float32)}, "model.dtype bfloat16, not float32"),
        ({"model": replace(MODEL, head_dim=64)}, "head dim 128, not 64"),
        (
            {"model": replace(MODEL, num_heads=3, num_kv_heads=3)},
            "1, 2, 4 or a multiple of 8 kv heads, not 3: change engine.mesh",
        ),
        ({"rules": Rules({"heads": "tensor"})}, "map heads and kv_heads to one axis in engine.rules"),
        ({"num_rows": 251, "row_pages": 1024}, "251 rows and 1024 pages takes .* raise engine.page_size"),
        ({"num_rows": 2048, "row_pages": 100}, "2048 rows and 100 pages takes .* raise engine.page_size"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    on_tpu(monkeypatch)
    with pytest.raises(ValueError, match=f"engine.attention: ragged cannot: .*{reason}.*; or set it to auto"):
        choose(need(**changes), "ragged")
    assert choose(need(**changes)).name == "gather"


def test_refusals_name_everything_and_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"it is for platform tpu, not cpu; it is for model\.dtype bfloat16, not float32"):
        choose(need(numerics=Numerics(jnp.float32)), "ragged")
    with pytest.raises(ValueError, match=r"engine\.attention: 'flash' is unknown; use auto, ragged or gather"):
        choose(need(), "flash")


def test_a_jax_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    on_tpu(monkeypatch)
    monkeypatch.setattr(paged, "_kernel", lambda: None)
    assert choose(need()).name == "gather"


# What is computed


def stand_in(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    num_kv_pages_per_block: int,
    num_queries_per_block: int,
) -> jax.Array:
    """Attention as the kernel's documentation says. NaN for tokens of no row, and for all where a row breaks its rules."""
    assert 0 < num_kv_pages_per_block <= page_indices.shape[1]
    assert 0 < num_queries_per_block <= q.shape[0]
    T, H, h = q.shape
    tokens = jnp.arange(T)
    counts = cu_q_lens[1:] - cu_q_lens[:-1]
    live = jnp.arange(kv_lens.shape[0]) < num_seqs[0]
    row = jnp.minimum((tokens[:, None] >= jnp.where(live, cu_q_lens[1:], T)[None]).sum(axis=1), num_seqs[0] - 1)
    position = kv_lens[row] - counts[row] + tokens - cu_q_lens[row]
    kv = kv_pages[page_indices[row]].astype(jnp.float32).reshape(T, -1, kv_pages.shape[2] // 2, 2, h)
    k, v = (jnp.repeat(kv[:, :, :, i], H // kv.shape[2], axis=2) for i in (0, 1))
    scores = jnp.einsum("thd,tchd->thc", q.astype(jnp.float32), k, precision="highest") * sm_scale
    seen = jnp.arange(k.shape[1])[None, None] <= position[:, None, None]
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("thc,tchd->thd", p, v, precision="highest")
    broken = (live & ((kv_lens < counts) | (counts < 1))).any()
    used = tokens < cu_q_lens[num_seqs[0]]
    return jnp.where(used[:, None, None] & ~broken, out, jnp.nan).astype(q.dtype)


def test_the_stand_in_is_the_reference_that_jax_ships() -> None:
    rng = np.random.default_rng(0)
    q, kv = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((12, 8, 128), (PAGES, PAGE, 8, 128)))
    lengths, table = np.array([1, 40, 17], np.int32), rng.permutation(PAGES)[:24].reshape(3, 8).astype(np.int32)
    starts, rows = np.array([0, 1, 8, 12], np.int32), np.array([3], np.int32)
    batch = tuple(map(jnp.asarray, (lengths, table, starts, rows)))
    expected = shipped.ref_ragged_paged_attention(q, kv, *batch, sm_scale=128**-0.5)
    ours = stand_in(q, kv, *batch, sm_scale=128**-0.5, num_kv_pages_per_block=1, num_queries_per_block=1)
    np.testing.assert_allclose(ours, expected, atol=2e-5)


Spans = list[tuple[int, int, int]]
"""of a step: (sequence, first position, last position + 1) of each row"""


def one_by_one(spans: Spans, T: int) -> Reads:
    """What `gather` reads: each token by itself, all key blocks of its row up to it."""
    W = ROW_PAGES * PAGE // KEY_BLOCK
    at = [(row, position) for row, (_, first, last) in enumerate(spans) for position in range(first, last)]
    at += [(0, -1)] * (T - len(at))
    row, position = (np.array(x, np.int32) for x in zip(*at, strict=True))
    number = np.broadcast_to(np.arange(W, dtype=np.int32), (T, W))
    index = np.where(number * KEY_BLOCK <= position[:, None], number, W)
    return Reads(
        query=np.arange(T, dtype=np.int32).reshape(T, 1, 1),
        position=position.reshape(T, 1, 1),
        row=np.broadcast_to(row[:, None], (T, W)),
        number=number,
        lists=Ragged(np.zeros((T, W), np.int32), index.reshape(T, 1, W)),
        num_chunks=np.array(sum(last - first for _, first, last in spans), np.int32),
    )


class Play:
    """Sequences with random q, k, v, written to scattered pages step by step."""

    def __init__(self, lengths: list[int], backend: Backend, seed: int = 0):
        rng = np.random.default_rng(seed)
        H, K, h = MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim
        self.q, self.k, self.v = ([rng.normal(size=(n, x, h)).astype(np.float32) for n in lengths] for x in (H, K, K))
        self.pages = rng.permutation(np.arange(1, PAGES))[: len(lengths) * ROW_PAGES].reshape(-1, ROW_PAGES)
        self.pool = [jax.tree.map(lambda x: jax.device_put(np.full(x.shape, 9, x.dtype), x.sharding), backend.layer())]

        @jax.jit
        def run(pool, q, k, v, blocks):
            context = PagedContext(pool, blocks, backend)
            return context.attend(0, q, k, v), context.pool

        self.run = run

    def blocks(self, spans: Spans, T: int) -> PagedBlocks:
        """The spans as rows, and padding."""
        page, offset = np.zeros(T, np.int32), np.zeros(T, np.int32)
        table, lengths = np.zeros((ROWS, ROW_PAGES), np.int32), np.zeros(ROWS, np.int32)
        starts = np.zeros(ROWS + 1, np.int32)
        for row, (seq, first, last) in enumerate(spans):
            at = np.arange(first, last)
            starts[row + 1 :] = starts[row] + len(at)
            page[starts[row] : starts[row + 1]] = self.pages[seq, at // PAGE]
            offset[starts[row] : starts[row + 1]] = at % PAGE
            table[row], lengths[row] = self.pages[seq], last
        fields = {"page": page, "offset": offset, "table": table, "starts": starts, "lengths": lengths}
        return PagedBlocks(**fields, num_rows=np.array([len(spans)], np.int32), reads=(one_by_one(spans, T),))

    def flat(self, x: list[np.ndarray], spans: Spans, T: int) -> jax.Array:
        rows = [x[seq][first:last] for seq, first, last in spans]
        return jnp.asarray(np.concatenate([*rows, np.full((T - sum(map(len, rows)), *x[0].shape[1:]), 3.0, np.float32)]))

    def step(self, spans: Spans, T: int, blocks: PagedBlocks | None = None) -> np.ndarray:
        """The outputs of the tokens of all rows; what padding gives is only checked to be finite."""

        arrays = (self.flat(x, spans, T) for x in (self.q, self.k, self.v))
        out, self.pool = self.run(self.pool, *arrays, blocks or self.blocks(spans, T))
        assert np.isfinite(out).all()
        return np.asarray(out)[: sum(last - first for _, first, last in spans)]

    def dense(self, spans: Spans) -> np.ndarray:
        """The same in float64, one token at a time."""
        outs = []
        for seq, first, last in spans:
            for at in range(first, last):
                k, v = (
                    x[seq][: at + 1].astype(np.float64).repeat(MODEL.num_heads // MODEL.num_kv_heads, 1)
                    for x in (self.k, self.v)
                )
                scores = np.einsum("hd,chd->hc", self.q[seq][at], k) * MODEL.head_dim**-0.5
                p = np.exp(scores - scores.max(axis=1, keepdims=True))
                outs.append(np.einsum("hc,chd->hd", p / p.sum(axis=1, keepdims=True), v).ravel())
        return np.stack(outs)


MIX = [
    [(0, 0, 40), (1, 0, 17)],
    [(0, 40, 41), (1, 17, 33), (2, 0, 5)],
    [(2, 5, 6), (0, 41, 42), (1, 33, 34), (3, 0, 150)],
    [(3, 150, 200), (2, 6, 7)],
]
"""steps of prefill, chunked prefill and decode together; rows in any order"""


@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("backend", [Gather, RaggedKernel])
def test_backend_is_dense_attention(
    monkeypatch: pytest.MonkeyPatch, backend: type[Backend], tensor: int, dtype: Any, atol: float
) -> None:
    """Any mix of rows over scattered pages, heads split over chips, padding behind."""
    monkeypatch.setattr(paged, "_kernel", lambda: stand_in)
    play = Play([42, 34, 7, 200], backend(need(tensor, numerics=Numerics(dtype))))
    for spans in MIX:
        np.testing.assert_allclose(play.step(spans, 192), play.dense(spans), atol=atol)


def test_ragged_decodes_beside_finished_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a decode each row has one token; one that has finished has no keys and writes to the trash page."""
    monkeypatch.setattr(paged, "_kernel", lambda: stand_in)
    play = Play([20, 30, 10], RaggedKernel(need(4, numerics=Numerics(jnp.float32))))
    play.step([(0, 0, 19), (1, 0, 29), (2, 0, 9)], 64)
    spans = [(0, 19, 20), (1, 29, 30), (2, 9, 10)]
    blocks = play.blocks(spans, 3)
    finished = replace(blocks, page=blocks.page * [1, 0, 1], lengths=blocks.lengths * [1, 0, 1, 1, 1])
    finished = jax.tree.map(lambda x: np.asarray(x, np.int32), finished)
    out, expected = play.step(spans, 3, finished), play.dense(spans)
    np.testing.assert_allclose(out[[0, 2]], expected[[0, 2]], atol=1e-5)


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("heads", "tensor", "page_size", "tokens", "rows", "row_pages"),
    [
        ((32, 8), 4, 128, 512, 64, 32),
        ((16, 1), 1, 16, 8, 8, 64),
        ((64, 8), 1, 128, 4096, 64, 32),
        ((32, 32), 1, 32, 64, 64, 128),
        ((12, 4), 1, 1, 100, 5, 300),
        ((32, 8), 4, 16, 512, 248, 1024),
    ],
    ids=str,
)
def test_what_is_not_refused_compiles(
    heads: tuple[int, int], tensor: int, page_size: int, tokens: int, rows: int, row_pages: int, topology: str
) -> None:
    """The kernel and its writes, at the edges of what `lacks` lets through; the pool is changed in place."""
    pytest.importorskip("libtpu", reason="the tpu extra is not installed")
    mesh = make_mesh({"tensor": tensor}, tpu_devices(topology))
    model = replace(MODEL, num_heads=heads[0], num_kv_heads=heads[1])
    sizes = {"num_pages": 2048, "page_size": page_size, "num_rows": rows, "row_pages": row_pages}
    backend = choose(need(model=model, mesh=mesh, **sizes), "ragged")

    def like(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    ints = {"page": tokens, "offset": tokens, "starts": rows + 1, "lengths": rows, "num_rows": 1}
    fields = {name: like((n,)) for name, n in ints.items()} | {"table": like((rows, row_pages))}
    blocks = PagedBlocks(**fields, reads=(jax.tree.map(lambda x: like(x.shape), one_by_one([(0, 0, 1)], 1)),))
    q, k = (like((tokens, n, 128), jnp.float32) for n in heads)

    def step(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, blocks: PagedBlocks) -> tuple[jax.Array, Any]:
        context = PagedContext([layer], blocks, backend)
        return context.attend(0, q, k, v), context.pool

    layer = backend.layer()
    memory = jax.jit(step, donate_argnums=0).lower(layer, q, k, k, blocks).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= layer.size * 2 // tensor
    assert memory.temp_size_in_bytes <= 4 * 4 * tokens * (heads[0] + heads[1]) * 128 + 2**20
