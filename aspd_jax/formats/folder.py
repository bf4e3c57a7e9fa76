"""Hugging Face folders: config.json, safetensors and tokenizer. Pickle files and code of a checkpoint are never run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from aspd_jax.errors import CheckpointError
from aspd_jax.files import write_folder
from aspd_jax.formats import Checkpoint, Tensors
from aspd_jax.formats.draft_file import FILE
from aspd_jax.formats.hf_config import IDS, make_config, read_config
from aspd_jax.formats.shards import (
    ADAPTER_FILES,
    EMBEDDING,
    HEAD,
    Stored,
    find_tensors,
    has_tensors,
    load_stored,
    read_stored,
    text_part,
)
from aspd_jax.formats.side_files import read_object
from aspd_jax.formats.tokenizer_files import has_tokenizer, read_tokenizer

log = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
KEPT = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "spaces_between_special_tokens")
ONLY_IN_MEMORY = ("backend", "is_local", "local_files_only", "name_or_path")  # describe the loading of a tokenizer


def open_folder(folder: Path) -> Checkpoint:
    """Open a checkpoint folder.

    For a model with an image part, the text part is opened, and the number of ignored tensors is logged.

    Raises:
        CheckpointError: a file or field is missing, broken or not supported.
    """
    file = folder / "config.json"
    if not file.exists():
        hint = "It is not a Hugging Face checkpoint."
        if (folder / ADAPTER_FILES[0]).exists():
            hint = "It holds an adapter; give its base model, and this folder as the adapter."
        raise CheckpointError(f"{folder}: expected config.json, got none. {hint}")
    hf_config, composite = read_config(file)
    hf = make_config(hf_config, str(file))
    places: dict[str, Stored] | None = None
    if has_tensors(folder):
        places = find_tensors(folder)
        if composite:
            places, others = text_part(places)
            if others:
                log.warning("%s: %d tensors of its image part are left out; the text part is read", folder, others)
        tied = _is_tied(folder, hf.tie_word_embeddings, places)
        if tied != hf.tie_word_embeddings:
            hf_config["tie_word_embeddings"] = hf.tie_word_embeddings = tied
    tokenizer = read_tokenizer(folder) if has_tokenizer(folder) else None
    file = folder / "generation_config.json"
    generation = read_object(file) if file.exists() else {}
    ends = _end_ids(generation, file, hf, tokenizer)

    def tensors() -> Tensors:
        return read_stored(find_tensors(folder) if places is None else places)

    return Checkpoint(str(folder), hf_config, hf, tokenizer, ends, tensors, generation=generation)


def _is_tied(folder: Path, tied: bool, places: dict[str, Stored]) -> bool:
    """Return whether the head is the embedding, by configuration and tensors as in `transformers`.

    In a tied model that has only a head, the head becomes the embedding.

    Raises:
        CheckpointError: the configuration requires a head, and the tensors have none.
    """
    if not tied:
        if EMBEDDING in places and HEAD not in places:
            raise CheckpointError(
                f"{folder}: expected {HEAD}, because tie_word_embeddings is false, got none. "
                "If the head is the embedding, set tie_word_embeddings to true in config.json."
            )
        return False
    if HEAD not in places:
        return True
    if EMBEDDING not in places:
        places[EMBEDDING] = places.pop(HEAD)
        return True
    return np.array_equal(load_stored(places[EMBEDDING]), load_stored(places[HEAD]))


def _end_ids(generation: dict[str, Any], file: Path, hf: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the end-of-text ids of the generation config, the config or the tokenizer, as in `transformers`."""
    ends = generation.get("eos_token_id")
    if ends is not None and not IDS.accepts(ends):
        raise CheckpointError(f"{file}: eos_token_id: expected {IDS.expected}, got {ends!r}")
    for candidate in (ends, hf.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        if candidate is not None:
            return tuple(candidate) if isinstance(candidate, list) else (int(candidate),)
    return ()


def write_settings(
    folder: Path,
    hf_config: dict[str, Any],
    dtype: str,
    end_ids: tuple[int, ...],
    tokenizer: Any,
    generation: Mapping[str, Any],
) -> None:
    """Write the configuration and tokenizer files of a checkpoint folder.

    Args:
        folder: output folder.
        hf_config: contents of config.json.
        dtype: dtype of the tensors.
        end_ids: ids of the tokens that end an answer.
        tokenizer: tokenizer; None: none is written.
        generation: further contents of generation_config.json.
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
    """Write a tokenizer in a form that `transformers` 4 and 5 load."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in ONLY_IN_MEMORY}
    source = Path(tokenizer.name_or_path) / file.name
    if tokenizer.name_or_path and source.is_file():  # `transformers` does not write all fields that it reads
        before = json.loads(source.read_text())
        config |= {key: value for key, value in before.items() if key not in config and key in KEPT}
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if named := config.pop("model_specific_special_tokens", None):
        config["extra_special_tokens"] = named
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def write_tensors(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors as safetensors files of at most about `shard_bytes`, holding one file in memory at a time."""
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
    """Write a checkpoint as a Hugging Face folder, one tensor at a time, with its draft heads.

    Args:
        checkpoint: checkpoint.
        output: new folder.
        dtype: dtype of the tensors, `float32` or `bfloat16`.

    Raises:
        CheckpointError: `output` exists.
    """
    with write_folder(output) as folder:
        write_settings(
            folder, checkpoint.hf_config, dtype, checkpoint.end_ids, checkpoint.tokenizer, checkpoint.generation
        )
        numbers = jnp.dtype(dtype)
        write_tensors(folder, ((name, tensor.astype(numbers)) for name, tensor in checkpoint.tensors()))
        if (draft_heads := Path(checkpoint.source) / FILE).is_file():
            copyfile(draft_heads, folder / FILE)
