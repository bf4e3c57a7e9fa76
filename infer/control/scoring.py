"""Controller of requests whose answer is log probabilities of known branches (protocol, section 5).

B rows, T tokens of a program, L tokens that get logits, R log probabilities that are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aspd_jax.model.cache import Bucket
from aspd_jax.trees import zeros
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
        tokens, offset, branch, place: see `ScoreInputs`, int32 [size]; a pack begins at place 0.
        read_at, read_id: index of the token after which each log probability is read, and its token id.
    """

    def __init__(self, branches: Sequence[ScoredBranch], room: int) -> None:
        sizes, starts, numbers, number, used = [len(branch.tokens) for branch in branches], [], [], 0, 0
        for size in sizes:
            number, used = (number, used) if used + size <= room else (0, 0)
            starts.append(used)
            number, used = number + 1, used + size
            numbers.append(number)
        self.size, firsts = sum(sizes), np.cumsum([0, *sizes[:-1]])
        self.tokens = np.concatenate([branch.tokens for branch in branches])
        self.offset = np.arange(self.size) - np.repeat(firsts, sizes)
        self.branch, self.place = np.repeat(numbers, sizes), np.repeat(starts, sizes) + self.offset
        places = [first + np.asarray(branch.places, int) for first, branch in zip(firsts, branches, strict=True)]
        self.read_at, self.read_id = np.concatenate(places), np.concatenate([of.ids for of in branches]).astype(int)

    def left(self, start: int) -> int:
        """Return the number of tokens from `start` to the end of its pack."""
        return int(np.append(np.flatnonzero(self.place[start + 1 :] == 0), self.size - start - 1)[0]) + 1


def score_inputs(
    parts: Mapping[int, tuple[KnownTokens, int, int]], batch: int, bucket: Bucket
) -> tuple[ScoreInputs, dict[int, tuple[int, int]]]:
    """Return the inputs of a program, and the numbers of tokens and log probabilities of each row in them.

    Args:
        parts: known tokens, the index of the first and the number of tokens to feed, by row; the bucket holds them all.
            A row feeds fewer where the program cannot read more.
        batch: B.
        bucket: sizes of the program.
    """
    lanes, fed = max_lanes(bucket), {}
    made: Any = zeros(ScoreInputs, {"T": bucket.tokens, "L": lanes, "R": MAX_READS}, np)
    made.row.fill(batch)
    token = lane = read = 0
    for row, (known, start, size) in sorted(parts.items()):
        first = np.searchsorted(known.read_at, start)
        at = known.read_at[first : np.searchsorted(known.read_at, start + size)] - start
        size = min([size, *np.unique(at)[lanes - lane :][:1], *at[MAX_READS - read :][:1]])
        at = at[at < size]
        used, index = np.unique(at, return_inverse=True)
        made.row[token : token + size] = row
        for name in ("place", "tokens", "offset", "branch"):
            getattr(made, name)[token : token + size] = getattr(known, name)[start : start + size]
        made.lanes[lane : lane + used.size] = token + used
        made.read_lane[read : read + at.size] = lane + index
        made.read_id[read : read + at.size] = known.read_id[first : first + at.size]
        fed[row] = int(size), at.size
        token, lane, read = token + size, lane + used.size, read + at.size
    return made, fed


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
