"""The Engine API of google-jetstream 0.2.2 over our engine: JetStream's orchestrator and gRPC server run on it unchanged.

    python -m inference.jetstream --model DIR --port 9000     a server on 127.0.0.1, until a signal ends it

Our engine schedules by itself, mixing chunks of prompts with decoding sequences. So `prefill` only hands the prompt's ids on:
JetStream takes no token from it, and on the same device nothing is gained by computing the prompt sooner. `insert` submits the
request, and `generate` steps the engine until each slot has a token to give out. Only JetStream's generate thread touches the
engine. Requests of JetStream 0.2.2 carry no sampling parameters: all are greedy.

An exception in one of JetStream's threads kills the process, without a clean-up. So nothing that a client may send raises
here: a prompt that the engine refuses is logged, and answered with no tokens.
"""

import argparse
import itertools
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from inference.config import EngineConfig
from inference.engine import Engine
from inference.text import token_text
from inference.types import Request, SamplingParams
from models.attention import KEY_BLOCK
from models.hf import load_hf, resolve
from models.hf_config import read_config
from models.tokenizer import Tokenizer
from models.transformer import describe
from sharding.mesh import make_mesh
from sharding.reshard import reshard
from sharding.rules import Rules

# By name: only JetStream's own environment (`make jetstream`) has it, and types are checked in the other one.
engine_api: Any = import_module("jetstream.engine.engine_api")
token_utils: Any = import_module("jetstream.engine.token_utils")
tokenizer_api: Any = import_module("jetstream.engine.tokenizer_api")
tokenizer_pb2: Any = import_module("jetstream.engine.tokenizer_pb2")
jax.__dict__.setdefault("tree_map", jax.tree.map)  # the orchestrator of 2024 calls it; jax took it away in 0.4.26

NO_ID = -1
"""of a token that the tokenizer has not got; JetStream wants a number"""


@struct.dataclass
class Prefix:
    """A prompt. A pytree without leaves, so that there is nothing for JetStream to move between devices, or to delete."""

    ids: tuple[int, ...] = struct.field(pytree_node=False)


@dataclass(eq=False)
class Slot:
    """A request that JetStream decodes."""

    id: str
    tokens: deque[int] = field(default_factory=deque)
    """sampled, and not yet given out"""
    running: bool = True
    """the engine will sample more"""
    given: int = 0
    read: int = 0
    """the last step at which JetStream looked at this slot's token"""


State = list[Slot | None]


@struct.dataclass
class Result(engine_api.ResultTokens):
    """One token of each slot, with a way to tell which ones JetStream reads."""

    on_read: Any = struct.field(pytree_node=False)

    def convert_to_numpy(self) -> "Result":
        return self

    def get_result_at_slot(self, slot: int) -> Any:
        self.on_read(slot)
        return super().get_result_at_slot(slot)


class JetStreamEngine(engine_api.Engine):
    """Ours under JetStream's interface, as prefill engine, as generate engine, or as both (interleaved mode)."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, JetStreamTokenizer(tokenizer, engine.model.eos_ids)
        self._params = SamplingParams(
            max_tokens=engine.config.max_context,  # JetStream counts by itself, and does not say how many it wants
            temperature=0,
            stop_ids=tuple(sorted(self.tokenizer.stop_tokens)),
        )
        self._numbers = itertools.count()
        self._running: dict[str, Slot] = {}
        self._step = self._last_read = 0
        """steps so far, and the last one of which JetStream read a token"""

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's own weights. They are never taken back from the caller: the engine holds them."""
        return self.engine.params

    def get_tokenizer(self) -> Any:
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        return self.tokenizer

    def prefill(self, *, params: Any, existing_prefix: Prefix | None = None, padded_tokens: Any, true_length: int) -> Prefix:
        ids = tuple(int(i) for i in np.asarray(padded_tokens)[:true_length])  # shorter where JetStream cut the prompt
        if ids[:1] == (NO_ID,):  # JetStream puts a start token before ids, whether there is one or not
            ids = ids[1:]
        return Prefix(ids if existing_prefix is None else existing_prefix.ids + ids)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> State:
        for slot in list(self._running.values()):
            self._cancel(slot)
        return [None] * self.max_concurrent_decodes

    def insert(self, prefix: Prefix, decode_state: State, slot: int) -> State:
        self._cancel(decode_state[slot])
        new = Slot(f"jetstream-{next(self._numbers)}", read=self._step)
        request = Request(id=new.id, prompt_ids=prefix.ids, params=self._params)
        try:
            self.engine.submit(request, lambda tokens: new.tokens.extend(tokens.ids.tolist()))
            self._running[new.id] = new
        except ValueError as error:
            logging.warning("JetStream request refused: %s", error)
            new.running = False
        decode_state[slot] = new
        return decode_state

    def generate(self, params: Any, decode_state: State) -> tuple[State, Result]:
        """The next token of each slot; where there is none, for the sequence is over, it is not valid."""
        self._free_unread(decode_state)
        self._step += 1
        while any(slot is not None and slot.running and not slot.tokens for slot in decode_state):
            for completion in self.engine.step():
                self._running.pop(completion.request_id).running = False
        data = np.zeros((len(decode_state), 3), np.int32)
        for row, slot in zip(data, decode_state, strict=True):
            if slot is not None and slot.tokens:
                slot.given += 1
                row[:] = slot.tokens.popleft(), True, slot.given
        on_read = partial(self._was_read, self._step, tuple(decode_state))
        columns: dict[str, Any] = {"tokens_idx": (0, 1), "valid_idx": (1, 2), "length_idx": (2, 3)}
        return decode_state, Result(data=data, **columns, samples_per_slot=self.samples_per_slot, on_read=on_read)

    def _was_read(self, step: int, slots: tuple[Slot | None, ...], index: int) -> None:
        """Called in JetStream's detokenize thread, which reads the steps in order, and of each only the slots in use."""
        self._last_read = step
        if (slot := slots[index]) is not None:
            slot.read = step

    def _free_unread(self, state: State) -> None:
        """Version 0.2.2 never says that a slot is free. It is when a step went by without its token being read."""
        for i, slot in enumerate(state):
            if slot is not None and slot.read + 1 < self._last_read:
                self._cancel(slot)
                state[i] = None

    def _cancel(self, slot: Slot | None) -> None:
        if slot is not None and slot.running:
            del self._running[slot.id]
            self.engine.cancel(slot.id)
            slot.running = False

    def get_prefix_destination_sharding(self) -> None:
        """A prefix is on no device."""

    @property
    def max_concurrent_decodes(self) -> int:
        return self.engine.config.max_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt, start token included; of a longer one JetStream keeps the end. One of its buckets, powers of two."""
        return min(32768, 1 << (self.engine.config.max_context - 1).bit_length() - 1)

    @property
    def mesh(self) -> Any:
        return jax.tree.leaves(self.engine.params)[0].sharding.mesh

    @property
    def colocated_cpus(self) -> None:
        """None are wanted: JetStream keeps nothing of ours on them."""


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Ours under JetStream's interface; needs no file of JetStream's formats."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]):
        self._tokenizer, self._eos_ids = tokenizer, (*tokenizer.eos_ids, *eos_ids)

    def encode(self, s: str, *, is_bos: bool = True, **padding: Any) -> tuple[Any, int]:
        """Padded ids and how many are real; the start token comes first where the tokenizer has one."""
        ids = np.array(self._tokenizer.encode(s), np.int32)
        is_bos = is_bos and self._tokenizer.bos_id is not None
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=is_bos, **padding)

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Text of tokens, each by itself, as JetStream asks for them: a space at the start stays."""
        return "".join(token_text(self._tokenizer, i) for i in token_ids)

    @property
    def pad_id(self) -> int:
        return 0 if self._tokenizer.pad_id is None else self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return next(iter(self._eos_ids), NO_ID)

    @property
    def bos_id(self) -> int:
        return NO_ID if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def stop_tokens(self) -> set[int]:
        return {*self._eos_ids, *(() if self._tokenizer.pad_id is None else (self.pad_id,))}


