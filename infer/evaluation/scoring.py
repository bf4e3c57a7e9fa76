"""Right or wrong: whole texts, final answers of mathematics, letters of a multiple choice.

Final answers are found and compared by `math-verify`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from infer.evaluation.questions import Question

PARSE_SECONDS = 5


def correct(question: Question, answer: str) -> bool | None:
    """Whether the last answer of a conversation is right; None: nothing says what would be."""
    if question.scoring == "chat" or not question.references:
        return None
    reference = question.references[-1]
    if question.scoring == "maths":
        return same_value(reference, answer)
    if question.scoring == "choice":
        return chosen_letter(answer, question.choices) == reference
    return answer.strip() == reference.strip()


def same_value(reference: str, answer: str) -> bool:
    """Whether the final answer of a text equals the reference, as mathematics: `1/2` and `0.5` do."""
    import math_verify

    expected = math_verify.parse(f"${reference}$", parsing_timeout=PARSE_SECONDS)
    expected = expected or math_verify.parse(reference, parsing_timeout=PARSE_SECONDS)
    found = math_verify.parse(answer, parsing_timeout=PARSE_SECONDS)
    return bool(math_verify.verify(expected, found, timeout_seconds=PARSE_SECONDS))


@cache
def _patterns(letters: str) -> tuple[Any, ...]:
    one = rf"[(\[]?\*{{0,2}}([{letters}])\b"
    return tuple(
        re.compile(pattern)
        for pattern in (
            rf"(?i:answer|option|choice)\W{{0,6}}(?i:is)?\W{{0,4}}{one}",
            rf"\\boxed\{{\s*(?:\\text\{{)?([{letters}])\b",
            rf"(?m)^\W*([{letters}])\W*$",
            rf"(?m)^\W*([{letters}])[.):]",
        )
    )


def chosen_letter(answer: str, letters: Sequence[str]) -> str | None:
    """The letter that an answer decides for: the last one that is announced as the answer, or stands alone."""
    for pattern in _patterns("".join(letters)):
        found = pattern.findall(answer)
        if found:
            return str(found[-1])
    return None
