"""Measures of structured answers, and the choice of the best candidate (protocol, sections 7 and 8)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aspd_jax.blocks.markers import SPACELESS
from aspd_jax.blocks.spans import BlockSpan

Count = Callable[[str], int]
# Runs of letters, and single digits, symbols and characters of scripts without spaces.
_PIECES = re.compile(rf"[{SPACELESS}]|[^\W\d_]+|\d|[^\w\s]")
TAGS = 2  # tags of a title: `<|title|>` and `<|/title|>`


def estimate_tokens(text: str) -> int:
    """Return an estimate of the number of tokens of a text from its words, for use without a tokenizer."""
    pieces = _PIECES.findall(text)
    return len(pieces) + sum([(len(piece) - 1) // 6 for piece in pieces if len(piece) > 6])


class Measures(NamedTuple):
    """Measures of one answer; a plain answer has no blocks.

    Attributes:
        tokens: content tokens of the answer.
        branch_tokens: tokens of all branches.
        title_tokens: tokens of the titles, which are part of `branch_tokens` if they are leads.
        critical_path: number of sequential steps plus one; `tokens + 1` for a serial answer.
        blocks, branches: numbers of blocks and branches.
    """

    tokens: int
    branch_tokens: int = 0
    title_tokens: int = 0
    critical_path: int = 0
    blocks: int = 0
    branches: int = 0

    @property
    def parallelism(self) -> float:
        """Return DP: branch tokens divided by all tokens."""
        return self.branch_tokens / max(1, self.tokens)

    @property
    def mean_branches(self) -> float:
        """Return ABN: mean number of branches per block."""
        return self.branches / max(1, self.blocks)

    @property
    def efficiency(self) -> float:
        """Return PE: branch tokens without titles divided by branch tokens."""
        return (self.branch_tokens - self.title_tokens) / max(1, self.branch_tokens)

    @property
    def ideal_speedup(self) -> float:
        """Return the ideal speed-up: content tokens divided by critical path."""
        return self.tokens / max(1, self.critical_path)


def measure(answer: str, blocks: Sequence[BlockSpan], count: Count) -> Measures:
    """Return the measures of an answer with blocks; `count` returns the tokens of a text."""
    costs = [_cost(answer, block, count) for block in blocks]
    edges = [0, *(edge for block in blocks for edge in (block.start, block.end)), len(answer)]
    serial = sum(count(answer[first:last]) for first, last in zip(edges[::2], edges[1::2], strict=True))
    in_branches = sum(cost.tokens for cost in costs)
    return Measures(
        tokens=serial + in_branches,
        branch_tokens=in_branches,
        title_tokens=sum(cost.titles for cost in costs),
        critical_path=1 + serial + sum(cost.steps for cost in costs),
        blocks=len(blocks),
        branches=sum(len(block.branches) for block in blocks),
    )


def saved(answer: str, block: BlockSpan, count: Count) -> int:
    """Return the steps that a block saves; negative if its titles cost more than parallel decoding saves."""
    cost = _cost(answer, block, count)
    return cost.tokens - cost.steps


class _Cost(NamedTuple):
    """Cost of a block: tokens of its text, tokens of its titles, and steps that have to follow one another."""

    tokens: int
    titles: int
    steps: int


def _cost(answer: str, block: BlockSpan, count: Count) -> _Cost:
    """Return the cost of a block.

    With names, the steps are all titles with their tags, `<|para|>`, and the longest branch with its closing tag. Leads
    have a tag each, and are part of the text; their number, with its tags, comes before them.
    """
    texts = [answer[branch.start : branch.end] for branch in block.branches]
    if not all(branch.lead for branch in block.branches):
        lengths, titles = [count(text) for text in texts], sum(count(branch.title) for branch in block.branches)
        return _Cost(sum(lengths), titles, titles + TAGS * len(lengths) + 1 + max(lengths) + 1)
    leads = sum(count(text[: branch.lead]) for text, branch in zip(texts, block.branches, strict=True))
    bodies = [count(text[branch.lead :]) for text, branch in zip(texts, block.branches, strict=True)]
    number = count(str(len(bodies)))
    return _Cost(leads + sum(bodies), leads, TAGS + number + leads + len(bodies) + max(bodies) + 1)


def best(measures: Sequence[Measures]) -> int | None:
    """Return the index of the best candidate (`ranked`); None if no candidate has a block."""
    first = ranked(measures)[:1]
    return first[0] if first and measures[first[0]].blocks else None


def ranked(measures: Sequence[Measures]) -> list[int]:
    """Return the indices of answers from the best one: by parallelism, mean branches and efficiency, in this order.

    Equal ones, such as those without a block, keep their order.
    """
    values = [(bool(m.blocks), m.parallelism, m.mean_branches, m.efficiency) for m in measures]
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)
