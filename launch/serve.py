"""Serves a model over HTTP: the OpenAI API, Anthropic's Messages, /generate for token ids, /health, /metrics.

    python -m launch.serve --model DIR_OR_HUB_ID   [--config.engine.key=value ...]
    python -m launch.serve --config configs/NAME.py [--config.key=value ...]

The second serves the config's model.source on its engine. `--config.server.key=value` sets a limit (inference/protocol.py,
Limits). With `--store URL`, where a trainer publishes, its newest version is served if it has one, and `POST /update
{"version": N}` brings the engine to another. Prints its address on standard output once it answers. SIGTERM: no new
requests, those that run are finished.
"""

import argparse
import asyncio
import ipaddress
import os
import socket
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import uvicorn
from fastapi import FastAPI
from jax.sharding import Mesh
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from inference.answers import Served
from inference.api import Door
from inference.chat import ChatTemplate
from inference.config import MIN_ROWS, EngineConfig
from inference.engine import Engine
from inference.follower import Follower, newest
from inference.front import AsyncEngine
from inference.protocol import Limits
from inference.types import SamplingParams
from launch.cli import Parser, read_config, run_main, set_up_jax
from models.attention import KEY_BLOCK
from models.config import ModelConfig
from models.exact import is_exact
from models.hf import load_hf, resolve
from models.hf_config import read_config as read_model_config
from models.tokenizer import Tokenizer
from models.transformer import describe
from rl import wire_messages, wire_responses
from rl.build import pick
from rl.config import EngineSection, EnvironmentSection, ModelSection, RunConfig, build
from rl.fleet import API_KEY
from rl.gateway import Gateway
from rl.registry import Sessions
from rl.run import make_model
from rl.templates import Template
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Rules

DEFAULT_CONTEXT = 4096


def get_config() -> ConfigDict:
    """What `--model` serves with, for `read_config`; the engine's defaults otherwise, but for `settings`' buckets."""
    return ConfigDict({"model": {"source": "", "dtype": "bfloat16"}, "engine": {}})


def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--with-parent", action="store_true", help="end, at once, when standard input does: its writer is gone")
    arguments, rest = parser.parse_known_args()
    if arguments.with_parent:
        threading.Thread(target=end_with_parent, daemon=True).start()
    what = settings(arguments, rest)
    key = read_key(arguments.api_key_file)
    listener = bind(arguments.host, arguments.port, key)
    engine, tokenizer = start_engine(what, arguments.store)
    door = make_door(engine, tokenizer, arguments.name or what.name, what.limits, key, arguments.store)
    if isinstance(tokenizer, Tokenizer) and tokenizer.chat_template is not None:
        add_dialects(door, tokenizer)
    Server(door).run([listener])


def add_dialects(door: Door, tokenizer: Tokenizer) -> None:
    """Responses and Messages, sampled as clients say; sessions that clients name are kept for a while, and not written down."""
    try:
        renderer = Template(tokenizer)
    except ValueError as error:
        print(f"warning: no /v1/responses and /v1/messages: {error}", file=sys.stderr)
        return
    params, context = SamplingParams(max_tokens=door.served.max_context), door.served.max_context
    sessions = Sessions(renderer, params, max_context=context, idle_s=600.0, client_sampling=True, shared=False)
    Gateway(door, sessions, (wire_responses.WIRE, wire_messages.WIRE))


