"""Globs and URLs of input files: order, line numbers, and errors that name the file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import fsspec
import pytest

from aspd_jax.errors import DataError
from aspd_jax.jsonl import read_lines
from aspd_jax.partitions import digest, is_url, partitions
from aspd_jax.sources import read_rows


@pytest.mark.parametrize("kind", ["files", "file URL", "other file system"])
def test_partitions_are_read_in_order(tmp_path: Path, kind: str) -> None:
    """Byte order marks, blank lines and files without a last line break; numbers run on."""
    contents = {"part-b.jsonl": b'3\n\n{"x": "\xc3\xa9"}', "part-a.jsonl": b"\xef\xbb\xbf1\r\n2\n", "other": b"9\n"}
    root = {"files": str(tmp_path), "file URL": f"file://{tmp_path}", "other file system": "memory://folder"}[kind]
    for name, data in contents.items():
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(data)
    source = f"{root}/part-*.jsonl"
    assert [Path(name).name for name in partitions(source)] == ["part-a.jsonl", "part-b.jsonl"]
    expected = [(1, 1, ""), (2, 2, ""), (3, 3, ""), (5, {"x": "é"}, "")]
    assert [*read_lines(source)] == expected == [*read_rows(source)]
    whole = contents["part-a.jsonl"] + contents["part-b.jsonl"]
    assert digest(source) == hashlib.sha256(whole).hexdigest() != digest(f"{root}/other")


def test_a_name_may_look_like_a_glob(tmp_path: Path) -> None:
    file = tmp_path / "a[1].jsonl"
    file.write_text("7\n")
    assert [line.value for line in read_lines(file)] == [7]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}/none-*.jsonl", "expected at least one file, got none"),
        ("file://{}/none-*.jsonl", "expected at least one file, got none"),
        ("{}/none.jsonl", "No such file"),
        ("file://{}/none.jsonl", "none.jsonl: "),
        ("nosuch://x/a.jsonl", "nosuch"),
        ("file://{}/none.parquet", "none.parquet: expected a dataset"),
        ("file://{}/none.json", "got .json"),
    ],
)
def test_errors_name_the_source(tmp_path: Path, source: str, message: str) -> None:
    source = source.format(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(source))
    assert source in str(caught.value) and "\n" not in str(caught.value)


def test_urls() -> None:
    assert is_url("s3://bucket/part-*.jsonl") and is_url("simplecache::gs://b/x")
    assert not is_url("part-*.jsonl") and not is_url("C:\\x") and not is_url("a b://x")
