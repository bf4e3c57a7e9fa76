"""What an annotator wrote, back onto the answer that it read: spans of the answer, or why there are none.

An annotator may leave out the middle of a long text and write `[...]` for it. What it writes may differ from the answer
in white space and in the kind of quotes and dashes; in anything else it is another answer, and rejected.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from aspd_jax.errors import StructureError
from aspd_jax.pipeline.spans import BlockSpan, BranchSpan, end_like_siblings

ELISION = "[...]"
MOST_TITLE_WORDS = 16
_SAME = str.maketrans("“”„«»‘’‚′`–—−‐‑", "\"\"\"\"\"'''''-----")


class Piece(NamedTuple):
    """A stretch of an annotation: a serial one (`block` 0), or a branch of block 1, 2, … under its title."""

    block: int
    title: str
    text: str


class Aligned(NamedTuple):
    """Spans of the answer, and whether the annotator had written it exactly as it is, elisions apart."""

    blocks: tuple[BlockSpan, ...]
    exact: bool


def align(answer: str, pieces: Sequence[Piece]) -> Aligned:
    """Find the pieces of an annotation in the answer, one after another, from its beginning to its end.

    Raises:
        StructureError: where they are not the answer's own words, are there in several ways, or a title is not fit.
    """
    _check_titles(answer, pieces)
    text, places = _bare(answer)
    literal = ELISION in text  # then it is the answer's own
    parts = []
    kept = []
    for piece in pieces:
        bare = _bare(piece.text)[0]
        if bare:
            parts.append([bare] if literal else bare.split(ELISION))
            kept.append(piece)
        elif piece.block:
            raise StructureError(f"the branch {piece.title!r} is empty")
    starts = _segment(text, parts)
    edges = [_edge(answer, places, start) for start in starts] + [len(answer)]
    edges[0] = 0
    blocks: list[BlockSpan] = []
    first = 0
    while first < len(kept):
        last = first
        while last < len(kept) and kept[last].block == kept[first].block:
            last += 1
        if kept[first].block:
            own = edges[first : last + 1]
            if last - first < 2:
                raise StructureError(f"block {kept[first].block} has one branch, {kept[first].title!r}")
            own[-1] = end_like_siblings(answer, own)
            spans = zip(kept[first:last], own, own[1:], strict=False)
            blocks.append(BlockSpan(tuple(BranchSpan(piece.title, start, end) for piece, start, end in spans)))
        first = last
    written = [part for piece in kept for part in piece.text.replace("[…]", ELISION).split(ELISION)]
    exact = all(part.strip() in answer for part in written)
    return Aligned(tuple(blocks), exact)


def _bare(text: str) -> tuple[str, list[int]]:
    """A text without white space, quotes and dashes all alike; and where each of its characters stands."""
    chars, places = [], []
    for place, char in enumerate(text):
        for plain in unicodedata.normalize("NFKC", char.translate(_SAME)):
            if not plain.isspace():
                chars.append(plain)
                places.append(place)
    return "".join(chars), places


def _edge(answer: str, places: Sequence[int], start: int) -> int:
    """Where a piece begins, white space before it shared out: line breaks to the piece before, the rest to this one."""
    first = places[start]
    gap = len(answer[:first].rstrip())
    newline = answer.rfind("\n", gap, first)
    return newline + 1 if newline >= 0 else gap


def _segment(text: str, pieces: Sequence[Sequence[str]]) -> list[int]:
    """Where each piece begins in a text that they make up; a piece in parts may have anything between them."""
    ways: dict[int, int] = {0: 1}  # ends of what came before, and in how many ways each was reached
    history: list[dict[int, int]] = []  # for every piece, where it begins for each end
    for number, parts in enumerate(pieces):
        following: dict[int, int] = {}
        begun: dict[int, int] = {}
        for start, count in ways.items():
            for end in _ends(text, start, parts, number == len(pieces) - 1):
                following[end] = following.get(end, 0) + count
                begun[end] = start
        if not following:
            raise StructureError(_difference(text, max(ways), parts[0]))
        ways = following
        history.append(begun)
    if len(text) not in ways:
        end = max(ways, default=0)
        raise StructureError(f"the answer goes on after the last piece: {text[end : end + 40]!r}")
    if ways[len(text)] > 1:
        raise StructureError(f"the pieces fit the answer in {ways[len(text)]} ways; less must be left out")
    starts, end = [], len(text)
    for begun in reversed(history):
        end = begun[end]
        starts.append(end)
    return starts[::-1]


def _ends(text: str, start: int, parts: Sequence[str], is_last: bool) -> list[int]:
    if not text.startswith(parts[0], start):
        return []
    place = start + len(parts[0])
    if len(parts) == 1:
        return [place]
    for part in parts[1:-1]:
        place = text.find(part, place)
        if place < 0:
            return []
        place += len(part)
    tail = parts[-1]
    if is_last:
        return [len(text)] if text.endswith(tail) and len(text) - len(tail) >= place else []
    ends = []
    while tail and (place := text.find(tail, place)) >= 0:
        ends.append(place + len(tail))
        place += 1
    return ends


def _difference(text: str, start: int, part: str) -> str:
    same = 0
    while same < len(part) and text[start + same : start + same + 1] == part[same]:
        same += 1
    place = start + same
    has = text[max(0, place - 10) : place + 20]
    return f"it differs from the answer, which has {has!r} where it has {part[max(0, same - 10) : same + 20]!r}"


def _check_titles(answer: str, pieces: Sequence[Piece]) -> None:
    scripts = _scripts(answer)
    for piece in pieces:
        if not piece.block:
            continue
        title = piece.title
        if not any(char.isalnum() for char in title) or "\n" in title or title != title.strip():
            raise StructureError(f"{title!r} is no title")
        if len(title.split()) > MOST_TITLE_WORDS or len(title) > 100:
            raise StructureError(f"the title {title[:60]!r} is longer than {MOST_TITLE_WORDS} words")
        if other := _scripts(title) - scripts:
            raise StructureError(
                f"the title {title!r} is in another script ({', '.join(sorted(other))}) than the answer"
            )


def _scripts(text: str) -> set[str]:
    return {unicodedata.name(char, "?").split()[0] for char in set(text) if char.isalpha()}
