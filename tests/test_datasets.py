"""Files of examples: what is rendered and trained, to the token; what is refused; the order; runs that learn from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.data.needle import examples
from launch.cli import read_config
from models.tokenizer import ByteTokenizer
from rl.config import RunConfig, build
from rl.datasets import Dataset, Row, load
from rl.loop import train
from rl.messages import Message
from rl.renderers import ChatML, Qwen3, Renderer, SmolLM2
from tests.runs import Lines

REPO = Path(__file__).parents[1]
TOKENIZER = ByteTokenizer()
RENDERERS: tuple[Renderer, ...] = (ChatML(TOKENIZER), SmolLM2(TOKENIZER))
CHATML = RENDERERS[0]
END = CHATML.stop_ids[0]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def loaded(path: Path, kind: str = "sft", renderer: Renderer = CHATML, limit: int = 1000) -> Dataset:
    return load(path, kind, renderer, limit, "refuse")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def trained(row: Row) -> list[list[int]]:
    """Runs of neighbouring trained ids."""
    runs: list[list[int]] = []
    before = 0.0
    for token, weight in zip(row.ids.tolist(), row.weights.tolist(), strict=True):
        if weight and not before:
            runs.append([])
        if weight:
            runs[-1].append(token)
        before = weight
    return runs


# ---- what is trained


def test_a_completion_is_what_sampling_would_have_given(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"prompt": "3+4?", "completion": "It is 7.", "source": "made up"}, "", {
        "prompt": [{"role": "system", "content": "Be short."}, user("1"), said("2"), user("3")], "completion": "4"
    })  # fmt: skip
    for renderer in RENDERERS:
        (first,), (second,) = loaded(path, renderer=renderer).examples
        prompt = renderer.render([user("3+4?")])
        assert first.ids.tolist() == [*prompt, *TOKENIZER.encode("It is 7."), END]
        assert first.ids.dtype == np.int32 and first.weights.dtype == np.float32
        np.testing.assert_array_equal(first.weights, [0] * len(prompt) + [1] * 9)
        assert trained(second) == [[*TOKENIZER.encode("4"), END]]  # a prompt's own turns are not


@given(st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant"]), st.text(max_size=4)), max_size=6))
def test_every_turn_of_the_assistant_is_trained(
    tmp_path_factory: pytest.TempPathFactory, turns: Sequence[tuple[str, str]]
) -> None:
    """What is trained stands after the prompt that its turn was sampled from; control tokens in a text are text."""
    messages: list[Message] = [
        user("<|im_end|>"),
        *({"role": role, "content": text} for role, text in turns),
        said("<|im_end|>"),
    ]
    path = write(tmp_path_factory.getbasetemp() / "turns.jsonl", {"messages": messages})
    tools = any(role == "tool" for role, _ in turns)  # bytes have no control tokens for Qwen3's
    for renderer in (*RENDERERS, *([] if tools else [Qwen3(TOKENIZER, thinking=False)])):
        [(row,)] = loaded(path, renderer=renderer).examples
        stream: list[int] = []
        expected: list[float] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = renderer.render(messages[:number])
                ids = [*TOKENIZER.encode(message["content"]), END]
                assert prompt[: len(stream)] == stream
                expected += [0.0] * (len(prompt) - len(stream)) + [1.0] * len(ids)
                stream = [*prompt, *ids]
        assert row.ids.tolist() == stream and row.weights.tolist() == expected


def test_thinking(tmp_path: Path) -> None:
    answer: Message = {"role": "assistant", "content": "7", "thinking": "3 and 4"}
    path = write(tmp_path / "a", {"messages": [user("3+4?"), answer]})
    [(row,)] = loaded(path, renderer=Qwen3(TOKENIZER)).examples
    assert Qwen3(TOKENIZER).parse(trained(row)[0]) == answer
    with pytest.raises(ValueError, match=r"a:1: thinking: 'chatml' has no form for it"):
        loaded(path)


def test_pairs(tmp_path: Path) -> None:
    more = [said("5?"), user("Sure?"), said("6")]
    path = write(tmp_path / "a", {"prompt": "2+4?", "chosen": "6", "rejected": "7"},
                 {"prompt": [user("2+4?")], "chosen": more, "rejected": [said("8")]})  # fmt: skip
    data = loaded(path, "dpo")
    assert [[trained(row) for row in example] for example in data.examples] == [
        [[[*TOKENIZER.encode("6"), END]], [[*TOKENIZER.encode("7"), END]]],
        [[[*TOKENIZER.encode("5?"), END], [*TOKENIZER.encode("6"), END]], [[*TOKENIZER.encode("8"), END]]],
    ]
    assert data.longest == len(data.examples[1][0].ids) and data.longest_trained == 5
    samples = data.samples(seed=0, first=0, count=2)
    assert [(s.pair, s.chosen, s.episode) for s in samples] == [(0, True, 0), (0, False, 1), (1, True, 2), (1, False, 3)]
    for sample in samples:
        assert not sample.advantages.any() and not sample.logprobs.any() and sample.weights[-1] == 1


# ---- what is refused

GOOD = {"prompt": "a", "completion": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("sft", "{", r"no JSON \(.*\); write one object a line"),
        ("sft", "[1]", r"expected an object, got \[1\]"),
        ("sft", {"prompt": "a"}, "completion: missing; a line for 'sft' has messages, or prompt and completion"),
        ("sft", PAIR, "completion: missing"),
        ("dpo", GOOD, "chosen: missing; a line for 'dpo' has prompt, chosen and rejected"),
        ("dpo", {"messages": []}, "prompt: missing"),
        ("sft", {**GOOD, "messages": [user("a")]}, "messages: beside prompt or completion; keep one"),
        ("sft", {"messages": []}, r"messages: expected messages .*, got \[\]"),
        ("sft", {"messages": "hi"}, 'messages: expected messages .*, got "hi"'),
        ("sft", {"messages": [user("a"), "b"]}, r'messages\[1\]: expected an object with role and content, got "b"'),
        ("sft", {"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\].role: \"bot\" is unknown; use one of"),
        ("sft", {"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: expected a text, got null"),
        ("sft", {"messages": [{"role": "user"}]}, r"messages\[0\].content: expected a text, got null"),
        ("sft", {"messages": [{**user("a"), "tool_calls": []}]}, r"messages\[0\].tool_calls: no renderer has a form for it"),
        ("sft", {"messages": [user("a")]}, "messages: has no turn of the assistant, so there is nothing to learn; add one"),
        ("sft", {"messages": [said("a")]}, "messages: begins with the assistant, who has nothing to answer"),
        ("sft", {"prompt": 3, "completion": "b"}, "prompt: expected messages .*, got 3"),
        ("dpo", {**PAIR, "rejected": "b"}, "rejected: is the same as chosen, which teaches nothing; remove the line"),
        ("dpo", {**PAIR, "chosen": [user("b")]}, "chosen: has no turn of the assistant"),
    ],
)  # fmt: skip
def test_lines_that_are_refused(tmp_path: Path, kind: str, line: Any, words: str) -> None:
    path = write(tmp_path / "some.jsonl", GOOD if kind == "sft" else PAIR, line)
    with pytest.raises(ValueError, match=rf"^\S+/some.jsonl:2: {words}"):
        loaded(path, kind)


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.path: there is no file \S+/a; give a file of JSON lines"):
        loaded(tmp_path / "a")
    with pytest.raises(ValueError, match="has no example"):
        loaded(write(tmp_path / "a", ""))
    with pytest.raises(ValueError, match=r"/a:1: .*; \S+/a:5: .*; and 2 more lines$"):
        loaded(write(tmp_path / "a", *["{}"] * 7))
    (tmp_path / "b").write_bytes(b'{"prompt": "\xff", "completion": "b"}\n')
    with pytest.raises(ValueError, match="/b:1: no JSON"):
        loaded(tmp_path / "b")


def test_long_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a", GOOD, {"prompt": "a" * 40, "completion": "b"}, GOOD)
    n = len(CHATML.render([user("a" * 40)])) + 2
    assert loaded(path, limit=n).dropped == 0
    with pytest.raises(ValueError, match=f"/a:2: {n} tokens, and a row has {n - 1}; raise .*data.too_long='drop'"):
        loaded(path, limit=n - 1)
    data = load(path, "sft", CHATML, n - 1, "drop")
    assert len(data.examples) == 2 and data.dropped == 1
    with pytest.raises(ValueError, match=r"has no example \(3 were too long\)"):
        load(path, "sft", CHATML, 3, "drop")


def test_the_files_in_configs() -> None:
    """They are what their command writes; every rejected answer stands in its own text, and is another."""
    for name, lines in examples().items():
        path = REPO / "configs/data" / name
        assert path.read_text() == "".join(json.dumps(line) + "\n" for line in lines)
        assert len(loaded(path, name[7:10]).examples) == 64
        assert all(line["rejected"] in line["prompt"] for line in lines if "rejected" in line)


# ---- the order


@given(st.integers(1, 7), st.integers(0, 3), st.integers(1, 20))
def test_the_stream(size: int, seed: int, count: int) -> None:
    """Every example once an epoch, each epoch in another order; a part of it is the same wherever the reading began."""
    data = Dataset("sft", [(Row(np.array([n], np.int32), np.ones(1, np.float32)),) for n in range(size)], 0, "")

    def read(first: int, count: int) -> list[int]:
        return [int(sample.ids[0]) for sample in data.samples(seed, first, count)]

    whole = read(0, 3 * size + count)
    for epoch in range(3):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert [read(first, 1)[0] for first in range(len(whole))] == whole
    assert read(size // 2, count) == whole[size // 2 : size // 2 + count]


def test_orders_differ() -> None:
    data = Dataset("sft", [(Row(np.array([n], np.int32), np.ones(1, np.float32)),) for n in range(50)], 0, "")
    read = [tuple(int(s.ids[0]) for s in data.samples(seed, first, 50)) for seed in (0, 1) for first in (0, 50)]
    assert len(set(read)) == 4 and tuple(range(50)) not in read


# ---- runs


def config_of(run_dir: Path, path: Path, loss: str, **changes: Any) -> dict[str, Any]:
    """configs/tiny.py without what only rollouts need."""
    values = read_config(str(REPO / "configs/tiny.py"), [f"--config.run_dir={run_dir}", f"--config.trainer.loss={loss}"])
    values |= {"environment": {"kind": "none"}, "data": {"path": str(path), "batch": 4}, "steps": 12} | changes
    values["model"]["shape"]["num_layers"] = 1
    values["trainer"]["tokens_per_row"] = 256
    del values["rollout"], values["engine"], values["evaluation"]
    return values


def run(values: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Lines of metrics.jsonl without wall times and counts of compiles, the summary, what the reporter was told."""
    reporter = Lines()
    result = train(build(RunConfig, values), json.dumps(values), reporter)
    path = Path(values["run_dir"]) / values["name"] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in x.items() if k[:5] != "time/" and k != "compiles"} for x in lines], result, reporter.phases


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", *({"prompt": f"{a}+1?", "completion": str(a + 1)} for a in range(7)))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    lines = ({"prompt": f"{a}?", "chosen": str(a), "rejected": f"no {a}"} for a in range(7))
    return write(tmp_path / "pairs.jsonl", *lines)


