"""Experts in checkpoints: config.json of both families, and both forms on disk, exactly or not at all."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from models.config import ModelConfig, MoEConfig
from models.hf import load_hf, save_hf
from models.hf_config import from_hf, to_hf
from models.hf_names import manifest
from models.transformer import describe

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "model_dim": 8,
    "ffn_dim": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "max_positions": 64,
}
QWEN3 = ModelConfig(family="qwen3_moe", moe=MoEConfig(num_experts=3, experts_per_token=2, ffn_dim=7), **SIZES)
QWEN2 = ModelConfig(
    family="qwen2_moe",
    moe=MoEConfig(num_experts=3, experts_per_token=2, ffn_dim=7, renormalise=False, shared_ffn_dim=9, shared_gate=True),
    **SIZES,
)
CONFIGS = {"qwen3_moe": QWEN3, "qwen2_moe": QWEN2}
FAMILIES = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])


def random_params(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(weight.shape, np.float32) for name, weight in describe(config).items()}


# ---- config.json


@FAMILIES
def test_what_a_file_may_leave_out(config: ModelConfig) -> None:
    fields = to_hf(config)
    for name in ("decoder_sparse_step", "mlp_only_layers", "use_sliding_window", "tie_word_embeddings", "rope_scaling"):
        del fields[name]
    fields.pop("qkv_bias", None)
    assert from_hf(fields) == config
    del fields["norm_topk_prob"], fields["head_dim"]
    read = from_hf(fields)
    assert read.moe and not read.moe.renormalise and read.head_dim == 2


@pytest.mark.oracle
@FAMILIES
def test_defaults_are_those_of_transformers(config: ModelConfig, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="make oracle has not been run")
    kept = {
        name: value
        for name, value in to_hf(config).items()
        if "num_" in name
        or "_size" in name
        or name in ("model_type", "architectures", "max_position_embeddings", "rms_norm_eps")
    }
    (tmp_path / "config.json").write_text(json.dumps(kept))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = from_hf(kept)
    assert ours.moe and theirs.norm_topk_prob == ours.moe.renormalise and theirs.tie_word_embeddings == ours.tied_head
    assert (theirs.decoder_sparse_step, theirs.mlp_only_layers, theirs.use_sliding_window) == (1, [], False)
    assert theirs.rope_parameters["rope_theta"] == ours.rope_theta and getattr(theirs, "head_dim", 2) == ours.head_dim
    assert getattr(theirs, "qkv_bias", False) == ours.qkv_bias and not getattr(theirs, "attention_bias", False)


def test_the_number_of_experts_has_two_names() -> None:
    fields = to_hf(QWEN3)
    count = fields.pop("num_experts")
    assert from_hf({**fields, "num_local_experts": count}) == QWEN3
    assert from_hf({**fields, "num_local_experts": count, "num_experts": count}) == QWEN3
    with pytest.raises(ValueError, match=r"num_experts, num_local_experts: \[4, 3\] differ"):
        from_hf({**fields, "num_local_experts": count, "num_experts": 4})
    with pytest.raises(ValueError, match=r"num_experts: missing"):
        from_hf(fields)


@pytest.mark.parametrize(
    ("config", "changes", "texts"),
    [
        (QWEN3, {"mlp_only_layers": [0], "decoder_sparse_step": 2}, ["mlp_only_layers: [0]", "decoder_sparse_step: 2"]),
        (QWEN3, {"num_experts_per_tok": None, "moe_intermediate_size": "7"}, ["num_experts_per_tok: missing", "moe_inter"]),
        (QWEN3, {"attention_bias": True, "use_sliding_window": True}, ["attention_bias", "use_sliding_window"]),
        (QWEN3, {"num_experts_per_tok": 4}, ["moe.experts_per_token: 4"]),
        (QWEN3, {"norm_topk_prob": "yes"}, ["norm_topk_prob: must be true or false, got 'yes'"]),
        (QWEN3, {"num_key_value_heads": None}, ["num_key_value_heads: missing"]),
        (QWEN2, {"qkv_bias": False, "shared_expert_intermediate_size": None}, ["qkv_bias: False", "shared_expert_inter"]),
        (QWEN2, {"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types"]),
        (QWEN2, {"shared_expert_intermediate_size": 0}, ["moe.shared_gate"]),
    ],
)
def test_unsupported_configs_are_refused_by_name(config: ModelConfig, changes: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        from_hf({**to_hf(config), **changes})
    assert all(text in str(error.value) for text in texts), str(error.value)


@pytest.mark.parametrize(
    ("config", "changes", "names"),
    [
        (QWEN3, {"scoring": "sigmoid", "groups": 3, "groups_per_token": 2}, ["scoring", "groups", "groups_per_token"]),
        (QWEN3, {"shared_ffn_dim": 9, "shared_gate": True}, ["shared_ffn_dim", "shared_gate"]),
        (QWEN2, {"scaling": 2.5, "shared_gate": False, "selection_bias": True}, ["scaling", "shared_gate", "selection_bias"]),
    ],
)
def test_experts_that_no_file_describes(config: ModelConfig, changes: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    assert config.moe
    other = dataclasses.replace(config, moe=dataclasses.replace(config.moe, **changes))
    with pytest.raises(ValueError, match="cannot say what the experts do") as error:
        save_hf(tmp_path / "out", other, random_params(config))
    assert all(f"moe.{name}: " in str(error.value) for name in names)
    assert not list(tmp_path.iterdir())


# ---- tensors


@FAMILIES
@pytest.mark.parametrize("shard", [10**9, 2000], ids=["single", "sharded"])
def test_fused_and_unfused_are_the_same_weights(config: ModelConfig, shard: int, tmp_path: Path) -> None:
    """Every number of both forms stands where the other's does, said by hand."""
    params = random_params(config)
    for fused in (False, True):
        save_hf(tmp_path / str(fused), config, params, dtype=np.float32, max_shard_bytes=shard, fused=fused)
        loaded = load_hf(tmp_path / str(fused), config)
        assert loaded.keys() == params.keys()
        for name, value in params.items():
            np.testing.assert_array_equal(loaded[name], value, err_msg=name, strict=True)
    single, fused = (
        {name: value for file in (tmp_path / form).glob("*.safetensors") for name, value in load_file(file).items()}
        for form in ("False", "True")
    )
    assert single.keys() == manifest(config).keys() and fused.keys() == manifest(config, fused=True).keys()
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gate_up, down = fused.pop(f"{at}.gate_up_proj"), fused.pop(f"{at}.down_proj")
        assert gate_up.shape == (3, 14, 8) and down.shape == (3, 8, 7)
        for e in range(3):
            gate, up = (single.pop(f"{at}.{e}.{name}_proj.weight") for name in ("gate", "up"))
            np.testing.assert_array_equal(gate_up[e], np.concatenate([gate, up]))
            np.testing.assert_array_equal(down[e], single.pop(f"{at}.{e}.down_proj.weight"))
            np.testing.assert_array_equal(gate, params["blocks.moe.gate"][layer, e].T)
    assert single.keys() == fused.keys()
    assert all(np.array_equal(single[name], fused[name]) for name in single)


