"""Checkpoints in Hugging Face's layout, in and out. `hf_names` says which tensors they have."""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.hf_config import read_json, to_hf
from models.hf_names import NAMES, Params, Tensor, expected, make, manifest, take
from models.transformer import describe

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


def load_hf(directory: Path, config: ModelConfig, dtype: np.typing.DTypeLike = np.float32) -> Params:
    """Reads a checkpoint into the canonical tree, blocks stacked on a leading layer dim.

    Args:
        dtype: of the result, float32 or bfloat16; a stored dtype of other precision is rounded to nearest even.

    Raises:
        ValueError: files or tensors are missing, unreadable, misshaped or unknown; all of them are named at once.
    """
    weights = describe(config)
    params: Params = {}
    with ExitStack() as stack:
        tensors, where, problems = _open(directory, stack)
        wanted, unfused = expected(config, tensors.keys() | where.keys()), manifest(config)
        tied_head = tensors.pop("lm_head.weight", None) if config.tied_head else None
        for name, tensor in wanted.items():
            if name not in tensors and where.get(name, "model.safetensors") not in problems:
                problems[name] = f"{where.get(name, 'checkpoint')}: {name} is missing, expected shape {tensor.shape}"
        for name, (file, handle) in tensors.items():
            if name not in wanted:
                why = f"is unknown to a {config.family} model of {config.num_layers} layers"
                if name in unfused:
                    why = "is of one expert, but its layer also has fused experts; remove one of the two forms"
                problems[name] = f"{file}: {name} {why}"
                continue
            view = handle.get_slice(name)
            shape, stored = tuple(view.get_shape()), view.get_dtype()
            if shape != wanted[name].shape:
                problems[name] = f"{file}: {name} has shape {shape}, expected {wanted[name].shape}"
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
        for name, tensor in wanted.items():
            for ours, value in zip(tensor.parts, take(tensors[name][1].get_tensor(name), tensor, weights), strict=True):
                if ours not in params:
                    params[ours] = np.empty(weights[ours].shape, dtype)
                params[ours][tensor.at] = value
    return params


def save_hf(
    directory: Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer_files_from: Path | None = None,
    dtype: np.typing.DTypeLike = ml_dtypes.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
    fused: bool = False,
) -> None:
    """Writes the canonical tree as a checkpoint that Hugging Face's loader reads. The directory appears whole or not.

    Args:
        params: stacked tree of numpy or jax arrays.
        tokenizer_files_from: directory whose tokenizer, chat template and generation settings are copied.
        fused: experts are stored in transformers 5's own form (`hf_names.FUSED`), not one by one as on the hub.

    Raises:
        ValueError: a checkpoint cannot say what the config does, the tree is not exactly the config's, or the directory is in
            use; nothing is written then.
    """
    settings = to_hf(config)
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
    if fused and not config.moe:
        problems.append(f"fused: a {config.family} model has no experts; leave it out")
    if tokenizer_files_from and not tokenizer_files_from.is_dir():
        problems.append(f"tokenizer_files_from: {tokenizer_files_from} is no directory")
    if problems:
        raise ValueError(f"{directory}: parameters do not fit the config, nothing was written:\n  " + "\n  ".join(problems))

    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    tensors = manifest(config, fused)
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", settings | {"torch_dtype": dtype.name})
        for file in TOKENIZER_FILES if tokenizer_files_from else ():
            if tokenizer_files_from and (tokenizer_files_from / file).is_file():
                shutil.copyfile(tokenizer_files_from / file, temporary / file)
        layer_of = _layers(params)
        for file, shard in zip(files, shards, strict=True):
            write_safetensors(temporary / file, {name: _stored(tensors[name], layer_of, dtype) for name in shard})
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


def _layers(params: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """(our name, layer) -> that on the host. Neighbours in the manifest are of one layer, of two weights at most."""

    @lru_cache(maxsize=2)
    def layer_of(name: str, layer: tuple[int, ...]) -> np.ndarray:
        return np.asarray(params[name][layer])

    return layer_of


def _stored(tensor: Tensor, layer_of: Callable[[str, tuple[int, ...]], np.ndarray], dtype: np.dtype) -> np.ndarray:
    return make(tensor, lambda name: layer_of(name, tensor.at[:1])[tensor.at[1:]], dtype)


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
