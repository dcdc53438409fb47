"""The engine on the embedded model with its real weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.types import Completion, Request, SamplingParams
from models.hf import load_hf
from models.hf_config import read_config
from models.transformer import Definition, describe
from rl.branches import Branch
from rl.forest import Layout, pack
from rl.forward import read_rows
from sharding.mesh import make_mesh
from sharding.reshard import reshard
from sharding.rules import Rules

MODEL = Path("runs/models/smollm2-135m-instruct")
GREEDY = json.loads(Path("tests/golden/smollm2_greedy.json").read_text())
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason="make model has not been run")]


@pytest.fixture(scope="module")
def masters() -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in load_hf(MODEL, read_config(MODEL)).items()}


def make_engine(masters: dict[str, jax.Array], dtype: Any, **options: Any) -> Engine:
    config, mesh, rules = read_config(MODEL), make_mesh({"data": 1}), Rules()
    weights = describe(config, stacked=False)
    params = reshard(masters, describe(config), weights, rules.shardings(mesh, weights), dtype)
    sizes: dict[str, Any] = {"max_context": 128, "context_buckets": (128,), "num_pages": 256, "page_size": 16} | options
    engine = Engine(config, EngineConfig(**sizes), params, version=0, dtype=dtype, mesh=mesh, rules=rules)
    engine.warm_up()
    return engine


def test_greedy_text_equals_transformers(masters: dict[str, jax.Array]) -> None:
    """20 prompts, 64 tokens, float32, against what transformers generated (tests/golden/record.py)."""
    engine = make_engine(masters, jnp.float32, max_slots=20, slot_buckets=(20,), tokens_per_step=512, decode_steps=16)
    stop = engine.model.eos_ids
    requests = [
        Request(
            id=item["prompt"],
            prompt_ids=tuple(item["prompt_ids"]),
            params=SamplingParams(max_tokens=64, temperature=0, stop_ids=stop),
        )
        for item in GREEDY
    ]
    for item, completion in zip(GREEDY, engine.run(requests), strict=True):
        assert completion.ids.tolist() == item["ids"], item["prompt"]


@pytest.mark.oracle
def test_live_greedy_text_is_the_recorded_one() -> None:
    """So the test above compares with this transformers too."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for item in GREEDY:
        prompt = torch.tensor([item["prompt_ids"]])
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False)
        assert ids[0, prompt.shape[1] :].tolist() == item["ids"], item["prompt"]


def test_sampler_is_trainer_on_real_weights(
    masters: dict[str, jax.Array], report: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16: log-probs of the engine, in five kinds of company, and of the trainer: the same bits (asserted, 1e-5 asked)."""
    monkeypatch.setattr("inference.scheduler.RESERVE", -1)  # admission leaves nothing for those who run
    options: dict[str, Any] = {"max_slots": 8, "slot_buckets": (8,), "decode_steps": 4}
    engine = make_engine(masters, jnp.bfloat16, tokens_per_step=128, **options)
    prompts = [tuple(item["prompt_ids"]) for item in GREEDY[:6]]
    prompts += [(*prompts[0], *prompts[1], *prompts[2], *prompts[3]), (*prompts[0], *prompts[1], *prompts[2])]
    requests = [
        Request(id=str(i), prompt_ids=prompt[:60], params=SamplingParams(max_tokens=12, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    batched = engine.run(requests)
    cells = {
        "batched, then alone with prefix hits": [engine.run([request])[0] for request in requests],
        "cut into chunks": make_engine(masters, jnp.bfloat16, tokens_per_step=8, **options).run(requests),
    }
    small = make_engine(masters, jnp.bfloat16, tokens_per_step=128, num_pages=12, **{**options, "decode_steps": 2})
    cells["preempted"] = small.run(requests)
    assert small.scheduler.num_preemptions > 0
    gaps = {name: _gap(batched, cell) for name, cell in cells.items()}
    gaps["trainer, one forest"] = _trainer_gap(masters, batched)
    for name, gap in gaps.items():
        report(f"SmolLM2, sampler log-prob against {name}: max |gap| {gap:g}")
    assert gaps == dict.fromkeys(gaps, 0.0)


def _gap(ours: list[Completion], others: list[Completion]) -> float:
    for one, other in zip(ours, others, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
    return max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(ours, others, strict=True))


def _trainer_gap(masters: dict[str, jax.Array], completions: list[Completion]) -> float:
    branches = []
    for completion in completions:
        ids = np.asarray([*completion.prompt_ids, *completion.ids], np.int32)
        branches.append(Branch(ids, np.arange(len(ids)) >= len(completion.prompt_ids)))
    [batch], _ = pack(branches, Layout(rows=1, tokens=512, context=128, branches=8, length=12))
    definition = Definition(read_config(MODEL), jnp.bfloat16, stacked=True)
    logps = jax.jit(lambda params, forest: read_rows(definition, params, forest, jnp.float32(1)).out)(masters, batch.forest)
    rows = zip(batch.order, np.asarray(logps), strict=True)
    return max(float(np.abs(row[: len(completions[n].ids)] - completions[n].logprobs).max()) for n, row in rows)
