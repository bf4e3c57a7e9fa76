"""Structured answers: serial and parallel items, and the plain text that they represent (protocol, section 1).

A structured answer is a sequence of items, each `Serial(text)` or `Parallel(branches)`. The plain text is the
concatenation of serial texts and branch texts in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from aspd_jax.errors import StructureError


@dataclass(frozen=True)
class Serial:
    """A segment of an answer that is decoded one token at a time."""

    text: str


@dataclass(frozen=True)
class Branch:
    """One independent part of a block.

    Attributes:
        title: name of the branch, or its lead, with which the text begins (protocol, section 2); not empty.
        text: text of the branch; may be empty.
    """

    title: str
    text: str

    def __post_init__(self) -> None:
        if not self.title:
            raise StructureError(f"title: expected text, got none for the branch {self.text[:40]!r}")

    @property
    def caption(self) -> str:
        """Return the title, or nothing if the text begins with it, as it does with a lead."""
        return "" if self.text.startswith(self.title) else self.title


@dataclass(frozen=True)
class Parallel:
    """A block: two or more sibling branches that are decoded at the same time."""

    branches: tuple[Branch, ...]

    def __init__(self, branches: Iterable[Branch]) -> None:
        object.__setattr__(self, "branches", tuple(branches))
        if len(self.branches) < 2:
            raise StructureError(f"branches: expected two or more, got {len(self.branches)}. Use Serial for one.")


Item: TypeAlias = Serial | Parallel
Structure: TypeAlias = tuple[Item, ...]


def plain_text(items: Iterable[Item]) -> str:
    """Return the text that a reader sees: all serial and branch texts in order."""
    parts: list[str] = []
    for item in items:
        if isinstance(item, Serial):
            parts.append(item.text)
        else:
            parts.extend(branch.text for branch in item.branches)
    return "".join(parts)


def canonical(items: Iterable[Item]) -> Structure:
    """Return an equal answer with adjacent serial segments joined and empty ones dropped.

    Linearisation keeps no boundary between two serial segments, so a round trip through tokens returns this form.
    """
    result: list[Item] = []
    for item in items:
        if isinstance(item, Serial):
            if not item.text:
                continue
            if result and isinstance(result[-1], Serial):
                result[-1] = Serial(result[-1].text + item.text)
                continue
        result.append(item)
    return tuple(result)


def beginning(items: Iterable[Item], size: int) -> Structure:
    """Return the structure of the first `size` characters of the plain text.

    If they end within a block, its later branches are kept with empty text.
    """
    kept: list[Item] = []
    for item in items:
        if size <= 0:
            break
        if isinstance(item, Serial):
            kept.append(Serial(item.text[:size]))
            size -= len(item.text)
            continue
        branches = []
        for branch in item.branches:
            branches.append(Branch(branch.title, branch.text[: max(0, size)]))
            size -= len(branch.text)
        kept.append(Parallel(branches))
    return tuple(kept)


def to_json(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Convert to JSON: `{"type": "serial", "text"}` and `{"type": "parallel", "branches": [{"title", "text"}]}`."""
    return [
        {"type": "serial", "text": item.text}
        if isinstance(item, Serial)
        else {"type": "parallel", "branches": [{"title": b.title, "text": b.text} for b in item.branches]}
        for item in items
    ]


def from_json(value: Any) -> Structure:
    """Convert from the JSON form of `to_json`.

    Raises:
        StructureError: a value has another form; the message names its place, and what was expected.
    """
    if not isinstance(value, list):
        raise StructureError(f"structure: expected a list of items, got {type(value).__name__}")
    return tuple(_item_from_json(item, f"item {index}") for index, item in enumerate(value))


def _item_from_json(item: Any, where: str) -> Item:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "serial":
        return Serial(_string(item, "text", where))
    if kind == "parallel":
        branches = item.get("branches")
        if not isinstance(branches, list) or not all(isinstance(branch, dict) for branch in branches):
            shown = f"{branches!r:.60}"
            raise StructureError(f'{where}: "branches": expected a list of {{"title", "text"}} objects, got {shown}')
        try:
            return Parallel(
                Branch(_string(b, "title", f"{where}, branch {n}"), _string(b, "text", f"{where}, branch {n}"))
                for n, b in enumerate(branches)
            )
        except StructureError as error:
            message = str(error)
            raise StructureError(message if message.startswith(where) else f"{where}: {message}") from None
    raise StructureError(f'{where}: "type": expected "serial" or "parallel", got {kind!r}')


def _string(mapping: dict[str, Any], key: str, where: str) -> str:
    value = mapping.get(key)
    if not isinstance(value, str):
        raise StructureError(f'{where}: "{key}": expected a string, got {value!r}')
    return value
