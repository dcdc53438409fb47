"""Serves a model to agent programs in their own dialects, and records what they do, token for token.

    python -m launch.gateway --model DIR_OR_HUB_ID   [--config.engine.key=value ...]
    python -m launch.gateway --config configs/NAME.py [--config.key=value ...]
    python -m launch.gateway --model DIR --engine URL    (of a launch.serve of that model)
    python -m launch.gateway --relay URL                 (of any server that speaks the clients' dialect)

Chat Completions, Responses and Messages; sessions, keys and how to attach programs: rl/README.md. Records are Parquet files of
message graphs in the folder of --record. Requests are sampled as --temperature says, so that they can be trained on; with
--client-sampling as clients say. Prints its address on standard output once it answers. SIGTERM: no new requests, those that
run are finished.

With --relay there is no model here: what clients ask is passed on, and both sides are written down as texts (rl/relay.py). No
tokens and no log-probs are known of it, so it cannot be trained on token by token.
"""

import argparse
from pathlib import Path

from inference.answers import Served
from inference.api import Door
from inference.protocol import Limits
from inference.types import SamplingParams
from launch.cli import Parser, override, run_main
from launch.serve import Server, add_arguments, bind, make_door, read_key, settings, start_engine
from models.hf import resolve
from models.tokenizer import Tokenizer
from rl.config import NO_TASKS, EnvironmentSection, build
from rl.fleet import API_KEY
from rl.gateway import Gateway
from rl.registry import Sessions
from rl.relay import RELAY_KEY, Relay
from rl.remote_front import RemoteFront
from rl.renderers import Renderer
from rl.run import make_renderer


def main() -> None:
    parser = Parser(__doc__)
    add_arguments(parser).add_argument("--relay", metavar="URL", help="pass requests on to this server, and write down texts")
    parser.add_argument(
        "--relay-key-file", metavar="FILE", help=f"holds the key of that server; or set {RELAY_KEY} (default: clients' own)"
    )
    parser.add_argument("--engine", metavar="URL", help=f"sample there, not here; its key is in {API_KEY}")
    parser.add_argument("--record", metavar="DIR", default="runs/gateway", help="folder of the records (default: %(default)s)")
    parser.add_argument(
        "--renderer", help="name in rl.renderers.RENDERERS (default: the config's, or the model's own template)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of all requests (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="most of an answer (default: %(default)s)")
    parser.add_argument("--client-sampling", action="store_true", help="clients set temperature, top_p and the like")
    arguments, rest = parser.parse_known_args()
    key = read_key(arguments.api_key_file)
    if arguments.relay:
        relay = make_relay(arguments, rest, key)
        return Server(relay).run([bind(arguments.host, arguments.port, key)])
    listener = bind(arguments.host, arguments.port, key)
    door, renderer = make(arguments, rest, key)
    sessions = Sessions(
        renderer,
        SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature),
        max_context=door.served.max_context,
        folder=Path(arguments.record),
        client_sampling=arguments.client_sampling,
    )
    Gateway(door, sessions)
    try:
        Server(door).run([listener])
    finally:
        sessions.close()


def make_relay(arguments: argparse.Namespace, rest: list[str], key: str | None) -> Relay:
    values = override({}, rest)
    limits: Limits = build(Limits, values.pop("server", {}), "config.server")
    given = [name for name in ("engine", "renderer", "client_sampling", "store", "name") if getattr(arguments, name)]
    if given or values:
        first = f"--{given[0].replace('_', '-')}" if given else f"config.{min(values)}"
        raise ValueError(f"{first}: a relay has no model; leave it out (there is config.server)")
    upstream = read_key(arguments.relay_key_file, RELAY_KEY, "--relay-key-file")
    return Relay(arguments.relay, Path(arguments.record), upstream_key=upstream, api_key=key, limits=limits)


def make(arguments: argparse.Namespace, rest: list[str], key: str | None) -> tuple[Door, Renderer]:
    """The door of an engine here or elsewhere, and what renders for it."""
    what = settings(arguments, rest)
    name = arguments.name or what.name
    if arguments.engine:
        front, tokenizer = RemoteFront(arguments.engine, key), Tokenizer.load(resolve(what.model.source))
        served = Served(
            name=name,
            tokenizer=tokenizer,
            max_context=front.max_context,
            eos_ids=tokenizer.eos_ids,
            limits=what.limits,
            chat=None,
        )
        door = Door(front, served, api_key=key)
    else:
        engine, tokenizer = start_engine(what, arguments.store)
        door = make_door(engine, tokenizer, name, what.limits, key, arguments.store)
    section = what.environment or EnvironmentSection(kind=NO_TASKS, renderer="template")
    if arguments.renderer:
        section = EnvironmentSection(kind=NO_TASKS, renderer=arguments.renderer)
    return door, make_renderer(section, tokenizer)


if __name__ == "__main__":
    run_main(main)
