"""Decisions that depend on the cost of a step: the number of branches that are fed, and the use of draft tokens.

They change the step in which a token is decoded, not the token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aspd_jax.errors import RequestError

NO_LIMIT = np.iinfo(np.int32).max
DRAFTING_STEPS = 32  # steps with draft tokens between two comparisons of gain and cost
PLAIN_STEPS = 512  # steps without draft tokens, after which draft tokens are tried again


class Sample(NamedTuple):
    """One timed step: tokens fed, cache slots read over all sequences, and milliseconds."""

    tokens: int
    context: int
    milliseconds: float


@dataclass(frozen=True)
class StepCost:
    """Cost of a step in milliseconds: `base + per_token * tokens + per_slot * context`.

    A step with draft tokens also costs `per_drafting_row` per row: for the look-up, and for logits and sampling.
    """

    base: float
    per_token: float
    per_slot: float
    per_drafting_row: float = 0.0

    def milliseconds(self, tokens: int, context: int) -> float:
        """Return the milliseconds of a step that feeds `tokens` and reads `context` slots."""
        return self.base + self.per_token * tokens + self.per_slot * context

    def tokens_within(self, milliseconds: float, context: int) -> int:
        """Return the maximum tokens of a step that takes at most `milliseconds`."""
        if self.per_token <= 0:
            return 1 << 30
        return int((milliseconds - self.base - self.per_slot * context) / self.per_token)


def fit(samples: Sequence[Sample]) -> StepCost:
    """Fit the cost by relative least squares; no part of it is negative."""
    rows = np.asarray([[1.0, s.tokens, s.context] for s in samples])
    times = np.asarray([s.milliseconds for s in samples])
    chosen = [0, 1, 2]
    while True:
        values = np.zeros(3)
        values[chosen] = np.linalg.lstsq(rows[:, chosen] / times[:, None], np.ones(len(times)), rcond=None)[0]
        if (values >= 0).all() or len(chosen) == 1:
            return StepCost(*(float(value) for value in np.maximum(values, 0)))
        chosen.remove(int(np.argmin(values)))


@dataclass(frozen=True)
class Policy:
    """Limit of the branches of a sequence that a step feeds.

    `all`: no limit. `cap:N`: at most N. `slo:MS`: as many as keep a step within MS milliseconds by its measured cost,
    and at least one.

    Attributes:
        cap: N, or None.
        milliseconds: MS, or None.
    """

    cap: int | None = None
    milliseconds: float | None = None

    @staticmethod
    def parse(text: str) -> Policy:
        """Return the policy that a text names.

        Raises:
            RequestError: the text names none.
        """
        if text == "all":
            return Policy()
        if found := re.fullmatch(r"cap:(\d+)", text):
            if int(found[1]) >= 1:
                return Policy(cap=int(found[1]))
        elif (found := re.fullmatch(r"slo:(\d+(?:\.\d+)?)", text)) and float(found[1]) > 0:
            return Policy(milliseconds=float(found[1]))
        raise RequestError(f"branch policy: expected all, cap:N (branches) or slo:MS (milliseconds), got {text!r}")

    def branches(self, cost: StepCost | None, serial: int, parallel: int, context: int) -> int | None:
        """Return the branches that a sequence may feed in a step; None: all.

        Args:
            cost: cost of a step, which `slo` needs.
            serial: number of sequences that feed one token.
            parallel: number of sequences in a block.
            context: cache slots that a step reads.
        """
        if self.cap is not None:
            return self.cap
        if self.milliseconds is None or cost is None or not parallel:
            return None
        return max(1, (cost.tokens_within(self.milliseconds, context) - serial) // parallel)


class DraftControl:
    """Control of draft tokens: steps feed them as long as they gain more than the wider steps cost.

    Args:
        draft_tokens: D; 0: no draft tokens.
        always: whether steps feed them whatever they cost.
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
            return NO_LIMIT
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
