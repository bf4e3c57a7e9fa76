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
    """Row for a prompt, and the longest cached prefix of the prompt.

    Attributes:
        source: row that holds the prefix.
        target: row that the prompt gets; if that is another row, the prefix is copied.
        tokens: number of tokens of the prefix; 0: none is reused.
        slots: number of slots that they take; after a block, slots are not in the order of the linearisation.
        in_order: number of these slots that are in this order.
    """

    source: int
    target: int
    tokens: int = 0
    slots: int = 0
    in_order: int = 0


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size


def best_match(
    rows: Sequence[RowMemory], free: Collection[int], prompt: Sequence[int], spare: int, adapter: int = 0
) -> Match:
    """Return the row with the longest prefix of a prompt: all tokens of the row, or those that are in order.

    The prompt gets the least recently used free row, or the free row all of whose tokens it continues.

    Args:
        rows: contents of all rows.
        free: rows that no request has.
        prompt: token ids of the prompt.
        spare: number of slots of a row beyond those that prompt and answer need.
        adapter: number of the adapter that the prompt is fed with; a prefix of another adapter does not match.
    """
    ids = np.asarray(prompt[:-1], np.int32)  # the last token is fed in any case: the first answer token follows from it
    oldest = min(free, key=lambda row: (rows[row].stamp, rows[row].ids.size > 0, row))
    matches = []
    for row, memory in enumerate(rows):
        common = common_prefix(memory.ids, ids) if memory.adapter == adapter else 0
        if common == memory.ids.size > 0 and memory.slots - common <= spare:
            match = Match(row, row if row in free else oldest, common, memory.slots, memory.in_order)
        else:
            shared = min(common, memory.in_order)
            match = Match(row, oldest, shared, shared, shared)
        if match.source == match.target or match.tokens >= MIN_COPIED:
            matches.append(match)
    return max(matches, key=lambda match: (match.tokens, match.source == match.target))


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

    def match(self, request: Request, free: Sequence[int], spare: int, feeding: Iterable[RowMemory]) -> Match | None:
        """Return a row for a prompt (`best_match`); None: a prompt that is being fed shares a longer prefix with it.

        Args:
            request: the request.
            free, spare: see `best_match`.
            feeding: contents of other rows, once their prompts have been fed.
        """
        if not self._reuse:
            return Match(free[0], free[0])
        match = best_match(self._memories, free, request.prompt, spare, request.adapter)
        ids = np.asarray(request.prompt[:-1], np.int32)
        shared = [common_prefix(other.ids, ids) for other in feeding if other.adapter == request.adapter]
        return None if max(shared, default=0) >= max(MIN_COPIED, match.tokens + 1) else match

    def begin(self, request: Request, match: Match) -> RowMemory:
        """Record that a row holds a prefix of a prompt; return its contents once the whole prompt has been fed."""
        prompt = np.asarray(request.prompt, np.int32)
        prefix = RowMemory(prompt[: match.tokens], match.in_order, match.slots, adapter=request.adapter)
        self.store(match.target, prefix)
        in_order = prompt.size if match.in_order == match.slots else match.in_order
        return RowMemory(prompt, in_order, match.slots + prompt.size - match.tokens, adapter=request.adapter)
