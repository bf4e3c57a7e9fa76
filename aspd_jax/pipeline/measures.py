"""What a structured answer saves, and which candidate is best (protocol, sections 7 and 8)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aspd_jax.pipeline.markers import SPACELESS
from aspd_jax.pipeline.spans import BlockSpan

Count = Callable[[str], int]
# Runs of letters, digits, or single other characters; every character of scripts without spaces counts.
_PIECES = re.compile(rf"[{SPACELESS}]|[^\W\d_]+|\d|[^\w\s]")
TAGS = 2  # `<|title|>` and `<|/title|>`


def estimate_tokens(text: str) -> int:
    """Tokens of a text, by its words: for where no tokenizer is given."""
    return sum(1 + (len(piece) - 1) // 6 for piece in _PIECES.findall(text))


class Measures(NamedTuple):
    """Of one answer; a plain one has no blocks.

    Attributes:
        tokens: of the answer.
        branch_tokens: of all branches, title_tokens of their titles.
        critical_path: passes of which each waits for the one before; the serial answer's is `tokens + 1`.
        blocks, branches: how many.
    """

    tokens: int
    branch_tokens: int = 0
    title_tokens: int = 0
    critical_path: int = 0
    blocks: int = 0
    branches: int = 0

    @property
    def parallelism(self) -> float:
        """DP: branch tokens by all tokens."""
        return self.branch_tokens / max(1, self.tokens)

    @property
    def mean_branches(self) -> float:
        """ABN."""
        return self.branches / max(1, self.blocks)

    @property
    def efficiency(self) -> float:
        """PE."""
        return (self.branch_tokens - self.title_tokens) / max(1, self.branch_tokens)

    @property
    def ideal_speedup(self) -> float:
        """Content tokens by critical path."""
        return self.tokens / max(1, self.critical_path)


def measure(answer: str, blocks: Sequence[BlockSpan], count: Count) -> Measures:
    """Count the tokens of an answer's stretches."""
    serial, critical, in_branches, in_titles, place = 0, 1, 0, 0, 0
    for block in blocks:
        serial += count(answer[place : block.start])
        lengths, titles = _lengths(answer, block, count)
        in_branches += sum(lengths)
        in_titles += sum(titles)
        critical += passes_of(lengths, titles)
        place = block.end
    serial += count(answer[place:])
    return Measures(
        tokens=serial + in_branches,
        branch_tokens=in_branches,
        title_tokens=in_titles,
        critical_path=critical + serial,
        blocks=len(blocks),
        branches=sum(len(block.branches) for block in blocks),
    )


def passes_of(lengths: Sequence[int], titles: Sequence[int]) -> int:
    """Critical path of a block: titles, `<|para|>`, and the longest branch with its closing tag."""
    return sum(titles) + TAGS * len(titles) + 1 + max(lengths) + 1


def saved(answer: str, block: BlockSpan, count: Count) -> int:
    """Passes that a block saves; negative where its titles cost more than decoding side by side brings."""
    lengths, titles = _lengths(answer, block, count)
    return sum(lengths) - passes_of(lengths, titles)


def _lengths(answer: str, block: BlockSpan, count: Count) -> tuple[list[int], list[int]]:
    """Tokens of every branch, and of its title."""
    return (
        [count(answer[branch.start : branch.end]) for branch in block.branches],
        [count(branch.title) for branch in block.branches],
    )


def best(measures: Sequence[Measures]) -> int | None:
    """The candidate with the highest parallelism, then mean branches, then efficiency; the first of equals."""
    order = [(m.parallelism, m.mean_branches, m.efficiency, -place) for place, m in enumerate(measures) if m.blocks]
    return -max(order)[3] if order else None
