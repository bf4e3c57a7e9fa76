"""Candidates of the teacher, and its votes, for one answer (protocol, section 7, stages 1 to 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from aspd_jax.errors import DataError, StructureError
from aspd_jax.pipeline.align import Aligned, Piece, align
from aspd_jax.pipeline.spans import BlockSpan
from aspd_jax.pipeline.teacher import Teacher


class Annotation(NamedTuple):
    """One candidate of the teacher: its spans, and its own wording where that differs from the answer's."""

    blocks: tuple[BlockSpan, ...]
    wording: str | None


class Vote(NamedTuple):
    """For or against, and why."""

    in_favour: bool
    reason: str


async def annotate(teacher: Teacher, question: str, answer: str) -> tuple[list[Annotation], list[str]]:
    """As many candidates as asked for, and why some of them are rejected.

    Raises:
        Unanswered: the endpoint gave no reply.
    """

    async def one(number: int) -> Annotation | str:
        try:
            pieces = await teacher.ask("annotate", {"question": question, "answer": answer}, number, read_pieces)
            aligned: Aligned = align(answer, pieces)
        except (DataError, StructureError) as error:
            return str(error)
        return Annotation(aligned.blocks, None if aligned.exact else "".join(piece.text for piece in pieces))

    found: list[Annotation] = []
    rejected: list[str] = []
    for outcome in await asyncio.gather(*(one(number) for number in range(teacher.settings.candidates))):
        if isinstance(outcome, str):
            rejected.append(outcome)
        elif outcome not in found:
            found.append(outcome)
    return found, rejected


def read_pieces(value: Any) -> list[Piece]:
    """Pieces of a reply to `annotate`.

    Raises:
        DataError: it has another form.
    """
    items = value.get("items") if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise DataError('the reply has no list "items"')
    pieces, block = [], 0
    for number, item in enumerate(items):
        branches = item.get("branches") if isinstance(item, dict) else None
        text = item.get("text", "") if isinstance(item, dict) else None
        if not isinstance(item, dict) or item.get("type") not in ("serial", "parallel") or not isinstance(text, str):
            raise DataError(f'item {number} of the reply is neither "serial" with a text nor "parallel"')
        if item["type"] == "serial":
            pieces.append(Piece(0, "", text))
            continue
        block += 1
        if not isinstance(branches, list) or not all(
            isinstance(b, dict) and isinstance(b.get("title"), str) and isinstance(b.get("text"), str) for b in branches
        ):
            raise DataError(f"item {number} of the reply has no branches with title and text")
        pieces += [Piece(block, branch["title"], branch["text"]) for branch in branches]
    return pieces


async def independence(teacher: Teacher, question: str, answer: str, blocks: Sequence[BlockSpan]) -> list[Vote]:
    """Whether all votes take each block for independent; the reason of the first that does not.

    Raises:
        DataError: a vote had no right form.
        Unanswered: the endpoint gave no reply.
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
            raise DataError(f"a vote must hold {len(blocks)} groups, as there are blocks")
        if not all(isinstance(one, dict) and isinstance(one.get("independent"), bool) for one in found):
            raise DataError('a vote must say "independent" for every group')
        return [Vote(one["independent"], str(one.get("reason", ""))) for one in found]

    values = {"question": question, "answer": answer, "groups": groups}
    ballots = await asyncio.gather(
        *(teacher.ask("independence", values, number, read) for number in range(teacher.settings.votes))
    )
    return [_all_agree(votes) for votes in zip(*ballots, strict=True)] if ballots else [Vote(True, "")] * len(blocks)


async def agreement(teacher: Teacher, question: str, answer: str, wording: str) -> Vote:
    """Whether all votes find the same in an answer and in what the teacher wrote for it.

    Raises:
        DataError: a vote had no right form.
        Unanswered: the endpoint gave no reply.
    """

    def read(value: Any) -> Vote:
        if not isinstance(value, dict) or not isinstance(value.get("same"), bool):
            raise DataError('a vote must say "same"')
        return Vote(value["same"], str(value.get("reason", "")))

    values = {"question": question, "answer": answer, "candidate": wording}
    votes = (teacher.ask("agreement", values, number, read) for number in range(teacher.settings.votes))
    return _all_agree(await asyncio.gather(*votes))


def _all_agree(votes: Sequence[Vote]) -> Vote:
    against = [vote for vote in votes if not vote.in_favour]
    return Vote(not against, f"{len(against)} of {len(votes)} votes against: {against[0].reason}" if against else "")
