"""JSONL: the value of each line, or the reason why it has none. All commands read files of records with this module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from aspd_jax.errors import DataError
from aspd_jax.partitions import open_partition, partitions

BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
MAX_LINE = 1 << 26


class Line(NamedTuple):
    """A line that is not blank.

    Attributes:
        number: line number from 1; blank lines are counted.
        value: JSON value; None if the line is not valid.
        reason: reason why the line is not valid; empty if it is.
    """

    number: int
    value: Any
    reason: str = ""


def read_lines(file: Path | str) -> Iterator[Line]:
    r"""Read a file of JSON values, one a line.

    Only `\n` ends a line; a byte order mark and `\r\n` are accepted.

    Args:
        file: path, glob or URL. Line numbers run on through the files of a glob.

    Raises:
        DataError: a file cannot be opened or read.
    """
    number = 0
    for name in partitions(str(file)):
        first = number + 1
        with open_partition(name) as lines:
            while line := lines.readline(MAX_LINE + 1):
                number += 1
                too_long = len(line) > MAX_LINE
                part = line
                while too_long and part and not part.endswith(b"\n"):
                    part = lines.readline(MAX_LINE)
                line = line.strip(b" \t\r\n")
                if too_long:
                    yield Line(number, None, f"expected at most {MAX_LINE} bytes in a line")
                elif number == first and line.startswith(UTF16):
                    yield Line(number, None, "not UTF-8: the file is UTF-16; convert it to UTF-8")
                elif line.removeprefix(BOM):
                    yield read_line(number, line)


def read_line(number: int, text: bytes) -> Line:
    """Return a line with its JSON value, or the reason why it has none."""
    try:
        return Line(number, parse_json(text))
    except DataError as error:
        return Line(number, None, str(error))


def parse_json(data: bytes) -> Any:
    """Parse one JSON text by RFC 8259: UTF-8, whole surrogate pairs, no NaN, at most 200 levels. A BOM is accepted.

    Raises:
        DataError: the text is not valid; the message names the kind of fault and its place.
    """
    data = data.removeprefix(BOM)
    try:
        data.decode()
        return from_json(data, allow_inf_nan=False)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: byte {error.start}") from None
    except ValueError as error:
        raise DataError(f"not JSON: {error}".replace(" line 1 column", " column")) from None
