"""Lists of answers to the same questions in serial and in adaptive mode: items, defects and ideal speed-up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from aspd_jax.blocks.checks import MAX_SHARED, asked_for, shared_words, similar
from aspd_jax.lists import TextList, concludes, lists_of

DEFECTS = {
    "misnumbered": "lists whose numbers do not count from 1",
    "joined": "lists with an item on the line of the one before, or with a text behind them after a single line break",
    "uneven": "lists with unequal white space between items",
    "mixed": "lists of items in different forms",
    "similar": "lists with two similar leads",
    "conclusion": "lists with a conclusion as an item",
    "empty": "lists in which some items have a body and others have none",
    "repeated": f"lists with an item that shares over {MAX_SHARED:.0%} of its five-word sequences with another",
    "number": "answers with another number of items than the question asks for",
}


@dataclass(frozen=True)
class ListChecks:
    """Checks of the lists of an answer.

    Attributes:
        lists: number of lists of two or more items.
        items: number of their items.
        asked: number of items that the question asks for; None: it asks for no number.
        defects: number of lists by kind of defect (`DEFECTS`); for `number`, of answers.
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
    found = [part for part in lists_of(text) if len(part.items) > 1]
    asked = asked_for(messages)
    defects = Counter(kind for part in found for kind in set(_defects(part, text)))
    if found and asked is not None and asked not in (len(part.items) for part in found):
        defects["number"] += 1
    return ListChecks(len(found), sum(len(part.items) for part in found), asked, defects)


def _defects(found: TextList, text: str) -> Iterator[str]:
    form, leads = found.form, [lead for lead in found.leads if lead is not None]
    if form.numeral and found.numbers != tuple(range(1, len(found.items) + 1)):
        yield "misnumbered"
    behind = text[found.end :]
    single = bool(behind.strip()) and behind[: len(behind) - len(behind.lstrip())].count("\n") == 1
    inner = [rf"[.!?:;)][ \t]*{re.escape(form.marker(index + 1))}\w" for index in range(len(found.items))]
    if single or ((form.numeral or form.opening) and any(map(re.search, inner, found.items))):
        yield "joined"
    if len({re.sub(r"[ \t]+\n", "\n", gap) for gap in found.gaps}) > 1:
        yield "uneven"
    if len({(lead.form.kind, lead.form.opening, lead.form.closing) for lead in leads}) > 1 or None in found.leads:
        yield "mixed"
    if any(similar(one.text, other.text) for one, other in combinations(leads, 2)):
        yield "similar"
    if any(concludes(lead.text) for lead in leads):
        yield "conclusion"
    bodies = [item[lead.end :].strip(" .") for item, lead in zip(found.items, found.leads, strict=True) if lead]
    if 0 < sum(not body for body in bodies) < len(bodies):
        yield "empty"
    if any(share is not None and share > MAX_SHARED for share in shared_words(found.items)):
        yield "repeated"


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
        self.begins = next(lists_of(record["text"]), None) is not None


def lists_lines(pairs: Sequence[ListPair]) -> list[str]:
    """Return the comparison of lists in both modes as lines of Markdown."""
    forked = [pair for pair in pairs if pair.adaptive["stats"]["blocks"]]
    kinds = dict.fromkeys(pair.kind for pair in pairs)
    groups = {"all": pairs} | ({kind: [p for p in pairs if p.kind == kind] for kind in kinds} if len(kinds) > 1 else {})
    head = ["questions", "answers", "begin a list, serial", "begin a list, adaptive", "fork"]
    head += ["ideal speed-up", "ideal speed-up where it forks, together", "mean", "best"]
    lines = _table(head, [_speed_row(name, group) for name, group in groups.items()])
    lines += ["", f"The {len(forked)} questions whose answers fork:", ""]
    modes = [[pair.answers[mode] for pair in forked] for mode in range(2)]
    names = ["content tokens", "ended by itself", "lists", "items", "asked-for number given", *DEFECTS.values()]
    return [*lines, *_table(["", "serial", "adaptive"], zip(names, *map(_column, modes), strict=True))]


def _speed_row(name: str, pairs: Sequence[ListPair]) -> list[Any]:
    answers = [pair.answers[1] for pair in pairs]
    forked = [answer.stats for answer in answers if answer.stats["blocks"]]
    ideal = [stats["content_tokens"] / stats["critical_path"] for stats in forked]
    begins = [sum(pair.answers[mode].begins for pair in pairs) for mode in range(2)]
    together = [_together([answer.stats for answer in answers]), _together(forked)]
    mean, best = (f"{value:.2f}x" for value in (sum(ideal) / len(ideal), max(ideal))) if ideal else ("", "")
    return [name, len(pairs), *begins, len(forked), *together, mean, best]


def _together(stats: Sequence[Mapping[str, Any]]) -> str:
    path = sum(s["critical_path"] for s in stats)
    return f"{sum(s['content_tokens'] for s in stats) / path:.2f}x" if path else ""


def _column(answers: Sequence[_Answer]) -> list[Any]:
    checks = [answer.checks for answer in answers]
    asked = [check for check in checks if check.asked is not None and check.lists]
    ended = sum(answer.record["finish_reason"] == "stop" for answer in answers)
    given = len(asked) - sum(check.defects.get("number", 0) for check in asked)
    return [
        sum(answer.stats["content_tokens"] for answer in answers),
        f"{ended} of {len(answers)}",
        sum(check.lists for check in checks),
        sum(check.items for check in checks),
        f"{given} of {len(asked)}",
        *(sum(check.defects.get(kind, 0) for check in checks) for kind in DEFECTS),
    ]


def _table(head: Sequence[Any], rows: Any) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]
