"""Measures of the structure of an answer: whether it forks, and whether its branches are independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aspd_jax.blocks.checks import find_dependence
from aspd_jax.blocks.measures import Count, measure
from aspd_jax.blocks.spans import spans_of
from aspd_jax.layout import Titles
from aspd_jax.structure import Parallel, Structure, plain_text


@dataclass(frozen=True)
class Health:
    """Measures of the structure of one answer; defects of its lists: `infer.evaluation.lists`.

    Attributes:
        forked: whether the answer has a block.
        well_formed: whether the answer parses and ended by itself.
        branches: number of branches of each block.
        dependent: number of blocks whose words indicate dependence (`aspd_jax.blocks.checks`).
        tokens, branch_tokens, title_tokens: token counts of the answer (protocol, section 7).
    """

    forked: bool
    well_formed: bool
    branches: tuple[int, ...]
    dependent: int
    tokens: int
    branch_tokens: int
    title_tokens: int


def health(
    messages: Sequence[str], structure: Structure, finished: bool, count: Count, titles: Titles = "leads"
) -> Health:
    """Measure the structure of an answer.

    Args:
        messages: all earlier messages of the conversation.
        structure: structure of the answer.
        finished: whether the answer ended by itself; a truncated answer is not well formed.
        count: returns the number of tokens of a text.
        titles: form of the titles.
    """
    blocks = [item for item in structure if isinstance(item, Parallel)]
    text = plain_text(structure)
    spans = spans_of(structure, titles)
    counts = measure(text, spans, count)
    whole = all(len(block.branches) > 1 and all(b.title.strip() for b in block.branches) for block in blocks)
    return Health(
        forked=bool(blocks),
        well_formed=finished and whole,
        branches=tuple(len(block.branches) for block in blocks),
        dependent=sum(find_dependence(messages, text, span) is not None for span in spans),
        tokens=counts.tokens,
        branch_tokens=counts.branch_tokens,
        title_tokens=counts.title_tokens,
    )
