"""Lists in a whole text, read with the functions that read a text while it is being written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from aspd_jax.blocks.markers import number_of
from aspd_jax.lists import Lead, ListForm, _any_lead, _lines, _numbered, body_of, lead_of


class TextList(NamedTuple):
    """A list in a whole text.

    Attributes:
        start, end: range of characters.
        form: form of the first item.
        items: text of every item, without white space at its end.
        leads: lead of every item, in the item's own form; None: it has none.
        numbers: number of every item; None: it has none.
        gaps: white space between items.
    """

    start: int
    end: int
    form: ListForm
    items: tuple[str, ...]
    leads: tuple[Lead | None, ...]
    numbers: tuple[int | None, ...]
    gaps: tuple[str, ...]


def lists_of(text: str) -> Iterator[TextList]:
    """Yield the lists of a whole text in order. Nested lists belong to their items."""
    text, end = text.rstrip("\n") + "\n", 0
    for start, line, protected in _lines(text):
        if start >= end and not protected and (lead := lead_of(line)):
            yield (found := _read_list(text, start, lead.form))
            end = found.end


def _read_list(text: str, start: int, form: ListForm) -> TextList:
    parts: list[tuple[str, Lead | None, int | None]] = []
    gaps: list[str] = []
    place = end = start
    while True:
        line = text[place : text.index("\n", place) + 1]
        numbered, lead = _numbered(line), _any_lead(line)
        number = number_of(numbered["number"]) if numbered else None
        if number == 1 and parts and parts[-1][2] != 1:  # another list
            gaps.pop()
            break
        behind = place + (lead.end if lead else len(line) - 1)
        body = body_of(form, text[behind:])
        end = behind + body.end
        parts.append((text[place:end], lead, number))
        if body.next != "item":
            break
        gaps.append(body.gap)
        place = end + len(body.gap)
    items, leads, numbers = zip(*parts, strict=True)
    return TextList(start, end, form, items, leads, numbers, tuple(gaps))
