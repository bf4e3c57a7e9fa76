"""Candidates by the form of an answer, and the checks of their blocks.

Results depend only on the configuration and on one answer (protocol, section 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aspd_jax.blocks.checks import find_defect, find_dependence
from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.leads import with_leads
from aspd_jax.blocks.measures import saved
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.spans import BlockSpan, structure_of
from aspd_jax.errors import StructureError
from aspd_jax.pipeline.work import Answer, Work
from aspd_jax.structure import plain_text


class Proposals(NamedTuple):
    """Candidates for the blocks of an answer.

    Attributes:
        candidates: well-formed candidates, each the blocks in order, with leads.
        rejected: rejected candidates, with `stage` and `reason`.
    """

    candidates: Sequence[tuple[BlockSpan, ...]] = ()
    rejected: Sequence[dict[str, str]] = ()


def propose_by_rules(work: Work, answer: Answer) -> Proposals:
    """Return the candidates that the form of an answer proposes, and the rejected ones; none for an empty answer.

    The plain text of a candidate is the answer.
    """
    text = answer.text
    if not text.strip():
        return Proposals()
    tokens, least = work.count(text), work.config.select.min_tokens
    if tokens < least:
        reason = f"{tokens} tokens, fewer than select.min_tokens ({least})"
        return Proposals(rejected=[{"stage": "short", "reason": reason}])
    kept: list[tuple[BlockSpan, ...]] = []
    rejected: list[dict[str, str]] = []
    for proposed in propose(text):
        try:
            for block in proposed:
                if any(block.start < end and start < block.end for start, end in regions_of(text).tags):
                    raise StructureError("a block reaches from one region into another, such as from a thought")
            blocks = tuple(with_leads(text, block) for block in proposed)
            if plain_text(structure_of(text, blocks)) != text:
                raise StructureError("its plain text is not the answer")
        except StructureError as error:
            rejected.append({"stage": "integrity", "reason": str(error)})
            continue
        kept.append(blocks)
    return Proposals(kept, rejected)


def check(work: Work, answer: Answer, block: BlockSpan) -> dict[str, str] | None:
    """Return the stage at which a block fails and the reason, or None: number of branches, saved steps and rules."""
    select = work.config.select
    if len(block.branches) > select.max_branches:
        reason = f"{len(block.branches)} branches, select.max_branches is {select.max_branches}"
        return {"stage": "select", "reason": reason}
    gain = saved(answer.text, block, work.count)
    if gain < select.min_saved:
        return {"stage": "select", "reason": f"it saves {gain} steps, select.min_saved is {select.min_saved}"}
    if why := find_dependence(answer.messages, answer.text, block):
        return {"stage": "check", "reason": why}
    if why := find_defect(answer.text, block):
        return {"stage": "defect", "reason": why}
    return None
