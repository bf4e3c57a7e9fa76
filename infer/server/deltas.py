"""From events, which come from all branches at once, to the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from infer.answers.events import Event


class Delta(NamedTuple):
    """What is sent at a time.

    Attributes:
        text: that is new.
        place: block and branch numbers, titles of a fork, ends of branches and blocks; None in reading order.
    """

    text: str
    place: dict[str, Any] | None = None


class ReadingOrder:
    """Text in the order it is read in: of the first open branch as it grows, of the next ones when they are due."""

    def __init__(self) -> None:
        self._first = 0  # the branch that is being read; 0: serial text
        self._held: dict[int, str] = {}
        self._ended: set[int] = set()

    def take(self, events: Sequence[Event]) -> list[Delta]:
        """What can be sent after a look at the answer: one delta at most, each costs server and client time."""
        text = "".join(map(self._due, events))
        return [Delta(text)] if text else []

    def _due(self, event: Event) -> str:
        if event.kind == "fork":
            self._first, self._held, self._ended = 1, dict.fromkeys(range(1, len(event.titles) + 1), ""), set()
        elif event.kind == "token":
            if event.branch in (0, self._first):
                return event.text
            self._held[event.branch] += event.text
        elif event.kind == "branch":
            self._ended.add(event.branch)
            text = ""
            while self._first in self._ended:
                self._first += 1
                text += self._held.get(self._first, "")
            return text
        elif event.kind == "merge":
            self._first = 0
        return ""


class AsTheyCome:
    """Every event, with its place."""

    def take(self, events: Sequence[Event]) -> list[Delta]:
        """What can be sent after a look at the answer."""
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> Delta | None:
        place: dict[str, Any] = {"event": event.kind, "block": event.block, "branch": event.branch}
        if event.kind == "token":
            return Delta(event.text, place) if event.text else None
        if event.kind == "fork":
            return Delta("", place | {"titles": list(event.titles)})
        return None if event.kind == "done" else Delta("", place)
