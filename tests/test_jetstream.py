"""JetStream's own orchestrator, gRPC server and benchmark client on our engine (`make jetstream`)."""

import asyncio
import base64
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.text import token_text
from inference.types import Request, SamplingParams
from models.config import ModelConfig
from models.tokenizer import ByteTokenizer, Tokenizer
from models.transformer import describe
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules

pytestmark = pytest.mark.jetstream
pytest.importorskip("jetstream", reason="google-jetstream is in an environment of its own (make jetstream)")
adapter: Any = importlib.import_module("inference.jetstream")
pb: Any = importlib.import_module("jetstream.core.proto.jetstream_pb2")
pb_grpc: Any = importlib.import_module("jetstream.core.proto.jetstream_pb2_grpc")
grpc: Any = importlib.import_module("grpc")
psutil: Any = importlib.import_module("psutil")

BYTES = ByteTokenizer()
MODEL = ModelConfig(
    family="llama",
    vocab_size=BYTES.vocab_size,
    model_dim=64,
    ffn_dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
    tied_head=True,
)
CONFIG = EngineConfig(
    max_context=256, context_buckets=(256,), max_slots=8, num_pages=17, tokens_per_step=64, token_buckets=(64,)
)
REAL = Path("runs/models/smollm2-135m-instruct")


@cache
def weights() -> dict[str, jax.Array]:
    described = describe(MODEL, stacked=False)
    return init(described, jax.random.key(0), jnp.bfloat16, Rules().shardings(mesh(), described))


def mesh() -> jax.sharding.Mesh:
    return make_mesh({"data": 1}, jax.devices()[:1])


def cold_engine() -> Engine:
    return Engine(MODEL, CONFIG, weights(), version=0, dtype=jnp.bfloat16, mesh=mesh(), rules=Rules())


@cache
def programs() -> dict[tuple, Any]:
    engine = cold_engine()
    engine.warm_up()
    return engine.runner._programs


def make_engine() -> Engine:
    """A cold engine with the shared programs."""
    engine = cold_engine()
    engine.runner._programs = programs()
    return engine


def directly(prompts: Sequence[Sequence[int]], most: Sequence[int], stop_ids: tuple[int, ...] = ()) -> list[list[int]]:
    """What our engine samples by itself, greedily; a stop token is not part of it."""
    requests = [
        Request(id=str(i), prompt_ids=tuple(ids), params=SamplingParams(max_tokens=n, temperature=0, stop_ids=stop_ids))
        for i, (ids, n) in enumerate(zip(prompts, most, strict=True))
    ]
    return [[i for i in completion.ids.tolist() if i not in stop_ids] for completion in make_engine().run(requests)]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


def decode_request(content: Sequence[int] | str, max_tokens: int) -> Any:
    if isinstance(content, str):
        return pb.DecodeRequest(text_content=pb.DecodeRequest.TextContent(text=content), max_tokens=max_tokens)
    return pb.DecodeRequest(token_content=pb.DecodeRequest.TokenContent(token_ids=content), max_tokens=max_tokens)


async def collect(responses: Any) -> tuple[list[int], str]:
    """Ids and text of a response stream."""
    samples = [response.stream_content.samples[0] async for response in responses]
    return [i for sample in samples for i in sample.token_ids], "".join(sample.text for sample in samples)


@pytest.fixture(scope="module")
def orchestrator() -> Any:
    """JetStream's module, whose import sets up the root logger; that is undone."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    module = adapter.import_orchestrator()
    root.level, root.handlers[:] = before
    return module


@contextmanager
def driver(orchestrator: Any, engine: Any, interleaved: bool = True) -> Iterator[Any]:
    """JetStream's threads around an adapter. Ends them before the event loop is closed: one that finds it so kills us."""
    threads = set(threading.enumerate())
    params = [engine.load_params()]
    running = orchestrator.Driver([engine], [engine], params, params, interleaved_mode=interleaved, jax_padding=False)
    try:
        yield orchestrator.LLMOrchestrator(running)
    finally:
        running.stop()
    assert {t for t in set(threading.enumerate()) - threads if not t.name.startswith("asyncio")} == set()


