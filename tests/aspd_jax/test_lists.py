"""Lists in text that is being written: first items, leads, forms, ends of bodies, and lists that should not fork."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aspd_jax.blocks.checks import similar
from aspd_jax.blocks.extract import CONCLUSIONS
from aspd_jax.lists import (
    Body,
    ListDetector,
    ListForm,
    Outline,
    begins_item,
    body_of,
    fork_refusal,
    lead_of,
    next_lead,
)
from tests.conftest import shared
from tests.helpers.lists import lists_of

# The first line of an item; marker, lead and closing of its form; kind of the form; marker of the third item.
FIRST_ITEMS = {
    "1. **Sleep well**: eight hours.": ("1. **", "Sleep well", "**:", "bold", "3. **"),
    "1. **Sleep well:** eight hours.": ("1. **", "Sleep well", ":**", "bold", "3. **"),
    "1. **Sleep** is good.": ("1. **", "Sleep", "**", "bold", "3. **"),
    "2) **Sleep**: no.": None,
    "1) **Sleep** - eight hours.": ("1) **", "Sleep", "** -", "bold", "3) **"),
    "- **Sleep.** Eight hours.": ("- **", "Sleep", ".**", "bold", "- **"),
    "**1. Sleep**: eight hours.": ("**1. ", "Sleep", "**:", "bold", "**3. "),
    "**1.** Sleep: eight hours.": ("**1.** ", "Sleep", ":", "label", "**3.** "),
    "**Sleep**: eight hours.": ("**", "Sleep", "**:", "bold", "**"),
    "**Sleep**\n": ("**", "Sleep", "**", "bold", "**"),
    "**Sleep** is good for you.": None,
    "1. Sleep: eight hours.": ("1. ", "Sleep", ":", "label", "3. "),
    "* Sleep well - eight hours.": ("* ", "Sleep well", " -", "label", "* "),
    "(1) Sleep: eight hours.": ("(1) ", "Sleep", ":", "label", "(3) "),
    "### 1. Sleep\n": ("### 1. ", "Sleep", "", "heading", "### 3. "),
    "## **Sleep well:**\n": ("## **", "Sleep well", ":**", "heading", "## **"),
    "# All about sleep\n": None,
    "Step 1: Lie down\n": ("Step 1: ", "Lie down", "", "clause", "Step 3: "),
    "1. Sleep for eight hours, even on Sundays.": ("1. ", "Sleep for eight hours", "", "clause", "3. "),
    "- Sleep for as long as you need to every single night.": ("- ", "Sleep for as long as you", "", "clause", "- "),
    "1、睡眠：每天八小时。": ("1、", "睡眠", "：", "label", "3、"),
    "一、早点睡觉，身体好。": ("一、", "早点睡觉", "", "clause", "三、"),
    "１．睡眠：好。": None,  # digits of other scripts are left as they are
    "**١. النوم**: ثماني ساعات.": ("**", "١. النوم", "**:", "bold", "**"),
    "① 睡眠：好。": ("① ", "睡眠", "：", "label", "③ "),
    "1. At 9:30 we leave, and come back late at night.": ("1. ", "At 9:30 we leave", "", "clause", "3. "),
    "1. https://example.org/a/b has all about it, and more than that": (
        "1. ", "https://example.org/a/b has all about it", "", "clause", "3. ",
    ),
    "   1. **Sleep**: nested.": None,
    "1.5 litres of water.": None,
    "1: no list, but a ratio": None,
    "12. **Months**: a year.": None,
    "-5 degrees: it is cold.": None,
    "---\n": None,
    "***\n": None,
    "| 1. a | b |": None,
    "> 1. said he": None,
    "The rose is red,\n": None,
    "Mike: Hello, Anna!\n": None,
    "2 + 2 = 4\n": None,
    "$$\n": None,
    "- - -\n": None,
}  # fmt: skip


@pytest.mark.parametrize("line", FIRST_ITEMS)
def test_first_items(line: str) -> None:
    """Check forms, and that a line decides without its second half only if that half does not matter."""
    lead, expected = lead_of(line + " " if line[-1] != "\n" else line), FIRST_ITEMS[line]
    if expected is None:
        assert lead is None
        return
    assert lead is not None
    form = lead.form
    assert (form.marker(0), lead.text, form.closing, form.kind, form.marker(2)) == expected
    assert line.startswith(form.item(0, lead.text)) and lead.end == len(form.item(0, lead.text))


@pytest.mark.parametrize(
    ("before", "token", "goes_on"),
    [
        ("- ", "-", True), ("- ", " - ", True), ("- ", "- Sleep", True), ("- ", "---", False), ("- ", "--", False),
        ("* ", "*", True), ("* ", "**", False), ("## ", "##", True), ("## ", "###", False), ("- ", "That", False),
    ],
)  # fmt: skip
def test_a_joint_goes_on_with_the_marker(before: str, token: str, goes_on: bool) -> None:
    """Check that rules, emphasis and other headings are no markers."""
    assert ListForm("label", before, closing=":").goes_on(1, token) == goes_on


def test_shown_items_have_an_ellipsis() -> None:
    leads = ["1. **Sleep**: x", "- Sleep for eight hours, then x\n", "1、睡眠：好", "## Sleep\n"]
    shown = ["2. **Eat**: ...", "- Eat...", "2、Eat：...", "## Eat"]
    assert [lead.form.shown(1, "Eat") for line in leads if (lead := lead_of(line))] == shown


def test_numerals() -> None:
    form = ListForm("label", "", "一", "、")
    assert [form.marker(index) for index in (0, 8, 9, 10, 20)] == ["一、", "九、", "十、", "十一、", "二十一、"]
    assert ListForm("label", "", "①").marker(19) == "⑳"


@pytest.mark.parametrize(
    "first, text, expected",
    [
        ("1. **Sleep**: x", "Eat well**: y", "Eat well"),
        ("1. **Sleep**: x", "Eat well: y", "Eat well"),
        ("1. **Sleep**: x", "Eat at 9:30 and", None),
        ("1. Sleep: x", "**Eat well**: y", "Eat well"),
        ("1. Sleep: x", "Eat well - y", "Eat well"),
        ("1. Sleep: x", "Eat well\n", "Eat well"),
        ("1. Sleep: x", "Eat as much as you can whenever you can find it: y", None),
        ("## Sleep\n", "Eat: well\n", "Eat: well"),
        ("## Sleep\n", "Eat: well", None),
        ("- Sleep long, then rise\n", "Eat well, and often", "Eat well"),
        ("- Sleep long, then rise\n", "Eat well", None),
        ("- Sleep long, then rise\n", "Eat well.\n", "Eat well"),
        ("1、睡眠：好", "饮食：好", "饮食"),
        ("1. **Sleep**: x", "\n", ""),
    ],
)
def test_further_leads(first: str, text: str, expected: str | None) -> None:
    lead = lead_of(first)
    assert lead is not None
    further = next_lead(lead.form, text)
    assert (further.text if further else None) == expected


NUMBERS, BULLETS = ListForm("bold", "", "1", ". ", "**", "**:"), ListForm("label", "- ", closing=":")
SECTIONS, BOLD = ListForm("heading", "## "), ListForm("bold", "", opening="**", closing="**")
# Form, body, what follows it, and what kind that is.
BODIES = [
    (NUMBERS, " One.", "\n\n2. **Eat", "item"),
    (NUMBERS, " One.", "\n2. Eat", "item"),
    (NUMBERS, " One.", "\n\n**2. Eat", "item"),
    (NUMBERS, " One.", "\n\n## More", "heading"),
    (NUMBERS, " One.", "\n\n---", "rule"),
    (NUMBERS, " One.", "\n\n* * *\n", "rule"),
    (NUMBERS, " One.", "\n\nThat is all.", "prose"),
    (NUMBERS, " One.", "\n\n**Note** that", "prose"),
    (NUMBERS, " One.", "\nBy following these tips, you will be sleeping well.", "prose"),
    (NUMBERS, "", "\n2. **Eat", "item"),
    (NUMBERS, " One.\nIt goes on in the next line, which is long enough to decide.", "\n\n2. **", "item"),
    (NUMBERS, "\n   - a\n   - b", "\n2. **", "item"),
    (NUMBERS, "\n- a\n- b\n\n- c", "\n\n2. **", "item"),
    (NUMBERS, "\n\nA paragraph.", "\n\n2. **", "item"),
    (NUMBERS, " One.\n\n   A paragraph.\n   3. nested", "\n\n2. **", "item"),
    (NUMBERS, "\n```python\n# 1. x\n2. y\n\nprint(3)\n```", "\n2. **", "item"),
    (NUMBERS, "\n~~~\n2. y\n~~~", "\n\nThat is", "prose"),
    (NUMBERS, " As:\n| 1. | 2. |\n|---|---|\n\n| a | b |", "\n\n2. **", "item"),
    (NUMBERS, " As:\n$$\nx =\n2. + 3\n\n- y\n$$", "\n\n2. **", "item"),
    (NUMBERS, " As:\n\\[\n2. x\n\\]", "\n\n2. **", "item"),
    (NUMBERS, " As:\n\\begin{align}\n2. x\n\\end{align}", "\n\n2. **", "item"),
    (NUMBERS, " It costs $5.\n\n> A quote.", "\n\n2. **", "item"),
    (BULLETS, " One.", "\n- ", "item"),
    (BULLETS, " Two:\n1. a\n2. b", "\n- ", "item"),
    (BULLETS, " Two:\n* a\n* b", "\n- ", "item"),
    (BULLETS, " One.", "\n\n2. Eat", "prose"),
    (ListForm("clause", "- "), "", "\n\nThat is all.", "prose"),
    (ListForm("clause", "Part ", "1", ": "), "\n\nOne.\n\nTwo.", "\n\nPart 2: ", "item"),
    (SECTIONS, "\n\nOne.\n\nTwo.\n\n### Deep\n\n1. a", "\n\n## ", "item"),
    (SECTIONS, "\n\nOne.", "\n\n# ", "heading"),
    (SECTIONS, "\n\nOne.", "\n\nIn conclusion, sleep is all that one needs.", "prose"),
    (BOLD, "\n\nOne.\n\nTwo.\n- a", "\n\n**Eat**\n", "item"),
    (BOLD, "\n\nOne.\n\n**Sleep** is good for all.", "\n\n**Eat**: ", "item"),
]


@pytest.mark.parametrize(("form", "body", "behind", "kind"), BODIES)
def test_ends_of_bodies(form: ListForm, body: str, behind: str, kind: str) -> None:
    """Check the end, and that the body may go on as long as what is behind it is not complete."""
    found = body_of(form, body + behind)
    assert (found.end, found.gap, found.next) == (len(body), behind[: len(behind) - len(behind.lstrip())], kind)
    undecided = [body_of(form, body + behind[:length]) for length in range(1, len(behind))]
    assert all(part.end == len(body) for part in undecided)
    assert body_of(form, body).next is None


@pytest.mark.parametrize(
    ("begin", "end"), [("```\n", "```"), ("$$\n", "$$"), ("As:\n\\[ x\n", "\\]"), ("~~~\n", "~~~")]
)
def test_no_list_begins_in_code_or_formulas(begin: str, end: str) -> None:
    def place(text: str) -> int | None:
        found = ListDetector([]).look(text)
        return found.place if found else None

    assert place(begin) is None and place(f"{begin}1. x") is None and place(begin + end) is None
    assert place(f"{begin}1. x\n{end}\n1. y") == len(begin) + len(end) + 6
    assert place("a\n1. b") == 2 and place("1. b") == 0 and place("") == 0 and place("a\nx") is None


PIECES = st.sampled_from(
    [
        "1. ", "2. ", "12. ", "**", "- ", "* ", "## ", "### ", "#", "---", "```", "~~~", "$$", "\\[", "\\]", "| a |",
        "> ", "\n", "\n\n", "\n   ", "Step 2: ", "Sleep", " well", ": ", "：", " - ", ".", ". ", ", ", "!",
        "一、", "二", "睡眠好", "①",
        "(1) ", "By following", "In conclusion", "9:30", "e", "`", "$", "\\begin{x}", "\\end{x}", "* * *", "=", "1",
        ")", "•",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=30)
FORMS = st.sampled_from(
    [lead.form for line, form in FIRST_ITEMS.items() if form and (lead := lead_of(line.rstrip("\n") + " \n"))]
)


@given(TEXTS)
@example("- " + "x" * 90)
@example("- " + ":" * 90)
def test_decisions_on_first_items_are_final(text: str) -> None:
    line = text.split("\n")[0] + "\n"
    begins: set[bool] = set()
    leads = []
    for length in range(len(line) + 1):
        decision, lead = begins_item(line[:length]), lead_of(line[:length])
        assert not (begins and decision is None) and (lead is None or decision)
        begins |= set() if decision is None else {decision}
        assert not leads or lead == leads[0]
        leads += [lead] if lead else []
    assert len(begins) == 1


@given(FORMS, TEXTS | st.sampled_from(["x" * 90, ":" * 90]))
def test_decisions_on_further_items_are_final(form: ListForm, text: str) -> None:
    lead, body = None, Body(0, "", None)
    for length in range(len(text) + 1):
        part = text[:length]
        further = next_lead(form, part)
        assert lead is None or further == lead
        lead = further
        longer = body_of(form, part)
        assert longer.end >= body.end and part[longer.end :].startswith(longer.gap)
        assert body.next is None or longer == body
        body = longer


WORDS = st.lists(st.sampled_from(["eat", "well", "sleep", "often", "`x`", "d'accord", "睡眠"]), min_size=1, max_size=4)
LEADS = st.lists(WORDS.map(" ".join), min_size=2, max_size=12)
TAILS = ["It helps.", "It helps.\n   - nested: a\n   - b", "See:\n```\n2. x\n\n- y\n```", "Or:\n| a |\n|---|\n\n| 2. |"]


@given(FORMS, LEADS, st.lists(st.sampled_from(TAILS), min_size=12, max_size=12), st.sampled_from(["\n", "\n\n"]))
def test_joined_items_are_read_again(form: ListForm, leads: list[str], tails: list[str], gap: str) -> None:
    first = "\n\n" if form.kind == "heading" or form == BOLD else ", " if form.kind == "clause" else " "
    items = [
        form.item(number, lead) + first + tail for number, (lead, tail) in enumerate(zip(leads, tails, strict=False))
    ]
    gap = "\n\n" if form.kind == "heading" else gap
    before, behind = "Some tips:\n\n", "\n\nIn conclusion, all of these are needed, and more."
    (found,) = lists_of(before + gap.join(items) + behind)
    assert list(found.items) == items
    assert (found.start, found.end) == (len(before), len(before + gap.join(items)))
    assert found.form.marker(0) == form.marker(0) and set(found.gaps) <= {gap}
    assert found.numbers == (tuple(range(1, len(items) + 1)) if form.numeral else (None,) * len(items))
    if form.kind in ("bold", "heading"):
        assert [lead.text if lead else None for lead in found.leads] == leads


def test_a_text_without_lists_has_none() -> None:
    """Negative control: code, tables, poems, dialogues, formulas, quotes and bold words in sentences."""
    text = (
        "```python\n# 1. load\n- x\n**a**: b\n```\n\n| 1. a | - b |\n|---|---|\n\nThe rose is red,\nThe sky is blue,\n"
        "\nAnna: Hello!\nMike: Hello, Anna!\n\n$$\n1. + 2.\n- x\n$$\n\n> 1. a\n> 2. b\n\n**Sleep** is good.\n\n"
        "1.5 + 2 = 3.5\n"
    )
    assert not list(lists_of(text))
    assert len(list(lists_of(text.replace("```python\n", "")))) > 0


@pytest.mark.parametrize(
    "lead, other, expected",
    [
        ("Take breaks", "Take regular breaks", True),
        ("Sleep", "sleep", True),
        ("C++", "C#", False),
        ("C", "C++", False),
        ("Set clear goals", "Seek support", False),
        ("饮食健康", "饮食", False),
    ],
)
def test_similar_leads(lead: str, other: str, expected: bool) -> None:
    assert similar(lead, other) == similar(other, lead) == expected


def test_conclusions() -> None:
    assert CONCLUSIONS.match("Conclusion") and CONCLUSIONS.match("**Final Thoughts**")
    assert not CONCLUSIONS.match("Include fruit")


REFUSED = {
    "program": ["Write a Python function that sorts a list.", "What is wrong here?\n```\nx = 1\n```"],
    "derivation": [
        "Solve for x in the equation x + 3 = 5.", "How many bees are there on Earth?", "What is 3 * 17?",
        "Where is the shadow? Explain your reasoning steps.", "Show all your work.", "How many x satisfy it", "|x| < 5",
        "And how do you solve this?",
    ],
    "connected text": ["Can you help me write a letter to my landlord?", "Tell me a story about a fox."],
    "course of events": [
        "Give me a recipe for soup.", "How do I install a sink?", "Explain it step by step.",
        "Design a five-step workflow.", "Summarize the story with three bullet points.",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "question"), [(kind, text) for kind, texts in REFUSED.items() for text in texts])
def test_questions_for_one_whole_are_refused(kind: str, question: str) -> None:
    assert (fork_refusal([question], NUMBERS, ["Sleep", "Eat"]) or "").split(":")[0] == kind


@pytest.mark.parametrize(
    "question",
    [
        "What are the main differences between Python and Java?",
        "How can I write a good letter?",
        "Which functions does a kidney have?",
        "Give me five ideas for a story about a fox.",
        "How can a school create a good climate in class?",
        "Summarize the main ideas of this text.",
        "I know how much I sleep. What else helps?",
        "How do you work with difficult colleagues?",
        "What is two-step verification good for?",
        "I <3 lists. Give me ideas for gifts.",
        "Give me tips for ages > 5.",
        "如何改善睡眠？",
    ],
)
def test_questions_for_items_fork(question: str) -> None:
    assert fork_refusal([question], NUMBERS, ["Sleep"]) is None
    assert (
        fork_refusal([question], NUMBERS, ["Sleep", "Eat", "Walk"], "1. **Sleep**: Eight hours.", "Tips:\n\n") is None
    )


def test_items_without_a_body_are_refused() -> None:
    form = ListForm("clause", "- ")
    assert (fork_refusal(["Name fruit."], form, ["Red apples"], "- Red apples.\n") or "").startswith("no body")
    for item in ("- Red apples", "- Red apples, such as Gala\n", "- Red apples. They are sweet.\n"):
        assert fork_refusal(["Name fruit."], form, ["Red apples"], item) is None
    assert fork_refusal(["Name fruit."], BULLETS, ["Red apples"], "- Red apples:\n") is None


def test_long_questions_take_linear_time() -> None:
    begun = time.perf_counter()
    assert fork_refusal(["\n" * 100_000 + "How can I sleep?"], NUMBERS, ["Sleep", "Eat"]) is None
    assert time.perf_counter() - begun < 10, "quadratic: minutes"


def test_a_lead_that_compares_the_others_ends_the_outline() -> None:
    lead = lead_of("1. **Euclidean geometry**: flat")
    assert lead is not None
    outline = Outline(lead, 10)
    assert outline.take(lead._replace(text="Riemannian geometry"), 5)
    assert not outline.take(lead._replace(text="Key Differences"), 5)
    assert outline.leads == ["Euclidean geometry", "Riemannian geometry"]
    assert outline.take(lead._replace(text="Differences in price"), 5), "negative control"


@pytest.mark.parametrize(
    "leads, before, kind",
    [
        (["Introduction", "Main part"], "", "connected text"),
        (["[Your Name]", "[Date]"], "", "connected text"),
        (["Calculate the mass", "Divide it"], "", "derivation"),
        (["Import the library", "Use it"], "", "program"),
        (["Boil water", "Then add salt"], "", "goes on"),
        (["Day 1", "Day 2"], "", "course of events"),
        (["Loop", "Output"], "```\nfor x in y:\n```\n\n", "explains code"),
    ],
)
def test_dependent_leads_are_refused(leads: list[str], before: str, kind: str) -> None:
    assert (fork_refusal(["What is it about?"], NUMBERS, leads, before=before) or "").split(":")[0] == kind


def test_real_answers() -> None:
    """Check decisions on prefixes of real answers, that no text is lost, and which questions fork."""
    rows = [json.loads(line) for line in shared("data", "answers", "vicuna80.jsonl").read_text().splitlines()]
    suitable = {"generic", "knowledge", "common-sense", "counterfactual"}
    forks = Counter[tuple[bool, bool]]()
    for row in rows:
        text = row["answer"].replace("\r\n", "\n")
        for found in (lists := list(lists_of(text))):
            joined = "".join(item + gap for item, gap in zip(found.items, (*found.gaps, ""), strict=True))
            assert text[found.start : found.end] == joined
            behind = text[found.start + (found.leads[0].end if found.leads[0] else 0) :][:600] + "\n"
            whole = body_of(found.form, behind)
            for length in range(0, len(behind), 7):
                part = body_of(found.form, behind[:length])
                assert part.end <= whole.end and part.next in (None, whole.next)
        if lists and len(lists[0].items) > 1 and lists[0].leads[0]:
            first = lists[0]
            refused = fork_refusal(
                [row["question"]],
                first.form,
                [first.leads[0].text],
                before=text[: first.start],  # type: ignore[union-attr]
            )
            forks[row["category"] in suitable, refused is None] += 1
    assert forks[True, True] > 230 and forks[False, False] > 60
    assert forks[True, True] >= 0.95 * (forks[True, True] + forks[True, False])
    assert forks[True, True] >= 0.9 * (forks[True, True] + forks[False, True])
