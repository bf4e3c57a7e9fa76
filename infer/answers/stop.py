"""Ends of an answer in its growing text: stop strings and repeated objects (protocol, section 5)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Characters `start` to `end` of a text."""

    start: int
    end: int


def first_match(text: str, stop: Sequence[str]) -> Match | None:
    """Return the match that ends first; of several that end there, the longest. None: there is no match.

    The result does not depend on the pieces in which the text arrives: a longer text has the same first match.
    """
    matches = [Match(start, start + len(string)) for string in stop if (start := text.find(string)) >= 0]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def undecided(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of a text without a match may begin one."""
    return max((n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])), default=0)


def canonical(text: str) -> str:
    """Return a text that is the same for all spellings of a JSON value; of another text, the text itself."""
    try:
        return json.dumps(_DECODER.decode(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def repeats_an_object(text: str, before: re.Pattern[str]) -> bool:
    """Return whether a text holds two equal JSON objects after matches of a pattern with equal first groups."""
    seen: set[tuple[str, str]] = set()
    at = 0
    while match := before.search(text, at):
        at = match.end()
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):  # incomplete, or other text
            continue
        if isinstance(value, dict):
            key = match[1], json.dumps(value, sort_keys=True)
            if key in seen:
                return True
            seen.add(key)
    return False


def _number(text: str) -> int | float:
    """Return a number with a point or an exponent; 1.0 equals 1 in JSON."""
    value = float(text)
    return int(value) if value.is_integer() else value


_DECODER = json.JSONDecoder(parse_float=_number)
