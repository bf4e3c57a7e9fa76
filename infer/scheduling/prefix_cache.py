"""What the rows of the cache still hold, and which new prompts can begin with it.

A follow-up turn of a conversation goes on where the turn before ended: nothing of it is fed again, branches included.
A prompt that begins like another, with a system prompt or a document, begins with a copy of that beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from infer.scheduling.admission import Beginning

MIN_COPIED = 32  # tokens; copying fewer is not worth it


@dataclass
class RowMemory:
    """What a row holds.

    Attributes:
        ids: tokens in the order of the linearisation.
        in_order: so many of the first slots hold the first tokens in this order; after a block they do not.
        slots: slots written.
        stamp: when it was last used.
        adapter: number of the adapter that it was fed with.
    """

    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    in_order: int = 0
    slots: int = 0
    stamp: int = 0
    adapter: int = 0


class Match(NamedTuple):
    """Where a prompt begins.

    Attributes:
        source: the row that holds its beginning.
        beginning: so much of it; nothing, where nothing is worth it.
        in_order: of its slots, so many are in the order of the linearisation.
    """

    source: int
    beginning: Beginning
    in_order: int


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences begin with in common."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size


def best_match(
    rows: Sequence[RowMemory], target: int, prompt: Sequence[int], spare: int, whole: bool = True, adapter: int = 0
) -> Match:
    """The row that holds most of a prompt's beginning: all that the row holds, or what is in order of it.

    Args:
        target: the row that the prompt gets: what is there already needs no copy.
        spare: slots that a row has beyond what prompt and answer need.
        whole: whether a row may be continued after blocks (not in the position scheme `predict`, whose positions
            while decoding differ from those of training).
        adapter: number of the adapter that the prompt is fed with; what was fed with another is of no use.
    """
    ids = np.asarray(prompt[:-1], np.int32)  # the last token is fed in any case: the first answer token follows from it
    matches = []
    for row, memory in enumerate(rows):
        common = common_prefix(memory.ids, ids) if memory.adapter == adapter else 0
        goes_on = common == memory.ids.size > 0 and memory.slots - common <= spare
        if goes_on and (whole or memory.in_order == memory.slots):
            match = Match(row, Beginning(common, memory.slots), memory.in_order)
        else:
            shared = min(common, memory.in_order)
            match = Match(row, Beginning(shared, shared), shared)
        if row == target or match.beginning.tokens >= MIN_COPIED:
            matches.append(match)
    return max(matches, key=lambda match: (match.beginning.tokens, match.source == target))


def row_to_keep_in(rows: Sequence[RowMemory], free: Collection[int], target: int) -> int | None:
    """The free row that takes over what `target` holds before it is given away: the one left longest ago; None: what
    `target` holds is not worth it, or was left longest ago itself.
    """
    oldest = min(free, key=lambda row: (rows[row].stamp, rows[row].ids.size > 0, row))
    kept = rows[target].ids.size >= MIN_COPIED and oldest != target
    return oldest if kept else None
