"""The state of a run in one SQLite file: every reply of a language model, and the result of each stage per answer.

A killed process loses only what it has not stored yet.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aspd_jax.errors import DataError
from aspd_jax.files import writing

TABLES = (
    "replies (key TEXT PRIMARY KEY, text TEXT, prompt INTEGER, completion INTEGER)",
    "stages (answer TEXT, stage TEXT, made_of TEXT, value TEXT, PRIMARY KEY (answer, stage))",
)


class Reply(NamedTuple):
    """A reply of a language model.

    Attributes:
        text: text of the reply.
        prompt_tokens, completion_tokens: numbers of tokens counted by the endpoint.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int


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
                for table in TABLES:
                    self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
                failed.pop_all()
        except sqlite3.OperationalError as error:
            raise DataError(f"{file}: {error}; is another process working on it?") from None
        except sqlite3.DatabaseError as error:
            raise DataError(f"{file}: expected the store of a run, got: {error}") from None

    def close(self) -> None:
        """Close the file and release its lock."""
        self._db.close()

    def reply(self, key: str) -> Reply | None:
        """Return a stored reply, or None."""
        row = self._db.execute("SELECT text, prompt, completion FROM replies WHERE key = ?", (key,)).fetchone()
        return Reply(*row) if row else None

    def add_reply(self, key: str, reply: Reply) -> None:
        """Store a reply."""
        with writing(self._file):
            self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", (key, *reply))

    def account(self) -> tuple[int, int, int]:
        """Return the numbers of replies, prompt tokens and completion tokens."""
        row = self._db.execute("SELECT count(*), total(prompt), total(completion) FROM replies").fetchone()
        return int(row[0]), int(row[1]), int(row[2])

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
