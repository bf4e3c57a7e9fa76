"""Candidates and votes of the teacher for one answer (protocol, section 7, stages 1 to 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from aspd_jax.blocks.spans import BlockSpan
from aspd_jax.errors import DataError, StructureError
from aspd_jax.pipeline.pieces import Group, Part, block_of, numbered
from aspd_jax.pipeline.teacher import Teacher


class Vote(NamedTuple):
    """A vote on the independence of a block.

    Attributes:
        in_favour: whether the branches are independent.
        reason: reason given by the teacher.
    """

    in_favour: bool
    reason: str


async def annotate(teacher: Teacher, question: str, answer: str) -> tuple[list[tuple[BlockSpan, ...]], list[str]]:
    """Return candidates for an answer, and the reasons why replies and groups were rejected.

    Candidates without a block and repeated ones are dropped.

    Raises:
        Unanswered: the endpoint did not reply.
    """
    values = {"question": question, "answer": numbered(answer)}
    candidates: list[tuple[BlockSpan, ...]] = []
    rejected: list[str] = []

    async def ask(number: int) -> list[Group] | str:
        try:
            return await teacher.ask("annotate", values, number, read_groups)
        except DataError as error:
            return str(error)

    for groups in await asyncio.gather(*(ask(number) for number in range(teacher.settings.candidates))):
        if isinstance(groups, str):
            rejected.append(groups)
            continue
        blocks: list[BlockSpan] = []
        for group in groups:
            try:
                block = block_of(answer, group)
                if blocks and block.start < blocks[-1].end:
                    raise StructureError(f"the group of {block.branches[0].title!r} begins inside the group before it")
                blocks.append(block)
            except StructureError as error:
                rejected.append(str(error))
        if blocks and tuple(blocks) not in candidates:
            candidates.append(tuple(blocks))
    return candidates, rejected


def read_groups(value: Any) -> list[Group]:
    """Return the groups of a reply to `annotate`.

    Raises:
        DataError: the reply has another form.
    """
    groups = value.get("groups") if isinstance(value, dict) else None
    if not isinstance(groups, list):
        raise DataError('reply: expected a list "groups", got none')
    parsed = []
    for number, group in enumerate(groups):
        parts = group.get("parts") if isinstance(group, dict) else None
        if not isinstance(parts, list) or not _is_number(group.get("last")):
            raise DataError(f'group {number} of the reply has no list "parts" with the number of its "last" piece')
        if not all(
            isinstance(p, dict) and _is_number(p.get("first")) and isinstance(p.get("title"), str) for p in parts
        ):
            raise DataError(
                f'group {number} of the reply has a part without the number of its "first" piece or a title'
            )
        parsed.append(Group(tuple(Part(part["first"], part["title"].strip()) for part in parts), group["last"]))
    return parsed


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def independence(teacher: Teacher, question: str, answer: str, blocks: Sequence[BlockSpan]) -> list[Vote]:
    """Return a vote per block, in favour if all votes of the teacher are; otherwise with the first reason against.

    Raises:
        DataError: a vote does not have the required form.
        Unanswered: the endpoint did not reply.
    """
    groups = "\n".join(
        f'<group number="{number}">\n'
        + "\n".join(f"<part title={b.title!r}>\n{answer[b.start : b.end]}\n</part>" for b in block.branches)
        + "\n</group>"
        for number, block in enumerate(blocks, 1)
    )

    def read(value: Any) -> list[Vote]:
        found = value.get("groups") if isinstance(value, dict) else None
        if not isinstance(found, list) or len(found) != len(blocks):
            raise DataError(f"vote: expected {len(blocks)} groups, one per block")
        if not all(isinstance(one, dict) and isinstance(one.get("independent"), bool) for one in found):
            raise DataError('vote: expected "independent" for every group')
        return [Vote(one["independent"], str(one.get("reason", ""))) for one in found]

    values = {"question": question, "answer": answer, "groups": groups}
    ballots = await asyncio.gather(
        *(teacher.ask("independence", values, number, read) for number in range(teacher.settings.votes))
    )
    return [_all_agree(votes) for votes in zip(*ballots, strict=True)] if ballots else [Vote(True, "")] * len(blocks)


def _all_agree(votes: Sequence[Vote]) -> Vote:
    against = [vote for vote in votes if not vote.in_favour]
    return Vote(not against, f"{len(against)} of {len(votes)} votes against: {against[0].reason}" if against else "")
