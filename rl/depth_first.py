"""Depth-first training: tries that fit no row, one path of keys, values and their gradients alive at a time.

Legend: T tokens of a segment, R = 2 T reads, C places of the path buffer, L layers, K kv heads, h head dim.

    score    enter every segment in pre-order: its keys and values go into the path buffer, its readings come out
    (loss)   once, for the whole batch, on the readings of all branches: any loss, and its cotangent of each reading
    pull     walk again; enter inner segments; on leaving a segment, forward and backward of it alone, with the cotangents
             of its readings, and those of its keys and values that the segments below have left

When a segment is left, all below it have been: the gradient is exact (Xia et al., "DTA", arXiv 2602.00482, walk so too). Live
are the buffers (of one path), and the activations of one segment.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from models.attention import KEY_BLOCK
from models.routes import not_recorded
from rl.forest import Layout
from rl.forward import Reading, SegmentArrays, read_segment
from rl.losses import Readout
from rl.programs import Programs
from rl.routes import Routes
from rl.tries import Segment, Trie, segment_sizes

SHORTEST_CONTEXT = 512
"""contexts are a quarter of one another down to this"""


def contexts(layout: Layout) -> tuple[int, ...]:
    """C: how much of the path buffer a program reads. The last is all of it, with room for the last segment's padding."""
    sizes = [-(-(layout.path + segment_sizes(layout)[-1]) // KEY_BLOCK) * KEY_BLOCK]
    while sizes[0] // 4 >= SHORTEST_CONTEXT:
        sizes.insert(0, -(-(sizes[0] // 4) // KEY_BLOCK) * KEY_BLOCK)
    return tuple(sizes)


class DepthFirst:
    """The walk, and its compiled programs. Segments are replicated: weights alone are split over the mesh."""

    def __init__(self, programs: Programs, mesh: Mesh):
        self.programs = programs
        self.definition, self.layout = programs.definition, programs.layout
        self.readout: Readout = programs.readout
        self.trained, self.shardings, self.replicated = programs.trained, programs.shardings, programs.replicated
        self.accum, config, layout = programs.accum, programs.definition.config, programs.layout
        self.shards = programs.shards
        self._buffer = NamedSharding(mesh, self.shards.spec(None, None, "kv_heads", None))
        self.contexts = contexts(layout)
        self._shape = (config.num_layers, self.contexts[-1], config.num_kv_heads, config.head_dim)
        self._zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=self._buffer)
        self.compiled: dict[tuple[str, int, int], Any] = {}
        """(enter or leave, T, C) -> program"""

    # ---- programs

    def enter(self, C: int, params: Any, keys: jax.Array, values: jax.Array, segment: SegmentArrays, temperature: jax.Array):
        """Pure: a segment's readings, and the buffers with its keys and values."""
        part = tuple(x[:, :C] for x in (keys, values))
        reading, new = read_segment(self.definition, params, part[0], part[1], segment, temperature, self.readout, self.shards)
        place = partial(jax.lax.dynamic_update_slice_in_dim, start_index=jnp.asarray(segment.start), axis=1)
        keys, values = (place(x, new.astype(x.dtype)) for x, new in zip((keys, values), new, strict=True))
        return reading, keys, values

    def leave(
        self,
        C: int,
        params: Any,
        grads: Any,
        buffers: tuple[jax.Array, jax.Array],
        buffer_grads: tuple[jax.Array, jax.Array],
        segment: SegmentArrays,
        temperature: jax.Array,
        out_grads: jax.Array,
    ):
        """Pure: weights' gradients with the segment's added; the buffers' with its ancestors' added and its own taken out; and
        the routers' metric sums."""
        start, T = jnp.asarray(segment.start), segment.tokens.shape[0]
        wide = tuple(x[:, :C].astype(self.accum) for x in buffers)

        def forward(trained: Any, keys: jax.Array, values: jax.Array):
            reading, new = read_segment(
                self.definition, {**params, **trained}, keys, values, segment, temperature, self.readout, self.shards
            )
            routers, sums = self.programs.routers(reading, segment.routes)
            return (reading.out, new, routers), sums

        trained = {name: params[name] for name in self.trained}
        (_, _, routers), transpose, sums = jax.vjp(forward, trained, *wide, has_aux=True)
        own = tuple(jax.lax.dynamic_slice_in_dim(x, start, T, axis=1) for x in buffer_grads)
        new, *above = transpose((jnp.asarray(out_grads), own, jax.tree.map(jnp.ones_like, routers)))
        cleared = (
            jax.lax.dynamic_update_slice_in_dim(x, jnp.zeros_like(y), start, 1) for x, y in zip(buffer_grads, own, strict=True)
        )
        below = tuple(x.at[:, :C].add(part) for x, part in zip(cleared, above, strict=True))
        return {name: grads[name] + new[name] for name in self.trained}, below, sums

    def lower(self, kind: str, T: int, C: int) -> Any:
        """A lowered program, over abstract arguments with the shardings of a step."""

        def like(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        params = {
            name: like(weight.shape, self.accum, self.shardings[name]) for name, weight in self.definition.weights.items()
        }
        zero = self._padded(None, T, step=kind == "leave")
        segment = jax.tree.map(lambda x: like(x.shape, x.dtype, self.replicated), zero)
        temperature = like((), np.float32, self.replicated)
        buffers = (like(self._shape, self.definition.dtype, self._buffer),) * 2
        if kind == "enter":
            out = (self.replicated, self._buffer, self._buffer)
            program = jax.jit(partial(self.enter, C), donate_argnums=(1, 2), out_shardings=out)
            return program.lower(params, *buffers, segment, temperature)
        grads = {name: params[name] for name in self.trained}
        out = ({name: self.shardings[name] for name in self.trained}, (self._buffer, self._buffer), self.replicated)
        program = jax.jit(partial(self.leave, C), donate_argnums=(1, 3), out_shardings=out)
        buffer_grads = (like(self._shape, self.accum, self._buffer),) * 2
        return program.lower(
            params, grads, buffers, buffer_grads, segment, temperature, like((2 * T,), self.accum, self.replicated)
        )

    def warm_up(self, reading_only: bool = False) -> None:
        """Compiles everything that a walk may run, or one that only reads."""
        for T in segment_sizes(self.layout):
            for C in self.contexts:
                if C >= T:
                    for kind in ("enter",) if reading_only else ("enter", "leave"):
                        if (kind, T, C) not in self.compiled:
                            self.compiled[kind, T, C] = self.lower(kind, T, C).compile()
        jax.block_until_ready((self._empty(self.definition.dtype), self._empty(self.accum)))

    def _run(self, kind: str, segment: Segment, *arguments: Any) -> Any:
        C = next(C for C in self.contexts if segment.start + segment.size <= C)
        assert (kind, segment.size, C) in self.compiled, "warm_up() first"
        return self.compiled[kind, segment.size, C](*arguments)

    # ---- the walk

    def readings(self, params: Any, trie: Trie, temperature: jax.Array) -> list[Reading]:
        """Of each segment, padded, on the device."""
        keys, values = self._empty(self.definition.dtype)
        readings = []
        for segment in trie.segments:
            arrays = self._arrays(segment, step=False)
            reading, keys, values = self._run("enter", segment, params, keys, values, arrays, temperature)
            readings.append(reading)
        return readings

    def score(self, params: Any, trie: Trie, temperature: jax.Array) -> Reading:
        """Readings of all entries of a trie, in numpy."""
        got = jax.device_get([(each.out, each.entropy) for each in self.readings(params, trie, temperature)])
        sizes = [len(segment.read) for segment in trie.segments]
        out, entropy = (np.concatenate([x[:n] for x, n in zip(part, sizes, strict=True)]) for part in zip(*got, strict=True))
        return Reading(out, entropy)

    def pull(self, params: Any, grads: Any, trie: Trie, temperature: jax.Array, out_grads: np.ndarray):
        """`grads` with those of a trie added, given the cotangent of each of its entries; and each segment's metric sums."""
        keys, values = self._empty(self.definition.dtype)
        buffer_grads, shares = self._empty(self.accum), []
        for what, number in walk(trie):
            segment = trie.segments[number]
            arrays = self._arrays(segment, step=what == "leave")
            if what == "enter":
                _, keys, values = self._run("enter", segment, params, keys, values, arrays, temperature)
                continue
            padded = np.zeros(2 * segment.size, self.accum)
            padded[: len(segment.read)] = out_grads[segment.first_entry :][: len(segment.read)]
            grads, buffer_grads, sums = self._run(
                "leave", segment, params, grads, (keys, values), buffer_grads, arrays, temperature,
                jax.device_put(padded, self.replicated),
            )  # fmt: skip
            shares.append(sums)
        return grads, shares

    def _empty(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        return self._zeros(self._shape, dtype), self._zeros(self._shape, dtype)

    def _arrays(self, segment: Segment, step: bool) -> SegmentArrays:
        return jax.device_put(self._padded(segment, segment.size, step), self.replicated)

    def _padded(self, segment: Segment | None, T: int, step: bool) -> SegmentArrays:
        """In numpy; None is an empty one. `step` says whether it has what the routers' losses need."""
        tokens, used = np.zeros(T, np.int32), np.zeros(2 * T, bool)
        read, target = np.zeros(2 * T, np.int32), np.zeros(2 * T, np.int32)
        routes, model = None, self.definition.config
        if model.moe is not None:
            routes = Routes.empty((T,), not_recorded(0, model))
        if segment is not None:
            n = len(segment.read)
            tokens[: len(segment.tokens)] = segment.tokens
            read[:n], target[:n], used[:n] = segment.read, segment.target, True
        if segment is not None and routes is not None and segment.routes is not None:
            n, given = len(segment.tokens), segment.routes
            routes.rows[:n], routes.weight[:n] = given.rows, given.weight
            routes = replace(routes, total=given.total, load=given.load if step else None)
        elif routes is not None and step:
            [routes] = self.programs.router.of_step([routes], model)
        count, start = (0, 0) if segment is None else (len(segment.tokens), segment.start)
        return SegmentArrays(
            tokens=tokens,
            start=np.asarray(start, np.int32),
            count=np.asarray(count, np.int32),
            read=read,
            target=target,
            used=used,
            routes=routes,
        )


def walk(trie: Trie) -> Iterator[tuple[str, int]]:
    """("enter" | "leave", segment): inner segments are entered, every segment is left once all below it have been."""
    path: list[int] = []

    def climb(parent: int) -> Iterator[tuple[str, int]]:
        while path and path[-1] != parent:
            yield "leave", path.pop()

    for number, segment in enumerate(trie.segments):
        yield from climb(segment.parent)
        if segment.inner:
            yield "enter", number
        path.append(number)
    yield from climb(-1)
