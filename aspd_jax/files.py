"""Files that are there whole or not at all, whenever the process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


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
