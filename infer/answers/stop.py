"""Stop strings: the first match in a text that grows in reading order (protocol, section 5)."""

from __future__ import annotations

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
