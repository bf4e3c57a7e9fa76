"""The state of a run in one SQLite file: the result of each stage per answer.

A killed process loses only what it has not stored yet.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError
from aspd_jax.files import writing

TABLE = "stages (answer TEXT, stage TEXT, made_of TEXT, value TEXT, PRIMARY KEY (answer, stage))"


class Store:
    """The store of a run; the file is created if it does not exist, and locked while it is open.

    Raises:
        DataError: the file is not a store, or another process has locked it.
        OutputError: the file cannot be written.
    """

    def __init__(self, file: Path) -> None:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        try:
            with writing(file), ExitStack() as failed:
                self._db = sqlite3.connect(file, timeout=2, isolation_level=None)
                failed.callback(self._db.close)
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(f"CREATE TABLE IF NOT EXISTS {TABLE}")
                failed.pop_all()
        except sqlite3.OperationalError as error:
            raise DataError(f"{file}: {error}; is another process working on it?") from None
        except sqlite3.DatabaseError as error:
            raise DataError(f"{file}: expected the store of a run, got: {error}") from None

    def close(self) -> None:
        """Close the file and release its lock."""
        self._db.close()

    def get(self, answer: str, stage: str, made_of: str) -> Any:
        """Return the stored result of a stage for an answer, or None if it was computed from other inputs.

        Args:
            answer: key of the answer.
            stage: name of the stage.
            made_of: hash of the inputs of the stage.
        """
        row = self._db.execute(
            "SELECT value FROM stages WHERE answer = ? AND stage = ? AND made_of = ?", (answer, stage, made_of)
        ).fetchone()
        return json.loads(row[0]) if row else None

    def put(self, answer: str, stage: str, made_of: str, value: Any) -> None:
        """Store the result of a stage for an answer; see `get`."""
        row = (answer, stage, made_of, json.dumps(value, ensure_ascii=False))
        with writing(self._file):
            self._db.execute("INSERT OR REPLACE INTO stages VALUES (?, ?, ?, ?)", row)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Store the results of a block in one transaction: a killed process has stored all of them or none."""
        with writing(self._file):
            self._db.execute("BEGIN")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
