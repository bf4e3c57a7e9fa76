"""A request under way, as its owner sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol, TypeAlias

import numpy as np

from aspd_jax.tokens import Codec
from infer.answers.answer import Answer, Result
from infer.answers.events import Event, EventReader
from infer.request import Job
from infer.scheduling.policy import NO_LIMIT
from infer.scheduling.structured import Constraint

Stream: TypeAlias = Literal["text", "branches"] | None


class Driver(Protocol):
    """What keeps requests going."""

    codec: Codec | None
    head: int

    def now(self) -> float:
        """Seconds, by the clock that the request's times are told by."""

    def step(self, steps: int) -> bool:
        """Do a chunk of at most so many passes."""

    def partial(self, handle: Handle) -> Result:
        """The answer of a request as far as it is."""

    def cancel(self, handle: Handle) -> None:
        """Give a request up."""


class Handle:
    """A request under way. Iterating over it gives its events, and keeps the engine going.

    Attributes:
        job: what was asked.
        result: the answer, once it has ended.
        cancelled: whether it was given up.
        failed: whether it was under way when the engine failed; it has no result then.
        stream: how the answer is read while it grows: `text`: in reading order; `branches`: all branches as they grow;
            None: it is not.
        constraint: of its tokens, once it has a row.
    """

    def __init__(self, driver: Driver, job: Job, steps: int, stream: Stream = None) -> None:
        self.job = job
        self.result: Result | None = None
        self.cancelled = self.failed = False
        self._driver, self.steps = driver, steps
        self.row: int | None = None
        self.reused = 0
        self.seconds: dict[str, float] = {}
        self.submitted = self.counted = driver.now()
        self.passes = np.zeros(2, np.int64)
        self.stream = stream
        self.constraint: Constraint | None = None
        self._events: deque[Event] = deque()
        self._reader: EventReader | None = None

    def events(self) -> Iterator[Event]:
        """What happens to the answer, until it is done; see `Event`."""
        self.stream = self.stream or "branches"
        while self._events or self.result is None:
            while self._events:
                yield self._events.popleft()
            if self.result is None:
                self.advance(self.steps)

    __iter__ = events

    def poll(self) -> list[Event]:
        """Return what happened since the last call, for owners that keep the engine going themselves. Without `stream`,
        everything comes together at the end of the answer.
        """
        news = list(self._events)
        self._events.clear()
        return news

    def wait(self) -> Result:
        """The answer, when it has ended."""
        while self.result is None:
            self.advance()
        return self.result

    def advance(self, steps: int = NO_LIMIT) -> None:
        """Let the engine do a chunk of at most so many passes."""
        if self.failed:
            raise RuntimeError("the engine failed while this request was under way; submit it again")
        self._driver.step(steps)

    def partial(self) -> Result:
        """The answer as far as it is."""
        return self.result or self._driver.partial(self)

    def cancel(self) -> None:
        """Give the request up; its result is what there is of the answer, with finish reason `cancelled`."""
        self._driver.cancel(self)

    def note(self, answer: Answer, final: Result | None) -> None:
        """Take what the scheduler read of the answer."""
        if self.stream or self.job.params.stop or final is not None:
            self._events.extend(self._event_reader.news(answer, final))
        self.result = final or self.result

    def stopped(self, answer: Answer) -> tuple[bool, list[int]]:
        """Return whether the answer holds a stop string, and the branches that no reader will get."""
        return self._event_reader.stopped, self._event_reader.branches_past_stop(answer)

    @property
    def _event_reader(self) -> EventReader:
        if self._reader is None:
            driver, stop = self._driver, self.job.params.stop
            self._reader = EventReader(driver.codec, driver.head, stop, in_order=self.stream == "text")
        return self._reader