@pytest.mark.slow
def test_supervised_run_goes_on(sums: Path, tmp_path: Path) -> None:
    """It learns, without an engine; broken off in the middle of an epoch it goes on bit for bit, with the same file only."""
    data = {"path": str(sums), "batch": 4, "epochs": 7}
    values = config_of(tmp_path / "a", sums, "sft", steps=0, data=data)
    whole, result, said = run(values)
    assert said[0] == f"{sums}: 7 examples, the longest of {len(CHATML.render([user('1+1?')])) + 2} tokens"
    assert [line["step"] for line in whole] == list(range(1, 14))  # 49 examples in thirteen steps of 4
    assert all(line["phase"] == "sft" and line["tokens"] >= 8 for line in whole) and whole[3]["epoch"] == 12 / 7
    assert whole[-1]["nll"] < whole[0]["nll"] / 2
    assert result["compiles_after_warmup"] == 0 and result["sft_steps"] == 13 and result["eval_before"] is None
    assert result["loss_last"] < result["loss_first"] and result["train_tokens_per_s"] > 0 and result["steps"] == 0
    assert "data.epochs goes on" in run(values)[2][-1]

    values = config_of(tmp_path / "b", sums, "sft", steps=0, data=data | {"epochs": 3})
    assert run(values)[0] == whole[:6]
    more = values | {"data": data}
    sums.write_text(sums.read_text() + "\n")
    with pytest.raises(ValueError, match="data.path: .* has changed since the run in .* began; restore it"):
        run(more)
    sums.write_text(sums.read_text()[:-1])
    lines, _, said = run(more)
    assert "resuming from step 6" in said and lines == whole
    record = json.loads((tmp_path / "b/tiny/run.json").read_text())
    assert record["data_sha256"] == Dataset("sft", [], 0, record["data_sha256"]).sha256 and len(record["data_sha256"]) == 64


