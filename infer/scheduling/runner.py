"""Run steps: select the program, start it, and decide by their measured gain whether steps feed draft tokens.

B rows of the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from infer.control.scoring import KnownTokens, score_inputs
from infer.decode.checking import Check, check_arrays, run_checks
from infer.decode.decode_step import StepSummary, StopConditions, run
from infer.decode.inputs import widest
from infer.decode.packed import Packed
from infer.decode.scoring import score
from infer.decode.state import DecodeState, EngineConfig
from infer.scheduling.buckets import PROMPT_BESIDE, Buckets
from infer.scheduling.step_cost import StepCost

ALL_STEPS = np.iinfo(np.int32).max
DRAFTING_STEPS = 32  # steps with draft tokens between two comparisons of gain and cost
FREE_TOKENS = 16  # on accelerators (docs/benchmarks.md)
PLAIN_STEPS = 512  # steps without draft tokens, after which draft tokens are tried again


def free_tokens() -> int:
    """Return the tokens of a step that cost no more than one: weights bound the time of accelerators."""
    return 1 if jax.default_backend() == "cpu" else FREE_TOKENS


class DraftControl:
    """Control of draft tokens: steps feed them as long as they gain more than the wider steps cost.

    Args:
        draft_tokens: D; 0: no draft tokens.
        always: whether steps feed them, and exact fields are drafted, whatever that costs.
    """

    def __init__(self, draft_tokens: int, always: bool = False) -> None:
        self._possible, self.always = draft_tokens > 0, always
        self._begin(0)

    def _begin(self, wait: int) -> None:
        self._wait, self._steps, self._segments, self._accepted, self._wider = wait, 0, 0, 0, 0.0

    @property
    def active(self) -> bool:
        """Return whether the next step feeds draft tokens."""
        return self._possible and not self._wait

    @property
    def steps(self) -> int:
        """Return the steps until gain and cost are compared, or draft tokens are tried again."""
        if not self._possible or self.always:
            return ALL_STEPS
        return DRAFTING_STEPS - self._steps if self.active else self._wait

    def note_plain(self, steps: int) -> None:
        """Record steps without draft tokens."""
        if self._possible and not self.active:
            self._begin(max(0, self._wait - steps))

    def note(self, cost: StepCost, steps: int, fed: int, rows: int, slots: int, segments: int, accepted: int) -> None:
        """Record steps with draft tokens; after `DRAFTING_STEPS` steps, compare gain and cost.

        Args:
            cost: cost of a step.
            steps: number of steps.
            fed: tokens of the program of each step.
            rows, slots: rows of the program, and slots that it reads of each.
            segments: segments that took tokens, summed over the steps; without drafts each takes one.
            accepted: further tokens that they took.
        """
        context = rows * slots
        without = cost.milliseconds(max(1, round(segments / max(1, steps))), context)
        drafting = cost.milliseconds(fed, context) + cost.per_drafting_row * rows
        self._wider += steps * drafting / max(without, 1e-9)
        if self.always:
            return
        self._steps += steps
        self._segments += segments
        self._accepted += accepted
        if self._steps >= DRAFTING_STEPS:
            pays = 1 + self._accepted / max(1, self._segments) > self._wider / self._steps
            self._begin(0 if pays else PLAIN_STEPS)


class InFlightSteps(NamedTuple):
    """Steps that the device is running.

    Attributes:
        steps: maximum number of steps.
        bucket: bucket of the program.
        drafting: whether the steps feed draft tokens.
        first: summary of the state before the steps.
        last: summary of the state after the steps.
        state: state after the steps.
        start: start time by the runner's clock, in seconds.
    """

    steps: int
    bucket: Bucket
    drafting: bool
    first: StepSummary
    last: Packed[StepSummary]
    state: DecodeState
    start: float


class Runner:
    """Runner of steps in the selected programs, with a record of the gain of draft tokens.

    Attributes:
        buckets: programs of the engine.
        drafts: control of draft tokens.
        clock: clock of all times of requests, in seconds.
        cost: measured cost of a step; None: not measured.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, lm: LanguageModel, config: EngineConfig, rows: int, capacity: int, drafts: DraftControl) -> None:
        self._lm, self._config = lm, config
        self.buckets = Buckets(config, rows, capacity, widest(config), free_tokens())
        self.drafts = drafts
        self.cost: StepCost | None = None

    def start(
        self,
        state: DecodeState,
        summary: StepSummary,
        steps: int,
        join: bool,
        streamed: bool,
    ) -> InFlightSteps:
        """Start steps without waiting for them; `state` is donated.

        Args:
            state: state before the steps.
            summary: summary of the state; some sequence has due tokens.
            steps: maximum number of steps. Fewer are run if the next one needs another program.
            join: whether the steps end when a sequence finishes.
            streamed: see `Buckets.need`.
        """
        since = self.clock()
        drafting = self.drafts.active
        steps = min(steps, self.drafts.steps)
        bucket, smaller, larger = self.buckets.select(summary, streamed)
        # The number of draft tokens varies by step, so a smaller program would alternate with this one.
        smaller = -1 if drafting else smaller
        conditions = StopConditions.pack(steps, smaller, larger, join)
        state, after = run(self._lm.params, state, conditions, self._config, bucket, drafting)
        return InFlightSteps(steps, bucket, drafting, summary, after, state, since)

    def check(
        self, state: DecodeState, checks: Mapping[int, Check], lengths: np.ndarray
    ) -> Iterator[tuple[DecodeState, StepSummary]]:
        """Run passes of checks; yield the state and its summary after each.

        Args:
            state: state in which the sequences wait, which is donated.
            checks: checks by row.
            lengths: used slots of all rows.
        """
        sizes, words = {row: len(one.tokens) for row, one in checks.items()}, state.token_mask.shape[3]
        for bucket, rows in self._passes(sizes, lengths):
            arrays = check_arrays({row: checks[row] for row in rows}, self.buckets.rows, words, bucket.tokens)
            state, after = run_checks(self._lm.params, state, arrays, self._config, bucket)
            yield state, after.read()

    def score(
        self,
        state: DecodeState,
        parts: Mapping[int, tuple[KnownTokens, int]],
        slots: Mapping[int, int],
        streamed: bool,
    ) -> Iterator[tuple[DecodeState, dict[int, tuple[int, list[float]]]]]:
        """Run passes over the next parts of known branches; yield the state, and for each row what it fed and read.

        Args:
            state: state in which the sequences wait after their prompts, which is donated.
            parts: known tokens, and the number of those that are fed already, by row.
            slots: slots of the prompt, by row.
            streamed: whether an answer is streamed, which waits for the passes.
        """
        sizes, lengths = {}, {}
        for row, (known, start) in parts.items():
            left = known.left(start)
            sizes[row] = min(left, PROMPT_BESIDE if streamed else max(PROMPT_BESIDE, self.buckets.prefill_chunk(left)))
            lengths[row] = slots[row] + int(known.place[start])
        for bucket, rows in self._passes(sizes, lengths, PROMPT_BESIDE):
            inputs, fed = score_inputs({row: (*parts[row], sizes[row]) for row in rows}, self.buckets.rows, bucket)
            state, read = score(self._lm.params, state, Packed.pack(inputs), self._config, bucket)
            scores = iter(np.asarray(read).tolist())
            yield state, {row: (tokens, list(islice(scores, reads))) for row, (tokens, reads) in fed.items()}

    def _passes(self, sizes: Mapping[int, int], lengths: Any, least: int = 1) -> list[tuple[Bucket, list[int]]]:
        """Return `Buckets.passes` by the cost of a step; where it is not measured, by tokens, padding included."""
        cost = self.cost

        def milliseconds(bucket: Bucket) -> float:
            return bucket.tokens if cost is None else cost.milliseconds(bucket.tokens, bucket.rows * bucket.slots)

        return self.buckets.passes(sizes, lengths, milliseconds, least)

    def end(self, started: InFlightSteps) -> tuple[int, StepSummary]:
        """Wait for steps in flight; return their number and the summary of the state."""
        before, after = started.first, started.last.read()
        done = started.steps - int(after.steps_left)
        if not started.drafting:
            self.drafts.note_plain(done)
        elif self.cost is not None:
            segments = int(np.sum(after.counters.segments - before.counters.segments))
            accepted = int(np.sum(after.counters.accepted - before.counters.accepted))
            bucket = started.bucket
            self.drafts.note(self.cost, done, bucket.tokens, bucket.rows, bucket.slots, segments, accepted)
        return done, after
