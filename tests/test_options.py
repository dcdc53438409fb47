"""Every option of a request, through the whole engine: what it means, and that no mix of them compiles or leaks."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.types import MAX_TOP_LOGPROBS, Completion, FinishReason, Request, SamplingParams, Tokens
from models.config import ModelConfig
from models.tokenizer import ByteTokenizer
from models.transformer import describe
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Rules

pytestmark = pytest.mark.plain_code

V = 264
MODEL = ModelConfig(
    family="llama", vocab_size=V, model_dim=32, ffn_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=256, tied_head=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Engine:
    mesh, rules = make_mesh({"data": 1}, jax.devices()[:1]), Rules()
    source, target = describe(MODEL), describe(MODEL, stacked=False)
    masters = init(source, jax.random.key(0), jnp.float32, rules.shardings(mesh, source))
    params = reshard(masters, source, target, rules.shardings(mesh, target), jnp.bfloat16)
    config = EngineConfig(max_context=256, max_slots=8, num_pages=80, page_size=16, tokens_per_step=64)
    engine = Engine(MODEL, config, params, version=0, dtype=jnp.bfloat16, mesh=mesh, rules=rules, tokenizer=ByteTokenizer())
    engine.warm_up()
    return engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.forget()
    return shared


def ask(engine: Engine, ids: list[int], max_tokens: int = 24, **params: Any) -> Completion:
    return engine.run([Request(id="one", prompt_ids=tuple(ids), params=SamplingParams(max_tokens=max_tokens, **params))])[0]


PROMPT = list(b"the cat sat on the mat and the dog sat on the log")


def test_stop_strings_straddle_tokens(engine: Engine) -> None:
    """Each byte is a token, so any string of two letters straddles; the completing token is the last."""
    whole = ask(engine, PROMPT, 60, seed=3)
    text = ByteTokenizer().decode(whole.ids.tolist(), skip_special=True)
    assert not text.isascii() or len(text) > 5
    plain = [i for i, token in enumerate(whole.ids.tolist()) if token < 128]
    at = next(i for i in plain[5:] if i - 1 in plain and i + 1 in plain)
    stop = bytes(whole.ids[at - 1 : at + 1].tolist()).decode()
    first = bytes(t for t in whole.ids.tolist() if t < 256).find(stop.encode())
    for extra in ((), ("never to be seen",)):
        cut = ask(engine, PROMPT, 60, seed=3, stop=(*extra, stop))
        assert cut.finish_reason == FinishReason.STOP and cut.stop_reason == stop
        assert len(cut.ids) <= at + 1 and cut.ids.tolist() == whole.ids[: len(cut.ids)].tolist()
        assert bytes(t for t in cut.ids.tolist() if t < 256).endswith(stop.encode())
        assert bytes(t for t in cut.ids.tolist() if t < 256).find(stop.encode()) == first
    with pytest.raises(ValueError, match="stop: an empty string"):
        SamplingParams(max_tokens=1, stop=("",))


def test_stop_strings_need_a_tokenizer(engine: Engine) -> None:
    engine.tokenizer, kept = None, engine.tokenizer
    with pytest.raises(ValueError, match="stop: this engine has no tokenizer"):
        ask(engine, PROMPT, stop=("a",))
    engine.tokenizer = kept
    assert engine.num_in_flight == 0


def test_ignore_eos_goes_on(engine: Engine) -> None:
    every = tuple(range(8))
    stopped = ask(engine, PROMPT, seed=1, allowed_ids=every, stop_ids=every)
    assert len(stopped.ids) == 1 and stopped.finish_reason == FinishReason.STOP and stopped.stop_reason == stopped.ids[0]
    going = ask(engine, PROMPT, seed=1, ignore_eos=True, allowed_ids=every, stop_ids=every)
    assert len(going.ids) == 24 and going.finish_reason == FinishReason.LENGTH and going.stop_reason is None


def test_masks_and_bias_and_penalties_reach_every_step(engine: Engine) -> None:
    allowed = (7, 50, 99, 200)
    masked = ask(engine, PROMPT, 40, allowed_ids=allowed, seed=2)
    assert set(masked.ids.tolist()) <= set(allowed) and len(set(masked.ids.tolist())) > 1
    assert set(ask(engine, PROMPT, 12, logit_bias=((42, 1e4),)).ids.tolist()) == {42}
    never = ask(engine, PROMPT, 4, allowed_ids=allowed, presence_penalty=100.0, temperature=0)
    assert len(set(never.ids.tolist())) == 4, "a penalised token never comes back while another is left"
    fresh = ask(engine, list(range(100)), 60, repetition_penalty=100.0, temperature=0)
    assert np.isfinite(fresh.logprobs_full).all()
    seen = set(range(100))
    raw = ask(engine, list(range(100)), 60, temperature=0)
    assert raw.ids.tolist() != fresh.ids.tolist() or not seen & set(raw.ids.tolist())
    # Slots change hands: what one request's tables held must not reach the next.
    again = ask(engine, PROMPT, 40, seed=2)
    engine.forget()
    assert again.ids.tolist() == ask(engine, PROMPT, 40, seed=2).ids.tolist()


def test_top_logprobs_are_the_likeliest(engine: Engine) -> None:
    """At temperature 0 the sampled token is the first of them, with its own log-prob."""
    completion = ask(engine, PROMPT, temperature=0, top_logprobs=5)
    assert completion.top_ids.shape == completion.top_logprobs.shape == (24, 5)
    assert (completion.top_ids[:, 0] == completion.ids).all()
    assert (completion.top_logprobs[:, 0] == completion.logprobs_full).all()
    assert (np.diff(completion.top_logprobs, axis=1) <= 0).all()
    most = ask(engine, PROMPT, temperature=0, top_logprobs=MAX_TOP_LOGPROBS)
    assert (most.top_ids[:, :5] == completion.top_ids).all() and (np.exp(most.top_logprobs).sum(axis=1) <= 1 + 1e-5).all()
    none = ask(engine, PROMPT, temperature=0)
    assert none.top_ids.shape == (24, 0) and none.ids.tolist() == completion.ids.tolist()
    with pytest.raises(ValueError, match="top_logprobs: must be in"):
        SamplingParams(max_tokens=1, top_logprobs=MAX_TOP_LOGPROBS + 1)


def test_prompt_logprobs_are_the_samplers_own_cold_and_warm(engine: Engine) -> None:
    """What sampling token after token records as log-prob is what the same tokens get as a prompt, to the bit."""
    sampled = ask(engine, PROMPT, 60, seed=5, top_logprobs=3)
    ids = [*PROMPT, *sampled.ids.tolist()]
    results = [ask(engine, ids, 1, prompt_logprobs=True, top_logprobs=3) for _ in range(2)]
    engine.forget()
    results.append(ask(engine, ids, 1, prompt_logprobs=True, top_logprobs=3))
    n = len(PROMPT)
    for result in results:
        prompt = result.prompt_logprobs
        assert prompt is not None and result.cached_tokens == 0
        assert np.isnan(prompt.logprobs[0]) and np.isfinite(prompt.logprobs[1:]).all()
        assert prompt.logprobs[n:].tobytes() == sampled.logprobs_full.tobytes()
        assert prompt.top_ids[n:].tobytes() == sampled.top_ids.tobytes()
        assert prompt.top_logprobs[n:].tobytes() == sampled.top_logprobs.tobytes()
        first = results[0].prompt_logprobs
        assert first is not None and prompt.logprobs.tobytes() == first.logprobs.tobytes()
    assert ask(engine, ids, 1).prompt_logprobs is None


def test_tokens_come_as_they_are_recorded(engine: Engine) -> None:
    parts: list[Tokens] = []
    params = SamplingParams(max_tokens=30, seed=1, top_logprobs=2)
    engine.submit(Request(id="streamed", prompt_ids=tuple(PROMPT), params=params), parts.append)
    done: list[Completion] = []
    while not done:
        done = engine.step()
    assert len(parts) > 3
    for name in ("ids", "logprobs", "logprobs_full", "versions", "top_ids", "top_logprobs"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tobytes() == getattr(done[0], name).tobytes()


def test_sleep_keeps_version_weights_and_requests(engine: Engine) -> None:
    """J31: after sleep and wake the same logits under the same version; a request that was running goes on."""
    before = ask(engine, PROMPT, 40, seed=9)
    engine.submit(Request(id="over", prompt_ids=tuple(PROMPT), params=SamplingParams(max_tokens=40, seed=9)))
    while engine.stats.sampled_tokens % 40 < 5:
        engine.step()
    engine.sleep()
    assert engine.step() == [] and engine.version == 0
    with pytest.raises(AssertionError, match="allocate"):
        _ = engine.runner.state
    with pytest.raises(ValueError, match="resume: the engine is asleep"):
        engine.resume()
    engine.wake()
    with pytest.raises(ValueError, match="wake: the engine is not asleep"):
        engine.wake()
    done: list[Completion] = []
    while not done:
        done = engine.step()
    assert done[0].ids.tolist() == before.ids.tolist() and done[0].logprobs.tobytes() == before.logprobs.tobytes()
    assert ask(engine, PROMPT, 40, seed=9).logprobs.tobytes() == before.logprobs.tobytes()
    engine.scheduler.check()


def random_request(rng: np.random.Generator, number: int) -> Request:
    options: list[Callable[[], dict[str, Any]]] = [
        lambda: {"temperature": float(rng.choice([0, 0.5, 1, 1.7]))},
        lambda: {"top_k": int(rng.integers(0, 40))},
        lambda: {"top_p": float(rng.uniform(0.1, 1))},
        lambda: {"min_p": float(rng.uniform(0, 0.2))},
        lambda: {"repetition_penalty": float(rng.uniform(0.8, 1.5))},
        lambda: {"presence_penalty": 0.5, "frequency_penalty": float(rng.uniform(-1, 1))},
        lambda: {"logit_bias": tuple((int(i), 1.0) for i in rng.integers(0, V, 3))},
        lambda: {"allowed_ids": tuple(rng.integers(0, V, 30).tolist())},
        lambda: {"stop_ids": tuple(rng.integers(0, V, 4).tolist())},
        lambda: {"stop": ("ab", "\n")},
        lambda: {"top_logprobs": int(rng.integers(0, MAX_TOP_LOGPROBS + 1))},
        lambda: {"prompt_logprobs": True},
    ]
    params: dict[str, Any] = {}
    for i in rng.choice(len(options), rng.integers(0, 5), replace=False):
        params |= options[i]()
    length = int(rng.integers(1, 60))
    ids = tuple(rng.integers(0, 256, length).tolist()) if rng.random() < 0.5 else tuple((PROMPT * 2)[:length])
    params = {"max_tokens": int(rng.integers(1, 12)), "seed": number} | params
    return Request(id=str(number), prompt_ids=ids, params=SamplingParams(**params), priority=int(rng.integers(0, 2)))


@pytest.mark.slow
def test_2000_requests_compile_nothing_and_keep_memory(
    engine: Engine, assert_no_compiles, report: Callable[[str], None]
) -> None:
    """J4, J6: random mixes of options and log-probs, from the first request after warm-up on."""
    rng = np.random.default_rng(0)

    def play(first: int, last: int) -> int:
        for begin in range(first, last, 100):
            asked = [random_request(rng, number) for number in range(begin, begin + 100)]
            for request, completion in zip(asked, engine.run(asked), strict=True):
                assert 1 <= len(completion.ids) <= request.params.max_tokens
                assert np.isfinite(completion.logprobs).all() and np.isfinite(completion.logprobs_full).all()
            engine.scheduler.check()
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with assert_no_compiles():
        warm, end = play(0, 1000), play(1000, 2000)
    grown = (end - warm) / 2**20
    report(f"2,000 requests of random options: no compile; memory grew by {grown:.1f} MiB over the second thousand")
    assert grown < 32


def test_steady_decode_takes_the_fast_dispatch_path(engine: Engine) -> None:
    """No call of a compiled program falls back to Python's argument handling."""
    from jax._src import test_util

    for number in range(8):
        params = SamplingParams(max_tokens=120, seed=number)
        engine.submit(Request(id=str(number), prompt_ids=tuple(PROMPT), params=params))
    for _ in range(6):
        engine.step()
    decodes = engine.stats.decodes
    with test_util.count_aot_jit_cpp_cache_miss() as compiled, test_util.count_pjit_cpp_cache_miss() as jitted:
        for _ in range(6):
            assert not engine.step()
    assert engine.stats.decodes == decodes + 6 and (compiled(), jitted()) == (0, 0)
    while engine.num_in_flight:
        engine.step()
