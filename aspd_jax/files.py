"""Files and folders that are there whole or not at all, whenever the process ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from aspd_jax.errors import CheckpointError


@contextmanager
def replacing(file: Path) -> Iterator[TextIO]:
    """Write a text file: what is there already stays until all is written, and for good if that fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Write a text file; see `replacing`."""
    with replacing(file) as out:
        out.write(text)


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """A new folder for a checkpoint: what is written into the one that is given appears there when all is written.

    Raises:
        CheckpointError: something is there already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and is not empty; choose another folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
