"""Question files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aspd_jax.configuration import read_config
from aspd_jax.errors import DataError
from infer.evaluation.config import BenchmarkSection, EvalConfig
from infer.evaluation.questions import Question, last_number, read_questions, select_evenly
from tests.conftest import ROOT, shared


def written(folder: Path, *records: Any) -> str:
    file = folder / "questions.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(file)


def asked(**section: Any) -> list[Question]:
    """Questions of a benchmark without a bad line."""
    left_out: list[str] = []
    questions = read_questions(BenchmarkSection(**section), left_out)
    assert not left_out
    return questions


def test_fastchat_files(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "required_temperature": 0.7},
        {"question_id": 101, "category": "math", "turns": ["Three?"], "reference": ["3"]},
    )
    first, second = asked(file=file)
    assert first == Question(81, "writing", ("One?", "Two?"), 0.7) and second.temperature is None


def test_choices(tmp_path: Path) -> None:
    """Check the forms of a right answer, and what is refused."""
    lines = [{"question": "q?", "choices": ["red", "blue"], "answer": answer} for answer in ("blue", 1, "B", "C", True)]
    more: list[Any] = [["red"], ["red", "red"], "red", [1, 2]]
    file = written(tmp_path, *lines, *({"question": "q?", "choices": listed, "answer": "red"} for listed in more))
    left_out: list[str] = []
    found = read_questions(BenchmarkSection(file=file), left_out)
    assert [(q.options, q.right) for q in found] == [(("red", "blue"), "blue")] * 3
    assert ['"choices":' in line for line in left_out] == [False, False, True, True, True, True]


def test_suitable_questions_are_marked(tmp_path: Path) -> None:
    file, marks = tmp_path / "questions.jsonl", tmp_path / "suitable.csv"
    texts = ["How?", 'Say "a; b".', "Why?"]
    rows = [{"question_id": n, "category": "x", "turns": [text]} for n, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    marks.write_text('label;request\n1;How?\n0;"Say ""a; b""."\nmaybe;Why?\n')
    left_out: list[str] = []
    questions = read_questions(BenchmarkSection(file=str(file), suitable=str(marks)), left_out)
    assert [question.forks for question in questions] == [True, False, None]
    assert len(left_out) == 1 and f"{marks}, line 4: expected 0 or 1" in left_out[0]
    with pytest.raises(DataError, match=r"none\.csv"):
        read_questions(BenchmarkSection(file=str(file), suitable=str(tmp_path / "none.csv")), left_out)


def test_vicuna_bench_has_37_suitable_questions() -> None:
    folder = shared("data", "vicuna_bench")
    section = BenchmarkSection(file=str(folder / "question.jsonl"), suitable=str(folder / "suitable_for_parallel.csv"))
    left_out: list[str] = []
    marks = [question.forks for question in read_questions(section, left_out)]
    assert (len(marks), marks.count(True), marks.count(None), left_out) == (80, 37, 0, [])


def test_mistakes_are_named_with_their_lines(tmp_path: Path) -> None:
    file = written(
        tmp_path, {"turns": ["ok"]}, "{broken", {"turns": []}, [1], {"id": 5, "prompt": "a"}, {"id": 5, "prompt": "b"},
        {"prompt": "c", "article": "A text"},
    )  # fmt: skip
    left_out: list[str] = []
    assert [q.id for q in read_questions(BenchmarkSection(file=file), left_out)] == [1, 5]
    reasons = (
        "line 2: not JSON",
        'line 3: "turns": expected',
        "line 4: not a JSON object",
        "line 6: id: expected different ids, got 5 twice",
        'line 7: "article": expected no content beside the conversation',
    )
    assert all(line.startswith(f"{file}, {reason}") for line, reason in zip(left_out, reasons, strict=True))
    with pytest.raises(DataError, match="No such file"):
        asked(file=str(tmp_path / "none.jsonl"))


def test_a_limit_takes_from_all_categories() -> None:
    every = [Question(n, "abc"[n % 3 if n < 6 else 0], ("?",)) for n in range(20)]
    assert [q.id for q in select_evenly(every, 4)] == [0, 1, 2, 3]
    assert [q.id for q in select_evenly(every, 8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(select_evenly(every, 0)) == 20 and len(select_evenly(every, 99)) == 20


def test_real_files() -> None:
    folder = shared("data")
    vicuna = folder / "vicuna_bench"
    section = BenchmarkSection(file=str(vicuna / "question.jsonl"))
    questions = read_questions(section, [])
    assert len(questions) == 80
    mt = folder / "mt_bench"
    both = asked(file=str(mt / "question.jsonl"))
    assert len(both) == 80 and all(len(q.turns) == 2 for q in both)


def test_columns_without_a_value_hide_no_others(tmp_path: Path) -> None:
    record = {"question_id": None, "id": "x", "turns": None, "question": "q", "reference": None, "answer": "5"}
    (question,) = asked(file=written(tmp_path, record))
    assert (question.id, question.turns) == ("x", ("q",))


@pytest.mark.further
def test_last_numbers_are_compared(tmp_path: Path) -> None:
    """Check numbers in the form of GSM8K's references (`#### 1,018`); a question without one is left out."""
    lines = [{"question": "How many?", "answer": "500 + 518 = <<500+518=1018>>1018\n#### 1,018"}, {"question": "Why?"}]
    left_out: list[str] = []
    (one,) = read_questions(BenchmarkSection(file=written(tmp_path, *lines), kind="numbers"), left_out)
    assert len(left_out) == 1 and "line 2: answer: expected one with a number" in left_out[0]
    for answer, right in (
        ("She has 500 and 518, so $1,018.00.", True), ("It is 518 + 500 = **1018**", True), ("1018, not 1019", False),
        ("-1018", False), ("2036-1018", True), ("Many.", False), ("", False),
    ):  # fmt: skip
        assert (last_number(answer) == last_number(one.right)) == right, answer
    assert not read_questions(BenchmarkSection(file=written(tmp_path, *lines)), left_out)[0].right


@pytest.mark.further
def test_spec_bench(tmp_path: Path) -> None:
    """Check that questions with one, no or several references are read, and that three of each category are timed."""
    records = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 161, "category": "translation", "turns": ["Translate."], "reference": ["Good."]},
        {"question_id": 561, "category": "rag", "turns": ["Who?"], "reference": [["James Ray", "George Harrison"]]},
    ]
    left_out: list[str] = []
    assert len(read_questions(BenchmarkSection(file=written(tmp_path, *records)), left_out)) == 3 and not left_out
    config = read_config(EvalConfig, ROOT / "configs" / "qwen05" / "spec_bench.yaml", [])
    assert config.speed.questions == 3 * 13