def add_arguments(parser: argparse.ArgumentParser) -> "argparse._MutuallyExclusiveGroup":
    """What every server has to know; returns the group of which one must be given."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="DIR", help="a Hugging Face directory or hub id")
    what.add_argument("--config", metavar="FILE", help="of configs/; --config.key=value overrides a key of it")
    parser.add_argument("--name", help="what clients call the model (default: the directory's, hub id's or config's name)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--store", metavar="URL", help="of a weight store: serve its newest version, and take others by /update"
    )
    parser.add_argument("--api-key-file", metavar="FILE", help=f"holds the key that clients must send; or set {API_KEY}")
    return what


class Settings(NamedTuple):
    name: str
    model: ModelSection
    engine: EngineSection
    limits: Limits
    seed: int = 0
    """of random weights"""
    environment: EnvironmentSection | None = None


def start_engine(what: Settings, store: str | None) -> tuple[Engine, Tokenizer]:
    """An engine that has compiled its programs."""
    set_up_jax()
    engine, tokenizer = make_engine(what.model, what.engine, what.seed, store)
    print("compiling; later starts take the programs from the cache", file=sys.stderr)
    engine.warm_up()
    return engine, tokenizer


def end_with_parent() -> None:
    while os.read(0, 2**12):
        pass
    os._exit(1)


def settings(arguments: argparse.Namespace, overrides: list[str]) -> Settings:
    values = read_config(arguments.config or __file__, overrides)
    for section in ("model", "engine", "server"):
        if not isinstance(values.get(section, {}), dict):
            raise ValueError(f"config.{section}: has keys of its own; override them one by one")
    limits: Limits = build(Limits, values.pop("server", {}), "config.server")
    if arguments.config:
        config: RunConfig = build(RunConfig, values)
        return Settings(config.name, config.model, config.engine, limits, config.seed, config.environment)
    if unknown := sorted(values.keys() - {"model", "engine"}):
        raise ValueError(f"config.{unknown[0]}: unknown key; with --model there are config.model, .engine and .server")
    values["model"]["source"] = arguments.model
    longest = read_model_config(resolve(arguments.model)).max_positions // KEY_BLOCK * KEY_BLOCK
    sizes: EngineSection = build(
        EngineSection, {"max_context": min(DEFAULT_CONTEXT, longest), **values["engine"]}, "config.engine"
    )
    sizes = replace(
        sizes,
        token_buckets=sizes.token_buckets or few(sizes.tokens_per_step),
        slot_buckets=sizes.slot_buckets or few(sizes.max_slots),
        context_buckets=sizes.context_buckets or few(sizes.max_context),
    )
    name = Path(arguments.model).resolve().name if Path(arguments.model).is_dir() else arguments.model
    return Settings(name, build(ModelSection, values["model"], "config.model"), sizes, limits)


def few(most: int) -> tuple[int, ...]:
    """Two sizes to compile for, where the engine's own default has more: a server starts sooner, and pads more."""
    return tuple(sorted({max(MIN_ROWS, most // 4), max(MIN_ROWS, most)}))


def read_key(file: str | None, variable: str = API_KEY, option: str = "--api-key-file") -> str | None:
    """The key in a file, or else in an environment variable. ValueError: it cannot be one."""
    key = os.environ.get(variable) if file is None else Path(file).read_text().strip()
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise ValueError(f"{option if file else variable}: a key is printable ASCII without spaces, and not empty")
    return key


def bind(host: str, port: int, key: str | None) -> socket.socket:
    """A socket on the address, which does not listen yet.

    Raises:
        ValueError: the address cannot be had, or others could reach it and there is no key.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port: must be in [0, 65535], got {port}")
    with ExitStack() as stack:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ValueError(f"--host, --port: cannot listen on {host} port {port} ({error}); choose another") from error
        if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
            if key is None:
                raise ValueError(
                    f"--host: {host} can be reached from other machines; set {API_KEY} or --api-key-file, or serve on 127.0.0.1"
                )
            print("warning: texts and the key travel unencrypted; put a proxy with TLS before this port", file=sys.stderr)
        stack.pop_all()
    return listener


def make_engine(section: ModelSection, sizes: EngineSection, seed: int, store: str | None = None) -> tuple[Engine, Tokenizer]:
    """An engine and its tokenizer. Its weights are the newest of the store, or else, as version 0, the model's own or random
    ones: the same bits that a trainer of this config publishes first."""
    model, source, tokenizer = make_model(section)
    mesh, rules = make_mesh(sizes.mesh, jax.devices()[sizes.first_device :]), Rules(dict(sizes.rules))
    dtype, unrolled = jnp.dtype(sizes.dtype or section.dtype), describe(model, stacked=False)
    if store is not None and (found := newest(store, reader_name(), rules.shardings(mesh, unrolled))) is not None:
        version, params = found
    else:
        version, params = 0, own_weights(model, source, seed, dtype, mesh, rules)
    engine = Engine(
        model,
        pick(EngineConfig, sizes),
        params,
        version=version,
        dtype=dtype,
        mesh=mesh,
        rules=rules,
        tokenizer=tokenizer,
        exact=is_exact(section.numerics, model, dtype, mesh, rules, "engine"),
    )
    return engine, tokenizer


def own_weights(
    model: ModelConfig, source: Path | None, seed: int, dtype: DTypeLike, mesh: Mesh, rules: Rules
) -> dict[str, jax.Array]:
    """The model's own weights, or random ones, as the engine wants them."""
    stacked, unrolled = describe(model), describe(model, stacked=False)
    shardings = rules.shardings(mesh, stacked)
    if source is None:
        params = init(stacked, jax.random.key(seed), jnp.float32, shardings)
    else:
        loaded = load_hf(source, model, dtype)
        params = {name: jax.device_put(loaded.pop(name), shardings[name]) for name in stacked}
    return reshard(params, stacked, unrolled, rules.shardings(mesh, unrolled), dtype)


def reader_name() -> str:
    """What the store's pins call this process."""
    return f"serve-{socket.gethostname()}-{os.getpid()}"


def make_door(
    engine: Engine, tokenizer: Tokenizer, name: str, limits: Limits, key: str | None, store: str | None = None
) -> Door:
    served = Served(
        name=name,
        tokenizer=tokenizer,
        max_context=engine.memory.longest_context,
        eos_ids=tuple(dict.fromkeys((*tokenizer.eos_ids, *engine.model.eos_ids))),
        limits=limits,
        chat=None if tokenizer.chat_template is None else ChatTemplate(tokenizer),
    )
    follower = None if store is None else Follower(engine, store, reader_name())
    return Door(AsyncEngine(engine), served, api_key=key, follower=follower)


class Application(Protocol):
    """What a server serves: `inference.api.Door`, or `rl.relay.Relay`."""

    app: FastAPI

    async def drain(self) -> None: ...


class Server(uvicorn.Server):
    """Prints the address when it answers. Its first signal lets the door finish what runs; its second ends it."""

    def __init__(self, door: Application) -> None:
        super().__init__(
            uvicorn.Config(
                door.app,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=65,  # longer than clients keep idle connections: the client closes first
                timeout_graceful_shutdown=5,  # the door has ended its requests before
            )
        )
        self._door = door
        self._finishing: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._finishing is None:
            self.loop.call_soon_threadsafe(self.finish)
        else:
            super().handle_exit(sig, frame)

    def finish(self) -> None:
        """Shuts down gracefully. In the server's event loop."""
        self._finishing = self._finishing or asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        print("finishing what runs; a second signal ends it", file=sys.stderr)
        await self._door.drain()
        self.should_exit = True


if __name__ == "__main__":
    run_main(main)
