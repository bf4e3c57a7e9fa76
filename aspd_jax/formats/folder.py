"""Hugging Face folders: config.json, safetensors, tokenizer. No pickle, no code from a checkpoint is ever run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoTokenizer

from aspd_jax.errors import CheckpointError
from aspd_jax.files import write_folder
from aspd_jax.formats import Checkpoint, Tensors

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SHARD_BYTES = 4 << 30
KEPT = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "spaces_between_special_tokens")
ONLY_IN_MEMORY = ("backend", "is_local", "local_files_only", "name_or_path")  # how a tokenizer was loaded


def open_folder(folder: Path) -> Checkpoint:
    """A checkpoint folder.

    Raises:
        CheckpointError: it has no config.json, or one that cannot be read.
    """
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json; it is not a Hugging Face checkpoint")
    try:
        hf_config = json.loads((folder / "config.json").read_text())
        hf = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    tokenizer = None
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text()) if file.exists() else {}
    ends = _end_ids(generation, hf, tokenizer)
    return Checkpoint(str(folder), hf_config, hf, tokenizer, ends, lambda: read_tensors(folder), generation=generation)


def _end_ids(generation: dict[str, Any], hf: Any, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text ids, from where `transformers` takes them: generation config, then config, then tokenizer."""
    for candidate in (generation.get("eos_token_id"), hf.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        if candidate is not None:
            return tuple(candidate) if isinstance(candidate, list) else (int(candidate),)
    return ()


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: there are none, or the index names one that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(f"{index} names {', '.join(missing)}, which is not in the folder")
        return [folder / name for name in names]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    hint = "; convert its .bin files to safetensors first" if list(folder.glob("*.bin")) else ""
    raise CheckpointError(f"{folder} holds no model.safetensors{hint}")


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a folder.

    Raises:
        CheckpointError: see `shard_files`, or a file is no safetensors file.
    """
    for file in shard_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a safe_open is not a mapping)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {error}") from None


def write_settings(
    folder: Path,
    hf_config: dict[str, Any],
    dtype: str,
    end_ids: tuple[int, ...],
    tokenizer: Any,
    generation: Mapping[str, Any],
) -> None:
    """Write everything of a checkpoint folder but its tensors.

    Args:
        dtype: of the tensors.
        generation: contents of generation_config.json beside its end ids.
    """
    kept = {key: value for key, value in hf_config.items() if key not in ("torch_dtype", "dtype")}
    (folder / "config.json").write_text(json.dumps(kept | {"torch_dtype": dtype}, indent=2) + "\n")
    settings = dict(generation)
    if end_ids:
        settings["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else list(end_ids)
    if settings:
        (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer)


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer that `transformers` 4 loads too: it does not know some names of 5."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in ONLY_IN_MEMORY}
    source = Path(tokenizer.name_or_path) / file.name
    if tokenizer.name_or_path and source.is_file():  # some fields are read and not written again
        before = json.loads(source.read_text())
        config |= {key: value for key, value in before.items() if key not in config and key in KEPT}
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def write_tensors(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors as safetensors, in files of about `shard_bytes` at most, one of them in memory at a time."""
    names: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}

    def write() -> None:
        names.append(list(shard))
        save_file(shard, folder / f"{len(names)}.partial", metadata={"format": "pt"})
        shard.clear()

    total = 0
    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
            write()
        shard[name] = tensor
        total += tensor.nbytes
    write()
    if len(names) == 1:
        (folder / "1.partial").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, inside in enumerate(names, 1):
        file = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        (folder / f"{number}.partial").rename(folder / file)
        weight_map.update(dict.fromkeys(inside, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def convert(checkpoint: Checkpoint, output: Path, dtype: str) -> None:
    """Write any checkpoint as a Hugging Face folder, a tensor at a time.

    Args:
        dtype: `float32` or `bfloat16`, of its tensors.

    Raises:
        CheckpointError: something is at `output` already.
    """
    with write_folder(output) as folder:
        write_settings(
            folder, checkpoint.hf_config, dtype, checkpoint.end_ids, checkpoint.tokenizer, checkpoint.generation
        )
        numbers = jnp.dtype(dtype)
        write_tensors(folder, ((name, tensor.astype(numbers)) for name, tensor in checkpoint.tensors()))
