"""JSONL files of any bytes: each line yields a record or a reason, in every command."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import aspd_jax.jsonl
from aspd_jax import LanguageModel
from aspd_jax.errors import DataError
from aspd_jax.jsonl import read_lines
from aspd_jax.pipeline.show import read_structured
from aspd_jax.sources import Conversation, Unreadable, read_records
from infer.evaluation.config import BenchmarkSection
from infer.evaluation.questions import Question, read_questions
from infer.offline.batch import Item, read_prompts
from train.config import DataSection
from train.records import Records

GOOD = b'{"prompt": "What is\xc2\x851+1?", "answer": "It is 2.\xe2\x80\xa8"}'
FAULTS = {
    b'{"messages": NaN}': "not JSON",
    b'{"question": -Infinity}': "not JSON",
    b"[" * 100_000: "not JSON: recursion limit exceeded",
    b'{"a":' * 100_000: "not JSON: recursion limit exceeded",
    b'{"id": ' + b"7" * 6000 + b"}": "not JSON: number out of range",
    b'{"question": "\\ud83d", "answer": "a"}': "not JSON: unexpected end of hex escape",
    b'{"question": "\xed\xa0\xbd", "answer": "a"}': "not UTF-8: byte 14",
    b'{"question": "caf\xe9", "answer": "a"}': "not UTF-8: byte 17",
    b'{"question": "\x00", "answer": "a"}': "not JSON: control character",
    GOOD + b"\r" + GOOD: "not JSON: trailing characters",
    b"\x0b{}": "not JSON",
    b"null": "",
    b'"text"': "",
    b"[]": "",
}
LINES = st.lists(
    st.one_of(
        st.sampled_from([GOOD, GOOD + b"\r", b"\xef\xbb\xbf" + GOOD, b"", b" \t", *FAULTS]),
        st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=4),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["messages", "role", "content", "structure", "type", "text", "answer", "prompt", "id"]
                    ),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    ),
    max_size=6,
)


def expected(data: bytes) -> tuple[list[int], list[int]]:
    """Numbers of the lines that hold a JSON value, and of those that hold none, by another JSON library's rules."""
    values, faults = [], []
    for number, line in enumerate(data.split(b"\n"), 1):
        line = line.strip(b" \t\r").removeprefix(b"\xef\xbb\xbf")
        if not line:
            continue
        try:
            value = json.loads(line.decode(), parse_constant=lambda name: pytest.fail(name))
            json.dumps(value, ensure_ascii=False).encode()
            values.append(number)
        except (ValueError, RecursionError, pytest.fail.Exception):
            faults.append(number)
    return values, faults


@settings(max_examples=150)
@given(lines=LINES, end=st.sampled_from([b"", b"\n", b"\r\n"]))
@example(lines=[GOOD, *FAULTS, GOOD], end=b"\n")
@example(lines=["\ufeff{}".encode("utf-16-le")], end=b"")
def test_every_reader_takes_any_bytes(lines: list[bytes], end: bytes) -> None:
    data = b"\n".join(lines) + end
    values, faults = expected(data)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "any.jsonl"
        file.write_bytes(data)
        found = list(read_lines(file))
        assert [line.number for line in found if not line.reason] == values
        assert [line.number for line in found if line.reason] == faults
        everything = sorted(values + faults)
        records = list(read_records(str(file)))
        assert [record.number for record in records] == everything
        bad = [record for record in records if isinstance(record, Unreadable)]
        assert {record.number for record in bad} >= set(faults) and all(record.reason for record in bad)
        left_out: list[str] = []
        structured = list(read_structured(file, left_out))
        assert len(structured) + len(left_out) == len(everything)
        assert left_out == [f"{file}, line {record.number}: {record.reason}" for record in bad]
        left_out = []
        questions: list[Question] = []
        with suppress(DataError):  # it holds none
            questions = read_questions(BenchmarkSection(file=str(file)), left_out)
        assert len(questions) + len(left_out) == len(everything)
        items: list[Item] = []
        with suppress(DataError):  # it holds no line
            items = read_prompts(file, chat=True)
        assert [item.line for item in items] == everything
        assert all((item.prompt is None) == bool(item.error) for item in items)


def test_each_fault_has_its_reason_and_ends_no_training(lm: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "faults.jsonl"
    file.write_bytes(b"\n".join([GOOD, *FAULTS, b"", GOOD]) + b"\n")
    for number, record in enumerate(read_records(str(file)), 1):
        line = record.number
        if isinstance(record, Conversation):
            assert line in (1, len(FAULTS) + 3)
        else:
            assert line == number and record.reason.startswith(list(FAULTS.values())[line - 2])
    records = Records(lm, [str(file)], DataSection(length=256, rows=2), tmp_path / "cache")
    assert len(records) == 2 and [p.line for p in records.problems] == list(range(2, len(FAULTS) + 2))
    assert f"{len(FAULTS) + 2} records, 2 used; left out: {len(FAULTS)} malformed" in records.report()
    assert f"{file}, line 2: not JSON" in records.report()
    with pytest.raises(DataError, match=r"faults\.jsonl, line 2: not JSON"):
        Records(lm, [str(file)], replace(DataSection(length=256), strict=True), tmp_path / "cache")


def test_long_lines_and_utf_16_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(aspd_jax.jsonl, "MAX_LINE", 100)
    file = tmp_path / "long.jsonl"
    exact = b'"%s"' % (b"x" * 97) + b"\n"
    file.write_bytes(exact + b'"%s"\n' % (b"y" * 350) + exact)
    assert [(line.number, bool(line.reason)) for line in read_lines(file)] == [(1, False), (2, True), (3, False)]
    file.write_text('{"question": "q", "answer": "a"}\n', encoding="utf-16")
    first, *_ = read_lines(file)
    assert first.reason == "not UTF-8: the file is UTF-16; convert it to UTF-8"
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}: Is a directory")):
        list(read_lines(tmp_path))
