"""Checks of lists, and the comparison of serial and parallel answers."""

from __future__ import annotations

from typing import Any

import pytest

from aspd_jax.errors import StructureError
from infer.evaluation import lists
from infer.evaluation.lists import OTHER_NUMBER, ListPair, check_lists, lists_table

GOOD = "Tips:\n\n1. **Sleep**: Eight hours.\n\n2. **Eat**: No sugar.\n\n3. **Walk**: Each day.\n\nThat is all."
SENTENCE = "which keeps the heart and the mind in good order for life."


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "lists: single break",
            GOOD.replace("\n\nThat", "\nThat").replace("That is", "By following these tips, that is"),
        ),
        ("lists: unequal gaps", GOOD.replace("\n\n3. ", "\n3. ")),
        ("lists: similar titles", GOOD.replace("Walk", "Sleeps")),
        (
            "lists: repeats a sibling",
            GOOD.replace("sugar.", f"sugar, {SENTENCE}").replace("hours.", f"hours, {SENTENCE}"),
        ),
        (OTHER_NUMBER, GOOD.replace("\n\n3. **Walk**: Each day.", "")),
    ],
)
def test_defects(kind: str, text: str) -> None:
    messages = ["Give me three tips."]
    assert check_lists(messages, text).defects == {kind: 1}
    assert not check_lists(messages, GOOD).defects and not check_lists(messages, "No list.").defects
    assert check_lists(["Give me tips."], text).defects == ({} if kind == OTHER_NUMBER else {kind: 1})


def test_a_list_counts_for_each_kind_of_its_defects() -> None:
    text = GOOD.replace("\n\n3. ", "\n3. ").replace("Walk", "Sleeps")
    assert check_lists([], text).defects == {"lists: unequal gaps": 1, "lists: similar titles": 1}


def test_a_list_without_leads_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StructureError("the lead ends in another part")

    monkeypatch.setattr(lists, "with_leads", refuse)
    checks = check_lists(["Give me tips."], GOOD)
    assert (checks.lists, checks.items, checks.defects) == (1, 3, {"lists: not well formed": 1})


def test_counts() -> None:
    checks = check_lists(
        ["Give me 3 tips."], GOOD + "\n\n- a: x\n- b: y\n\nEnd.\n\n- alone: z\n\n```\n1. x\n2. y\n```\n"
    )
    assert (checks.lists, checks.items, checks.asked, dict(checks.defects)) == (2, 5, 3, {})


def record(text: str, path: int, blocks: int, finish: str = "stop") -> dict[str, Any]:
    stats = {"content_tokens": 40, "critical_path": path, "blocks": blocks, "branches": 3 * blocks}
    return {"text": text, "stats": stats, "finish_reason": finish}


def test_both_modes_are_compared() -> None:
    asks, short = ["Give me three tips."], GOOD.replace("\n\n3. **Walk**: Each day.", "")
    wrong = GOOD.replace("\n\n2. ", "\n2. ")
    pairs = [
        ListPair("tips", asks, record(short, 41, 0), record(GOOD, 20, 1)),
        ListPair("trips", asks, record(GOOD, 41, 0), record(wrong, 10, 1, "length")),
        ListPair("tips", asks, record("No list.", 41, 0), record("No list.", 41, 0)),
    ]
    rows = table(lists_table(pairs))
    assert rows["all"] == ["3", "2", "2", "2", "1.69x", "2.67x", "3.00x", "4.00x"]
    assert rows["tips"] == ["2", "1", "1", "1", "1.31x", "2.00x", "2.00x", "2.00x"]
    assert rows["trips"] == ["1", "1", "1", "1", "4.00x", "4.00x", "4.00x", "4.00x"]
    assert rows["items"] == ["5", "6"] and rows["content tokens"] == ["80", "80"]
    assert rows["ended by itself"] == ["2 of 2", "1 of 2"]
    assert rows["asked-for number given"] == ["1 of 2", "2 of 2"]
    assert rows["lists: unequal gaps"] == ["0", "1"] and rows[OTHER_NUMBER] == ["1", "0"]


def table(text: str) -> dict[str, list[str]]:
    """Cells of the rows of a Markdown text by their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {name: cells for name, *cells in lines}
