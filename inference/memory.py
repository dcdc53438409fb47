"""How the engine's memory divides: what a token's keys and values take, what a chip holds, how much fits.

Bytes are per chip unless a name says otherwise. The pool, the weights and the sampler's tables are counted exactly; what a
step needs besides (activations, scores, logits) is the compiler's to say: `launch.bench aot` reports it.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from inference.config import EngineConfig, captures
from models.attention import KEY_BLOCK
from models.config import ModelConfig
from models.routes import not_recorded
from models.transformer import describe
from sharding.rules import Rules

TABLE_BYTES = 8
"""of one sampler table entry: an int32 count and a float32 bias"""


def token_bytes(model: ModelConfig, dtype: DTypeLike) -> int:
    """Bytes of one token's keys and values, in all layers, over all chips."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * np.dtype(dtype).itemsize


def amount(num_bytes: int) -> str:
    """Bytes for people: `256 GiB`, `144 KiB`."""
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, 4)
    value = num_bytes / 2 ** (10 * power)
    digits = f"{value:.0f}" if value == int(value) else f"{value:.4g}"
    return f"{digits} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What one chip of an engine holds, and how many tokens that is room for."""

    num_chips: int
    weight_bytes: int
    max_slots: int
    slot_bytes: int
    """of a slot's row in the sampler's tables of counts and biases"""
    token_bytes: int
    """of one token's keys and values"""
    page_size: int
    num_pages: int
    """the trash page among them"""
    max_context: int
    row_bytes: int = 0
    """of one token's routing, in host memory; 0 where none is recorded"""

    @property
    def table_bytes(self) -> int:
        return (self.max_slots + 1) * self.slot_bytes

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.pool_bytes + self.table_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds at once."""
        return (self.num_pages - 1) * self.page_size

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that can run."""
        return min(self.max_context, self.num_tokens)

    @property
    def full_sequences(self) -> int:
        """How many sequences of max_context tokens the pool holds at once."""
        return (self.num_pages - 1) // -(-self.max_context // self.page_size)

    def __str__(self) -> str:
        rows = self.num_pages * self.page_size * self.row_bytes
        host = f"\nrouting: {amount(self.row_bytes)} a token, {amount(rows)} of host memory" if rows else ""
        chips = f"each of {self.num_chips} chips" if self.num_chips > 1 else "1 chip"
        return (
            f"engine memory, {chips}: {amount(self.total_bytes)} = weights {amount(self.weight_bytes)} + pages "
            f"{amount(self.pool_bytes)} + sampler tables {amount(self.table_bytes)}\n"
            f"pages: {self.num_pages} of {self.page_size} tokens, {amount(self.token_bytes)} a token and chip; "
            f"they hold {self.num_tokens:,} tokens\n"
            f"longest sequence: {self.longest_context:,} tokens; {self.full_sequences} of max_context "
            f"({self.max_context:,}) at once{host}"
        )


def plan(model: ModelConfig, config: EngineConfig, dtype: DTypeLike, mesh: Mesh | AbstractMesh, rules: Rules) -> MemoryPlan:
    """The plan of an engine, from its sizes alone: nothing is allocated.

    Raises:
        ValueError: the rules do not fit the mesh or the model.
    """
    itemsize = np.dtype(dtype).itemsize
    weights = describe(model, stacked=False)
    shardings = rules.shardings(mesh, weights)
    kv = NamedSharding(mesh, rules.spec(("kv_heads",), "the page pool"))
    (heads_per_chip,) = kv.shard_shape((model.num_kv_heads,))
    tables = NamedSharding(mesh, rules.spec(("vocab",), "the sampler's tables"))
    (columns_per_chip,) = tables.shard_shape((model.vocab_size,))
    return MemoryPlan(
        num_chips=mesh.size,
        weight_bytes=sum(math.prod(shardings[name].shard_shape(w.shape)) for name, w in weights.items()) * itemsize,
        max_slots=config.max_slots,
        slot_bytes=columns_per_chip * TABLE_BYTES,
        token_bytes=token_bytes(model, dtype) // model.num_kv_heads * heads_per_chip,
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_context=config.max_context,
        row_bytes=not_recorded(1, model).nbytes if captures(model, config) else 0,
    )


def free_bytes(mesh: Mesh) -> int:
    """Bytes that can be allocated on each chip of the mesh; devices on the host's own memory share what is free there."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    if all(each and "bytes_limit" in each for each in stats):
        return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    return _host_bytes() // len(mesh.local_devices)


def _host_bytes() -> int:
    """Memory that the machine can give: free, or held by caches that make way; all of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check(needs: MemoryPlan, free: int) -> None:
    """Whether pages and sampler tables fit into `free` bytes of a chip that holds the weights already.

    Raises:
        ValueError: they do not; says which field to change, and a value that fits.
    """
    wanted = needs.pool_bytes + needs.table_bytes
    if wanted <= free:
        return
    problem = (
        f"{needs.num_pages} pages ({amount(needs.pool_bytes)}) and the sampler's tables ({amount(needs.table_bytes)}) do not "
        f"fit a chip: {amount(free)} is free beside the weights"
    )
    pages = (free - needs.table_bytes) // needs.page_bytes
    if (pages - 1) * needs.page_size >= KEY_BLOCK:
        shorter = (pages - 1) * needs.page_size // KEY_BLOCK * KEY_BLOCK
        also = f", and max_context to {shorter}" if shorter < needs.max_context else ""
        raise ValueError(f"engine.num_pages: {problem}; lower it to {pages}{also}")
    slots = (free // 2) // needs.slot_bytes - 1
    fix = (
        f"lower it to {slots}, and num_pages"
        if 0 < slots < needs.max_slots
        else "split the model over more chips (engine.mesh)"
    )
    raise ValueError(f"engine.max_slots: {problem}; {fix}")
