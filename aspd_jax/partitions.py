"""Sources of records in several files and on other file systems: globs, and URLs that fsspec opens."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from aspd_jax.errors import DataError

_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://")
_BLOCK = 1 << 20  # bytes that are read at a time


def is_url(source: str) -> bool:
    """Return whether a source is a URL, such as `s3://bucket/part-*.jsonl`."""
    return _URL.match(source) is not None


def partitions(source: str) -> list[str]:
    """Return the files of a source in order of their names: those of a glob, or the source itself.

    Raises:
        DataError: the glob matches no file, or its file system cannot be read.
    """
    if not glob.has_magic(source) or (not is_url(source) and Path(source).exists()):
        return [source]
    if is_url(source):
        import fsspec

        with _explained(source):
            system, pattern = fsspec.core.url_to_fs(source)
            files = sorted(str(system.unstrip_protocol(file)) for file in system.glob(pattern))
    else:
        files = sorted(file for file in glob.glob(source, recursive=True) if Path(file).is_file())
    if not files:
        raise DataError(f"{source}: expected at least one file, got none")
    return files


@contextmanager
def open_partition(name: str) -> Iterator[IO[bytes]]:
    """Open a file or a URL for reading. A file of another file system is copied once to this machine, by a process.

    Raises:
        DataError: the file cannot be opened or read.
    """
    with _explained(name):
        if is_url(name):
            import fsspec

            with fsspec.open(f"simplecache::{name}", "rb") as file:
                yield file
        else:
            with Path(name).open("rb") as file:
                yield file


def digest(source: str) -> str:
    """Return the SHA-256 of the bytes of a source, over all its files in order.

    Raises:
        DataError: a file cannot be read.
    """
    whole = hashlib.sha256()
    for name in partitions(source):
        with open_partition(name) as file:
            while block := file.read(_BLOCK):
                whole.update(block)
    return whole.hexdigest()


@contextmanager
def _explained(name: str) -> Iterator[Any]:
    """Convert errors of a file system into one-line errors that name the file."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from None
    except Exception as error:  # the types of errors depend on the file system
        if not is_url(name):
            raise
        raise DataError(f"{name}: {error}") from None
