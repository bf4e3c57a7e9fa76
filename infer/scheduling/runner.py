"""Runs of passes: in which program, with or without drafts.

B rows of the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from infer.decode.decode_step import StepSummary, StopConditions, run
from infer.decode.inputs import widest
from infer.decode.packed import Packed
from infer.decode.state import DecodeState, EngineConfig
from infer.scheduling.buckets import Buckets
from infer.scheduling.policy import DraftControl, StepCost


class InFlightSteps(NamedTuple):
    """Steps that the device is running.

    Attributes:
        steps: maximum number of steps.
        bucket: bucket of the program.
        drafting: whether the steps feed draft tokens.
        before: summary of the state before the steps.
        after: summary of the state after the steps.
        state: state after the steps.
        since: start time by the runner's clock, in seconds.
    """

    steps: int
    bucket: Bucket
    drafting: bool
    before: StepSummary
    after: Packed[StepSummary]
    state: DecodeState
    since: float


class Runner:
    """Starts steps in the selected program, and records what draft tokens gain.

    Attributes:
        buckets: programs of the engine.
        drafts: control of draft tokens.
        clock: clock of all times of requests, in seconds.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, lm: LanguageModel, config: EngineConfig, rows: int, capacity: int, drafts: DraftControl) -> None:
        self._lm, self._config = lm, config
        self.buckets = Buckets(config, rows, capacity, widest(config))
        self.drafts = drafts

    def start(
        self,
        state: DecodeState,
        report: StepSummary,
        steps: int,
        join: bool,
        listened: bool,
        one_token: bool,
    ) -> InFlightSteps:
        """Start steps without waiting for them; `state` is donated.

        Args:
            state: state before the steps.
            report: summary of the state; some sequence has due tokens.
            steps: maximum number of steps. Fewer are run if the next one needs another program.
            join: whether the steps end when a sequence finishes.
            listened: see `Buckets.need`.
            one_token: whether a step takes one token per segment, because the host has to see each: it searches stop
                strings.
        """
        since = self.clock()
        drafting = self.drafts.on and not one_token
        steps = min(steps, self.drafts.passes)
        bucket, smaller, larger = self.buckets.select(report, listened)
        smaller = -1 if drafting else smaller  # drafts come and go
        conditions = StopConditions(np.int32(steps), np.int32(smaller), np.int32(larger), np.bool_(join))
        state, after = run(self._lm.params, state, conditions, self._config, bucket, drafting)
        return InFlightSteps(steps, bucket, drafting, report, after, state, since)

    def end(self, started: InFlightSteps, cost: StepCost | None) -> tuple[int, StepSummary]:
        """Wait for passes: how many there were, and what they report; `cost`: of a pass, which drafts are judged by."""
        before, after = started.before, started.after.read()
        done = started.steps - int(after.left)
        if not started.drafting:
            self.drafts.note_plain(done)
        elif cost is not None:
            segments = int(np.sum(after.segments - before.segments))
            accepted = int(np.sum(after.accepted - before.accepted))
            bucket = started.bucket
            self.drafts.note(cost, done, bucket.tokens, bucket.rows, bucket.slots, segments, accepted)
        return done, after
