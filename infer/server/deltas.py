"""Conversion of events to the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from infer.answers.events import Event


class Delta(NamedTuple):
    """Unit of a stream.

    Attributes:
        text: new text; may be empty.
        place: event kind, block and branch numbers, and the titles of a fork; None for text in reading order.
    """

    text: str
    place: dict[str, Any] | None = None


def text_deltas(events: Sequence[Event]) -> list[Delta]:
    """Return the text of events in reading order as at most one delta, because every delta has a cost."""
    text = "".join(event.text for event in events if event.kind == "token")
    return [Delta(text)] if text else []


def branch_deltas(events: Sequence[Event]) -> list[Delta]:
    """Return one delta for each event, with its block and branch."""
    deltas = []
    for event in events:
        place: dict[str, Any] = {"event": event.kind, "block": event.block, "branch": event.branch}
        if event.kind == "token" and event.text:
            deltas.append(Delta(event.text, place))
        elif event.kind == "fork":
            deltas.append(Delta("", place | {"titles": list(event.titles)}))
        elif event.kind in ("branch", "merge"):
            deltas.append(Delta("", place))
    return deltas
