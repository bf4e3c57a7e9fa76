"""Blocks by the form of an answer: exact text, and all lists."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.spans import BlockSpan, BranchSpan, spans_of, structure_of
from aspd_jax.errors import StructureError
from aspd_jax.structure import plain_text
from tests.conftest import shared


def texts(answer: str, reading: int = 0) -> list[list[tuple[str, str]]]:
    """Titles and texts of the blocks of one reading."""
    found = propose(answer)
    if len(found) <= reading:
        return []
    return [[(b.title, answer[b.start : b.end]) for b in block.branches] for block in found[reading]]


def titles(answer: str, reading: int = 0) -> list[list[str]]:
    return [[title for title, _ in block] for block in texts(answer, reading)]


FORMS = {
    "numbers": ("Tips:\n\n1. Plan: do it.\n\n2. Rest: sleep.\n\nThat is all.", [["Plan", "Rest"]]),
    "bullets with bold leads": ("* **Cost.** It is cheap.\n* **Speed:** It is fast.\n", [["Cost", "Speed"]]),
    "unindented paragraphs": ("1. Plan:\n\nWrite.\n\nSort.\n\n2. Do:\n\nWork.\n\nStop.\n\nBye.", [["Plan", "Do"]]),
    "headings": ("# Guide\n\n## Paris\n\nLight.\n\n## Rome\n\nOld.\n\n## Conclusion\n\nGo.", [["Paris", "Rome"]]),
    "steps": ("Step 1: Mix\nStir well.\nStep 2: Bake\nIt is hot.\n", [["Mix", "Bake"]]),
    "bold lines": ("**Pros**\n\nIt is cheap.\n\n**Cons**\n\nIt is slow.\n", [["Pros", "Cons"]]),
    "leads over lists": ("Pros:\n- a is good\n- b is good\nCons:\n- c is bad\n- d is bad\n", [["Pros", "Cons"]]),
    "lead lines": ("Sleep: eight hours.\nFood: no sugar.\nSport: every day.\n", [["Sleep", "Food", "Sport"]]),
    "ordinals": ("First, it is hot.\n\nSecond, it is dry.\n", [["it is hot", "it is dry"]]),
    "Chinese numbers": (
        "建议：\n\n一、制定计划。早上列清单。\n\n二、避免干扰。关闭通知。\n\n总之，坚持。",
        [["制定计划", "避免干扰"]],
    ),
    "circled": ("① 早睡，身体好。\n② 早起，精神好。\n", [["早睡，身体好", "早起，精神好"]]),
    "Japanese bullets": ("・東京：首都です。\n・京都：古都です。\n", [["東京", "京都"]]),
    "keycaps": ("1️⃣ Open the door\n2️⃣ Close the window\n", [["Open the door", "Close the window"]]),
    "parentheses": ("(a) red is warm\n(b) blue is cold\n", [["red is warm", "blue is cold"]]),
    "Roman": (
        "I. Origins of jazz\n\nText.\n\nII. Swing era\n\nText.\n\nIII. Bebop\n\nText.\n",
        [["Origins of jazz", "Swing era", "Bebop"]],
    ),
    "a numbered conclusion": (
        "1. Early jazz: it began.\n2. Modern jazz: it is free.\n3. Conclusion: it changed.\n",
        [["Early jazz", "Modern jazz"]],
    ),
    "a Roman conclusion": (
        "I. Origins\n\nText.\n\nII. Swing\n\nText.\n\nIII. Conclusion\n\nText.\n",
        [["Origins", "Swing"]],
    ),
    "lazy numbers": ("1. red\n1. green\n1. blue\n", [["red", "green", "blue"]]),
    "equal leads": ("- Fiscal: one way\n- Fiscal: two ways\n", [["Fiscal: one way", "Fiscal: two ways"]]),
    "carriage returns": ("- one thing\r\n- two things\r\n", [["one thing", "two things"]]),
    "cut off": ("1. Red: warm.\n2. Blue: cold.\n3.", [["Red", "Blue"]]),
    "tables": ("| a | b |\n|---|---|\n| 1. x | 2. y |\n| 3. z | 4. w |\n", []),
    "code": ("```python\n# 1. one\n# 2. two\n- x\n- y\n```\n", []),
    "prose": ("It was a dark night. The wind blew.\n\nNobody came.", []),
    "one item": ("- alone\n", []),
    "numbers in prose": ("We have 3.\nAnd 4.\n\n2020. A year.\n", []),
    "markers alone": ("1.\n2.\n3.", []),
    "empty": ("", []),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    answer, expected = FORMS[name]
    assert titles(answer) == expected


def test_inner_lists_are_another_reading() -> None:
    answer = (
        "## Pros\n\n- cheap to run\n- easy to mend\n\n## Cons\n\n- slow at night\n- loud by day\n\n```sh\n- x\n```\n"
    )
    assert titles(answer, 0) == [["Pros", "Cons"]]
    assert titles(answer, 1) == [["cheap to run", "easy to mend"], ["slow at night", "loud by day"]]


def test_what_stands_between_branches_ends_the_first() -> None:
    (block,) = texts("Tips:\n\n1. Plan: do it.\n   - in the\n   - morning\n\n2. Rest: sleep.\n\nThat is all.")
    assert [text for _, text in block] == ["1. Plan: do it.\n   - in the\n   - morning\n\n", "2. Rest: sleep.\n\n"]


@pytest.mark.parametrize("before", ["", "Rooms:\n\n"])
def test_the_last_part_keeps_what_its_siblings_have(before: str) -> None:
    """Check lists at any place of the text."""
    answer = (
        f"{before}1. Kitchen, which is big\n- a stove\n- a sink\n2. Hall, which is small\n- a lamp\n- a door\n\nBye."
    )
    (block,) = texts(answer)
    assert [text[0] + text.rstrip()[-4:] for _, text in block] == ["1sink", "2door"]


@pytest.mark.parametrize("siblings, end", [("", "cold."), ("\nBoth say so.", "said.")])
def test_a_sentence_at_the_margin_is_the_last_part_s_if_siblings_have_one(siblings: str, end: str) -> None:
    answer = f"1. Red: it is warm.{siblings}\n2. Blue: it is\ncold.\nAll is said."
    (block,) = texts(answer)
    assert block[-1][1].rstrip().endswith(end)


def test_real_answers_are_kept_and_their_lists_found() -> None:
    answers = shared("data", "answers", "vicuna80.jsonl")
    rows = [json.loads(line) for line in answers.read_text().split("\n") if line]
    lists = found = 0
    for row in rows:
        proposals = propose(row["answer"])
        for blocks in proposals:
            assert plain_text(structure_of(row["answer"], blocks)) == row["answer"]
        if holds_list(row["answer"]):
            lists += 1
            found += bool(proposals)
    assert len(rows) == 959 and lists > 300
    assert found >= 0.95 * lists


def holds_list(answer: str) -> bool:
    """Two or more neighbouring items of ten or more words at the left edge, by lines alone."""
    fenced, before, long = False, None, 0
    for line in answer.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        found = re.match(r"(?:(\d+)[.)]|([-*+•])) +(.*)", line)
        if fenced or not found:
            continue
        this = int(found[1]) if found[1] else found[2]
        goes_on = this == before if found[2] else isinstance(before, int) and this == before + 1
        long = (long if goes_on else 0) + (len(found[3].split()) >= 10)
        before = this
        if long >= 2:
            return True
    return False


LINES = st.sampled_from(
    [
        "1. One thing", "2. Two things", "3. Three", "- a b", "- c d", "  - in", "    - deep", "* x", "", "", "Text.",
        "```", "```python", "~~~", "**Bold**", "**Bold:** more", "## Head", "# Top", "Lead: text", "Other lead:", "> q",
        "| a | b |", "|---|---|", "Step 1: go", "Step 2: stay", "一、早", "二、晚", "\tcode", "1.", "***", "<div>",
        "First, a", "Second, b", "✅ done", "In conclusion, no", "\u2028", "\x0b", "a\x00b", "• dot", "(a) x", "(b) y",
        "[x]: y",
    ]
)  # fmt: skip


@settings(max_examples=400)
@given(lines=st.lists(LINES, max_size=25), newline=st.sampled_from(["\n", "\r\n", "\r"]))
@example(lines=["- a b", "```", "- c d", "```", "- a b"], newline="\n")
def test_spans_are_exact_and_code_is_never_cut(lines: list[str], newline: str) -> None:
    answer = newline.join(lines)
    fenced = [range(*span.span()) for span in re.finditer(r"(?ms)^(```|~~~)[^\n]*$.*?^\1[ \t]*$", answer)]
    for blocks in propose(answer):
        structure = structure_of(answer, blocks)
        assert plain_text(structure) == answer
        assert spans_of(structure, "names") == blocks
        for block in blocks:
            assert len(block.branches) >= 2
            for branch in block.branches:
                assert branch.title in answer[branch.start : branch.end]
                assert any(char.isalnum() for char in branch.title)
                if newline == "\n" and len(fenced) * 2 == sum(line[:3] in ("```", "~~~") for line in lines):
                    assert not any(branch.start in span and branch.start != span.start for span in fenced)


@settings(max_examples=200)
@given(st.text(max_size=200))
def test_any_text_is_kept(answer: str) -> None:
    for blocks in propose(answer):
        assert plain_text(structure_of(answer, blocks)) == answer


@pytest.mark.parametrize(
    "spans",
    [[(0, 2), (3, 4)], [(0, 2), (2, 9)], [(0, 2), (2, 2)], [(2, 3), (1, 2)]],
    ids=["gap", "long", "empty", "back"],
)
def test_wrong_spans_are_refused(spans: list[tuple[int, int]]) -> None:
    block = BlockSpan(tuple(BranchSpan("t", *span) for span in spans))
    with pytest.raises(StructureError, match="branch"):
        structure_of("abcd", [block])


def test_overlapping_blocks_are_refused() -> None:
    block = BlockSpan((BranchSpan("a", 0, 1), BranchSpan("b", 1, 2)))
    with pytest.raises(StructureError, match="inside"):
        structure_of("abcd", [block, block])
