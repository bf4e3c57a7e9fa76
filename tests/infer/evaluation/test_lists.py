"""Checks of lists, and the comparison of serial and parallel answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax.errors import DataError
from infer.evaluation.lists import DEFECTS, check_lists, lists_report

GOOD = "Tips:\n\n1. **Sleep**: Eight hours.\n\n2. **Eat**: No sugar.\n\n3. **Walk**: Each day.\n\nThat is all."
SENTENCE = "which keeps the heart and the mind in good order for life."


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("misnumbered", GOOD.replace("3. ", "4. ")),
        ("joined", GOOD.replace("sugar.\n\n3. ", "sugar. 3. ")),
        ("joined", GOOD.replace("\n\nThat", "\nThat").replace("That is", "By following these tips, that is")),
        ("uneven", GOOD.replace("\n\n3. ", "\n3. ")),
        ("mixed", GOOD.replace("**Eat**", "Eat")),
        ("similar", GOOD.replace("Walk", "Sleeps")),
        ("conclusion", GOOD.replace("Walk", "Conclusion")),
        ("empty", GOOD.replace(" No sugar.", "")),
        ("repeated", GOOD.replace("sugar.", f"sugar, {SENTENCE}").replace("hours.", f"hours, {SENTENCE}")),
        ("number", GOOD.replace("\n\n3. **Walk**: Each day.", "")),
    ],
)
def test_defects(kind: str, text: str) -> None:
    messages = ["Give me three tips."]
    assert dict(check_lists(messages, text).defects).get(kind) == 1
    assert not check_lists(messages, GOOD).defects
    if kind not in ("joined", "number"):
        assert set(check_lists(["Give me tips."], text).defects) == {kind}


def test_counts() -> None:
    checks = check_lists(
        ["Give me 3 tips."], GOOD + "\n\n- a: x\n- b: y\n\nEnd.\n\n- alone: z\n\n```\n1. x\n2. y\n```\n"
    )
    assert (checks.lists, checks.items, checks.asked, dict(checks.defects)) == (2, 5, 3, {})


def record(id: int, text: str, path: int, blocks: int, kind: str = "tips", **more: Any) -> dict[str, Any]:
    stats = {"content_tokens": 40, "critical_path": path, "blocks": blocks, "branches": 3 * blocks}
    return {"id": id, "kind": kind, "prompt": "Give me three tips.", "text": text, "stats": stats} | (
        {"finish_reason": "stop"} | more
    )


def files(folder: Path) -> list[Path]:
    short = GOOD.replace("\n\n3. **Walk**: Each day.", "")
    serial = [record(1, short, 41, 0), record(2, GOOD, 41, 0, "trips"), record(3, "No list.", 41, 0)]
    serial.append(record(9, "", 1, 0))
    parallel = [
        record(2, GOOD.replace("3. ", "5. "), 10, 1, "trips", finish_reason="length"),
        record(1, GOOD, 20, 1),
        record(3, "No list.", 41, 0),
        {"id": 9, "error": "too long"},
    ]
    paths = [folder / "serial.jsonl", folder / "parallel.jsonl"]
    for path, records in zip(paths, (serial, parallel), strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in records))
    return paths


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = files(tmp_path)
    assert aspd.main(["eval", "lists", *map(str, paths)]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["all"] == ["3", "2", "2", "2", "1.69x", "2.67x", "3.00x", "4.00x"]
    assert rows["tips"] == ["2", "1", "1", "1", "1.31x", "2.00x", "2.00x", "2.00x"]
    assert rows["trips"] == ["1", "1", "1", "1", "4.00x", "4.00x", "4.00x", "4.00x"]
    assert rows["items"] == ["5", "6"] and rows["content tokens"] == ["80", "80"]
    assert rows["ended by itself"] == ["2 of 2", "1 of 2"]
    assert rows["asked-for number given"] == ["1 of 2", "2 of 2"]
    assert rows[DEFECTS["misnumbered"]] == ["0", "1"] and rows[DEFECTS["number"]] == ["1", "0"]


def table(text: str) -> dict[str, list[str]]:
    """Cells of the rows of a Markdown text by their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {name: cells for name, *cells in lines}


def test_files_without_a_common_question_are_refused(tmp_path: Path) -> None:
    serial, parallel = files(tmp_path)
    parallel.write_text(json.dumps(record(7, GOOD, 10, 1)) + "\n")
    with pytest.raises(DataError, match="got none"):
        lists_report(serial, parallel)
