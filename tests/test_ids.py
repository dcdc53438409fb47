"""POST /inference/v1/generate: what it gives is what `/generate` gives, and the unmodified `renderers.client` reads it."""

import base64
import json
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from launch.serve import make_engine, settings
from models.routes import from_json
from tests.programs import REPO, SECONDS, TRAINERS
from tests.test_serve import Live, serving

SIZES = [
    f"--config.{item}"
    for item in (
        *("model.shape.vocab_size=272", "engine.max_context=256", "engine.num_pages=64", "engine.token_buckets=(128,)"),
        *("engine.tokens_per_step=128", "engine.max_slots=8", "engine.slot_buckets=(8,)", "engine.context_buckets=(256,)"),
    )
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A model with experts."""
    what = settings(Namespace(model=None, config=str(REPO / "configs/tiny_moe.py")), SIZES)
    engine, _ = make_engine(what.model, what.engine, what.seed)
    engine.warm_up()
    with serving(engine) as made:
        yield made


def ask(live: Live, ids: list[int], **sampling: Any) -> dict[str, Any]:
    body = {"model": "tiny", "token_ids": ids, "sampling_params": {"max_tokens": 8, "seed": 5, **sampling}}
    answer = live.post("/inference/v1/generate", body)
    assert answer.status_code == 200, answer.text
    assert b'"routed_experts":{"data":"' in answer.content  # clients look for these bytes
    return answer.json()


def rows(routed: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(routed["data"]), routed["dtype"]).reshape(routed["shape"])


def check_same(live: Live, prompt_ids: list[int], choice: dict[str, Any], **sampling: Any) -> None:
    """Against `/generate` with the same seed."""
    sampling = {"max_tokens": 8, "seed": 5, "stop_ids": [258, 256]} | sampling
    same = live.post("/generate", {"prompt_ids": prompt_ids, "sampling": sampling}).json()
    assert choice["token_ids"] == same["ids"] and choice["finish_reason"] == same["finish_reason"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in same["ids"]]
    assert [entry["logprob"] for entry in content] == same["logprobs"]
    if (routed := choice.get("routed_experts")) is None:
        return  # this client does not say
    whole = from_json(same["routing"], "routing")
    assert len(whole) == len(prompt_ids) + len(same["ids"]) - 1
    assert np.array_equal(rows(routed), whole[routed["start"] :])


def test_it_is_what_generate_gives(live: Live) -> None:
    ids = list(b"hello there")
    answer = ask(live, ids, temperature=0.7, top_k=-1, top_p=0.9, logprobs=1, skip_special_tokens=False, stop_token_ids=[258])
    check_same(live, ids, answer["choices"][0], temperature=0.7, top_p=0.9)
    sampled = len(answer["choices"][0]["token_ids"])
    assert answer["usage"]["total_tokens"] == len(ids) + sampled and answer["usage"]["completion_tokens"] == sampled
    part = ask(live, ids, routed_experts_prompt_start=6)["choices"][0]
    assert part["routed_experts"]["start"] == 6
    check_same(live, ids, part)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [1] * 256}, 400, "token_ids"),
        ({"token_ids": [-1]}, 400, None),
        ({"token_ids": [1], "features": {}}, 400, "features"),
        ({"token_ids": [1], "model": "other"}, 404, "model"),
        ({"token_ids": [1], "stream": True}, 400, "stream"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, 400, "sampling_params.n"),
        ({"token_ids": [1], "sampling_params": {"best_of": 2}}, 400, "sampling_params.best_of"),
        ({"token_ids": [1], "sampling_params": {"stop": ["x" * 300]}}, 400, "stop"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1.0}}, 400, "temperature"),
    ],
)
def test_what_is_refused(live: Live, body: dict[str, Any], status: int, param: str | None) -> None:
    answer = live.post("/inference/v1/generate", body)
    assert answer.status_code == status, answer.text
    assert param is None or answer.json()["error"]["param"] == param


INSTALLED = pytest.mark.skipif(not TRAINERS.exists(), reason="`make clients` installs it")


def run(script: str, live: Live) -> Any:
    """What a script prints, in the libraries' own environment."""
    ran = subprocess.run(
        [str(TRAINERS), str(REPO / "tests/clients" / script), live.url, "tiny"],
        env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "KEY": "none", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def as_choice(turn: dict[str, Any]) -> dict[str, Any]:
    ids = turn["completion_ids"]
    content = [{"token": f"token_id:{i}", "logprob": x} for i, x in zip(ids, turn["completion_logprobs"], strict=True)]
    return {"token_ids": ids, "finish_reason": turn["finish_reason"], "logprobs": {"content": content}}


@pytest.mark.clients
@INSTALLED
def test_the_client_of_renderers(live: Live) -> None:
    first, second = run("ids_client.py", live)
    whole = first["prompt_ids"] + first["completion_ids"]
    assert second["prompt_ids"][: len(whole)] == whole
    for turn, seed, start in ((first, 3, 0), (second, 4, len(first["prompt_ids"]))):
        assert turn["routed"]["start"] == start
        choice = as_choice(turn) | {"routed_experts": turn["routed"]}
        check_same(live, turn["prompt_ids"], choice, seed=seed, max_tokens=12)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(first["prompt_ids"])


@pytest.mark.clients
@INSTALLED
def test_the_training_client_of_verifiers(live: Live) -> None:
    turn = run("train_client.py", live)
    check_same(live, turn["prompt_ids"], as_choice(turn), seed=3, max_tokens=12)
