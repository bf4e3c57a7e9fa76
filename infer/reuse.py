"""What the rows of the cache still hold, and which new prompts can begin with it.

A follow-up turn of a conversation goes on in the row of the turn before: nothing of it is fed again, branches
included. A prompt that begins like another, with a system prompt or a document, begins with a copy of that row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

LEAST_COPIED = 32  # tokens; copying a row for fewer is not worth it


@dataclass
class RowMemory:
    """What a row holds.

    Attributes:
        ids: tokens in the order of the linearisation.
        in_order: so many of the first slots hold the first tokens in this order; after a block they do not.
        slots: slots written.
        stamp: when it was last used.
    """

    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    in_order: int = 0
    slots: int = 0
    stamp: int = 0


class Match(NamedTuple):
    """Where a prompt can begin: copy from `source` (if that is another row than `row`), keep tokens and slots.

    So many of the slots as `in_order` says hold the tokens in the order of the linearisation.
    """

    row: int
    source: int
    tokens: int
    slots: int
    in_order: int


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences begin with in common."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size


def best_match(
    rows: Sequence[RowMemory], free: Collection[int], prompt: Sequence[int], spare: int, whole: bool = True
) -> Match:
    """Where a prompt begins: in a free row that it goes on from, or in the free row that was left longest ago, with a
    copy of what it has in common with some row.

    Args:
        free: rows that no request holds; at least one.
        spare: slots that a row has beyond what prompt and answer need.
        whole: whether a row may be continued after blocks (not in the position scheme `predict`, whose positions
            while decoding differ from those of training).
    """
    ids = np.asarray(prompt[:-1], np.int32)  # the last token is fed in any case: the first answer token follows from it
    common = [common_prefix(memory.ids, ids) for memory in rows]
    continued = [
        row
        for row in free
        if common[row] == rows[row].ids.size > 0 and rows[row].slots - common[row] <= spare
        if whole or rows[row].in_order == rows[row].slots
    ]
    if continued:
        row = max(continued, key=lambda row: common[row])
        return Match(row, row, common[row], rows[row].slots, rows[row].in_order)
    oldest = min(free, key=lambda row: (rows[row].stamp, row))
    shared = [min(tokens, memory.in_order) for tokens, memory in zip(common, rows, strict=True)]
    source = max(range(len(rows)), key=lambda row: (shared[row], row == oldest))
    if source != oldest and shared[source] < LEAST_COPIED:
        source = oldest
    return Match(oldest, source, *[shared[source]] * 3)
