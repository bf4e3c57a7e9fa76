"""Measures of the structure of an answer: whether it forks, and whether its branches are independent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from aspd_jax.pipeline.checks import find_dependence
from aspd_jax.pipeline.markers import marker_of
from aspd_jax.pipeline.measures import Count, measure
from aspd_jax.pipeline.spans import spans_of
from aspd_jax.structure import Parallel, Structure, plain_text

GRAM = 5  # words in a row


@dataclass(frozen=True)
class Health:
    """Measures of the structure of one answer.

    Attributes:
        forked: whether the answer has a block.
        well_formed: whether the answer parses and ended by itself.
        branches: number of branches of each block.
        dependent: number of blocks whose words indicate dependence (`aspd_jax.pipeline.checks`).
        numbered: number of branches that begin with a number such as `3.`.
        misnumbered: number of those whose number does not follow that of the previous branch.
        repeated: share of five-word sequences of a branch that also occur in a sibling, mean over branches; None: no
            branch has five words.
        tokens, branch_tokens, title_tokens: token counts of the answer (protocol, section 7).
    """

    forked: bool
    well_formed: bool
    branches: tuple[int, ...]
    dependent: int
    numbered: int
    misnumbered: int
    repeated: float | None
    tokens: int
    branch_tokens: int
    title_tokens: int


def health(question: str, structure: Structure, finished: bool, count: Count) -> Health:
    """Measure the structure of an answer.

    Args:
        question: all earlier messages of the conversation.
        structure: structure of the answer.
        finished: whether the answer ended by itself; a truncated answer is not well formed.
        count: returns the number of tokens of a text.
    """
    blocks = [item for item in structure if isinstance(item, Parallel)]
    text = plain_text(structure)
    spans = spans_of(structure)
    counts = measure(text, spans, count)
    shares = [share for block in blocks for share in _repeated([branch.text for branch in block.branches])]
    numbers = [number for block in blocks for number in _numbers([branch.text for branch in block.branches])]
    whole = all(len(block.branches) > 1 and all(b.title.strip() for b in block.branches) for block in blocks)
    return Health(
        forked=bool(blocks),
        well_formed=finished and whole,
        branches=tuple(len(block.branches) for block in blocks),
        dependent=sum(find_dependence(question, text, span) is not None for span in spans),
        numbered=len(numbers),
        misnumbered=sum(not right for right in numbers),
        repeated=sum(shares) / len(shares) if shares else None,
        tokens=counts.tokens,
        branch_tokens=counts.branch_tokens,
        title_tokens=counts.title_tokens,
    )


def _numbers(texts: Sequence[str]) -> list[bool]:
    """Return, for every branch that begins with a number, whether it is the expected number."""
    right, before = [], None
    for text in texts:
        marker = marker_of(text.strip())
        number = marker.number if marker else None
        if number is not None:
            right.append(before is None or number == before + 1)
        before = number if before is None or number is None else before + 1
    return right


def _repeated(texts: Sequence[str]) -> list[float]:
    """Return, for every branch of at least `GRAM` words, the share of its n-grams that occur in a sibling."""
    counters = [Counter(_grams(text)) for text in texts]
    shares = []
    for counter in counters:
        if not counter:
            continue
        others = set().union(*(other for other in counters if other is not counter))
        shares.append(sum(n for gram, n in counter.items() if gram in others) / counter.total())
    return shares


def _grams(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)]