def import_orchestrator() -> Any:
    """JetStream's orchestrator without its asserts. One of them, that some slot is taken when a step begins, is a race: it
    fails, and the process dies, when the last request is found to be over just as the next step begins."""
    name = "jetstream.core.orchestrator"
    if name not in sys.modules:
        spec: Any = find_spec(name)
        module = sys.modules[name] = module_from_spec(spec)
        exec(compile(Path(spec.origin).read_bytes(), spec.origin, "exec", optimize=1), vars(module))
    return sys.modules[name]


def serve(engine: Engine, tokenizer: Tokenizer, port: int) -> Any:
    """JetStream's gRPC server over a warmed-up engine, on this machine's loopback only, already running.

    `stop()` ends it; so does `wait_for_termination()`, when a signal comes. Call only one of them.
    """
    import_orchestrator()
    logging.getLogger().setLevel(logging.WARNING)  # the orchestrator sets DEBUG, and then has some lines for each token
    config_lib: Any = import_module("jetstream.core.config_lib")
    server_lib: Any = import_module("jetstream.core.server_lib")
    server_lib._HOST = "127.0.0.1"  # there is no option, and it is all of the machine's addresses
    adapter = JetStreamEngine(engine, tokenizer)
    config = config_lib.ServerConfig(interleaved_slices=("engine=1",), interleaved_engine_create_fns=(lambda devices: adapter,))
    return server_lib.run(port=port, config=config, devices=[None], jax_padding=False)


def load(directory: Path, max_context: int, slots: int) -> tuple[Engine, Tokenizer]:
    """An engine on one device with the weights of a Hugging Face directory, and pages for all slots at their longest."""
    model, tokenizer = read_config(directory), Tokenizer.load(directory)
    tokenizer.check_vocab(model)
    context = min(max_context, model.max_positions) // KEY_BLOCK * KEY_BLOCK
    pages = slots * context // KEY_BLOCK + 1
    sizes = EngineConfig(max_context=context, max_slots=slots, page_size=KEY_BLOCK, num_pages=pages)
    mesh, rules, weights = make_mesh({"data": 1}, jax.devices()[:1]), Rules(), describe(model, stacked=False)
    params = {name: jnp.asarray(value) for name, value in load_hf(directory, model, jnp.bfloat16).items()}
    params = reshard(params, describe(model), weights, rules.shardings(mesh, weights), jnp.bfloat16)
    return Engine(model, sizes, params, version=0, dtype=jnp.bfloat16, mesh=mesh, rules=rules), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser("python -m inference.jetstream", description="JetStream's gRPC server over our engine")
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--max-context", type=int, default=2048, help="most tokens of a sequence, prompt and answer")
    parser.add_argument("--slots", type=int, default=16, help="sequences that run at once")
    arguments = parser.parse_args()
    try:
        socket.create_server(("127.0.0.1", arguments.port)).close()  # JetStream would never end if it were taken
        engine, tokenizer = load(resolve(arguments.model), arguments.max_context, arguments.slots)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    engine.warm_up()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = serve(engine, tokenizer, arguments.port)
    print(f"serving {arguments.model} on 127.0.0.1:{arguments.port}", flush=True)
    with suppress(KeyboardInterrupt):
        server.wait_for_termination()


if __name__ == "__main__":
    main()
