"""Journals in JSONL: files that grow by lines and survive kill -9."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError
from aspd_jax.files import Log


def read_journal(file: Path) -> list[Any]:
    """What is in a journal; a line that was cut off by the end of a process is dropped from the file.

    Raises:
        DataError: a whole line is no JSON.
    """
    if not file.exists():
        return []
    found, size = [], 0
    *whole, _ = file.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            raise DataError(f"{file}, line {number}: not JSON; delete the line, and it is made again") from None
        size += len(line) + 1
    os.truncate(file, size)
    return found


def append(journal: Log, value: dict[str, Any]) -> None:
    """Add a line, so that it is there whatever happens next."""
    journal.write(json.dumps(value, ensure_ascii=False) + "\n")
