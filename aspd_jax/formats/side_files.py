"""Small files of a checkpoint folder, read with errors that name the file and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aspd_jax.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_content(file: Path, expected: str) -> None:
    """Check that a file is present and not empty.

    Args:
        file: file.
        expected: description of the content, for messages.

    Raises:
        CheckpointError: the file is missing, empty, not a file, or a Git LFS pointer.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(len(LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{file}: expected {expected}, got {error.strerror or error}") from None
    if not head:
        raise CheckpointError(f"{file}: expected {expected}, got an empty file. Download the file again.")
    if head == LFS_POINTER:
        raise CheckpointError(
            f"{file}: expected {expected}, got a Git LFS pointer. Download the file itself (git lfs pull)."
        )


def read_text(file: Path, expected: str = "text in UTF-8") -> str:
    """Return the text of a file.

    Raises:
        CheckpointError: see `check_content`; or the text is not UTF-8.
    """
    check_content(file, expected)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: expected {expected}, got a byte that is not UTF-8 at {error.start}") from None


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: see `read_text`; or the content is not a JSON object.
    """
    expected = "a JSON object"
    text = read_text(file, expected)
    try:
        value = json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{file}: expected {expected}, got JSON that is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: expected {expected}, got invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected {expected}, got {type(value).__name__}")
    return value
