"""A submitted request as its owner sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

from infer.answers.answer import RequestOutput, Result
from infer.answers.events import Event
from infer.control.schemas import Schemas
from infer.decode.state import DecodeState
from infer.request import Request, Stream
from infer.scheduling.request_state import RequestState
from infer.scheduling.step_cost import StepCost

STREAM_STEPS = 4  # steps between the events of an owner who iterates without `max_steps`


class Executor(Protocol):
    """Executor of requests; implemented by `infer.scheduling.scheduler.Scheduler`."""

    def step(self, max_steps: int | None) -> bool:
        """Run a chunk of steps."""

    def partial(self, state: RequestState) -> Result:
        """Return the answer as far as it is decoded."""

    def cancel(self, state: RequestState) -> None:
        """Cancel a request."""


class Handle:
    """Handle of a submitted request. Iterating over it yields its events and runs the engine.

    Attributes:
        state: state of the request. The scheduler changes it, except for the stream and the events taken.
        finish: completes the result when it is first asked for; None: nothing is to be done.
    """

    finish: Callable[[Result], Result] | None = None

    def __init__(self, executor: Executor, state: RequestState) -> None:
        self._executor, self.state = executor, state

    @property
    def request(self) -> Request:
        """Return the request."""
        return self.state.request

    @property
    def result(self) -> Result | None:
        """Return the answer, once it has ended."""
        if self.state.result is not None and self.finish is not None:
            self.state.result, self.finish = self.finish(self.state.result), None
        return self.state.result

    @property
    def row(self) -> int | None:
        """Return the index of the row that the request has or had; None: it waits, or the engine failed."""
        return self.state.row

    @property
    def cancelled(self) -> bool:
        """Return whether the request was cancelled."""
        return self.state.cancelled

    @property
    def failed(self) -> bool:
        """Return whether the engine failed while the request was under way; it has no result then."""
        return self.state.failed

    def set_stream(self, stream: Stream) -> None:
        """Change the form of later events (`Request.stream`)."""
        self.state.set_stream(stream)

    def events(self) -> Iterator[Event]:
        """Yield the events of the answer up to `done` while it grows; run the engine for them."""
        self.set_stream(self.state.stream or "branches")
        while self.state.events or self.result is None:
            while (event := self.state.next_event()) is not None:
                yield event if event.result is None else replace(event, result=self.result)
            if self.result is None:
                self.advance(self.request.max_steps or STREAM_STEPS)

    __iter__ = events

    def poll(self) -> list[Event]:
        """Return the events since the last call, for owners that run the engine themselves.

        Without `stream`, all events come together at the end of the answer.
        """
        return list(iter(self.state.next_event, None))

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
        self._executor.step(max_steps)

    def partial(self) -> Result:
        """Return the answer as far as it is decoded."""
        return self.result or self._executor.partial(self.state)

    def cancel(self) -> None:
        """Cancel the request; its result has the decoded part of the answer and the finish reason `cancelled`."""
        self._executor.cancel(self.state)


class DebugState(NamedTuple):
    """State of a scheduler as tests see it.

    Attributes:
        decode: state on the device.
        rows: request of each row; None: the row is free.
        waiting: requests without a row, in the order of submission.
        cost: measured cost of a step; None: not measured.
        schemas: compiled schemas.
        read_output: function that returns the output of a request as far as it is decoded.
    """

    decode: DecodeState
    rows: tuple[Handle | None, ...]
    waiting: tuple[Handle, ...]
    cost: StepCost | None
    schemas: Schemas
    read_output: Callable[[RequestState], RequestOutput]
