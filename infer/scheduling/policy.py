"""What the host decides by the cost of a pass: how many branches of a loaded batch it feeds, and whether drafts pay.

Neither changes which tokens come, only when.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aspd_jax.errors import RequestError

NO_LIMIT = np.iinfo(np.int32).max
DRAFTING_PASSES = 32  # that show whether drafts pay
PLAIN_PASSES = 512  # before they are tried again where they did not


class Sample(NamedTuple):
    """One timed pass: tokens fed, slots of the cache looked at (over all sequences), milliseconds."""

    tokens: int
    context: int
    milliseconds: float


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a pass: `base + per_token * tokens + per_slot * context`, and `per_drafting_row` for each row of
    one that feeds drafts: they are looked up, and their logits computed and sampled from.
    """

    base: float
    per_token: float
    per_slot: float
    per_drafting_row: float = 0.0

    def milliseconds(self, tokens: int, context: int) -> float:
        """Of a pass that feeds so many tokens and looks at so many slots."""
        return self.base + self.per_token * tokens + self.per_slot * context

    def tokens_within(self, milliseconds: float, context: int) -> int:
        """Most tokens that a pass may feed to stay within a time."""
        if self.per_token <= 0:
            return 1 << 30
        return int((milliseconds - self.base - self.per_slot * context) / self.per_token)


def fit(samples: Sequence[Sample]) -> StepCost:
    """The cost that fits best in relative terms; no part of it is negative."""
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
    """`all`: every branch in every pass. `cap:N`: at most N branches of a sequence. `slo:MS`: as many as keep a pass
    within so many milliseconds, by the measured cost of a pass; at least one.
    """

    cap: int | None = None
    milliseconds: float | None = None

    @staticmethod
    def parse(text: str) -> Policy:
        """From its name.

        Raises:
            RequestError: it is none of the three.
        """
        if text == "all":
            return Policy()
        if found := re.fullmatch(r"cap:(\d+)", text):
            if int(found[1]) >= 1:
                return Policy(cap=int(found[1]))
        elif (found := re.fullmatch(r"slo:(\d+(?:\.\d+)?)", text)) and float(found[1]) > 0:
            return Policy(milliseconds=float(found[1]))
        raise RequestError(f"branch policy {text!r} is unknown; it is all, cap:N (branches) or slo:MS (milliseconds)")

    def branches(self, cost: StepCost | None, serial: int, parallel: int, context: int) -> int | None:
        """Branches that a sequence may feed in a pass; None: all.

        Args:
            cost: of a pass; needed by `slo`.
            serial: sequences that feed one token.
            parallel: sequences in a block.
            context: slots that a pass looks at.
        """
        if self.cap is not None:
            return self.cap
        if self.milliseconds is None or cost is None or not parallel:
            return None
        return max(1, (cost.tokens_within(self.milliseconds, context) - serial) // parallel)


class DraftControl:
    """Whether passes feed drafts: as long as these bring more than the wider passes cost.

    Args:
        draft_tokens: D; 0: never.
    """

    def __init__(self, draft_tokens: int) -> None:
        self._possible = draft_tokens > 0
        self._begin(0)

    def _begin(self, wait: int) -> None:
        self._wait, self._passes, self._segments, self._accepted, self._wider = wait, 0, 0, 0, 0.0

    @property
    def on(self) -> bool:
        """Whether the next pass feeds drafts."""
        return self._possible and not self._wait

    @property
    def passes(self) -> int:
        """Until drafts are judged, or tried again."""
        if not self._possible:
            return NO_LIMIT
        return DRAFTING_PASSES - self._passes if self.on else self._wait

    def note_plain(self, passes: int) -> None:
        """Take note of passes without drafts."""
        if self._possible and not self.on:
            self._begin(max(0, self._wait - passes))

    def note(self, cost: StepCost, passes: int, fed: int, rows: int, slots: int, segments: int, accepted: int) -> None:
        """Take what passes with drafts have brought, and judge when there were enough.

        Args:
            passes: how many.
            fed: places for tokens in each.
            rows, slots: of the program; each looked at so many slots of so many rows.
            segments: segments that took tokens, over all passes; without drafts each would have taken one.
            accepted: tokens that they took beside.
        """
        context = rows * slots
        without = cost.milliseconds(max(1, round(segments / max(1, passes))), context)
        drafting = cost.milliseconds(fed, context) + cost.per_drafting_row * rows
        self._wider += passes * drafting / max(without, 1e-9)
        self._passes += passes
        self._segments += segments
        self._accepted += accepted
        if self._passes >= DRAFTING_PASSES:
            pays = 1 + self._accepted / max(1, self._segments) > self._wider / self._passes
            self._begin(0 if pays else PLAIN_PASSES)
