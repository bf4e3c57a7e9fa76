"""An answer as numbered lines and sentences (pieces), by which a teacher marks parts (protocol, section 7, stage 1).

The teacher copies no text, so the answer cannot change, and a reply consists of a few numbers and titles.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

from aspd_jax.blocks.extract import line_starts, whole_ranges
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.spans import BlockSpan, BranchSpan, end_like_siblings
from aspd_jax.errors import StructureError

MAX_TITLE_WORDS = 16
MIN_WORDS = 4  # minimum words of a sentence that is a separate piece; the number of an item is shorter
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]*_]*\s+|[。！？][\"'”’』」）]*")
_WORD = re.compile(r"\w+|[。！？]")


class Part(NamedTuple):
    """A part of a group.

    Attributes:
        first: number of its first piece, from 1.
        title: title of the part.
    """

    first: int
    title: str


class Group(NamedTuple):
    """Adjacent parts.

    Attributes:
        parts: the parts in order.
        last: number of the last piece of the last part.
    """

    parts: tuple[Part, ...]
    last: int


def piece_starts(answer: str) -> list[int]:
    """Return the offsets of the pieces of an answer: its lines, and the sentences of the lines.

    An empty line belongs to the piece before it. A tag between two regions begins a piece, and what follows it another
    one. Code, tables, quotes, formulas and elements are never cut.
    """
    whole = list(whole_ranges(answer))
    edges = sorted({edge for tag in regions_of(answer).tags for edge in tag})
    starts: list[int] = []
    lines = [*line_starts(answer), len(answer)]
    for start, end in pairwise(lines):
        bounds = [start, *(edge for edge in edges if start < edge < end), end]
        places = [place for first, last in pairwise(bounds) for place in (first, *_sentences(answer, first, last))]
        for place, following in pairwise([*places, end]):
            if answer[place:following].strip() and not any(first < place < last for first, last in whole):
                starts.append(place)
    return [0, *starts[1:]]


def numbered(answer: str) -> str:
    """Return the answer with a number before every piece, as the teacher reads it."""
    starts = piece_starts(answer)
    ends = [*starts[1:], len(answer)]
    return "\n".join(f"[{n}] {answer[a:b].strip()}" for n, (a, b) in enumerate(zip(starts, ends, strict=True), 1))


def block_of(answer: str, group: Group) -> BlockSpan:
    """Return the spans of a group.

    Raises:
        StructureError: a piece does not exist, the pieces are out of order, or a title is not valid.
    """
    starts = piece_starts(answer)
    if len(group.parts) < 2:
        raise StructureError("a group needs two parts")
    places = [*(part.first for part in group.parts), group.last + 1]
    if places[0] < 1 or places[-1] > len(starts) + 1:
        raise StructureError(f"parts reach from piece {places[0]} to {group.last}, the answer has {len(starts)} pieces")
    for part, following in zip(group.parts, places[1:], strict=True):
        if part.first >= following:
            raise StructureError(f"the part {part.title!r} begins with piece {part.first} and ends before it")
        check_title(answer, part.title)
    edges = [[*starts, len(answer)][place - 1] for place in places]
    edges[-1] = end_like_siblings(answer, edges)
    spans = zip(group.parts, pairwise(edges), strict=True)
    return BlockSpan(tuple(BranchSpan(part.title, start, end) for part, (start, end) in spans))


def check_title(answer: str, title: str) -> None:
    """Check the title of a teacher.

    Raises:
        StructureError: the title is not valid; the message says why.
    """
    if not any(char.isalnum() for char in title) or "\n" in title or title != title.strip():
        raise StructureError(f"{title!r} is no title")
    if len(title.split()) > MAX_TITLE_WORDS or len(title) > 100:
        raise StructureError(f"the title {title[:60]!r} is longer than {MAX_TITLE_WORDS} words")
    if other := _scripts(title) - _scripts(answer):
        raise StructureError(f"the title {title!r} is in another script ({', '.join(sorted(other))}) than the answer")


def _sentences(answer: str, start: int, end: int) -> list[int]:
    """Return the offsets of the sentences of a line, except the first."""
    begins: list[int] = []
    before = start
    words = [found.start() for found in _WORD.finditer(answer, start, end)]

    def count(first: int, last: int) -> int:
        return bisect_right(words, last - 1) - bisect_right(words, first - 1)

    for found in _SENTENCE_END.finditer(answer, start, end):
        following = answer[found.end() : end].lstrip("\"'“‘([*_")
        if following[:1].islower() or count(before, found.end()) < MIN_WORDS or count(found.end(), end) < MIN_WORDS:
            continue
        before = found.end()
        begins.append(before)
    return begins


def _scripts(text: str) -> set[str]:
    return {unicodedata.name(char, "?").split()[0] for char in set(text) if char.isalpha()}
