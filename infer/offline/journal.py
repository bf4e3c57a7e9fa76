"""Journals: JSONL files to which records are appended, and which stay valid when a process is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError, RequestError
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


def read_answers(file: Path, settings: dict[str, Any]) -> list[Any]:
    """Read the records of a journal behind its first one, the settings of the job.

    Raises:
        RequestError: the journal was written with other settings.
    """
    first, *records = read_journal(file) or [settings]
    different = _different(first, settings)
    if different:
        raise RequestError(
            f"{file}: expected answers with the same {', '.join(different)}, got others. Delete it, or choose another "
            "output."
        )
    return records


def open_journal(file: Path, settings: dict[str, Any]) -> Log:
    """Open a journal to append records; a new one begins with the settings of the job."""
    log = Log(file)
    if file.stat().st_size == 0:
        append(log, settings)
    return log


def _different(old: dict[str, Any], new: dict[str, Any]) -> Sequence[str]:
    flat = [{**value, **value.get("params", {})} for value in (old, new)]
    return sorted(key for key in flat[0] | flat[1] if key != "params" and flat[0].get(key) != flat[1].get(key))


def append(journal: Log, value: dict[str, Any]) -> None:
    """Append a record."""
    journal.write(json.dumps(value, ensure_ascii=False) + "\n")
