"""What words tell against a block, and annotations back onto answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax.endpoint import parse_json
from aspd_jax.errors import DataError, StructureError
from aspd_jax.pipeline.align import Piece, align
from aspd_jax.pipeline.annotate import read_pieces
from aspd_jax.pipeline.checks import find_dependence
from aspd_jax.pipeline.extract import propose
from aspd_jax.pipeline.spans import structure_of
from aspd_jax.pipeline.teacher import SCHEMAS
from aspd_jax.structure import plain_text


def why(answer: str, question: str = "What should I do?") -> str | None:
    return find_dependence(question, answer, propose(answer)[0][0])


INDEPENDENT = [
    "1. Funding: schools lack money.\n2. Teachers: there are too few.\n3. Classes: they are too large.",
    "- Visit a museum: it shows 3 paintings.\n- Go on a hike: it takes 2 hours.",
    "1. The first step is to listen.\n2. Ask questions.\n3. The last word is theirs.",
    "- 3 pens at $20 = $60.\n- 2 maps at $30 = $60 too.".replace("$60 too", "$61"),
    "1. Area of A: 3 x 4 = 12.\n2. Area of B: 5 x 7 = 35.",
]
DEPENDENT = {
    "back reference": [
        "1. Buy a car: cheap.\n2. Rent a car: better than the first option.",
        "1. Measure the wall.\n2. Cut paper: use the length from step 1.",
        "- Tea: calms.\n- Coffee: as mentioned above, no sugar.",
        "一、买车：便宜。\n二、租车：与前者不同。",
    ],
    "goes on": [
        "1. Boil water for the pasta.\n2. Then add salt to it.",
        "1. Mix flour and eggs into a dough.\n2. Knead the dough for long.",
        "1. We know that x is two.\n2. Therefore, y is three.",
    ],
    "shared counter": ["## A\n1. red\n2. blue\n\n## B\n3. green\n4. black\n"],
    "shared result": [
        "1. Packs: 20 / 4 = 5 cards each.\n2. All: 10 * 5 = 50 cards.",
        "1. Cost of pens: 3 x 20 = 60 dollars.\n2. With tax: 60 x 1.1 = 66 dollars.",
    ],
    "shared symbol": ["- Radius: r = 2 cm.\n- Area: it is 3 * r * r."],
    "title says nothing": ["1. 1. What do you like?\n2. 2. How do you work?\n3. 3. Why here?\n"],
    "duplicate title": ["**Note**\n\nText one.\n\n**Note**\n\nText one.\n"],
}


@pytest.mark.parametrize("answer", INDEPENDENT)
def test_independent_parts_pass(answer: str) -> None:
    assert why(answer) is None


@pytest.mark.parametrize("kind, answer", [(kind, answer) for kind, answers in DEPENDENT.items() for answer in answers])
def test_dependence_is_named(kind: str, answer: str) -> None:
    assert (why(answer) or "").split(":")[0] == kind


def test_numbers_of_the_question_are_nobodys_result() -> None:
    answer = "1. Pens: 3 x 20 = 60.\n2. Left of 60: none."
    assert (why(answer) or "").startswith("shared result")
    assert why(answer, "I have 60 dollars.") is None


ANSWER = (
    "Here are two “good” ideas:\n\n1. Sleep — eight hours a night, every night, and never less than that.\n"
    "2. Eat well.\n\nBye."
)


def pieces_of(answer: str) -> list[Piece]:
    """A faithful annotation."""
    return [
        Piece(0, "", "Here are two “good” ideas:"),
        Piece(1, "Sleep", "1. Sleep — eight hours a night, every night, and never less than that."),
        Piece(1, "Food", "2. Eat well."),
        Piece(0, "", "Bye."),
    ]


def spans(answer: str, pieces: list[Piece]) -> list[str]:
    (block,) = align(answer, pieces).blocks
    assert plain_text(structure_of(answer, [block])) == answer
    return [answer[b.start : b.end] for b in block.branches]


def test_annotations_are_found_in_the_answer() -> None:
    expected = ["1. Sleep — eight hours a night, every night, and never less than that.\n", "2. Eat well.\n"]
    assert spans(ANSWER, pieces_of(ANSWER)) == expected
    assert align(ANSWER, pieces_of(ANSWER)).exact
    plain = [p._replace(text=p.text.replace("“", '"').replace("”", '"').replace("—", "-")) for p in pieces_of(ANSWER)]
    assert spans(ANSWER, plain) == expected and not align(ANSWER, plain).exact
    short = [p._replace(text=p.text.replace("hours a night, every night, and never", "[…]")) for p in pieces_of(ANSWER)]
    assert spans(ANSWER, short) == expected


@pytest.mark.parametrize(
    "place, piece, message",
    [
        (2, Piece(1, "Food", "2. Eat good."), "differs from the answer"),
        (2, Piece(1, "食物", "2. Eat well."), "script"),
        (2, Piece(1, "", "2. Eat well."), "no title"),
        (2, Piece(1, "word " * 20 + "x", "2. Eat well."), "longer than"),
        (2, Piece(1, "Food", " "), "empty"),
        (2, Piece(2, "Food", "2. Eat well."), "one branch"),
        (3, Piece(0, "", ""), "goes on after the last piece"),
    ],
)
def test_what_is_not_the_answer_is_rejected(place: int, piece: Piece, message: str) -> None:
    pieces = pieces_of(ANSWER)
    pieces[place] = piece
    with pytest.raises(StructureError, match=message):
        align(ANSWER, pieces)


def test_too_much_left_out_is_rejected() -> None:
    with pytest.raises(StructureError, match="in 2 ways"):
        align("a x b y b z b", [Piece(1, "A", "a [...] b"), Piece(1, "B", "[...] z b")])


@settings(max_examples=200)
@given(st.lists(st.text("ab. \n[…]“é第", min_size=1, max_size=12), min_size=2, max_size=5), st.data())
def test_any_cut_of_any_text_is_found(parts: list[str], data: Any) -> None:
    """Pieces with other white space around them give spans that hold the same characters, none lost."""
    answer = "".join(parts)
    if not all(part.strip() and any(char.isalnum() for char in part) for part in parts):
        return
    padded = [part + data.draw(st.sampled_from(["", " ", "\n\n"])) for part in parts]
    (block,) = align(answer, [Piece(1, str(n), part) for n, part in enumerate(padded)]).blocks
    assert plain_text(structure_of(answer, [block])) == answer
    for branch, part in zip(block.branches, parts, strict=True):
        assert "".join(answer[branch.start : branch.end].split()) == "".join(part.split())


@pytest.mark.parametrize(
    "text, value",
    [
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('Sure! {"a": {"b": 2}} Done.', {"a": {"b": 2}}),
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
    ],
)
def test_json_is_found_in_replies(text: str, value: Any) -> None:
    assert parse_json(text) == value


@pytest.mark.parametrize("text", ["", "no", '{"a": ', "[1]", '{"items": [{"type": "serial"'])
def test_replies_without_json_are_named(text: str) -> None:
    with pytest.raises(DataError, match="reply"):
        parse_json(text)


NO_BRANCHES = {"items": [{"type": "parallel"}]}
NO_TITLE = {"items": [{"type": "parallel", "branches": [{"title": 1, "text": ""}]}]}


@pytest.mark.parametrize(
    "value", [None, [], {}, {"items": 1}, {"items": [1]}, {"items": [{"type": "x", "text": ""}]}, NO_BRANCHES, NO_TITLE]
)
def test_replies_of_another_form_are_named(value: Any) -> None:
    with pytest.raises(DataError, match=r"reply"):
        read_pieces(value)


def test_schemas_are_strict() -> None:
    """Structured outputs want every field required and no others, at every depth."""

    def check(schema: dict[str, Any]) -> None:
        if schema["type"] == "object":
            assert schema["additionalProperties"] is False and schema["required"] == list(schema["properties"])
            for field in schema["properties"].values():
                check(field)
        elif schema["type"] == "array":
            check(schema["items"])

    for schema in SCHEMAS.values():
        check(schema)
        json.dumps(schema)
