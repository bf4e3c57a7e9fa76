"""Answers of templates while they are filled: their text, structure and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, canonical
from aspd_jax.template import Hole, Template
from infer.answers.answer import RequestOutput, Result
from infer.answers.events import Event, StopFilter


@dataclass(frozen=True)
class FilledBlock:
    """A block of holes that are filled in parallel.

    Attributes:
        holes: the holes in the order of the branches.
        growing: names of the holes whose values are not complete.
    """

    holes: tuple[Hole, ...]
    growing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Filled:
    """A template as far as it is filled.

    Attributes:
        template: the template.
        values: values by name; of holes that grow, what later tokens cannot change.
        blocks: blocks that have begun.
        critical_path: see `Statistics`.
        ended: whether the answer has ended.
    """

    template: Template
    values: Mapping[str, str]
    blocks: tuple[FilledBlock, ...] = ()
    critical_path: int = 1
    ended: bool = False

    @property
    def growing(self) -> frozenset[str]:
        """Return the names of the holes whose values are not complete."""
        return self.blocks[-1].growing if self.blocks else frozenset()

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of branches of each block."""
        return tuple(len(block.holes) for block in self.blocks)

    @property
    def text(self) -> str:
        """Return the text in reading order, up to the part that is not known yet."""
        text = ""
        for part in self.template.parts:
            if isinstance(part, str):
                text += part
                continue
            text += self.values.get(part.name, "")
            if part.name in self.growing or part.name not in self.values:
                break
        return text

    @property
    def structure(self) -> Structure:
        """Return the answer as serial text and blocks, in reading order; literal text precedes each value.

        While the answer grows, all branches that have begun have their text; afterwards none behind a value that was
        cut.
        """
        template = self.template
        numbers = {hole.name: number for number, block in enumerate(self.blocks) for hole in block.holes}
        begun = [hole for hole in template.holes if hole.name in numbers]
        cut = next((n for n, hole in enumerate(template.holes) if not self._complete(hole)), len(template.holes))
        if self.ended:
            begun = begun[: cut + 1]
        items: list[Item] = [Serial(template.opening)]
        for _, group in groupby(begun, key=lambda hole: numbers[hole.name]):
            branches = [Branch(h.name or '""', template.lead(h) + self.values.get(h.name, "")) for h in group]
            items.append(Parallel(branches) if len(branches) > 1 else Serial(branches[0].text))
        if cut == len(template.holes):
            items.append(Serial(template.following(template.holes[-1])))
        return canonical(items)

    def _complete(self, hole: Hole) -> bool:
        return hole.name in self.values and hole.name not in self.growing


class FilledReader:
    """Makes events of what a template has gained since the last call; takes the place of `EventReader`.

    Args:
        stop: strings that end the answer.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._filter = stop, StopFilter(stop)
        self._text = ""
        self._shown: dict[tuple[int, int], str] = {}  # (block, branch) -> text in events
        self._ended: set[tuple[int, int]] = set()  # a branch, or with branch 0 a block

    @property
    def stopped(self) -> bool:
        """Return whether the answer holds a stop string."""
        return self._filter.matched

    def branches_past_stop(self, output: RequestOutput) -> list[int]:
        """Return no branch: all are filled until a stop string is found in reading order."""
        return []

    def collect_events(self, output: RequestOutput, result: Result | None, in_order: bool) -> list[Event]:
        """Return the new events (`EventReader.collect_events`)."""
        filled = output.filled
        assert filled is None or isinstance(filled, Filled)
        events: list[Event] = []
        if filled is not None and (in_order or self._stop):
            text = filled.text if result is None or self._stop else result.text
            events, self._text = [Event("token", text=text[len(self._text) :])], text
            events = [event for event in events if event.text]
        elif filled is not None:
            events = self._block_events(filled)
        if result is not None:
            events.append(Event("done", result=result))
        return self._filter.take(events, result is not None) if self._stop else events

    def _block_events(self, filled: Filled) -> list[Event]:
        events: list[Event] = []
        if filled.blocks and not self._shown and filled.template.opening:
            events.append(Event("token", text=filled.template.opening))
        for number, block in enumerate(filled.blocks, 1):
            if (number, 0) in self._ended:
                continue
            if (number, 1) not in self._shown:
                events.append(Event("fork", number, titles=tuple(hole.name for hole in block.holes)))
            for branch, hole in enumerate(block.holes, 1):
                key, before = (number, branch), self._shown.get((number, branch), "")
                text = filled.template.lead(hole) + filled.values.get(hole.name, "")
                self._shown[key] = text
                if len(text) > len(before):
                    events.append(Event("token", number, branch, text=text[len(before) :]))
                if key not in self._ended and hole.name not in block.growing:
                    self._ended.add(key)
                    events.append(Event("branch", number, branch, text=text))
            if not block.growing:
                self._ended.add((number, 0))
                events.append(Event("merge", number))
        following = filled.template.following(filled.template.holes[-1])
        if filled.ended and not filled.growing and following:
            events.append(Event("token", text=following))
        return events
