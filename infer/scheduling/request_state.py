"""State of a request from submission to result."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from infer.answers.answer import RequestOutput, Result
from infer.answers.events import Event, EventReader, FilledReader
from infer.control.controller import Controller
from infer.request import Request, Stream
from infer.scheduling.prefix_cache import RowMemory


@dataclass(eq=False)
class RequestState:
    """State of a request. The scheduler advances it; a `Handle` sets its stream and takes its events.

    Attributes:
        request: the request.
        reader: event reader of the answer.
        submitted: time of submission, in seconds of the scheduler's clock.
        stream: form of the events while the answer grows, at first `Request.stream`.
        row: index of the cache row; None: the request waits, or the engine failed.
        reused: number of prompt tokens that the cache held.
        output: the answer as far as it is read.
        prompt: contents of the row once the prompt has been fed; None: the prompt is not being fed.
        controller: decisions about the answer, since the request has a row.
        steps: steps after prefill, int [2]: outside and inside blocks.
        count_time: time up to which `seconds` accounts.
        seconds: wall time by phase (`Statistics.seconds`).
        decisions: see `Statistics`.
        events: events that the owner has not taken.
        result: the answer, once it has ended.
        cancelled: whether the owner cancelled the request.
        failed: whether the request was under way when the engine failed.
    """

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
    events: deque[Event] = field(default_factory=deque)
    result: Result | None = None
    cancelled: bool = False
    failed: bool = False

    @property
    def decoding(self) -> bool:
        """Return whether the request has a row and its prompt has been fed."""
        return self.row is not None and self.prompt is None

    def set_stream(self, stream: Stream) -> None:
        """Change the form of later events."""
        self.stream = stream

    def next_event(self) -> Event | None:
        """Remove and return the first event that the owner has not taken; None: there is none."""
        return self.events.popleft() if self.events else None

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
            self.events.extend(self.reader.collect_events(output, result, in_order=self.stream == "text"))
        self.result = result

    def fail(self) -> None:
        """Record that the engine failed while the request had a row."""
        self.failed, self.row, self.prompt = True, None, None

    def retry(self) -> None:
        """Wait again after a failure. The answer will be the same, so its events continue where they stopped."""
        self.failed, self.steps = False, np.zeros(2, np.int64)
