"""Controller of requests whose answer is log probabilities of known branches (protocol, section 5).

T tokens of a program, L tokens that get logits, R log probabilities that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aspd_jax.model.cache import Bucket
from infer.answers.answer import RequestOutput
from infer.control.controller import Controller
from infer.decode.guidance import RowGuidance
from infer.decode.scoring import MAX_READS, ScoreInputs, max_lanes
from infer.decode.state import STOP
from infer.request import Request, ScoredBranch


class KnownTokens:
    """Tokens of branches, one branch after the other, in packs that a sequence has room for.

    Args:
        branches: the branches.
        room: maximum tokens of a pack, at least those of the longest branch.

    Attributes:
        size: number of tokens.
        place: index of each token in its pack, int32 [size].
    """

    def __init__(self, branches: Sequence[ScoredBranch], room: int) -> None:
        sizes, starts, numbers, number, used = [len(branch.tokens) for branch in branches], [], [], 0, 0
        for size in sizes:
            number, used = (number, used) if used + size <= room else (0, 0)
            starts.append(used)
            number, used = number + 1, used + size
            numbers.append(number)
        self.size, firsts = sum(sizes), np.cumsum([0, *sizes[:-1]])
        self._tokens = np.concatenate([branch.tokens for branch in branches])
        self._offset = np.arange(self.size) - np.repeat(firsts, sizes)
        self._branch = np.repeat(numbers, sizes)
        self.place = np.repeat(starts, sizes) + self._offset
        places = [first + np.asarray(branch.places, int) for first, branch in zip(firsts, branches, strict=True)]
        self._read_at, self._read_id = np.concatenate(places), np.concatenate([of.ids for of in branches]).astype(int)

    def left(self, start: int) -> int:
        """Return the number of tokens from `start` to the end of its pack."""
        return int(np.append(np.flatnonzero(self.place[start + 1 :] == 0), self.size - start - 1)[0]) + 1

    def inputs(self, row: int, start: int, size: int, bucket: Bucket) -> ScoreInputs:
        """Return the inputs of a program for at most `size` tokens from `start` on, as many as it can read."""
        lanes, (first, last) = max_lanes(bucket), np.searchsorted(self._read_at, [start, start + size])
        at = self._read_at[first:last] - start
        used = np.unique(at)
        if used.size > lanes or at.size > MAX_READS:
            size = min([*used[lanes : lanes + 1], *at[MAX_READS : MAX_READS + 1]])
            at, used = at[at < size], used[used < size]
        own = slice(start, start + size)

        def padded(values: np.ndarray, length: int) -> np.ndarray:
            return np.pad(values, (0, length - values.size)).astype(np.int32)

        arrays: dict[str, Any] = {
            "row": np.int32(row),
            "kept": np.int32(self.place[start]),
            "size": np.int32(size),
            "tokens": padded(self._tokens[own], bucket.tokens),
            "offset": padded(self._offset[own], bucket.tokens),
            "branch": padded(self._branch[own], bucket.tokens),
            "lanes": padded(used, lanes),
            "reads": np.int32(at.size),
            "read_lane": padded(np.searchsorted(used, at), MAX_READS),
            "read_id": padded(self._read_id[first : first + at.size], MAX_READS),
        }
        return ScoreInputs(**arrays)


class Scoring(Controller):
    """Known branches of a request, whose parts are fed one after the other.

    Args:
        request: request with branches; its budget has room for a pack of them.
    """

    def __init__(self, request: Request) -> None:
        self.tokens = KnownTokens(request.scored, request.budget)

    def read(self, output: RequestOutput) -> RequestOutput:
        return replace(output, steps=len(output.scores), path=len(output.scores))

    def follow(self, output: RequestOutput) -> RowGuidance:
        ended = output.scored_tokens == self.tokens.size
        return RowGuidance(finish=STOP) if ended else RowGuidance(scores=True)
