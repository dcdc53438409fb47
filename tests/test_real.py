"""The engine on the embedded model with its real weights."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.types import Request, SamplingParams
from models.hf import load_hf
from models.hf_config import read_config
from models.transformer import describe
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
    """So the test above compares with this transformers too; five texts say so."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for item in GREEDY[::4]:
        prompt = torch.tensor([item["prompt_ids"]])
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False)
        assert ids[0, prompt.shape[1] :].tolist() == item["ids"], item["prompt"]
