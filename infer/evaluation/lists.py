"""Lists of answers to the same questions in serial and in adaptive mode: items, defects and ideal speed-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aspd_jax.blocks.checks import asked_for, find_defects
from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.spans import BlockSpan, with_leads
from aspd_jax.errors import StructureError
from aspd_jax.tables import markdown_table

OTHER_NUMBER = "answers with another number of items than the question asks for"


@dataclass(frozen=True)
class ListChecks:
    """Checks of the outermost lists of an answer, as the data pipeline reads them (protocol, section 7).

    Attributes:
        lists: number of lists of two or more items.
        items: number of their items.
        asked: number of items that the question asks for; None: it asks for no number.
        defects: number of lists by kind of defect; a list counts once for each of its kinds. Answers by `OTHER_NUMBER`.
    """

    lists: int
    items: int
    asked: int | None
    defects: Mapping[str, int]


def check_lists(messages: Sequence[str], text: str) -> ListChecks:
    """Check the lists of an answer.

    Args:
        messages: the messages before the answer.
        text: plain text of the answer.
    """
    blocks = next(iter(propose(text)), ())
    sizes, asked = [len(block.branches) for block in blocks], asked_for(messages)
    defects = Counter(f"lists: {kind}" for block in blocks for kind in _defects(text, block))
    if sizes and asked is not None and asked not in sizes:
        defects[OTHER_NUMBER] = 1
    return ListChecks(len(sizes), sum(sizes), asked, defects)


def _defects(text: str, block: BlockSpan) -> set[str]:
    """Return the kinds of the defects of a list."""
    try:
        return {reason.partition(":")[0] for reason in find_defects(text, with_leads(text, block))}
    except StructureError:
        return {"not well formed"}


@dataclass(frozen=True)
class ListPair:
    """The answers to a question in serial and in adaptive mode: records with `text`, `finish_reason` and `stats`.

    Attributes:
        kind: kind of the question.
        messages: the messages before the answer.
        serial, adaptive: records.
    """

    kind: str
    messages: Sequence[str]
    serial: Mapping[str, Any]
    adaptive: Mapping[str, Any]

    @cached_property
    def checks(self) -> tuple[ListChecks, ListChecks]:
        """Return the checks of the lists of both answers, serial first."""
        serial, adaptive = (check_lists(self.messages, record["text"]) for record in (self.serial, self.adaptive))
        return serial, adaptive


def lists_table(pairs: Sequence[ListPair]) -> str:
    """Return the comparison of lists in both modes as Markdown."""
    forked = [pair for pair in pairs if pair.adaptive["stats"]["blocks"]]
    kinds = dict.fromkeys(pair.kind for pair in pairs)
    groups = {"all": pairs} | ({kind: [p for p in pairs if p.kind == kind] for kind in kinds} if len(kinds) > 1 else {})
    speeds = markdown_table([_speed_row(name, group) for name, group in groups.items()])
    defects = sorted({kind for pair in forked for checks in pair.checks for kind in checks.defects})
    serial = _column([(pair.serial, pair.checks[0]) for pair in forked], defects)
    adaptive = _column([(pair.adaptive, pair.checks[1]) for pair in forked], defects)
    rows = [{"": name, "serial": serial[name], "adaptive": adaptive[name]} for name in serial]
    return f"{speeds}\n\nThe {len(forked)} questions whose answers fork:\n\n{markdown_table(rows)}"


def _speed_row(name: str, pairs: Sequence[ListPair]) -> dict[str, Any]:
    stats = [pair.adaptive["stats"] for pair in pairs]
    forked = [one for one in stats if one["blocks"]]
    ideal = [one["content_tokens"] / one["critical_path"] for one in forked]
    return {
        "questions": name,
        "answers": len(pairs),
        "have a list, serial": sum(pair.checks[0].lists > 0 for pair in pairs),
        "have a list, adaptive": sum(pair.checks[1].lists > 0 for pair in pairs),
        "fork": len(forked),
        "ideal speed-up": _together(stats),
        "ideal speed-up where it forks, together": _together(forked),
        "mean": f"{sum(ideal) / len(ideal):.2f}x" if ideal else "",
        "best": f"{max(ideal):.2f}x" if ideal else "",
    }


def _together(stats: Sequence[Mapping[str, Any]]) -> str:
    path = sum(s["critical_path"] for s in stats)
    return f"{sum(s['content_tokens'] for s in stats) / path:.2f}x" if path else ""


def _column(answers: Sequence[tuple[Mapping[str, Any], ListChecks]], defects: Sequence[str]) -> dict[str, Any]:
    asked = [checks for _, checks in answers if checks.asked is not None and checks.lists]
    ended = sum(record["finish_reason"] == "stop" for record, _ in answers)
    return {
        "content tokens": sum(record["stats"]["content_tokens"] for record, _ in answers),
        "ended by itself": f"{ended} of {len(answers)}",
        "lists": sum(checks.lists for _, checks in answers),
        "items": sum(checks.items for _, checks in answers),
        "asked-for number given": f"{sum(OTHER_NUMBER not in one.defects for one in asked)} of {len(asked)}",
        **{kind: sum(checks.defects.get(kind, 0) for _, checks in answers) for kind in defects},
    }
