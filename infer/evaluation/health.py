"""Measures of the structure of an answer: whether it forks, and whether its branches are independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aspd_jax.blocks.checks import find_dependence
from aspd_jax.blocks.measures import Count, measure
from aspd_jax.blocks.spans import spans_of
from aspd_jax.layout import Titles
from aspd_jax.structure import Parallel, Structure, plain_text


def health(
    messages: Sequence[str], structure: Structure, finished: bool, count: Count, titles: Titles = "leads"
) -> dict[str, Any]:
    """Measure the structure of an answer; defects of its lists: `infer.evaluation.lists`.

    Args:
        messages: all earlier messages of the conversation.
        structure: structure of the answer.
        finished: whether the answer ended by itself; a truncated answer is not well formed.
        count: returns the number of tokens of a text.
        titles: form of the titles.

    Returns:
        forked: whether the answer has a block.
        well_formed: whether the answer parses and ended by itself.
        branches: number of branches of each block.
        dependent: number of blocks whose words indicate dependence (`aspd_jax.blocks.checks`).
        tokens, branch_tokens, title_tokens: token counts of the answer (protocol, section 7).
    """
    blocks = [item for item in structure if isinstance(item, Parallel)]
    text = plain_text(structure)
    spans = spans_of(structure, titles)
    counts = measure(text, spans, count)
    whole = all(len(block.branches) > 1 and all(b.title.strip() for b in block.branches) for block in blocks)
    return {
        "forked": bool(blocks),
        "well_formed": finished and whole,
        "branches": [len(block.branches) for block in blocks],
        "dependent": sum(find_dependence(messages, text, span) is not None for span in spans),
        "tokens": counts.tokens,
        "branch_tokens": counts.branch_tokens,
        "title_tokens": counts.title_tokens,
    }
