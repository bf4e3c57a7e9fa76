"""Limits of llguidance, which follows the grammars of answers, and errors of an answer that meets one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Above its defaults: a step of an answer may take 0.1 s, compiling 0.2 s more, an answer 250 MB.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 1_000_000,
    "max_items_in_row": 20_000,
    "step_max_items": 500_000,
    "verbose_errors": False,
}


def parser_limits() -> Any:
    """Return `LIMITS` in the form of llguidance (`LLParserLimits`)."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


def limit_error(where: str, schema: str, reason: str) -> str:
    """Return the error of an answer whose schema or grammar, quoted by its first line, can be followed no further."""
    return (
        f"{where}: expected a schema within the limits of the grammar library, got {reason} for "
        f"{first_line(schema)[:200]!r}. Use simpler patterns, or smaller limits of lengths and numbers."
    )


def first_line(text: str) -> str:
    """Return the first line of an error of llguidance."""
    return text.strip().partition("\n")[0]
