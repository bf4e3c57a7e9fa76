"""Entries: the lines of the sets and the figures of the report that one record contributes.

An entry depends on the configuration and on its record only. Decisions that depend on
other records are in `sets`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from aspd_jax.blocks.checks import asked_for
from aspd_jax.blocks.measures import Measures, best, measure
from aspd_jax.blocks.spans import BlockSpan, structure_of
from aspd_jax.pipeline.rule_stages import check, propose_by_rules
from aspd_jax.pipeline.work import Answer, Work, answers_of
from aspd_jax.sources import Conversation, Unreadable
from aspd_jax.structure import to_json


class Selection(NamedTuple):
    """The best surviving candidate of an answer.

    Attributes:
        blocks: its blocks; empty: the answer is serial.
        measures: measures of the answer.
        proposed: number of blocks of all candidates.
        rejected: rejected candidates and blocks, with `stage` and `reason`.
    """

    blocks: tuple[BlockSpan, ...]
    measures: Measures
    proposed: int
    rejected: list[dict[str, Any]]


class Entry(NamedTuple):
    """Contribution of one record to the results, before it is compared with others. Its JSON form is the array.

    Attributes:
        base: its `id` and `line`, for lines of `rejected.jsonl`.
        refused: stage that refuses the record: `read` or `record`; empty: it may be in the sets.
        reason: reason why it is refused.
        rejected: lines of `rejected.jsonl` about its messages.
        plain, structured: its lines of the sets.
        defect: defect of a list, if the record has no block; otherwise empty.
        draw: random number of 32 bits from the text, for `select.serial_ratio`.
        question: hash of all messages before the last answer.
        forked: whether an answer has a block.
        serial: whether the record may be in the sets without a block: it is of such a kind and has no list with a
            defect.
        selections: selections of its answers, without blocks.
    """

    base: dict[str, Any]
    refused: str = ""
    reason: str = ""
    rejected: str = ""
    plain: str = ""
    structured: str = ""
    defect: str = ""
    draw: int = 0
    question: str = ""
    forked: bool = False
    serial: bool = False
    selections: Sequence[Selection] = ()

    @property
    def number(self) -> int:
        """Return the number of the record."""
        return int(self.base["line"])

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Entry:
        """Return the entry of an array."""
        *fields, selections = values
        chosen = [Selection((), Measures(*measures), *rest) for _, measures, *rest in selections]
        return cls(*fields)._replace(selections=chosen)


def entry_of(work: Work, record: Conversation | Unreadable) -> Entry:
    """Return the entry of a record."""
    base: dict[str, Any] = {"id": record.id, "line": record.number}
    if isinstance(record, Unreadable):
        return Entry(base, "read", record.reason)
    if repetitive := work.repetitive(record):
        return Entry(base, "record", repetitive)
    answers = list(answers_of(record))
    proposals = [propose_by_rules(work, answer) for _, answer in answers]
    for (_, answer), proposed in zip(answers, proposals, strict=True):
        if unfit := _unfit(work, answer, proposed.candidates):
            return Entry(base, "record", unfit)
    selections = [_select(work, answer, *proposed) for (_, answer), proposed in zip(answers, proposals, strict=True)]
    return _entry(work, record, base, answers, selections)


def line(value: dict[str, Any]) -> str:
    """Return a line of JSONL."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def _unfit(work: Work, answer: Answer, candidates: Sequence[tuple[BlockSpan, ...]]) -> str | None:
    """Return the reason why the record of an answer belongs to neither set, whatever its structure, or None."""
    if work.config.select.as_asked and (asked := asked_for(answer.messages)):
        sizes = {len(block.branches) for candidate in candidates for block in candidate}
        if sizes and asked not in sizes:
            return f"its question asks for {asked}, and its blocks have {', '.join(map(str, sorted(sizes)))}"
    return None


def _select(
    work: Work, answer: Answer, candidates: Sequence[tuple[BlockSpan, ...]], refused: Sequence[dict[str, Any]]
) -> Selection:
    rejected = list(refused)
    surviving: list[tuple[BlockSpan, ...]] = []
    for candidate in candidates:
        both = [(block, check(work, answer, block)) for block in candidate]
        surviving.append(tuple(block for block, failure in both if failure is None))
        for block, failure in both:
            if failure is not None:
                titles = [branch.title for branch in block.branches]
                rejected.append(failure | {"start": block.start, "end": block.end, "titles": titles})
    measures = [measure(answer.text, blocks, work.count) for blocks in surviving]
    chosen = best(measures)
    return Selection(
        () if chosen is None else surviving[chosen],
        measure(answer.text, (), work.count) if chosen is None else measures[chosen],
        sum(map(len, candidates)),
        rejected,
    )


def _entry(
    work: Work,
    record: Conversation,
    base: dict[str, Any],
    answers: Sequence[tuple[int, Answer]],
    selections: Sequence[Selection],
) -> Entry:
    select = work.config.select
    rejected = []
    if record.unanswered:
        rejected.append({"message": len(record.messages), "stage": "read", "reason": "no answer follows"})
    plain: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in record.messages]
    structured, details = list(plain), []
    for (place, answer), chosen in zip(answers, selections, strict=True):
        rejected += [{"message": place} | rejection for rejection in chosen.rejected]
        structured[place] = {"role": "assistant", "structure": to_json(structure_of(answer.text, chosen.blocks))}
        speedup = {"ideal_speedup": round(chosen.measures.ideal_speedup, 3)}
        measures = chosen.measures._asdict() | speedup
        details.append({"message": place, "measures": measures, "rejected": chosen.rejected})
    forked = any(chosen.blocks for chosen in selections)
    rejections = [rejection for chosen in selections for rejection in chosen.rejected]
    defects = [rejection["reason"] for rejection in rejections if rejection["stage"] == "defect"]
    dependent = any(rejection["stage"] == "check" for rejection in rejections)
    serial = not select.serial_kinds or record.kind in select.serial_kinds or dependent
    question = hashlib.sha256(json.dumps(record.messages[:-1]).encode()).hexdigest()
    return Entry(
        base,
        rejected="".join(line(base | rejection) for rejection in rejected),
        plain=line(base | {"messages": plain}),
        structured=line(base | {"messages": structured, "pipeline": details}),
        defect=defects[0] if defects and not forked else "",
        draw=crc32(json.dumps(plain).encode()) if select.serial_ratio else 0,
        question=question,
        forked=forked,
        serial=serial and not defects,
        selections=[chosen._replace(blocks=()) for chosen in selections],
    )