def serve_all(orchestrator: Any, engine: Any, requests: Sequence[Any], **options: Any) -> list[tuple[list[int], str]]:
    async def run() -> list[tuple[list[int], str]]:
        with driver(orchestrator, engine, **options) as client:
            async with asyncio.timeout(300):
                return await asyncio.gather(*(collect(client.Decode(request)) for request in requests))

    return asyncio.run(run())


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_orchestrator_gives_the_engines_greedy_tokens(orchestrator: Any, interleaved: bool) -> None:
    """32 requests at once, in ids and in text, prompts of 1 to 128 tokens, on 8 slots."""
    lengths = [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, *np.random.default_rng(0).integers(1, 128, 18)]
    most = [1 + 7 * i % 40 for i in range(32)]
    prompts = [prompt(i, n) for i, n in enumerate(lengths)]
    requests = [
        decode_request(ids if i % 2 else BYTES.decode(ids), n) for i, (ids, n) in enumerate(zip(prompts, most, strict=True))
    ]
    engine = make_engine()
    served = serve_all(orchestrator, adapter.JetStreamEngine(engine, BYTES), requests, interleaved=interleaved)
    expected = directly(prompts, most, tuple(BYTES.eos_ids))
    assert [ids for ids, _ in served] == expected
    assert sum(map(len, expected)) > 400
    for i, (ids, text) in enumerate(served):
        assert text == ("" if i % 2 else "".join(token_text(BYTES, token) for token in ids))


def test_a_stop_token_ends_a_request(orchestrator: Any) -> None:
    prompts = [prompt(i, 20) for i in range(6)]
    stop = directly(prompts, [30] * 6)[0][3]
    expected = directly(prompts, [30] * 6, (stop,))
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = (stop,)
    engine = make_engine()
    served = serve_all(orchestrator, adapter.JetStreamEngine(engine, tokenizer), [decode_request(p, 30) for p in prompts])
    assert [ids for ids, _ in served] == expected
    assert len(expected[0]) <= 3


