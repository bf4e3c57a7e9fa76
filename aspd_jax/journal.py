"""Journals: JSONL files with the finished records of a job, which stay valid when the process is killed.

The first line of a journal of a job holds its settings, so that a job resumes only what an equal one has left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError, RequestError
from aspd_jax.files import Log


def read_journal(file: Path) -> Iterator[Any]:
    """Yield the records of a journal, and truncate an incomplete last line; a missing file has no records.

    Raises:
        DataError: a complete line is not JSON.
    """
    if not file.exists():
        return
    size = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                os.truncate(file, size)
                return
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise DataError(
                    f"{file}, line {number}: expected JSON, got text. Delete it and all later lines to repeat them."
                ) from None
            size += len(line)


def resume(file: Path, settings: dict[str, Any]) -> Iterator[Any]:
    """Return the finished records of a job; its journal has none if it is new.

    Raises:
        RequestError: the journal was written with other settings.
        DataError: as in `read_journal`.
    """
    records, settings = read_journal(file), json.loads(json.dumps(settings))  # tuples are lists in JSON
    different = _different(next(records, settings), settings)
    if different:
        raise RequestError(
            f"{file}: expected records with the same {', '.join(different)}, got others. Delete it, or choose another "
            "output."
        )
    return records


def open_journal(file: Path, settings: dict[str, Any]) -> Log:
    """Open a journal to append records, after `resume`; a new one begins with the settings of the job."""
    log = Log(file)
    if file.stat().st_size == 0:
        append(log, settings)
    return log


def _different(old: dict[str, Any], new: dict[str, Any]) -> Sequence[str]:
    flat = [{**value, **value.get("params", {})} for value in (old, new)]
    return sorted(key for key in flat[0] | flat[1] if key != "params" and flat[0].get(key) != flat[1].get(key))


def append(journal: Log, *values: Any) -> None:
    """Append records."""
    journal.write("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))
