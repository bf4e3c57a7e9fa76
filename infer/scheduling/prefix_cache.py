"""Prefix cache: rows keep the tokens of ended requests, and new prompts reuse them.

A follow-up turn of a conversation continues the row of the turn before: none of its tokens, branches included, is fed
again. A prompt that shares a system prompt or a document with another row gets a copy of that prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from aspd_jax.layout import Layout
from infer.decode.slots import RowContents
from infer.request import Request
from infer.scheduling.admission import EMPTY_PREFIX, CachedPrefix

MIN_COPIED = 32  # tokens; copying fewer is not worth it


@dataclass
class RowMemory:
    """Contents of a row.

    Attributes:
        ids: tokens in the order of the linearisation.
        in_order: number of first slots that hold the first tokens in this order; slots after a block do not.
        slots: number of written slots.
        stamp: chunk in which the row was last used.
        adapter: number of the adapter that the tokens were fed with.
    """

    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    in_order: int = 0
    slots: int = 0
    stamp: int = 0
    adapter: int = 0


def read_row(contents: RowContents, adapter: int) -> RowMemory:
    """Return the contents of a row from its copy; `adapter`: number of the adapter of its tokens."""
    slots = int(contents.length)
    layout = Layout(*(np.asarray(field)[:slots] for field in contents.layout))
    anchor = np.array(layout.position)  # a block stands where it begins
    for block in np.unique(layout.block[layout.block > 0]):
        inside = layout.block == block
        anchor[inside] = anchor[inside].min()
    order = np.lexsort((layout.position, layout.branch, anchor))
    order = order[layout.sequence[order] > 0]  # slots of hidden tokens hold none
    elsewhere = np.flatnonzero(order != np.arange(order.size))
    in_order = int(elsewhere[0]) if elsewhere.size else order.size
    return RowMemory(np.asarray(contents.tokens)[order], in_order, slots, adapter=adapter)


class Match(NamedTuple):
    """Longest cached prefix of a prompt.

    Attributes:
        source: row that holds the prefix.
        prefix: the prefix; empty where copying does not pay.
        in_order: number of its slots that are in the order of the linearisation.
    """

    source: int
    prefix: CachedPrefix
    in_order: int


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size


def best_match(rows: Sequence[RowMemory], target: int, prompt: Sequence[int], spare: int, adapter: int = 0) -> Match:
    """Return the row with the longest prefix of a prompt: all tokens of the row, or those that are in order.

    Args:
        rows: contents of all rows.
        target: row that the prompt gets, whose prefix needs no copy.
        prompt: token ids of the prompt.
        spare: number of slots of a row beyond those that prompt and answer need.
        adapter: number of the adapter that the prompt is fed with; a prefix of another adapter does not match.
    """
    ids = np.asarray(prompt[:-1], np.int32)  # the last token is fed in any case: the first answer token follows from it
    matches = []
    for row, memory in enumerate(rows):
        common = common_prefix(memory.ids, ids) if memory.adapter == adapter else 0
        continues = common == memory.ids.size > 0 and memory.slots - common <= spare
        if continues:
            match = Match(row, CachedPrefix(common, memory.slots), memory.in_order)
        else:
            shared = min(common, memory.in_order)
            match = Match(row, CachedPrefix(shared, shared), shared)
        if row == target or match.prefix.tokens >= MIN_COPIED:
            matches.append(match)
    return max(matches, key=lambda match: (match.prefix.tokens, match.source == target))


def row_to_keep_in(rows: Sequence[RowMemory], free: Collection[int], target: int) -> int | None:
    """Return the free row that takes over the contents of `target`: the least recently used one.

    None: `target` holds too little, or is the least recently used row itself.
    """
    oldest = min(free, key=lambda row: (rows[row].stamp, rows[row].ids.size > 0, row))
    kept = rows[target].ids.size >= MIN_COPIED and oldest != target
    return oldest if kept else None


class RowCopies(NamedTuple):
    """Copies of rows that are made at once.

    Attributes:
        sources: rows to copy from, int32 [2].
        targets: rows to copy to, int32 [2]; out of range means none.
        slots: number of first slots to copy.
    """

    sources: np.ndarray
    targets: np.ndarray
    slots: int


class PrefixCache:
    """Contents of all rows.

    Args:
        rows: number of rows.
        reuse: whether prompts reuse what rows hold.
    """

    def __init__(self, rows: int, reuse: bool) -> None:
        self._memories = [RowMemory() for _ in range(rows)]
        self._reuse, self._stamp = reuse, 0

    def tick(self) -> None:
        """Advance the clock of least recently used rows."""
        self._stamp += 1

    def store(self, row: int, memory: RowMemory) -> None:
        """Record the contents of a row, used now."""
        self._memories[row] = replace(memory, stamp=self._stamp)

    def memory(self, row: int) -> RowMemory:
        """Return the recorded contents of a row."""
        return self._memories[row]

    def reset(self, rows: Iterable[int]) -> None:
        """Forget the contents of rows."""
        for row in rows:
            self._memories[row] = RowMemory()

    def match(self, request: Request, target: int, spare: int, feeding: Iterable[RowMemory]) -> Match | None:
        """Return the longest cached prefix of a prompt; None: a prompt that is being fed shares a longer one.

        Args:
            request: the request.
            target, spare: see `best_match`.
            feeding: contents of other rows, once their prompts have been fed.
        """
        if not self._reuse:
            return Match(target, EMPTY_PREFIX, 0)
        match = best_match(self._memories, target, request.prompt, spare, request.adapter)
        ids = np.asarray(request.prompt[:-1], np.int32)
        shared = [common_prefix(other.ids, ids) for other in feeding if other.adapter == request.adapter]
        return None if max(shared, default=0) >= max(MIN_COPIED, match.prefix.tokens + 1) else match

    def plan_copies(self, match: Match, free: Sequence[int]) -> RowCopies | None:
        """Plan the copies: the prefix to the first free row, and the contents of that row to another free row.

        Returns:
            The copies; None: no row is copied.
        """
        target, memory, nowhere = free[0], self._memories[free[0]], len(self._memories)
        copied = match.source != target
        loses = self._reuse and (copied or match.prefix.tokens < memory.ids.size)
        keep = row_to_keep_in(self._memories, free, target) if loses else None
        if keep is None and not copied:
            return None
        # The row `keep` may be the source of the prefix: both copies are read before either is written.
        targets = [target if copied else nowhere, nowhere if keep is None else keep]
        slots = max(match.prefix.slots if copied else 0, 0 if keep is None else memory.slots)
        if keep is not None:
            self._memories[keep] = memory
        return RowCopies(np.asarray([match.source, target], np.int32), np.asarray(targets, np.int32), slots)

    def begin(self, row: int, request: Request, match: Match) -> RowMemory:
        """Record that a row holds a prefix of a prompt; return its contents once the whole prompt has been fed."""
        (tokens, slots), prompt = match.prefix, np.asarray(request.prompt, np.int32)
        self.store(row, RowMemory(prompt[:tokens], min(match.in_order, slots), slots, adapter=request.adapter))
        in_order = prompt.size if match.in_order == slots else match.in_order
        return RowMemory(prompt, in_order, slots + prompt.size - tokens, adapter=request.adapter)
