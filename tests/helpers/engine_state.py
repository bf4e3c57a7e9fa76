"""State of an engine on host and device, which tests compare with answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from infer.answers.answer import RequestOutput
from infer.control.schemas import Schemas
from infer.decode.state import DecodeState
from infer.engine import Engine
from infer.scheduling.handle import Handle
from infer.scheduling.step_cost import StepCost


class EngineState(NamedTuple):
    """State of an engine.

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
    read_output: Callable[[Handle], RequestOutput]


def engine_state(engine: Engine) -> EngineState:
    """Return the state of an engine between chunks, or in a call within one."""
    scheduler = engine._scheduler
    with scheduler._lock:
        rows, waiting = tuple(scheduler._rows), tuple(scheduler._waiting)
        state = scheduler._state_now()
        return EngineState(state, rows, waiting, scheduler.runner.cost, scheduler._schemas, scheduler._output)