@pytest.mark.slow
def test_preferences_are_learned(pairs: Path, tmp_path: Path) -> None:
    """DPO against the frozen first weights: at step 1 the margin is exactly 0; a resumed run has the same reference."""
    values = config_of(tmp_path / "a", pairs, "dpo")
    whole, result, _ = run(values)
    assert [line["phase"] for line in whole] == ["dpo"] * 12
    assert whole[0]["pair_margin"] == 0 and whole[0]["loss"] == pytest.approx(np.log(2), rel=1e-6) and whole[0]["pairs"] == 4
    assert whole[-1]["pair_margin"] > 0.1 and whole[-1]["pair_accuracy"] == 1 and result["compiles_after_warmup"] == 0
    assert result["dpo_steps"] == 12 and result["sft_steps"] == 0 and result["pair_accuracy_last"] == 1
    values = config_of(tmp_path / "b", pairs, "dpo")
    assert run(values | {"steps": 5})[0] == whole[:5]
    assert run(values)[0] == whole


def test_what_does_not_fit_together(sums: Path, tmp_path: Path) -> None:
    def refused(words: str, **changes: Any) -> None:
        values = config_of(tmp_path, sums, "sft") | changes
        with pytest.raises(ValueError, match=words):
            build(RunConfig, {key: value for key, value in values.items() if value is not ...})

    trainer = config_of(tmp_path, sums, "sft")["trainer"]
    refused(
        r"trainer.loss: 'grpo' learns from rollouts; with data.path, use one of \('sft', 'dpo'\)",
        trainer=trainer | {"loss": "grpo"},
    )
    refused("config.rollout: missing; set it in the config file; config.engine: missing", data=...)
    refused("environment.kind: is evaluated with rollout and engine; give both", environment={"kind": "arithmetic"})
    refused("warmup.steps: a run that learns from data.path has no other supervised steps", warmup={"steps": 1})
    refused("data.epochs: says how long the run is, and so does steps; set one", data={"path": "x", "batch": 1, "epochs": 2})
    refused("data.epochs: says how long the run is, and so does steps; set one", steps=0)
    refused("config.data: data.batch: must be at least 1, got 0", data={"path": "x", "batch": 0})
    refused("config.data.batch: missing; set it", data={"path": "x"})
    refused("config.data: expected .*DataSection.*, got 'x'", data="x")
    tiny = read_config(str(REPO / "configs/tiny.py"), ["--config.trainer.loss=dpo", "--config.environment.kind=none"])
    with pytest.raises(
        ValueError, match=r"trainer.loss: 'dpo' has no rollouts.*data.path.*environment.kind: 'none' has no tasks"
    ):
        build(RunConfig, tiny)
    with pytest.raises(ValueError, match="environment.renderer: 'x' is unknown; use one of"):
        run(config_of(tmp_path, sums, "sft", environment={"kind": "none", "renderer": "x"}))
    with pytest.raises(ValueError, match=r"sums.jsonl:1: \d+ tokens, and a row has 256; raise trainer.tokens_per_row"):
        sums.write_text(json.dumps({"prompt": "a" * 300, "completion": "b"}))
        run(config_of(tmp_path, sums, "sft"))
