"""Entries: the lines of the sets and the figures of the report that one record contributes (protocol, section 7).

The form of an answer proposes candidates; the checks leave those of their blocks that may be taught, and the best
candidate is selected. An entry depends on the configuration and on its record only. Decisions that depend on other
records are in `sets`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from aspd_jax.blocks.checks import asked_for, find_defects, find_dependence, repetition
from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.measures import Count, Measures, best, measure, saved
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.spans import BlockSpan, structure_of, with_leads
from aspd_jax.errors import StructureError
from aspd_jax.pipeline.data_config import SelectSection
from aspd_jax.sources import Conversation, Unreadable
from aspd_jax.structure import to_json


class Answer(NamedTuple):
    """An answer to process.

    Attributes:
        place: index of its message.
        messages: the messages before it.
        text: text of the answer.
    """

    place: int
    messages: tuple[str, ...]
    text: str


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


def entry_of(select: SelectSection, count: Count, record: Conversation | Unreadable) -> Entry:
    """Return the entry of a record.

    Args:
        select: configuration.
        count: function that counts the tokens of a text.
        record: the record.
    """
    base: dict[str, Any] = {"id": record.id, "line": record.number}
    if isinstance(record, Unreadable):
        return Entry(base, "read", record.reason)
    texts = [content for _, content in record.messages]
    answers = [Answer(place, tuple(texts[:place]), texts[place]) for place in record.answers]
    for answer in answers if select.max_repetition < 1 else ():
        if (repeated := repetition(answer.text)) > select.max_repetition:
            allowed = f"at most {select.max_repetition:.0%} may"
            return Entry(base, "record", f"{repeated:.0%} of its words repeat what it said before, {allowed}")
    proposals = [propose_by_rules(select, count, answer.text) for answer in answers]
    for answer, (candidates, _) in zip(answers, proposals, strict=True):
        sizes = {len(block.branches) for candidate in candidates for block in candidate}
        asked = asked_for(answer.messages) if select.as_asked else None
        if asked and sizes and asked not in sizes:
            found = ", ".join(map(str, sorted(sizes)))
            return Entry(base, "record", f"its question asks for {asked}, and its blocks have {found}")
    pairs = zip(answers, proposals, strict=True)
    return _entry(select, record, base, answers, [_select(select, count, answer, *found) for answer, found in pairs])


def line(value: dict[str, Any]) -> str:
    """Return a line of JSONL."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def propose_by_rules(
    select: SelectSection, count: Count, text: str
) -> tuple[list[tuple[BlockSpan, ...]], list[dict[str, str]]]:
    """Return the candidates for the blocks of an answer that its form proposes; none for an empty answer.

    Returns:
        Well-formed candidates, whose plain text is the answer, each the blocks in order, with leads; and the rejected
        ones, with `stage` and `reason`.
    """
    kept: list[tuple[BlockSpan, ...]] = []
    if not text.strip():
        return kept, []
    if (tokens := count(text)) < select.min_tokens:
        reason = f"{tokens} tokens, fewer than select.min_tokens ({select.min_tokens})"
        return kept, [{"stage": "short", "reason": reason}]
    rejected: list[dict[str, str]] = []
    for proposed in propose(text):
        try:
            for block in proposed:
                if any(block.start < end and start < block.end for start, end in regions_of(text).tags):
                    raise StructureError("a block reaches from one region into another, such as from a thought")
            blocks = tuple(with_leads(text, block) for block in proposed)
            structure_of(text, blocks)  # raises if they are not the whole answer, in order
        except StructureError as error:
            rejected.append({"stage": "integrity", "reason": str(error)})
            continue
        kept.append(blocks)
    return kept, rejected


def check(select: SelectSection, count: Count, answer: Answer, block: BlockSpan) -> dict[str, str] | None:
    """Return the stage at which a block fails and the reason, or None: number of branches, saved steps and rules."""
    if len(block.branches) > select.max_branches:
        reason = f"{len(block.branches)} branches, select.max_branches is {select.max_branches}"
        return {"stage": "select", "reason": reason}
    gain = saved(answer.text, block, count)
    if gain < select.min_saved:
        return {"stage": "select", "reason": f"it saves {gain} steps, select.min_saved is {select.min_saved}"}
    if why := find_dependence(answer.messages, answer.text, block):
        return {"stage": "check", "reason": why}
    if why := next(find_defects(answer.text, block), None):
        return {"stage": "defect", "reason": why}
    return None


def _select(
    select: SelectSection,
    count: Count,
    answer: Answer,
    candidates: Sequence[tuple[BlockSpan, ...]],
    refused: Sequence[dict[str, Any]],
) -> Selection:
    rejected = list(refused)
    surviving: list[tuple[BlockSpan, ...]] = []
    for candidate in candidates:
        both = [(block, check(select, count, answer, block)) for block in candidate]
        surviving.append(tuple(block for block, failure in both if failure is None))
        for block, failure in both:
            if failure is not None:
                titles = [branch.title for branch in block.branches]
                rejected.append(failure | {"start": block.start, "end": block.end, "titles": titles})
    measures = [measure(answer.text, blocks, count) for blocks in surviving]
    chosen = best(measures)
    return Selection(
        () if chosen is None else surviving[chosen],
        measure(answer.text, (), count) if chosen is None else measures[chosen],
        sum(map(len, candidates)),
        rejected,
    )


def _entry(
    select: SelectSection,
    record: Conversation,
    base: dict[str, Any],
    answers: Sequence[Answer],
    selections: Sequence[Selection],
) -> Entry:
    rejected = []
    if record.unanswered:
        rejected.append({"message": len(record.messages), "stage": "read", "reason": "no answer follows"})
    plain: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in record.messages]
    structured, details = list(plain), []
    for (place, _, text), chosen in zip(answers, selections, strict=True):
        rejected += [{"message": place} | rejection for rejection in chosen.rejected]
        structured[place] = {"role": "assistant", "structure": to_json(structure_of(text, chosen.blocks))}
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
