"""Rules that refuse a block by its words."""

from __future__ import annotations

import pytest

from aspd_jax.blocks.checks import find_dependence
from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.spans import BlockSpan, BranchSpan


def why(answer: str, question: str = "What should I do?") -> str | None:
    return find_dependence([question], answer, propose(answer)[0][0])


INDEPENDENT = [
    "1. Funding: schools lack money.\n2. Teachers: there are too few.\n3. Classes: they are too large.",
    "- Visit a museum: it shows 3 paintings.\n- Go on a hike: it takes 2 hours.",
    "1. The first step is to listen.\n2. Ask questions.\n3. The last word is theirs.",
    "- 3 pens at $20 = $60.\n- 2 maps at $30 = $60 too.".replace("$60 too", "$61"),
    "1. Summary: who you are.\n2. Skills: what you can do.\n3. Schools: where you were.",
    "1. This example: it is short.\n2. Method: this method is slow.\n3. Examples: they are the example of a method.",
    "1. Area of A: 3 x 4 = 12.\n2. Area of B: 5 x 7 = 35.",
    "```\nx = 1\n```\n\n- Loops:\n```\nfor x in y:\n```\n- Branches:\n```\nif x:\n```\n",
    "1. Rest: once a day, sleep.\n2. Soap: once a week, buy some.\n3. Hands: after a walk, wash them.",
    "1. A bicycle: This is cheap.\n2. A bus: This is a great way to read.\n3. Instead of a car: a train, but slow.",
]
DEPENDENT = {
    "back reference": [
        "1. Buy a car: cheap.\n2. Rent a car: better than the first option.",
        "1. Measure the wall.\n2. Cut paper: use the length from step 1.",
        "- Tea: calms.\n- Coffee: as mentioned above, no sugar.",
        "- Letters: a to z.\n- Ends: none of the letters listed above.",
        "一、买车：便宜。\n二、租车：与前者不同。",
        "- Example: Sort the names of a class.\n- Explanation: This example shows how words are compared.",
        "1. Variation: no two birds are alike.\n2. Inheritance: chicks have some of these variations, too.",
    ],
    "goes on": [
        "1. Sport keeps the heart fit and the mind calm.\n2. However, too much of it harms the joints.",
        "1. Work can be hard for some people.\n2. This includes those who stand all day.",
        "1. Boil water for the pasta.\n2. Then add salt to it.",
        "1. Mix flour and eggs into a dough.\n2. Knead the dough for long.",
        "1. We know that x is two.\n2. Therefore, y is three.",
        "1. Remove the old tap: turn it left.\n2. Install the new tap: once the old one is off, turn it right.",
    ],
    "shared counter": ["## A\n1. red\n2. blue\n\n## B\n3. green\n4. black\n"],
    "shared result": [
        "1. Packs: 20 / 4 = 5 cards each.\n2. All: 10 * 5 = 50 cards.",
        "1. Cost of pens: 3 x 20 = 60 dollars.\n2. With tax: 60 x 1.1 = 66 dollars.",
    ],
    "shared symbol": ["- Radius: r = 2 cm.\n- Area: it is 3 * r * r."],
    "course of events": [
        "1. Day 1: arrive and rest.\n2. Day 2: see the castle.",
        "### Step 1: Choose it\n\nIt is here.\n\n### Step 2: Buy it\n\nIt is dear.\n",
        "Ingredients:\n- tea\n- milk\n\nInstructions:\n- Boil the milk.\n- Add the tea.\n",
        "1. Cooking: boil it.\n2. Serving: after cooking, wait.\n3. Cleaning: after the meal, wash up.",
        "- **9:00 am**: breakfast in the garden.\n- **11:30 am**: a walk to the lake.",
    ],
    "explains code": [
        "```python\nfor x in y:\n    print(x)\n```\n\n- Loop: it visits all of y.\n- Output: it shows x.\n"
    ],
    "title says nothing": ["1. 1. What do you like?\n2. 2. How do you work?\n3. 3. Why here?\n"],
    "duplicate title": [
        "**Note**\n\nText one.\n\n**Note**\n\nText one.\n",
        "1. Mike: Hello, Alex!\n2. Alex: How are you?\n3. Mike: I am well.",
    ],
}


@pytest.mark.parametrize("answer", INDEPENDENT)
def test_independent_parts_pass(answer: str) -> None:
    assert why(answer) is None


@pytest.mark.parametrize("kind, answer", [(kind, answer) for kind, answers in DEPENDENT.items() for answer in answers])
def test_dependence_is_named(kind: str, answer: str) -> None:
    assert (why(answer) or "").split(":")[0] == kind


@pytest.mark.parametrize(("title", "sums_up"), [("Conclusion", True), ("Final thoughts", True), ("Legacy", False)])
def test_the_last_part_may_not_sum_up(title: str, sums_up: bool) -> None:
    answer = "It began. It grew. It lasted."
    branches = (BranchSpan("Birth", 0, 10), BranchSpan("Youth", 10, 19), BranchSpan(title, 19, 29))
    assert (find_dependence(["What is jazz?"], answer, BlockSpan(branches)) is not None) == sums_up


@pytest.mark.parametrize(
    ("kind", "question", "refused"),
    [
        ("derivation", "How many bees are needed for a jar of honey? Explain it.", True),
        ("derivation", "Estimate how many words a child hears.", True),
        ("derivation", "一年有多少天？", True),
        ("derivation", "Many people ask how much is enough. What helps against stress?", False),
        ("derivation", "Compute clusters: what are their uses?", False),
        ("course of events", "Tell me how to fix a dripping tap, step by step.", True),
        ("course of events", "Explain in 5 easy steps how to plant a tree.", True),
        ("course of events", "Give me a weekly plan to eat more vegetables.", True),
        ("course of events", "Which steps help against stress?", False),
        ("course of events", "Make a plan for someone who wants to keep a small flat tidy.", False),
    ],
)
def test_questions_for_a_number_or_for_steps_get_chains(kind: str, question: str, refused: bool) -> None:
    assert ((why(INDEPENDENT[0], question) or "").split(":")[0] == kind) == refused


def test_numbers_of_the_question_are_nobodys_result() -> None:
    answer = "1. Pens: 3 x 20 = 60.\n2. Left of 60: none."
    assert (why(answer) or "").startswith("shared result")
    assert why(answer, "I have 60 dollars.") is None
