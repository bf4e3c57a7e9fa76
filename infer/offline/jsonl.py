"""JSONL: files of users, whose mistakes are named by line; and journals, which grow by lines and survive kill -9."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError
from aspd_jax.files import Log

SHOWN = 5  # problems that are told at once


def objects(file: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered JSON objects of a file of a user's; a line that is none is added to the problems.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"line {number}: not JSON: {error.msg} at column {error.colno}")
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            problems.append(f"line {number}: not a JSON object")


def refuse(file: Path, problems: Sequence[str]) -> None:
    """Raise DataError where there are problems: the first few of them."""
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise DataError(f"{file}, " + "; ".join(problems[:SHOWN]) + more)


def read_journal(file: Path) -> list[Any]:
    """What is in a journal; a line that was cut off by the end of a process is dropped from the file.

    Raises:
        DataError: a whole line is no JSON.
    """
    if not file.exists():
        return []
    found, size = [], 0
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            found.append(json.loads(line))
        except ValueError:
            raise DataError(f"{file}, line {number}: not JSON; delete the line, and it is made again") from None
        size += len(line)
    os.truncate(file, size)
    return found


def append(journal: Log, value: dict[str, Any]) -> None:
    """Add a line, so that it is there whatever happens next."""
    journal.write(json.dumps(value, ensure_ascii=False) + "\n")
