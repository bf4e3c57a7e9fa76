"""Numbered pieces of an answer, and a teacher's groups of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aspd_jax.blocks.spans import structure_of
from aspd_jax.errors import DataError, StructureError
from aspd_jax.pipeline.annotate import read_groups
from aspd_jax.pipeline.pieces import Group, Part, block_of, numbered, piece_starts
from aspd_jax.structure import plain_text

ANSWER = (
    "Here are two “good” ideas:\n\n1. Sleep — eight hours a night, every night.\n   Never less than that.\n"
    "2. Eat well, as mothers say. Fruit is better than cake.\n\nBye."
)


def test_pieces_are_lines_and_their_sentences() -> None:
    assert numbered(ANSWER).split("\n") == [
        "[1] Here are two “good” ideas:",
        "[2] 1. Sleep — eight hours a night, every night.",
        "[3] Never less than that.",
        "[4] 2. Eat well, as mothers say.",
        "[5] Fruit is better than cake.",
        "[6] Bye.",
    ]


WHOLE = {
    "code": "Run it like this:\n\n```\nx = 1\n\ny = 2\n```\n\nThat is all.",
    "table": "Prices in the shop:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nThat is all.",
    "quote": "As she said once:\n\n> One line.\n> Two lines.\n\nThat is all.",
    "formula": "The sum of both is\n\n$$\na + b\n= c\n$$\n\nThat is all.",
    "code in an item": "Run it like this:\n\n- code:\n  ```\n  x = 1\n\n  y = 2\n  ```\n\nThat is all.",
}


@pytest.mark.parametrize("name", WHOLE)
def test_some_things_are_never_cut(name: str) -> None:
    answer = WHOLE[name]
    pieces = len(piece_starts(answer))
    assert pieces == (4 if name == "code in an item" else 3)
    assert len(piece_starts(re.sub(r"[`|>$]", "", answer))) > pieces  # the same lines without what makes them one


def test_groups_become_spans() -> None:
    block = block_of(ANSWER, Group((Part(2, "Sleep"), Part(4, "Food")), 5))
    assert [ANSWER[b.start : b.end] for b in block.branches] == [
        "1. Sleep — eight hours a night, every night.\n   Never less than that.\n",
        "2. Eat well, as mothers say. Fruit is better than cake.\n",
    ]


@pytest.mark.parametrize(
    "parts, last, message",
    [
        ([(2, "Sleep")], 3, "needs two parts"),
        ([(0, "Sleep"), (4, "Food")], 5, "from piece 0 to 5, the answer has 6"),
        ([(2, "Sleep"), (4, "Food")], 7, "from piece 2 to 7, the answer has 6"),
        ([(2, "Sleep"), (4, "Food")], 3, "'Food' begins with piece 4 and ends before it"),
        ([(4, "Food"), (2, "Sleep")], 5, "'Food' begins with piece 4 and ends before it"),
        ([(2, "Sleep"), (4, "食物")], 5, "script"),
        ([(2, "Sleep"), (4, "...")], 5, "no title"),
        ([(2, "Sleep"), (4, "word " * 20 + "x")], 5, "longer than"),
    ],
)
def test_what_the_answer_has_not_is_named(parts: list[tuple[int, str]], last: int, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        block_of(ANSWER, Group(tuple(Part(*part) for part in parts), last))


TEXT = st.lists(
    st.sampled_from(
        [
            "Buy a small boat now. ",
            "Sell it! ",
            "\n",
            "\n\n",
            "- ",
            "2. ",
            "```\n",
            "> ",
            "$$",
            "第一。",
            "\r\n",
            "é ",
            "    ",
        ]
    ),
    min_size=1,
    max_size=20,
).map("".join)


@settings(max_examples=300)
@given(TEXT, st.data())
def test_any_group_of_any_answer_leaves_it_as_it_is(answer: str, data: Any) -> None:
    assume(answer.strip())
    starts = piece_starts(answer)
    assert starts[0] == 0 and starts == sorted(set(starts))
    ends = [*starts[1:], len(answer)]
    assert all(answer[a:b].strip() for a, b in zip(starts, ends, strict=True))
    assert "".join(numbered(answer).split()) == "".join(
        f"[{n}]" + "".join(answer[a:b].split()) for n, (a, b) in enumerate(zip(starts, ends, strict=True), 1)
    )
    assume(len(starts) >= 2)
    firsts = data.draw(st.lists(st.integers(1, len(starts)), min_size=2, max_size=len(starts), unique=True).map(sorted))
    last = data.draw(st.integers(firsts[-1], len(starts)))
    block = block_of(answer, Group(tuple(Part(first, f"B{first}" if "B" in answer else "1") for first in firsts), last))
    assert plain_text(structure_of(answer, [block])) == answer
    for branch, first in zip(block.branches, firsts, strict=True):
        assert branch.start == starts[first - 1] and answer[branch.start : branch.end].strip()
    assert answer[block.end : ends[last - 1]].strip() == ""


PART: dict[str, Any] = {"first": 1, "title": "A"}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"groups": 1},
        {"groups": [1]},
        {"groups": [{"parts": [PART, PART]}]},
        {"groups": [{"parts": [PART, PART], "last": "2"}]},
        {"groups": [{"parts": [PART, PART], "last": True}]},
        {"groups": [{"parts": {}, "last": 2}]},
        {"groups": [{"parts": [PART, 1], "last": 2}]},
        {"groups": [{"parts": [PART, {"first": 2}], "last": 2}]},
        {"groups": [{"parts": [PART, PART | {"first": 1.5}], "last": 2}]},
    ],
)
def test_replies_of_another_form_are_named(value: Any) -> None:
    with pytest.raises(DataError, match="reply"):
        read_groups(value)


def test_a_reply_is_read() -> None:
    value = {"groups": [{"parts": [PART, {"first": 3, "title": " B "}], "last": 4}]}
    assert read_groups(value) == [Group((Part(1, "A"), Part(3, "B")), 4)]
