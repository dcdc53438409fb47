"""config.json, Hugging Face checkpoints in and out, and the command-line conversion."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.cli import run_main
from launch.convert import convert, main
from models.config import ModelConfig, MoEConfig, RopeScaling
from models.hf import load_hf, resolve, save_hf
from models.hf_config import from_hf, read_config, to_hf
from models.hf_names import manifest
from models.transformer import describe

GOLDEN = Path(__file__).parent / "golden"
REAL = Path(__file__).parents[1] / "runs/models/smollm2-135m-instruct"
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "model_dim": 8,
    "ffn_dim": 12,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "max_positions": 64,
}
LLAMA = ModelConfig(family="llama", rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), bos_id=1, eos_ids=(2, 3), **SIZES)
QWEN3 = ModelConfig(family="qwen3", tied_head=True, rope_theta=1e6, eos_ids=(2,), pad_id=0, **SIZES)
QWEN3_MOE = ModelConfig(family="qwen3_moe", moe=MoEConfig(num_experts=5, experts_per_token=2, ffn_dim=7), **SIZES)
QWEN2_MOE = ModelConfig(
    family="qwen2_moe",
    tied_head=True,
    moe=MoEConfig(num_experts=4, experts_per_token=3, ffn_dim=7, renormalise=False, shared_ffn_dim=9, shared_gate=True),
    **SIZES,
)
FAMILIES = pytest.mark.parametrize("config", [LLAMA, QWEN3, QWEN3_MOE, QWEN2_MOE], ids=lambda config: config.family)


def random_params(config: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(weight.shape).astype(dtype) for name, weight in describe(config).items()}


def raw(**changes: Any) -> dict[str, Any]:
    return {**to_hf(QWEN3), **changes}


@FAMILIES
def test_config_round_trip(config: ModelConfig) -> None:
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config


def test_config_defaults() -> None:
    fields = to_hf(LLAMA)
    for name in ("head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "architectures", "bos_token_id"):
        del fields[name]
    config = from_hf(fields)
    assert (config.family, config.head_dim, config.num_kv_heads) == ("llama", 2, 4)
    assert (config.rope_theta, config.rope_scaling, config.bos_id) == (10000.0, None, None)


def test_newer_rope_form_is_read() -> None:
    config = read_config(GOLDEN / "tiny_llama3")
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 256) and config.rope_theta == 10000.0
    assert read_config(GOLDEN / "tiny_qwen3").rope_theta == 1e6
    assert from_hf(raw(rope_scaling={"type": "default"})).rope_scaling is None


def test_config_names_every_missing_field() -> None:
    fields = raw()
    for name in ("hidden_size", "num_hidden_layers", "head_dim", "rms_norm_eps"):
        del fields[name]
    with pytest.raises(ValueError, match=r"hidden_size: missing.*num_hidden_layers: missing.*rms_norm_eps.*head_dim"):
        from_hf(fields)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: kind 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters: kind 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks .*low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling: must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures: .*MixtralForCausalLM"),
        ({"hidden_size": "8"}, "hidden_size: must be a number"),
        ({"num_key_value_heads": 3}, "num_kv_heads: 3 must divide"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_hf(raw(**changes))


def test_read_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_config(tmp_path).eos_ids == (2, 7)


@FAMILIES
@pytest.mark.parametrize("shard", [10**9, 600], ids=["single", "sharded"])
def test_round_trip_is_exact(config: ModelConfig, shard: int, tmp_path: Path) -> None:
    params = random_params(config, ml_dtypes.bfloat16)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer_config.json").write_text("{}")
    save_hf(tmp_path / "out", config, params, tmp_path / "tokenizer", max_shard_bytes=shard)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (shard == 600)
    assert (tmp_path / "out/tokenizer_config.json").exists()
    assert read_config(tmp_path / "out") == config
    for dtype in (np.float32, ml_dtypes.bfloat16):
        loaded = load_hf(tmp_path / "out", config, dtype)
        assert loaded.keys() == params.keys()
        for name, value in loaded.items():
            assert value.dtype == dtype and value.flags.c_contiguous
            np.testing.assert_array_equal(value, params[name].astype(dtype))


@FAMILIES
def test_float32_is_kept_or_rounded_once(config: ModelConfig, tmp_path: Path) -> None:
    params = random_params(config)
    save_hf(tmp_path / "out", config, params, dtype=np.float32)
    loaded = load_hf(tmp_path / "out", config)
    assert all(np.array_equal(loaded[name], params[name]) for name in params)
    rounded = load_hf(tmp_path / "out", config, ml_dtypes.bfloat16)
    assert all(np.array_equal(rounded[name], params[name].astype(ml_dtypes.bfloat16)) for name in params)


def test_layout_is_the_transpose_by_heads() -> None:
    config = read_config(GOLDEN / "tiny_llama3")
    stored = load_file(GOLDEN / "tiny_llama3/model.safetensors")
    params = load_hf(GOLDEN / "tiny_llama3", config, ml_dtypes.bfloat16)
    x = np.random.default_rng(0).standard_normal(config.model_dim).astype(np.float32)
    q = stored["model.layers.1.self_attn.q_proj.weight"].astype(np.float32) @ x
    ours = np.einsum("d,dhk->hk", x, params["blocks.q"][1].astype(np.float32))
    np.testing.assert_allclose(ours.reshape(-1), q, rtol=1e-5, atol=1e-5)
    back = stored["model.layers.1.self_attn.o_proj.weight"].astype(np.float32) @ q
    o = np.einsum("hk,hkd->d", ours, params["blocks.o"][1].astype(np.float32))
    np.testing.assert_allclose(o, back, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny_llama3", "tiny_qwen3", "tiny_qwen3_moe", "tiny_qwen2_moe"])
def test_golden_checkpoints_survive(name: str, tmp_path: Path) -> None:
    config = read_config(GOLDEN / name)
    save_hf(tmp_path / "out", config, load_hf(GOLDEN / name, config))
    before, after = load_file(GOLDEN / name / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys() == manifest(config).keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    with pytest.raises(ValueError, match="not an empty directory"):
        save_hf(tmp_path / "out", config, load_hf(GOLDEN / name, config))


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    save_hf(tmp_path / "a", LLAMA, random_params(LLAMA))
    tensors = load_file(tmp_path / "a/model.safetensors")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((12, 8), np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.zeros(8, np.int32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "a/model.safetensors")
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path / "a", LLAMA)
    text = str(error.value)
    assert "model.norm.weight is missing, expected shape (8,)" in text
    assert "lm_head.weight has shape (23, 8), expected (24, 8)" in text
    assert "model.layers.9.mlp.up_proj.weight is unknown" in text
    assert "input_layernorm.weight has dtype I32" in text
    assert "inv_freq" not in text and len(text.splitlines()) == 5


@pytest.mark.parametrize("keep", [0, 4, 60, -7], ids=["empty", "no header", "half header", "cut"])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    save_hf(tmp_path / "a", QWEN3, random_params(QWEN3))
    file = tmp_path / "a/model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors: cannot be read, it is truncated") as error:
        load_hf(tmp_path / "a", QWEN3)
    assert len(str(error.value).splitlines()) == 2  # and not one line for each tensor that was in it
    file.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: there is no such file"):
        load_hf(tmp_path / "a", QWEN3)


def test_broken_shards(tmp_path: Path) -> None:
    save_hf(tmp_path / "a", LLAMA, random_params(LLAMA), max_shard_bytes=600)
    files = sorted((tmp_path / "a").glob("model-*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(b"\xff" * 64)
    kept = load_file(files[2])
    gone = sorted(kept)[0]
    del kept[gone]
    save_file(kept, files[2])
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path / "a", LLAMA)
    text = str(error.value)
    assert f"{files[0].name}: there is no such file" in text
    assert f"{files[1].name}: cannot be read" in text
    assert f"{files[2].name}: {gone} is missing" in text
    assert len(text.splitlines()) == 4
    (tmp_path / "a/model.safetensors.index.json").write_text('{"weight_map": ["x"]}')
    with pytest.raises(ValueError, match="weight_map must map"):
        load_hf(tmp_path / "a", LLAMA)


def test_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    params = random_params(QWEN3)
    save_hf(tmp_path / "a", QWEN3, params, dtype=np.float32)
    file = tmp_path / "a/model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, file)
    assert load_hf(tmp_path / "a", QWEN3).keys() == params.keys()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from the embedding although tie_word_embeddings"):
        load_hf(tmp_path / "a", QWEN3)


def test_save_checks_everything_before_writing(tmp_path: Path) -> None:
    params = random_params(LLAMA)
    del params["norm"]
    params["blocks.q"] = params["blocks.q"][:, :, :2]
    params["extra"] = np.zeros(3)
    with pytest.raises(ValueError) as error:
        save_hf(tmp_path / "out", LLAMA, params, tmp_path / "nowhere", dtype=np.int8)
    text = str(error.value)
    for part in ("norm: missing", "blocks.q: has shape (3, 8, 2, 6)", "extra: unknown", "int8", "nowhere"):
        assert part in text
    assert not list(tmp_path.iterdir())


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("models.hf.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_hf(tmp_path / "out", LLAMA, random_params(LLAMA))
    assert not list(tmp_path.iterdir())


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="neither a local directory nor a hub id"):
        resolve("./no/such/directory")

    def offline(*_: Any, **__: Any) -> str:
        raise FileNotFoundError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"'org/name' is no local directory.*not known.*pass its path"):
        resolve("org/name")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve("org/name") == tmp_path


def write_tokenizer(directory: Path, more: dict[str, int]) -> None:
    vocab = {chr(ord("!") + i): i for i in range(120)} | more
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_convert_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "tiny_qwen3", source)
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        convert(str(source), tmp_path / "out")
    write_tokenizer(source, {})
    convert(str(source), tmp_path / "out")
    assert read_config(tmp_path / "out") == read_config(source)
    assert (tmp_path / "out/tokenizer.json").exists()
    write_tokenizer(source, {"too many": 128})
    with pytest.raises(ValueError, match="ids up to 128, the model only 128"):
        convert(str(source), tmp_path / "other")
    with pytest.raises(SystemExit) as status:
        run_main(lambda: convert(str(source), tmp_path / "out"))
    assert status.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_convert_to_fused_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "tiny_qwen3_moe", source)
    write_tokenizer(source, {})
    monkeypatch.setattr("sys.argv", ["convert", str(source), str(tmp_path / "out"), "--fused-experts"])
    main()
    config = read_config(source)
    assert read_config(tmp_path / "out") == config
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored.keys() == manifest(config, fused=True).keys() and stored["model.layers.2.mlp.experts.gate_up_proj"].ndim == 3
    before, after = load_hf(source, config), load_hf(tmp_path / "out", config)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    with pytest.raises(ValueError, match=r"--fused-experts: embedded has no experts"):
        convert("embedded", tmp_path / "dense", fused_experts=True)
    with pytest.raises(ValueError, match=r"fused: a qwen3 model has no experts"):
        save_hf(tmp_path / "dense", QWEN3, random_params(QWEN3), fused=True)
    assert not (tmp_path / "dense").exists()


@pytest.mark.real
@pytest.mark.skipif(not REAL.exists(), reason="make model has not been run")
def test_real_checkpoint(tmp_path: Path) -> None:
    config = read_config(REAL)
    assert (config.num_layers, config.vocab_size, config.rope_theta, config.eos_ids) == (30, 49152, 1e5, (2,))
    params = load_hf(REAL, config, ml_dtypes.bfloat16)
    assert sum(math.prod(value.shape) for value in params.values()) == 134_515_008
    assert all(np.isfinite(value.astype(np.float32)).all() for value in params.values())
    save_hf(tmp_path / "out", config, params, REAL, max_shard_bytes=100_000_000)
    again = load_hf(tmp_path / "out", config, ml_dtypes.bfloat16)
    assert all(np.array_equal(again[name], params[name]) for name in params)
