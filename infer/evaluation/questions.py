"""Question files in FastChat's format."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from aspd_jax.errors import DataError
from aspd_jax.jsonl import read_lines
from aspd_jax.record_fields import ANSWERS, CHOICES, check_record
from infer.evaluation.config import BenchmarkSection, Kind

READ = ("turns", "question", "problem", "prompt", "required_temperature", "reference", *ANSWERS, *CHOICES)


@dataclass(frozen=True)
class Question:
    """A question with one or more turns.

    Attributes:
        id: identifier in the file and in answers.
        category: category in the report.
        turns: messages of the user.
        temperature: temperature that the file requires; None: none.
        forks: whether the question is suitable for an answer with a block; None: unknown.
        options: options of a multiple-choice question; empty: the answer is text.
        right: the right option, or an answer whose last number is right; empty: answers are not compared.
    """

    id: str | int
    category: str
    turns: tuple[str, ...]
    temperature: float | None = None
    forks: bool | None = None
    options: tuple[str, ...] = ()
    right: str = ""


def last_number(text: str) -> float | None:
    """Return the last number of a text, without commas between its digits; None: there is none."""
    numbers = re.findall(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def read_questions(section: BenchmarkSection, left_out: list[str]) -> list[Question]:
    """Read the questions of a benchmark.

    Args:
        section: configuration of the benchmark.
        left_out: list to which file, line and reason are appended for each invalid line or repeated id.

    Raises:
        DataError: a file cannot be read, or holds no question.
    """
    file = Path(section.file)
    suitable = read_suitable(Path(section.suitable), left_out) if section.suitable else {}
    questions: dict[str | int, Question] = {}
    before = len(left_out)
    for number, record, reason in read_lines(file):
        try:
            if reason or not isinstance(record, dict):
                raise DataError(reason or "not a JSON object")
            question = _question(record, number, section.kind)
            if question.id in questions:
                raise DataError(f"id: expected different ids, got {question.id!r} twice")
            questions[question.id] = replace(question, forks=suitable.get(question.turns[0], question.forks))
        except DataError as error:
            left_out.append(f"{file}, line {number}: {error}")
    if not questions:
        first = f"; first error: {left_out[before]}" if len(left_out) > before else ""
        raise DataError(f"{file}: expected at least one question, got none{first}")
    return select_evenly(questions.values(), section.limit)


def read_suitable(file: Path, left_out: list[str]) -> dict[str, bool]:
    """Read whether questions are suitable for parallel parts, by question, from rows of `label;request`.

    Args:
        file: CSV file.
        left_out: list to which file, line and reason are appended for each invalid row.

    Raises:
        DataError: the file cannot be read.
    """
    found: dict[str, bool] = {}
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = csv.reader(lines, delimiter=";")
            for row in rows:
                if len(row) == 2 and row[0] in ("0", "1"):
                    found[row[1]] = row[0] == "1"
                elif row != ["label", "request"] and row:
                    left_out.append(f"{file}, line {rows.line_num}: expected 0 or 1, and a question, got {row!r:.80}")
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file}: {error}") from None
    return found


def _first(record: dict[str, Any], *names: str, default: Any = None) -> Any:
    """Return the value of the first of these fields that is not null."""
    return next((record[name] for name in names if record.get(name) is not None), default)


def select_evenly(questions: Iterable[Question], limit: int) -> list[Question]:
    """Select at most `limit` questions, evenly over the categories and in their order; 0: all."""
    candidates = list(questions)
    if not limit or limit >= len(candidates):
        return candidates
    by_category: dict[str, list[int]] = defaultdict(list)
    for place, question in enumerate(candidates):
        by_category[question.category].append(place)
    in_turn = sorted(
        (rank, order, place) for order, places in enumerate(by_category.values()) for rank, place in enumerate(places)
    )
    return [candidates[place] for place in sorted(place for _, _, place in in_turn[:limit])]


def _question(record: dict[str, Any], number: int, kind: Kind) -> Question:
    id = _first(record, "question_id", "id", "unique_id", default=number)
    if not isinstance(id, (str, int)):
        raise DataError(f'"question_id": expected a string or a number, got {id!r:.60}.')
    turns = _turns(record)
    check_record(record, READ, turns)
    options, right = _options(record, turns), ""
    answer = _first(record, "answer", "reference", "solution")
    if options:
        right = _option(answer, options)
    elif kind == "numbers":
        right = str(answer)
        if last_number(right) is None:
            raise DataError(f"answer: expected one with a number, got {answer!r:.60}")
    temperature = record.get("required_temperature")
    if temperature is not None and not (isinstance(temperature, (int, float)) and 0 <= temperature < inf):
        raise DataError(f'"required_temperature": expected a number from 0, got {temperature!r:.60}.')
    return Question(
        id=id,
        category=str(record.get("category") or record.get("subject") or "all"),
        turns=turns,
        right=right,
        temperature=temperature,
        options=options,
    )


def _options(record: dict[str, Any], turns: Sequence[str]) -> tuple[str, ...]:
    """Return the options of a multiple-choice question; empty: it is none."""
    listed = _first(record, *CHOICES)
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed) or len(set(listed)) < 2:
        raise DataError(f'"choices": expected a list of at least two strings, got {listed!r:.60}.')
    if len(set(listed)) < len(listed) or len(listed) > len(ascii_uppercase) or len(turns) > 1:
        raise DataError(f'"choices": expected at most {len(ascii_uppercase)} different ones, and one turn, got others.')
    return tuple(listed)


def _option(answer: Any, options: Sequence[str]) -> str:
    """Return the right option from its text, its index or its letter."""
    places: dict[str | int, str] = dict(enumerate(options))
    places |= zip(ascii_uppercase, options, strict=False)
    if isinstance(answer, str) and answer in options:
        return answer
    if isinstance(answer, bool) or not isinstance(answer, (str, int)) or answer not in places:
        raise DataError(f'"answer": expected the text, the index or the letter of a choice, got {answer!r:.60}.')
    return places[answer]


def _turns(record: dict[str, Any]) -> tuple[str, ...]:
    turns = _first(record, "turns", "question", "problem", "prompt")
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise DataError(
            f'"turns": expected a list of strings (or one in "question", "problem" or "prompt"), got {turns!r:.60}.'
        )
    return tuple(turns)
