"""Structure of what a model writes: when it forks, and whether its branches are what branches should be."""

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
    """Of one answer.

    Attributes:
        forked: whether it has a block.
        well_formed: whether it parses and ended by itself.
        branches: of each block.
        dependent: blocks whose words tell against them (`aspd_jax.pipeline.checks`).
        numbered, misnumbered: branches that begin with a number such as `3.`, and those of them whose number is not one
            more than that of the branch before.
        repeated: share of a branch's runs of five words that a sibling has too, mean over branches; None: no runs.
        tokens, branch_tokens, title_tokens: of the answer, as they are counted (protocol, section 7).
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
    """Look at an answer.

    Args:
        question: everything that was said before it.
        finished: whether it ended by itself: an answer that was cut off is not well formed.
        count: tokens of a text.
    """
    blocks = [item for item in structure if isinstance(item, Parallel)]
    text = plain_text(structure)
    spans = spans_of(structure)
    of = measure(text, spans, count)
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
        tokens=of.tokens,
        branch_tokens=of.branch_tokens,
        title_tokens=of.title_tokens,
    )


def _numbers(texts: Sequence[str]) -> list[bool]:
    """For every branch that begins with a number: whether it is the one that is due."""
    right, before = [], None
    for text in texts:
        marker = marker_of(text.strip())
        number = marker.number if marker else None
        if number is not None:
            right.append(before is None or number == before + 1)
        before = number if before is None or number is None else before + 1
    return right


def _repeated(texts: Sequence[str]) -> list[float]:
    """For every branch that is long enough: the share of its runs of words that some sibling has."""
    grams = [Counter(_grams(text)) for text in texts]
    shares = []
    for own in grams:
        if not own:
            continue
        others = set().union(*(other for other in grams if other is not own))
        shares.append(sum(n for gram, n in own.items() if gram in others) / own.total())
    return shares


def _grams(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)]