def test_a_bad_prompt_gets_no_tokens_and_harms_nobody(orchestrator: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in JetStream's threads would kill the process."""
    good = prompt(0, 10)
    requests = [decode_request(content, 5) for content in ([10**6], good, [], [3, -1], "", good)]
    served = serve_all(orchestrator, adapter.JetStreamEngine(make_engine(), BYTES), requests)
    [expected] = directly([good], [5])
    assert [ids for ids, _ in served] == [[], expected, [], [], [], expected]
    assert "1000000 is outside the model's vocabulary" in caplog.text and "empty prompt" in caplog.text


def test_a_long_prompt_keeps_its_end(orchestrator: Any) -> None:
    """JetStream's rule; its longest prompt is the largest power of two that leaves room for a token."""
    long = prompt(0, 200)
    engine = adapter.JetStreamEngine(make_engine(), BYTES)
    assert engine.max_prefill_length == 128
    served = serve_all(orchestrator, engine, [decode_request(long, 5), decode_request(BYTES.decode(long), 5)])
    assert [ids for ids, _ in served] == directly([long[-128:]], [5]) * 2


def insert(engine: Any, state: Any, slot: int, ids: Sequence[int], existing: Any = None) -> Any:
    padded, length = np.pad(np.asarray(ids), (0, 5)), len(ids)
    prefix = engine.prefill(params=None, existing_prefix=existing, padded_tokens=padded, true_length=length)
    return engine.insert(jax.device_put(prefix, engine.get_prefix_destination_sharding()), state, slot=slot)


def test_the_interface_by_hand() -> None:
    """Two slots, one begun later, one on top of an existing prefix; valid until the context is full."""
    engine, ours = adapter.JetStreamEngine(make_engine(), BYTES), prompt(0, 240)
    one, two = directly([ours, prompt(1, 9)], [100, 20])
    assert len(one) == 16
    state = engine.init_decode_state()
    existing = engine.prefill(params=None, padded_tokens=np.asarray(ours[:100]), true_length=100)
    state = insert(engine, state, 3, ours[100:], existing)
    rows = []
    for step in range(20):
        if step == 2:
            state = insert(engine, state, 0, prompt(1, 9))
        state, result = engine.generate(engine.load_params(), state)
        rows.append([result.convert_to_numpy().get_result_at_slot(slot) for slot in (3, 0)])
    assert [int(row.tokens[0, 0]) for row, _ in rows[:16]] == one
    assert [bool(row.valid[0, 0]) for row, _ in rows] == [True] * 16 + [False] * 4
    assert [int(row.lengths[0]) for row, _ in rows[:16]] == list(range(1, 17))
    assert [int(row.tokens[0, 0]) for _, row in rows[2:]] == two[:18]
    assert [int(row.lengths[0]) for _, row in rows] == [0, 0, *range(1, 19)]


def test_a_slot_that_is_not_read_is_freed() -> None:
    """JetStream does not say when it has enough of a request; its pages are free two steps later, or with the slot."""
    ours = make_engine()
    engine = adapter.JetStreamEngine(ours, BYTES)
    state = engine.init_decode_state()
    for slot in range(3):
        state = insert(engine, state, slot, prompt(slot, 10))
    for read in ((0, 1, 2), (0, 1), (0, 1), (0, 1)):
        assert ours.num_in_flight == 3
        state, result = engine.generate(None, state)
        for slot in read:
            result.get_result_at_slot(slot)
    state, result = engine.generate(None, state)
    assert ours.num_in_flight == 2 and not result.get_result_at_slot(2).valid
    state = insert(engine, state, 0, prompt(5, 10))
    assert ours.num_in_flight == 2
    engine.init_decode_state()
    assert ours.num_in_flight == 0
    ours.step()
    ours.scheduler.check()
    assert ours.scheduler.pool.num_free + ours.scheduler.tree.num_pages == CONFIG.num_pages - 1


# ---- gRPC


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def ask(port: int, content: Sequence[int] | str, max_tokens: int) -> tuple[list[int], str]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.OrchestratorStub(channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).is_live
        return await collect(stub.Decode(decode_request(content, max_tokens)))


def run_benchmark_client(folder: Path, port: int, tokens: Sequence[bytes], texts: Sequence[str], max_tokens: int) -> dict:
    """JetStream's benchmark client, as it is, in a process of its own; it makes prompts of the texts.

    Args:
        tokens: bytes of each token; the client reads tiktoken's format.
    """
    lines = (f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens))
    (folder / "tokens").write_text("\n".join(lines))
    talks = [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "a b c d"}]} for text in texts]
    (folder / "talks.json").write_text(json.dumps(talks))
    script = importlib.import_module("benchmarks").__path__[0] + "/benchmark_serving.py"
    options = {
        "server": "127.0.0.1",
        "port": port,
        "model": "llama-3",
        "tokenizer": folder / "tokens",
        "dataset": "sharegpt",
        "dataset-path": folder / "talks.json",
        "num-prompts": len(texts),
        "max-output-length": max_tokens,
        "additional-metadata-metrics-to-save": "{}",
    }
    command = [sys.executable, script, "--save-result", "--disable-tqdm", *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    [result] = folder.glob("JetStream-*.json")
    return json.loads(result.read_text())["metrics"]


def show(metrics: dict) -> str:
    rates = ", ".join(f"{metrics[f'{kind}_throughput']:.1f} {kind}" for kind in ("request", "input", "output"))
    waits = f"TTFT {metrics['median_ttft_ms']:.0f} ms, TPOT {metrics['median_tpot_ms']:.1f} ms (medians)"
    return f"{metrics['completed']} requests, per second {rates} tokens; {waits}"


def test_the_grpc_server_and_the_benchmark_client(orchestrator: Any, tmp_path: Path, report: Callable[[str], None]) -> None:
    threads, port = set(threading.enumerate()), free_port()
    server = adapter.serve(make_engine(), BYTES, port)
    try:
        listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == port and c.status == "LISTEN"]
        assert listening and all(address.removeprefix("::ffff:") == "127.0.0.1" for address in listening)
        ids, text = asyncio.run(ask(port, "Hello", 12))
        assert ids == directly([list(b"Hello")], [12])[0]
        assert text == "".join(token_text(BYTES, i) for i in ids)
        texts = ["word " * (1 + i % 20) for i in range(32)]
        metrics = run_benchmark_client(tmp_path, port, [bytes([i]) for i in range(256)], texts, 16)
    finally:
        server.stop()
        server._loop.close()  # JetStream leaves it open
    alive = {t for t in set(threading.enumerate()) - threads if not t.name.startswith(("ThreadPoolExecutor", "asyncio"))}
    assert not {t for t in alive if not t.daemon}
    assert metrics["completed"] == 32 and metrics["total_output_tokens"] > 0 and metrics["output_throughput"] > 0
    report(f"JetStream's benchmark client, tiny random model: {show(metrics)}")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="make model has not been run")
def test_the_command_serves_a_model_and_ends_at_a_signal(tmp_path: Path, report: Callable[[str], None]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "inference.jetstream", f"--model={REAL}", f"--port={port}", "--max-context=512"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("serving ")
            tokenizer = Tokenizer.load(REAL)
            ids, text = asyncio.run(ask(port, "The capital of France is", 8))
            assert text == tokenizer.decode(ids) and "Paris" in text
            tokens = [tokenizer.decode([i]).encode() for i in range(tokenizer.vocab_size)]
            texts = [" ".join(f"Count to {n}." for n in range(1 + i % 16)) for i in range(32)]
            metrics = run_benchmark_client(tmp_path, port, tokens, texts, 64)
            second = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert second.returncode == 2 and "Address already in use" in second.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert metrics["completed"] == 32
    report(f"JetStream's benchmark client, {REAL.name} on {os.cpu_count()} CPUs: {show(metrics)}")
