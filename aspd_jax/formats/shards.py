"""Tensors of a Hugging Face folder: their files, and their values read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from aspd_jax.errors import CheckpointError
from aspd_jax.formats import Tensors
from aspd_jax.formats.side_files import check_content, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
DTYPES = ("F64", "F32", "F16", "BF16")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Name prefixes in a model with an image part: of the text part, with the prefix in a text model, and of the image part.
TEXT_PART = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
IMAGE_PART = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class Stored(NamedTuple):
    """Place of a tensor: a safetensors file and the name in it."""

    file: Path
    name: str


def has_tensors(folder: Path) -> bool:
    """Return whether a folder has the safetensors of a model."""
    return any((folder / name).exists() for name in (SINGLE, INDEX))


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Return the place of each tensor of a folder by name.

    A single file takes precedence over an index, as in `transformers`.

    Raises:
        CheckpointError: files or tensors are missing or broken, or a dtype is not supported.
    """
    if all((folder / name).exists() for name in ADAPTER_FILES) and has_tensors(folder):
        raise CheckpointError(
            f"{folder}: expected a model or an adapter, got both. Remove {ADAPTER_FILES[0]} to use the model, "
            "or give the base model and this folder as the adapter."
        )
    if (folder / SINGLE).exists():
        return list_tensors(folder / SINGLE)
    if not (folder / INDEX).exists():
        hint = "; convert its .bin files to safetensors first" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder}: expected {SINGLE}, got none{hint}")
    weight_map = _read_index(folder)
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        for name, stored in list_tensors(folder / shard).items():
            # As in `transformers`, a tensor missing from the index is read; one indexed in another file is ignored.
            if weight_map.get(name, shard) == shard:
                tensors[name] = stored
    if lost := sorted(set(weight_map) - set(tensors)):
        raise CheckpointError(
            f"{folder / INDEX}: expected {lost[0]} in {weight_map[lost[0]]}, got a file without it. "
            "Download index and shards of one version."
        )
    return tensors


def _read_index(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor."""
    index = folder / INDEX
    weight_map = read_object(index).get("weight_map")
    plain = isinstance(weight_map, dict) and all(
        isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file
        for file in weight_map.values()
    )
    if not weight_map or not plain:
        expected = "names of tensors with .safetensors files of the folder"
        raise CheckpointError(f"{index}: weight_map: expected {expected}, got {str(weight_map)[:80]}")
    missing = [name for name in sorted(set(weight_map.values())) if not (folder / name).exists()]
    if missing:
        raise CheckpointError(f"{index}: expected {', '.join(missing)} in the folder, got none")
    return dict(weight_map)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: expected safetensors, got a broken file ({error})") from None


def list_tensors(file: Path) -> dict[str, Stored]:
    """Return the place of each tensor of a file by name.

    Raises:
        CheckpointError: the file is not a safetensors file, or a dtype is not supported.
    """
    check_content(file, "safetensors")
    with _opened(file) as tensors:
        names = list(tensors.keys())
        for name in names:
            dtype = tensors.get_slice(name).get_dtype()
            if dtype not in DTYPES and not name.startswith(IMAGE_PART):
                raise CheckpointError(
                    f"{file}: {name}: expected one of {', '.join(DTYPES)}, got {dtype}. "
                    "Use a checkpoint that is not quantised."
                )
    return {name: Stored(file, name) for name in names}


def text_part(places: Mapping[str, Stored]) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a model's text part with the names of a text model, and the number of other tensors."""
    text = {text_name(name): stored for name, stored in places.items() if not name.startswith(IMAGE_PART)}
    return text, len(places) - len(text)


def text_name(name: str) -> str:
    """Return the name in a text model of a part of a model's text part; other names are returned unchanged."""
    for beginning, alone in TEXT_PART.items():
        if name.startswith(beginning):
            return alone + name.removeprefix(beginning)
    return name


def load_stored(stored: Stored) -> np.ndarray:
    """Return the values of one tensor."""
    with _opened(stored.file) as tensors:
        values: np.ndarray = tensors.get_tensor(stored.name)
    return values


def read_stored(places: Mapping[str, Stored]) -> Tensors:
    """Yield all tensors with their names, file by file."""
    for file, stored in groupby(places.items(), lambda place: place[1].file):
        with _opened(file) as tensors:
            for name, (_, inside) in stored:
                yield name, tensors.get_tensor(inside)
