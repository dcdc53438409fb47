"""Llama and Qwen3 checkpoints in Hugging Face's layout: one name table, read and written.

Legend: L layers, D model, H query heads, K kv heads, h head dim, F ffn, V vocab.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.config import ModelConfig, read_json
from models.transformer import describe

Params = dict[str, np.ndarray]

NAMES: dict[str, tuple[str, int]] = {
    "embed": ("model.embed_tokens.weight", 0),
    "blocks.attn_norm": ("model.layers.{}.input_layernorm.weight", 0),
    "blocks.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", 0),
    "blocks.q": ("model.layers.{}.self_attn.q_proj.weight", 1),
    "blocks.k": ("model.layers.{}.self_attn.k_proj.weight", 1),
    "blocks.v": ("model.layers.{}.self_attn.v_proj.weight", 1),
    "blocks.o": ("model.layers.{}.self_attn.o_proj.weight", 2),
    "blocks.q_norm": ("model.layers.{}.self_attn.q_norm.weight", 0),
    "blocks.k_norm": ("model.layers.{}.self_attn.k_norm.weight", 0),
    "blocks.gate": ("model.layers.{}.mlp.gate_proj.weight", 1),
    "blocks.up": ("model.layers.{}.mlp.up_proj.weight", 1),
    "blocks.down": ("model.layers.{}.mlp.down_proj.weight", 1),
    "norm": ("model.norm.weight", 0),
    "head": ("lm_head.weight", 1),
}
"""Our name -> (Hugging Face's, number of leading dims that are inputs). A linear layer is [in..., out...] here and a
flattened [out, in] there; 0 stands for an array that is the same in both."""

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_INDEX = "model.safetensors.index.json"


def manifest(config: ModelConfig) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
    """Hugging Face name -> (our name, layer or None, its shape there) of every tensor of a checkpoint."""
    tensors: dict[str, tuple[str, int | None, tuple[int, ...]]] = {}
    for name, weight in describe(config).items():
        template, num_in = NAMES[name]
        layers = range(weight.shape[0]) if name.startswith("blocks.") else [None]
        shape = weight.shape[1:] if name.startswith("blocks.") else weight.shape
        if num_in:
            shape = (int(np.prod(shape[num_in:])), int(np.prod(shape[:num_in])))
        tensors |= {template.format(layer): (name, layer, shape) for layer in layers}
    return tensors


def load_hf(directory: Path, config: ModelConfig, dtype: np.typing.DTypeLike = np.float32) -> Params:
    """Reads a checkpoint into the canonical tree, blocks stacked on a leading layer dim.

    Args:
        dtype: of the result, float32 or bfloat16; a stored dtype of other precision is rounded to nearest even.

    Raises:
        ValueError: files or tensors are missing, unreadable, misshaped or unknown; all of them are named at once.
    """
    expected = manifest(config)
    params: Params = {}
    with ExitStack() as stack:
        tensors, where, problems = _open(directory, stack)
        tied_head = tensors.pop("lm_head.weight", None) if config.tied_head else None
        for name, (_, _, shape) in expected.items():
            if name not in tensors and where.get(name, "model.safetensors") not in problems:
                problems[name] = f"{where.get(name, 'checkpoint')}: {name} is missing, expected shape {shape}"
        for name, (file, handle) in tensors.items():
            if name not in expected:
                problems[name] = f"{file}: {name} is unknown to a {config.family} model of {config.num_layers} layers"
                continue
            view = handle.get_slice(name)
            shape, stored = tuple(view.get_shape()), view.get_dtype()
            if shape != expected[name][2]:
                problems[name] = f"{file}: {name} has shape {shape}, expected {expected[name][2]}"
            elif stored not in DTYPES:
                problems[name] = f"{file}: {name} has dtype {stored}; supported are {', '.join(DTYPES)}"
        if tied_head and not problems and not _equal("lm_head.weight", tied_head, tensors):
            problems["lm_head.weight"] = (
                f"{tied_head[0]}: lm_head.weight differs from the embedding although tie_word_embeddings is true; "
                f"set it to false in config.json, or remove the tensor"
            )
        if problems:
            raise ValueError(
                f"{directory}: the checkpoint does not fit its config.json; copy it again or correct config.json:\n  "
                + "\n  ".join(problems.values())
            )
        shapes = describe(config)
        for name, (ours, layer, _) in expected.items():
            value = tensors[name][1].get_tensor(name)
            shape = shapes[ours].shape
            if layer is None:
                params[ours] = _from_hf(value, shape, NAMES[ours][1]).astype(dtype, order="C")
            else:
                whole = params.setdefault(ours, np.empty(shape, dtype))
                whole[layer] = _from_hf(value, shape[1:], NAMES[ours][1])
    return params


def save_hf(
    directory: Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer_files_from: Path | None = None,
    dtype: np.typing.DTypeLike = ml_dtypes.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes the canonical tree as a checkpoint that Hugging Face's loader reads. The directory appears whole or not.

    Args:
        params: stacked tree of numpy or jax arrays.
        tokenizer_files_from: directory whose tokenizer, chat template and generation settings are copied.

    Raises:
        ValueError: the tree is not exactly the config's, or the directory is in use; nothing is written then.
    """
    weights = describe(config)
    problems = [f"{name}: missing, expected shape {weights[name].shape}" for name in weights if name not in params]
    for name, value in params.items():
        if name not in weights:
            problems.append(f"{name}: unknown to a {config.family} model")
        elif tuple(value.shape) != weights[name].shape:
            problems.append(f"{name}: has shape {tuple(value.shape)}, expected {weights[name].shape}")
    dtype = np.dtype(dtype)
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        problems.append(f"dtype: {dtype} is not supported; use one of {[str(known) for known in names]}")
    if tokenizer_files_from and not tokenizer_files_from.is_dir():
        problems.append(f"tokenizer_files_from: {tokenizer_files_from} is no directory")
    if problems:
        raise ValueError(f"{directory}: parameters do not fit the config, nothing was written:\n  " + "\n  ".join(problems))

    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    expected = manifest(config)
    for name, (_, _, shape) in expected.items():
        size = int(np.prod(shape)) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", config.to_hf() | {"torch_dtype": dtype.name})
        for file in TOKENIZER_FILES if tokenizer_files_from else ():
            if tokenizer_files_from and (tokenizer_files_from / file).is_file():
                shutil.copyfile(tokenizer_files_from / file, temporary / file)
        for file, shard in zip(files, shards, strict=True):
            tensors = {name: _to_hf(params, *expected[name], dtype) for name in shard}
            write_safetensors(temporary / file, tensors)
        if len(shards) > 1:
            total = dtype.itemsize * sum(weight.size for weight in weights.values())
            where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
            write_json(temporary / _INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def resolve(model: str) -> Path:
    """Directory of a model: a local one as it is, else a hub id `org/name`, downloaded or taken from the hub's cache.

    Raises:
        ValueError: there is no such directory, and it is no hub id or cannot be downloaded.
    """
    if Path(model).is_dir():
        return Path(model)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise ValueError(f"model: {model!r} is neither a local directory nor a hub id like 'org/name'")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(f"model: huggingface_hub is not installed, pass a local directory, not {model!r}") from error
    try:
        patterns = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except OSError as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model: {model!r} is no local directory, and downloading it from the hub failed ({reason}); without a "
            f"network, copy the model's files to a local directory and pass its path"
        ) from error


def check_free(directory: Path) -> None:
    """Refuses to write over anything.

    Raises:
        ValueError: the directory is a file, or holds something already.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"{directory}: exists and is not an empty directory; remove it or choose another")


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A temporary sibling that becomes `directory` when the block ends well, and is removed when it does not.

    Raises:
        ValueError: the directory is a file, or holds something already.
    """
    check_free(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as parent:
        temporary = Path(parent) / directory.name
        temporary.mkdir()
        yield temporary
        os.replace(temporary, directory)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an indented JSON object."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one safetensors file, readable like its neighbours (the library's own files are 0600)."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _from_hf(value: np.ndarray, shape: tuple[int, ...], num_in: int) -> np.ndarray:
    """[out, in] -> [in..., out...]"""
    return value.T.reshape(shape) if num_in else value


def _to_hf(params: Mapping[str, Any], ours: str, layer: int | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One tensor as it is stored: [in..., out...] -> [out, in]"""
    value = np.asarray(params[ours] if layer is None else params[ours][layer])
    if NAMES[ours][1]:
        value = value.reshape(shape[::-1]).T
    return value.astype(dtype, order="C")


def _equal(name: str, tensor: tuple[str, Any], tensors: Mapping[str, tuple[str, Any]]) -> bool:
    """Whether a stored tensor holds what the embedding does."""
    embed = NAMES["embed"][0]
    return np.array_equal(tensor[1].get_tensor(name), tensors[embed][1].get_tensor(embed))


def _open(directory: Path, stack: ExitStack) -> tuple[dict[str, tuple[str, Any]], dict[str, str], dict[str, str]]:
    """Opens the files: tensor -> (file, handle), tensor -> file by the index, file -> what is wrong with it."""
    index = directory / _INDEX
    where: dict[str, str] = {}
    files = ["model.safetensors"]
    if index.is_file() and not (directory / files[0]).is_file():
        where = read_json(index).get("weight_map") or {}
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise ValueError(f"{index}: weight_map must map tensors to file names; copy the file again")
        files = sorted(set(where.values()))
    tensors: dict[str, tuple[str, Any]] = {}
    problems: dict[str, str] = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(directory / file, framework="np"))
        except FileNotFoundError:
            problems[file] = f"{file}: there is no such file"
        except (OSError, SafetensorError) as error:
            problems[file] = f"{file}: cannot be read, it is truncated or no safetensors file ({error})"
        else:
            names = [name for name in list(handle.keys()) if not _IGNORED.search(name)]
            tensors |= dict.fromkeys(names, (file, handle))
    return tensors, where, problems
