"""The scores of a run in one SQLite file. A killed process loses only what it has not stored yet."""

from __future__ import annotations

import json
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError
from aspd_jax.files import writing


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
                self._db.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, value TEXT)")
                failed.pop_all()
        except sqlite3.OperationalError as error:
            raise DataError(f"{file}: {error}; is another process working on it?") from None
        except sqlite3.DatabaseError as error:
            raise DataError(f"{file}: expected the store of a run, got: {error}") from None

    def close(self) -> None:
        """Close the file and release its lock."""
        self._db.close()

    def get(self, key: str) -> Any:
        """Return a stored value, or None."""
        row = self._db.execute("SELECT value FROM scores WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def put(self, key: str, value: Any) -> None:
        """Store a value."""
        with writing(self._file):
            self._db.execute("INSERT OR REPLACE INTO scores VALUES (?, ?)", (key, json.dumps(value)))
