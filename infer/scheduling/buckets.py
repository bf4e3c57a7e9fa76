"""Which compiled program a pass runs in: few sizes, each holding any mix of serial rows, branches and prompts.

B rows of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import next_power, powers
from infer.decode.decode_step import StepSummary
from infer.decode.inputs import max_lanes, only_row
from infer.decode.state import PROMPT, EngineConfig

MIN_CAPACITY = 128  # slots of the smallest cache
MIN_SLOTS = 512  # of a row that a pass looks at: below, there is little to save; of several rows half as many
MAX_TOKENS = 512  # of a pass, and of prompts in it while no answer waits for it
PROMPT_BESIDE = 64  # tokens of a pass with prompts in it that answers wait for, and of a prompt beside others
ROW_STEP = 8  # rows of a program to those of the next


def capacity_for(tokens: int) -> int:
    """Slots of a row that holds so many tokens."""
    return max(MIN_CAPACITY, next_power(tokens))


@dataclass(frozen=True)
class Buckets:
    """The programs of an engine.

    Attributes:
        config: of the engine.
        rows: B.
        capacity: slots of a row.
        widest: most tokens that a sequence feeds in a pass.
    """

    config: EngineConfig
    rows: int
    capacity: int
    widest: int

    @cached_property
    def every(self) -> list[Bucket]:
        """All of them."""
        few = [] if self._split else [size for size in (1, ROW_STEP, ROW_STEP**2) if size < self.rows]
        found = []
        for rows in [*few, self.rows]:
            least = min(MIN_SLOTS if rows == 1 else MIN_SLOTS // 2, self.capacity)
            parts = [min(size, self.capacity) for size in powers(least, self.capacity)]
            found += [
                Bucket(rows, tokens, per_row, slots, longest)
                for tokens, per_row, longest in self._sizes(rows)
                for slots in parts
            ]
        return found

    @property
    def _split(self) -> bool:
        """Whether rows of the cache are split over devices: none can be looked at alone then."""
        mesh = self.config.mesh
        return mesh is not None and mesh.shape["data"] * mesh.shape["fsdp"] > 1

    def _sizes(self, rows: int) -> list[tuple[int, int, int]]:
        """Tokens of a pass, of a row in it, and of the longest if that may have more."""
        branches, most = next_power(self.config.max_branches), max(MAX_TOKENS, next_power(self.widest))
        if rows == 1:
            sizes = sorted({1, *powers(4, 2 * branches), PROMPT_BESIDE, 2 * PROMPT_BESIDE, most})
            return [(size, size, 0) for size in sizes]
        found = [(next_power(rows), 1, 0)]
        found += [(tokens, branches, 0) for tokens in powers(max(rows, branches), min(rows * branches, most))]
        if self._split:
            return [*found, *((tokens, PROMPT_BESIDE, 0) for tokens in (2 * PROMPT_BESIDE, most)), (most, most, 0)]
        found += [(tokens, branches, tokens) for tokens in (PROMPT_BESIDE, 2 * PROMPT_BESIDE) if tokens > branches]
        return [*found, (most, max(PROMPT_BESIDE, branches), most)]

    def choose(self, report: StepSummary, listened: bool) -> tuple[Bucket, int, int]:
        """The smallest program for the next pass, and how few tokens a smaller and how many a larger one is for.

        Args:
            listened: somebody reads an answer as it grows. Otherwise all wait for long prompts, each of which has
                passes to itself: so most is done in a given time.
        """
        due, is_prompt = np.asarray(report.tokens), np.asarray(report.phase) == PROMPT
        rows, lanes = max(2, int(np.flatnonzero(due)[-1]) + 1), np.asarray(report.lanes)
        first = int(only_row(due, is_prompt))
        is_alone = np.count_nonzero(due) == 1 or (is_prompt[first] and due[first] >= PROMPT_BESIDE and not listened)
        if self.rows == 1 or (is_alone and not self._split):
            here = np.arange(due.size) == first
            rows, due, lanes = 1, np.where(here, due, 0), np.where(here, lanes, 0)
        answers = np.where(is_prompt, 0, due)
        left = np.where(is_prompt, due, 0)
        piece = np.minimum(left, self._piece(int(left.max())) if rows == 1 else PROMPT_BESIDE)
        few = next_power(self.config.max_branches)
        beside = MAX_TOKENS if not answers.any() else max(PROMPT_BESIDE - int(answers.sum()), few)
        piece = np.minimum(piece, beside)
        tokens = int(answers.sum() + min(piece.sum(), beside))
        per_row = int(max(answers.max(), piece.max()))
        slots = int((np.asarray(report.length) + answers + piece)[due > 0].max())
        most = max(bucket.tokens for bucket in self.every)

        def holds(bucket: Bucket) -> bool:
            return (
                (bucket.rows == 1 if rows == 1 else bucket.rows >= rows)
                and bucket.most >= per_row
                and bucket.slots >= min(slots, self.capacity)
                and (bucket.tokens == most or bucket.tokens >= tokens)
                and (bucket.tokens == most or max_lanes(self.config, self.rows, bucket) >= lanes.sum())
            )

        best = min(filter(holds, self.every), key=lambda of: (of.tokens, of.rows * of.per_row + of.longest, of.slots))
        alike = [of.tokens for of in self.every if of.tokens < best.tokens and of.rows == best.rows]
        smaller = min(max(alike, default=-1), tokens - 1)
        return best, smaller, best.tokens if best.tokens < most else np.iinfo(np.int32).max

    def _piece(self, left: int) -> int:
        """Tokens of a prompt in a pass that it has to itself: as many as a program holds that is at least half full."""
        sizes = [of.tokens for of in self.every if of.rows == 1]
        return max(size for size in sizes if size <= 2 * max(left, 1))
