"""Atomic writes of files and folders, also if the process is killed; write errors name the file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from aspd_jax.errors import CheckpointError, OutputError
from aspd_jax.progress import waiting

# Error numbers that mean that a file cannot be written. Other system errors are not translated.
REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Patterns of these errors in messages of Rust and C++ libraries (safetensors, TensorStore) and NumPy.
NUMBERED = re.compile(r"\bos[ _]error(?: |_code=')(\d+)", re.IGNORECASE)
SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")


def refusal(error: BaseException) -> int | None:
    """Return the number (`errno`) of a failure to write, or None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := NUMBERED.search(str(error))):
        number = int(found[1])
    if number is None and SHORT_WRITE.search(str(error)):
        number = errno.ENOSPC
    if number is None and error.__cause__ is not None:
        return refusal(error.__cause__)
    return number if number in REFUSALS else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert a failure to write into a one-line error that names the file.

    Raises:
        OutputError: the disk is full, writing is not allowed, or the path has the wrong kind.
    """
    try:
        yield
    except OutputError:
        raise
    except Exception as error:
        number = refusal(error)
        if number is None:
            raise
        advice = "Free some space" if number in FULL else "Choose another path"
        raise OutputError(f"{path} cannot be written: {os.strerror(number)}. {advice}.") from None


@contextmanager
def exclusive(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield an empty temporary file or folder beside `path`, and delete it at the end unless it was renamed.

    Only one process at a time holds it; others wait. The lock of a killed process ends with it, and its temporary file
    is deleted by the next process.

    Args:
        path: file or folder that is written.
        folder: whether to create a folder.

    Raises:
        OutputError: the path has no name.
    """
    if not path.name:
        raise OutputError(f"{path}: expected a path with a name, got a folder. Choose another path.")
    partial = path.with_name(f".{path.name}.partial")
    delete = shutil.rmtree if folder else os.unlink
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        partial.mkdir(exist_ok=True) if folder else partial.touch()
        try:
            descriptor = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:  # another process has renamed it since
            continue
        try:
            with waiting(f"waiting for another process that writes {path}"), suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # where the file system has no locks, nothing is waited for
            if not _is_open(partial, descriptor):
                continue
            if any(partial.iterdir()) if folder else partial.stat().st_size:  # of a killed process
                delete(partial)
                continue
            try:
                yield partial
            finally:
                if _is_open(partial, descriptor):
                    with suppress(OSError):
                        delete(partial)
            return
        finally:
            os.close(descriptor)


def _is_open(path: Path, descriptor: int) -> bool:
    """Return whether a path leads to an open file or folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def partial_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `file` on success; on failure, `file` is not changed; see `exclusive`.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(file), exclusive(file) as partial:
        yield partial
        partial.replace(file)


@contextmanager
def replacing(file: Path) -> Iterator[TextIO]:
    """Yield a text file that atomically replaces `file`; see `partial_file`."""
    with partial_file(file) as partial, partial.open("w", encoding="utf-8") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically; see `partial_file`."""
    with replacing(file) as out:
        out.write(text)


class Log:
    """A text file for appending whole records, each durable when `write` returns."""

    def __init__(self, file: Path) -> None:
        self._path = file
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab", buffering=0)

    def write(self, text: str) -> None:
        """Append text; on failure, the file keeps its old contents.

        Raises:
            OutputError: the file cannot be written.
        """
        size, rest = os.fstat(self._file.fileno()).st_size, memoryview(text.encode())
        with writing(self._path):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), size)
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` on success; for checkpoints; see `exclusive`.

    Raises:
        CheckpointError: `folder` exists and is not an empty folder.
        OutputError: the folder cannot be written, or is a mount point, which cannot be replaced.
    """
    folder = folder.resolve()  # a link stays one, and `.` gets a name
    with writing(folder):
        if folder.is_mount():
            raise OutputError(f"{folder}: expected a folder that can be replaced, got a mount point. Choose one in it.")
        with exclusive(folder, folder=True) as partial:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise CheckpointError(
                    f"{folder}: expected a new or empty folder, got files in it. Choose another folder."
                )
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    file.chmod(0o644)  # safetensors creates files that only their owner can read
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
