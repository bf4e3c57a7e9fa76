"""A submitted request, from submission to result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np

from infer.answers.answer import RequestOutput, Result
from infer.answers.events import Event, EventReader, FilledReader
from infer.control.controller import Controller
from infer.request import Request, Stream
from infer.scheduling.prefix_cache import RowMemory

STREAM_STEPS = 4  # steps between the events of an owner who iterates without `max_steps`
CHECK_STEPS = 256  # steps between two checks for finished answers of many requests
Done = TypeVar("Done")


class Executor(Protocol):
    """Executor of requests; implemented by `infer.scheduling.scheduler.Scheduler`."""

    def step(self, max_steps: int | None) -> bool:
        """Run a chunk of steps."""

    def partial(self, handle: Handle) -> Result:
        """Return the answer as far as it is decoded."""

    def cancel(self, handle: Handle) -> None:
        """Cancel a request."""


@dataclass(eq=False, repr=False)
class Handle:
    """Handle of a submitted request. Iterating over it yields its events and runs the engine.

    The scheduler advances the request; the owner of the handle sets its stream and takes its events.

    Attributes:
        executor: scheduler of the request.
        request: the request.
        reader: event reader of the answer.
        submitted: time of submission, in seconds of the scheduler's clock.
        stream: form of later events while the answer grows, at first `Request.stream`.
        row: index of the cache row that the request has or had; None: the request waits, or the engine failed.
        reused: number of prompt tokens that the cache held.
        output: the answer as far as it is read.
        prompt: contents of the row once the prompt has been fed; None: the prompt is not being fed.
        controller: decisions about the answer, since the request has a row.
        steps: steps after prefill, int [2]: outside and inside blocks.
        count_time: time up to which `seconds` accounts.
        seconds: wall time by phase (`Statistics.seconds`).
        decisions: see `Statistics`.
        unread: events that the owner has not taken.
        decoded: the answer, once it has ended, before `finish`.
        finish: completes the result when it is first asked for; None: nothing is to be done.
        cancelled: whether the request was cancelled.
        failed: whether the engine failed while the request was under way; it has no result then.
    """

    executor: Executor
    request: Request
    reader: EventReader | FilledReader
    submitted: float
    stream: Stream
    row: int | None = None
    reused: int = 0
    output: RequestOutput = field(default_factory=RequestOutput)
    prompt: RowMemory | None = None
    controller: Controller = field(default_factory=Controller)
    steps: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))
    count_time: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    decisions: int = 0
    unread: deque[Event] = field(default_factory=deque)
    decoded: Result | None = None
    finish: Callable[[Result], Result] | None = None
    cancelled: bool = False
    failed: bool = False

    @property
    def result(self) -> Result | None:
        """Return the answer, once it has ended."""
        if self.decoded is not None and self.finish is not None:
            self.decoded, self.finish = self.finish(self.decoded), None
        return self.decoded

    @property
    def decoding(self) -> bool:
        """Return whether the request has a row and its prompt has been fed."""
        return self.row is not None and self.prompt is None

    def events(self) -> Iterator[Event]:
        """Yield the events of the answer up to `done` while it grows; run the engine for them."""
        self.stream = self.stream or "branches"
        while self.unread or self.result is None:
            while self.unread:
                event = self.unread.popleft()
                yield event if event.result is None else replace(event, result=self.result)
            if self.result is None:
                self.advance(self.request.max_steps or STREAM_STEPS)

    __iter__ = events

    def poll(self) -> list[Event]:
        """Return the events since the last call, for owners that run the engine themselves.

        Without `stream`, all events come together at the end of the answer.
        """
        return [self.unread.popleft() for _ in range(len(self.unread))]

    def wait(self) -> Result:
        """Run the engine until the answer has ended; return it."""
        while self.result is None:
            self.advance()
        return self.result

    def advance(self, max_steps: int | None = None) -> None:
        """Run the engine for a chunk (`Engine.step`).

        Raises:
            RuntimeError: the engine failed while the request was under way.
        """
        if self.failed:
            raise RuntimeError("the engine failed while this request was under way; submit it again")
        self.executor.step(max_steps)

    def partial(self) -> Result:
        """Return the answer as far as it is decoded."""
        return self.result or self.executor.partial(self)

    def cancel(self) -> None:
        """Cancel the request; its result has the decoded part of the answer and the finish reason `cancelled`."""
        self.executor.cancel(self)

    def start(self, row: int, reused: int, prompt: RowMemory, controller: Controller, now: float) -> None:
        """Record the assignment of a row; the prompt is fed next."""
        self.row, self.reused, self.prompt, self.controller = row, reused, prompt, controller
        self.output = RequestOutput(untagged=self.request.untagged or self.request.draft is not None)
        self.seconds = {"queued": now - self.submitted}

    def end_prefill(self, serial_steps: int, now: float) -> None:
        """Record that the prompt has been fed and the first token sampled."""
        self.prompt, self.steps, self.count_time = None, np.asarray([serial_steps, 0]), now
        total = now - self.submitted
        self.seconds |= {"prefill": total - self.seconds["queued"], "serial": 0.0, "parallel": 0.0}
        self.seconds |= {"first_token": total, "total": total, "deciding": 0.0}

    def count(self, serial_steps: int, parallel_steps: int, seconds: float, now: float) -> None:
        """Account for steps of a chunk that took `seconds`; the arguments count all steps since prefill."""
        steps = np.asarray([serial_steps, parallel_steps])
        new, spent = steps - self.steps, min(seconds, now - self.count_time)  # prefill may have ended within the chunk
        serial, parallel = new / max(1, new.sum()) * spent
        self.steps, self.count_time = steps, now
        self.seconds["serial"] += float(serial)
        self.seconds["parallel"] += float(parallel)
        self.seconds["total"] = now - self.submitted

    def count_decision(self, seconds: float) -> None:
        """Account for a decision of the host that took `seconds`."""
        self.decisions += 1
        self.seconds["deciding"] += seconds

    def update(self, output: RequestOutput, result: Result | None = None) -> None:
        """Collect the events of what was read of the answer; `result`: the answer, if it has ended."""
        if self.stream or self.request.ends_by_text or result is not None:
            self.unread.extend(self.reader.collect_events(output, result, in_order=self.stream == "text"))
        self.decoded = result

    def fail(self) -> None:
        """Record that the engine failed while the request had a row."""
        self.failed, self.row, self.prompt = True, None, None

    def retry(self) -> None:
        """Wait again after a failure. The answer will be the same, so its events continue where they stopped."""
        self.failed, self.steps = False, np.zeros(2, np.int64)


def run_together(
    step: Callable[[int], object], jobs: Iterable[Generator[None, None, Done]], limit: int
) -> Iterator[Done]:
    """Run generators that submit requests and yield while these are under way; yield what they return as they end.

    Args:
        step: runs at most the given number of steps (`Engine.step`).
        jobs: the generators, which start in this order.
        limit: maximum number of generators that have started and not ended.
    """
    waiting, running = iter(jobs), list[Generator[None, None, Done]]()
    while True:
        following, running = chain(running, waiting), []
        while len(running) < limit and (job := next(following, None)) is not None:
            try:
                next(job)
                running.append(job)
            except StopIteration as end:
                yield end.value
        if not running:
            return
        step(CHECK_STEPS)