@FAMILIES
def test_a_layer_has_one_form(config: ModelConfig, tmp_path: Path) -> None:
    """Layers may differ; within one, neither form may complete the other."""
    params = random_params(config)
    forms = []
    for fused in (False, True):
        save_hf(tmp_path / str(fused), config, params, dtype=np.float32, fused=fused)
        forms.append(load_file(tmp_path / str(fused) / "model.safetensors"))
    single, fused = forms
    mixed = {name: value for name, value in single.items() if "layers.1.mlp.experts" not in name}
    mixed |= {name: value for name, value in fused.items() if "layers.1.mlp.experts" in name}
    file = tmp_path / "True/model.safetensors"
    save_file(mixed, file)
    loaded = load_hf(file.parent, config)
    assert all(np.array_equal(loaded[name], params[name]) for name in params)
    gone, extra = "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.2.down_proj.weight"
    save_file({name: value for name, value in mixed.items() if name != gone} | {extra: single[extra]}, file)
    with pytest.raises(ValueError) as error:
        load_hf(file.parent, config)
    text = str(error.value)
    assert f"{gone} is missing, expected shape (3, 8, 7)" in text and len(text.splitlines()) == 3
    assert f"{extra} is of one expert, but its layer also has fused experts; remove one of the two forms" in text


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for family, config in CONFIGS.items():
        for fused in (False, True):
            save_hf(root / f"{family} {fused}", config, random_params(config), dtype=np.float32, fused=fused)
    return {(family, fused): root / f"{family} {fused}" for family in CONFIGS for fused in (False, True)}


FAULTS = {
    "dropped": lambda name, value: {},
    "renamed": lambda name, value: {name + "s": value},
    "longer": lambda name, value: {name: np.concatenate([value, value[:1]])},
    "turned": lambda name, value: {name: np.ascontiguousarray(value.T) if value.ndim > 1 else value[None]},
    "doubled": lambda name, value: {name: value, name + "s": value.copy()},
}


@given(st.sampled_from(sorted(CONFIGS)), st.booleans(), st.data())
@settings(max_examples=60)
def test_damaged_checkpoints_are_refused(
    checkpoints: dict[tuple[str, bool], Path], tmp_path_factory: pytest.TempPathFactory, family: str, fused: bool, data: Any
) -> None:
    """Any tensor, dropped, renamed, of another shape, or there twice; several at once are all named."""
    source = checkpoints[family, fused]
    tensors = load_file(source / "model.safetensors")
    square = [name for name, value in tensors.items() if value.ndim > 1 and value.shape == value.T.shape]
    names = data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=3, unique=True))
    lines = 1
    for name in names:
        fault = data.draw(st.sampled_from([fault for fault in FAULTS if fault != "turned" or name not in square]))
        tensors |= FAULTS[fault](name, tensors.pop(name))
        lines += 2 if fault == "renamed" else 1
    directory = tmp_path_factory.mktemp("damaged")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load_hf(directory, CONFIGS[family])
    assert len(str(error.value).splitlines()) == lines, str(error.value)
    assert all(name in str(error.value) for name in names)


@given(st.sampled_from(sorted(CONFIGS)), st.booleans(), st.sampled_from(["drop", "rename", "shape"]), st.data())
@settings(max_examples=40)
def test_damaged_trees_are_not_written(
    tmp_path_factory: pytest.TempPathFactory, family: str, fused: bool, fault: str, data: Any
) -> None:
    config = CONFIGS[family]
    params = random_params(config)
    name = data.draw(st.sampled_from(sorted(params)))
    value = params.pop(name)
    if fault == "rename":
        params[name.replace("blocks.", "blocks.0.") if "blocks" in name else name + "s"] = value
    elif fault == "shape":
        params[name] = value[..., :-1]
    directory = tmp_path_factory.mktemp("out")
    with pytest.raises(ValueError, match="nothing was written") as error:
        save_hf(directory / "out", config, params, fused=fused)
    assert f"{name}: {'has shape' if fault == 'shape' else 'missing'}" in str(error.value)
    assert not list(directory.iterdir())
