"""Conversion of events to the deltas of a stream, and of several streams to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from infer.answers.events import Event

T = TypeVar("T")


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


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Run generators concurrently and yield their items as they come; an error of one, or closing, closes them all."""
    news: asyncio.Queue[tuple[T, ...] | BaseException] = asyncio.Queue()

    async def read(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    news.put_nowait((item,))
            news.put_nowait(())
        except BaseException as error:
            news.put_nowait(error)
            raise

    tasks = [asyncio.create_task(read(source)) for source in sources]
    try:
        growing = len(tasks)
        while growing:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            growing -= not item
            for one in item:
                yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
