"""Scoring of answers: whole texts, final answers of mathematics, letters of multiple choice.

`math-verify` extracts and compares final answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from infer.evaluation.questions import Question

PARSE_SECONDS = 5


def is_correct(question: Question, answer: str) -> bool | None:
    """Return whether the last answer of a conversation is right; None without a reference."""
    if question.scoring == "chat" or not question.references:
        return None
    reference = question.references[-1]
    if question.scoring == "maths":
        return same_value(reference, answer)
    if question.scoring == "choice":
        return chosen_letter(answer, question.choices) == reference
    return answer.strip() == reference.strip()


def same_value(reference: str, answer: str) -> bool:
    """Return whether the final answer of a text equals the reference mathematically, such as `1/2` and `0.5`."""
    import math_verify

    expected = math_verify.parse(f"${reference}$", parsing_timeout=PARSE_SECONDS)
    expected = expected or math_verify.parse(reference, parsing_timeout=PARSE_SECONDS)
    parsed = math_verify.parse(answer, parsing_timeout=PARSE_SECONDS)
    return bool(math_verify.verify(expected, parsed, timeout_seconds=PARSE_SECONDS))


@cache
def _patterns(letters: str) -> tuple[Any, ...]:
    letter = rf"[(\[]?\*{{0,2}}([{letters}])\b"
    return tuple(
        re.compile(pattern)
        for pattern in (
            rf"(?i:answer|option|choice)\W{{0,6}}(?i:is)?\W{{0,4}}{letter}",
            rf"\\boxed\{{\s*(?:\\text\{{)?([{letters}])\b",
            rf"(?m)^\W*([{letters}])\W*$",
            rf"(?m)^\W*([{letters}])[.):]",
        )
    )


def chosen_letter(answer: str, letters: Sequence[str]) -> str | None:
    """Return the last letter that an answer announces as its choice or writes on a line of its own; None: none."""
    for pattern in _patterns("".join(letters)):
        matches = pattern.findall(answer)
        if matches:
            return str(matches[-1])
    return None
