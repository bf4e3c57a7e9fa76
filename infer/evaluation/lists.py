"""Lists of answers to the same questions in serial and in adaptive mode: items, defects and ideal speed-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aspd_jax.blocks.checks import asked_for, find_defect
from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.spans import BlockSpan, with_leads
from aspd_jax.errors import StructureError

OTHER_NUMBER = "answers with another number of items than the question asks for"


@dataclass(frozen=True)
class ListChecks:
    """Checks of the outermost lists of an answer, as the data pipeline reads them (protocol, section 7).

    Attributes:
        lists: number of lists of two or more items.
        items: number of their items.
        asked: number of items that the question asks for; None: it asks for no number.
        defects: number of lists by kind of their first defect; of answers by `OTHER_NUMBER`.
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
    reasons = filter(None, (_defect(text, block) for block in blocks))
    defects = Counter(f"lists: {reason.partition(':')[0]}" for reason in reasons)
    if sizes and asked is not None and asked not in sizes:
        defects[OTHER_NUMBER] = 1
    return ListChecks(len(sizes), sum(sizes), asked, defects)


def _defect(text: str, block: BlockSpan) -> str | None:
    """Return the first defect of a list, or None."""
    try:
        return find_defect(text, with_leads(text, block))
    except StructureError as error:
        return f"not well formed: {error}"


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
    def answers(self) -> tuple[_Answer, _Answer]:
        """Return both answers, serial first, with the checks of their lists."""
        return _Answer(self.messages, self.serial), _Answer(self.messages, self.adaptive)


class _Answer:
    """A record with the checks of its lists."""

    def __init__(self, messages: Sequence[str], record: Mapping[str, Any]) -> None:
        self.record, self.stats = record, record["stats"]
        self.checks = check_lists(messages, record["text"])


def lists_lines(pairs: Sequence[ListPair]) -> list[str]:
    """Return the comparison of lists in both modes as lines of Markdown."""
    forked = [pair for pair in pairs if pair.adaptive["stats"]["blocks"]]
    kinds = dict.fromkeys(pair.kind for pair in pairs)
    groups = {"all": pairs} | ({kind: [p for p in pairs if p.kind == kind] for kind in kinds} if len(kinds) > 1 else {})
    head = ["questions", "answers", "have a list, serial", "have a list, adaptive", "fork"]
    head += ["ideal speed-up", "ideal speed-up where it forks, together", "mean", "best"]
    lines = _table(head, [_speed_row(name, group) for name, group in groups.items()])
    lines += ["", f"The {len(forked)} questions whose answers fork:", ""]
    modes = [[pair.answers[mode] for pair in forked] for mode in range(2)]
    defects = sorted({kind for answers in modes for answer in answers for kind in answer.checks.defects})
    names = ["content tokens", "ended by itself", "lists", "items", "asked-for number given", *defects]
    columns = (_column(answers, defects) for answers in modes)
    return [*lines, *_table(["", "serial", "adaptive"], zip(names, *columns, strict=True))]


def _speed_row(name: str, pairs: Sequence[ListPair]) -> list[Any]:
    answers = [pair.answers[1] for pair in pairs]
    forked = [answer.stats for answer in answers if answer.stats["blocks"]]
    ideal = [stats["content_tokens"] / stats["critical_path"] for stats in forked]
    listing = [sum(pair.answers[mode].checks.lists > 0 for pair in pairs) for mode in range(2)]
    together = [_together([answer.stats for answer in answers]), _together(forked)]
    mean, best = (f"{value:.2f}x" for value in (sum(ideal) / len(ideal), max(ideal))) if ideal else ("", "")
    return [name, len(pairs), *listing, len(forked), *together, mean, best]


def _together(stats: Sequence[Mapping[str, Any]]) -> str:
    path = sum(s["critical_path"] for s in stats)
    return f"{sum(s['content_tokens'] for s in stats) / path:.2f}x" if path else ""


def _column(answers: Sequence[_Answer], defects: Sequence[str]) -> list[Any]:
    checks = [answer.checks for answer in answers]
    asked = [check for check in checks if check.asked is not None and check.lists]
    ended = sum(answer.record["finish_reason"] == "stop" for answer in answers)
    given = sum(OTHER_NUMBER not in check.defects for check in asked)
    return [
        sum(answer.stats["content_tokens"] for answer in answers),
        f"{ended} of {len(answers)}",
        sum(check.lists for check in checks),
        sum(check.items for check in checks),
        f"{given} of {len(asked)}",
        *(sum(check.defects.get(kind, 0) for check in checks) for kind in defects),
    ]


def _table(head: Sequence[Any], rows: Any) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]
