"""Selection of the compiled program for the next step: few sizes hold any mix of serial rows, branches and prompts.

B rows of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import next_power, powers
from infer.decode.decode_step import StepSummary
from infer.decode.inputs import max_lanes, only_row
from infer.decode.state import PROMPT, EngineConfig

MIN_CAPACITY = 128  # slots of the smallest cache
MIN_SLOTS = 512  # minimum slots of a row that a program reads
SPACING = 4  # ratio of a size to the next smaller one
MAX_TOKENS = 512  # maximum tokens of a step, and of prompts in a step without decoding rows
PROMPT_BESIDE = 64  # maximum tokens of a step that prefills and decodes, and of a prompt in such a step


def capacity_for(tokens: int) -> int:
    """Return the capacity of a row, in slots, that holds `tokens` tokens."""
    return max(MIN_CAPACITY, next_power(tokens))


def spaced(first: int, last: int) -> list[int]:
    """Return sizes from `first` to `last`, each `SPACING` times the one before, and then `last`."""
    sizes = []
    while first <= last // 2:
        sizes.append(first)
        first *= SPACING
    return [*sizes, last]


class Need(NamedTuple):
    """The sizes that the next step needs.

    Attributes:
        rows: 1, or the number of rows of the cache.
        tokens: tokens of all rows together.
        per_row: maximum tokens of one row.
        slots: maximum used slots of one row after the step.
        lanes: number of segments that get a next token.
    """

    rows: int
    tokens: int
    per_row: int
    slots: int
    lanes: int


@dataclass(frozen=True)
class Buckets:
    """The programs of an engine.

    Attributes:
        config: configuration of the engine.
        rows: B, number of rows of the cache.
        capacity: number of slots of a row.
        widest: maximum tokens that one sequence feeds in a step.
        free: tokens of a row that cost no more than one. Up to this many, one program holds all steps of a row that
            feeds more than one token, and the steps that follow.
    """

    config: EngineConfig
    rows: int
    capacity: int
    widest: int
    free: int = 1

    @cached_property
    def buckets(self) -> list[Bucket]:
        """List all buckets, the cheapest first: by tokens, then by queries of attention, then by slots."""
        rows = [self.rows] if self._split else sorted({1, self.rows})
        sizes = [(count, *size) for count in rows for size in self._sizes(count)]
        made = [
            Bucket(count, tokens, per_row, slots, longest)
            for count, tokens, per_row, longest in sizes
            for slots in spaced(MIN_SLOTS, self.capacity)
        ]
        return sorted(made, key=lambda bucket: (bucket.tokens, bucket.rows * bucket.per_row + bucket.longest, bucket))

    @property
    def _split(self) -> bool:
        """Return whether rows of the cache are split over devices; no program for a single row exists then."""
        mesh = self.config.mesh
        return mesh is not None and mesh.shape["data"] * mesh.shape["fsdp"] > 1

    @property
    def _alone(self) -> int:
        """Return the rows of the programs for a single row."""
        return self.rows if self._split else 1

    @property
    def max_checked(self) -> int:
        """Return the maximum tokens of a check: where width is free, those of the largest program."""
        return PROMPT_BESIDE if self.free == 1 else self._max_tokens

    @property
    def _branches(self) -> int:
        """Return the tokens per row of every program for branches: `max_branches` rounded up to a power of two."""
        return next_power(self.config.max_branches)

    @property
    def _max_tokens(self) -> int:
        """Return the tokens of the largest program."""
        return max(MAX_TOKENS, next_power(self.widest))

    def _sizes(self, rows: int) -> list[tuple[int, int, int]]:
        """Return (tokens, per_row, longest) of the programs for `rows` rows, as in `Bucket`."""
        branches, wide, largest = self._branches, 2 * PROMPT_BESIDE, self._max_tokens
        if rows == 1:
            tokens = sorted({1, *powers(4, branches), branches, PROMPT_BESIDE, wide, largest})
            return [(size, size, 0) for size in tokens if size == 1 or size >= min(self.free, branches)]
        widths = spaced(2 * max(next_power(rows), branches), min(next_power(rows) * branches, largest))
        sizes = [(next_power(rows), 1, 0), *((tokens, branches, 0) for tokens in widths)]
        if self._split:
            return [
                *sizes,
                *((tokens, PROMPT_BESIDE, 0) for tokens in (wide, largest)),
                (largest, largest, 0),
            ]
        sizes += [(tokens, branches, tokens) for tokens in (PROMPT_BESIDE, wide) if branches < tokens]
        drafting = next_power(self.config.max_branches * (1 + self.config.draft_tokens))
        return [*sizes, (largest, min(largest, max(PROMPT_BESIDE, branches, drafting)), largest)]

    def select(self, summary: StepSummary, streamed: bool) -> tuple[Bucket, int, int]:
        """Select the cheapest bucket that holds the next step.

        Args:
            summary: summary of the state; some row has due tokens.
            streamed: see `need`.

        Returns:
            The bucket, and `StopConditions.smaller` and `StopConditions.larger`.
        """
        need = self.need(summary, streamed)
        best = next(bucket for bucket in self.buckets if self.holds(bucket, need))
        below = [bucket.tokens for bucket in self.buckets if bucket.rows == best.rows and bucket.tokens < best.tokens]
        smaller = min(max(below, default=-1), need.tokens - 1) if best.tokens > self.free else -1
        return best, smaller, best.tokens if best.tokens < self._largest else np.iinfo(np.int32).max

    def passes(
        self, sizes: Mapping[int, int], lengths: Any, cost: Callable[[Bucket], float], least: int = 1
    ) -> list[tuple[Bucket, list[int]]]:
        """Return the cheapest passes over tokens of rows, together or row by row: bucket and rows of each.

        Args:
            sizes: tokens of each row.
            lengths: used slots of all rows.
            cost: cost of a pass.
            least: minimum tokens of a row in the buckets.
        """

        def one_pass(rows: list[int]) -> tuple[Bucket, list[int]] | None:
            single = self.rows == 1 or (len(rows) == 1 and not self._split)
            tokens, slots = [sizes[row] for row in rows], max(int(lengths[row]) + sizes[row] for row in rows)
            need = Need(1 if single else self.rows, sum(tokens), max(least, *tokens), slots, 0)
            # Of several rows, one may be longer than `per_row`.
            second = sorted(tokens)[-2] if len(rows) > 1 else 0
            holding = (bucket for bucket in self.buckets if self.holds(bucket, need) and bucket.per_row >= second)
            return next(((bucket, rows) for bucket in holding), None)

        alone = [] if self._split else [one_pass([row]) for row in sorted(sizes)]
        groups: list[list[int]] = []
        for row in sorted(sizes):
            if not groups or sum(sizes[other] for other in groups[-1]) + sizes[row] > self._largest:
                groups.append([])
            groups[-1].append(row)
        together = [one_pass(rows) for rows in groups]
        possible = [[one for one in passes if one] for passes in (together, alone) if passes and all(passes)]
        return min(possible, key=lambda passes: sum(cost(bucket) for bucket, _ in passes))

    @property
    def _largest(self) -> int:
        """Return the tokens of the largest bucket, which is also selected if no bucket holds the step."""
        return self.buckets[-1].tokens

    def holds(self, bucket: Bucket, need: Need) -> bool:
        """Return whether a step fits a bucket; in the largest one, rows that do not fit wait."""
        lanes = max_lanes(self.config, self.rows, bucket)
        enough = bucket.tokens >= need.tokens and lanes >= need.lanes
        slots = min(need.slots, self.capacity)
        return (
            bucket.rows == need.rows
            and bucket.max_per_row >= need.per_row
            and bucket.slots >= slots
            and (enough or bucket.tokens == self._largest)
        )

    def padded(self, tokens: int) -> int:
        """Return the tokens of the smallest program in which any one row feeds tokens."""
        return next(b.tokens for b in self.buckets if b.rows == self._alone and b.max_per_row >= tokens)

    def need(self, summary: StepSummary, streamed: bool) -> Need:
        """Return the sizes of the next step.

        Args:
            summary: summary of the state.
            streamed: whether an answer is streamed. If not, a prompt of `PROMPT_BESIDE` tokens or more is prefilled
                alone, which minimises the total time.
        """
        due, is_prompt = np.asarray(summary.tokens), np.asarray(summary.phase) == PROMPT
        rows, lanes = self.rows, np.asarray(summary.lanes)
        first = int(only_row(due, is_prompt))
        is_alone = np.count_nonzero(due) == 1 or (is_prompt[first] and due[first] >= PROMPT_BESIDE and not streamed)
        if self.rows == 1 or (is_alone and not self._split):
            selected = np.arange(due.size) == first
            rows, due, lanes = 1, np.where(selected, due, 0), np.where(selected, lanes, 0)
        answers, left = np.where(is_prompt, 0, due), np.where(is_prompt, due, 0)
        # Answers wait for the whole step, so prompts get few of its tokens.
        beside = max(PROMPT_BESIDE - int(answers.sum()), self._branches) if answers.any() else MAX_TOKENS
        per_row = self.prefill_chunk(int(left.max())) if rows == 1 else PROMPT_BESIDE
        chunk = np.minimum(left, min(per_row, beside))
        return Need(
            rows=rows,
            tokens=int(answers.sum() + min(chunk.sum(), beside)),
            per_row=int(max(answers.max(), chunk.max())),
            slots=int((np.asarray(summary.length) + answers + chunk)[due > 0].max()),
            lanes=int(lanes.sum()),
        )

    def prefill_chunk(self, tokens: int) -> int:
        """Return the tokens of the bucket of one row for the next tokens of a prompt: the largest that is half full.

        Where each token costs time, a program for more than `PROMPT_BESIDE` tokens has to be full.
        """
        half = 2 * max(tokens, 1)
        most = half if self.free > 1 else max(min(half, PROMPT_BESIDE), tokens)
        return max(b.max_per_row for b in self.buckets if b.rows == self._alone and b.max_per_row <= most)
