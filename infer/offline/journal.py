"""Journals: JSONL files to which records are appended, and which stay valid when a process is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError
from aspd_jax.files import Log


def read_journal(file: Path) -> list[Any]:
    """Read the records of a journal, and truncate an incomplete last line; a missing file has no records.

    Raises:
        DataError: a complete line is not JSON.
    """
    if not file.exists():
        return []
    records, size = [], 0
    *whole, _ = file.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            raise DataError(f"{file}, line {number}: expected JSON, got text. Delete the line to repeat it.") from None
        size += len(line) + 1
    os.truncate(file, size)
    return records


def append(journal: Log, value: dict[str, Any]) -> None:
    """Append a record."""
    journal.write(json.dumps(value, ensure_ascii=False) + "\n")
