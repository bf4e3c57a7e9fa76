"""What happens to an answer while it grows, as events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from aspd_jax.tokens import Codec, SerialIds, TextStream
from infer.answers.answer import Answer, Result, cut
from infer.decode.state import SERIAL

Kind = Literal["token", "fork", "branch", "merge", "done"]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: `token`: text was added to a stretch. `fork`: a block began. `branch`: a branch ended.
            `merge`: a block ended. `done`: the answer ended.
        block: number of the block from 1; 0 in serial text.
        branch: number of the branch from 1; 0 in serial text.
        text: of a `token`: what was added, whole characters only. Of a `branch`: all of it.
        token_ids: of a `token`: the new tokens.
        titles: of a `fork`.
        result: of `done`: the answer with finish reason and statistics.
    """

    kind: Kind
    block: int = 0
    branch: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    titles: tuple[str, ...] = ()
    result: Result | None = None


class EventReader:
    """Compares what is there of an answer with what was told of it."""

    def __init__(self, codec: Codec | None, head: int, stop: Sequence[str]) -> None:
        self._codec, self._head, self._stop = codec, head, stop
        self._tokens: dict[tuple[int, int], int] = {}  # (item, branch) -> tokens told of
        self._text: dict[tuple[int, int], int] = {}  # characters told of
        self._streams: dict[tuple[int, int], TextStream] = {}
        self._forked: set[int] = set()
        self._merged: set[int] = set()
        self._ended: set[tuple[int, int]] = set()

    def news(self, answer: Answer, result: Result | None = None) -> list[Event]:
        """What is new.

        Args:
            answer: as far as it is.
            result: of an answer that has ended.
        """
        events: list[Event] = []
        block = 0
        for number, item in enumerate(answer.items):
            last = number + 1 == len(answer.items) and result is None
            if isinstance(item, SerialIds):
                if (number, 0) not in self._ended:
                    events += self._stretch((number, 0), 0, item, growing=last)
                if not last:
                    self._ended.add((number, 0))
                continue
            block += 1
            if number not in self._forked:
                self._forked.add(number)
                events.append(Event("fork", block, titles=tuple(self._title(title) for title in item.titles)))
            growing = answer.open_branches if last else ()
            for branch, text in enumerate(item.texts(self._head), 1):
                key = (number, branch)
                if key in self._ended:
                    continue
                events += self._stretch(key, block, text, growing=branch in growing)
                if branch not in growing:
                    self._ended.add(key)
                    events.append(Event("branch", block, branch, text=self._final(text)))
            if not growing and number not in self._merged:
                self._merged.add(number)
                events.append(Event("merge", block))
        if result is not None:
            events.append(Event("done", result=result))
        return events

    def stopped(self, answer: Answer) -> tuple[bool, list[int]]:
        """Whether the serial stretch under way holds a stop string; and which branches, from 1, do."""
        if not answer.items or self._codec is None:
            return False, []
        number, last = len(answer.items) - 1, answer.items[-1]
        if isinstance(last, SerialIds):
            return answer.phase == SERIAL and self._first_stop((number, 0), self._growing((number, 0), last)) >= 0, []
        texts = [
            (branch, text) for branch, text in enumerate(last.texts(self._head), 1) if branch in answer.open_branches
        ]
        found = (
            (branch, self._first_stop((number, branch), self._growing((number, branch), t))) for branch, t in texts
        )
        return False, [branch for branch, place in found if place >= 0]

    def _stretch(self, key: tuple[int, int], block: int, stretch: SerialIds, growing: bool) -> list[Event]:
        told, shown, ids = self._tokens.get(key, 0), self._text.get(key, 0), stretch.ids
        if growing:
            text = self._growing(key, stretch)
            stop = self._first_stop(key, text)
            text = text[: stop if stop >= 0 else len(text) - self._unsure(text)]
        else:
            text = self._final(stretch)
        if len(ids) <= told and len(text) <= shown:
            return []
        self._tokens[key], self._text[key] = max(told, len(ids)), max(shown, len(text))
        new = tuple(int(token) for token in ids[told:])
        return [Event("token", block, key[1], text=text[shown:], token_ids=new)]

    def _growing(self, key: tuple[int, int], stretch: SerialIds) -> str:
        """Text of a stretch as far as it is sure."""
        if self._codec is None:
            return ""
        if stretch.drop:  # the end of the last token belongs to a tag that is written as text
            return self._codec.text.text_of(stretch).rstrip("\ufffd")
        if key not in self._streams:
            self._streams[key] = self._codec.text.stream()
        self._streams[key].extend(stretch.ids)
        return self._streams[key].text

    def _first_stop(self, key: tuple[int, int], text: str) -> int:
        """Where the first stop string begins; -1: there is none. What was shown before holds none."""
        start = max(0, self._text.get(key, 0) - max(map(len, self._stop), default=0))
        return min((place for stop in self._stop if (place := text.find(stop, start)) >= 0), default=-1)

    def _final(self, stretch: SerialIds) -> str:
        return "" if self._codec is None else cut(self._codec.text.text_of(stretch), self._stop)

    def _title(self, ids: np.ndarray) -> str:
        return "" if self._codec is None else self._codec.text.decode(ids) or self._codec.text.spell(ids)

    def _unsure(self, text: str) -> int:
        """Characters at the end that may begin a stop string."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
