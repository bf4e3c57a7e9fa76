"""Thoughts, formulas and elements are never cut, and no tag is in a branch."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax.blocks.checks import find_defects
from aspd_jax.blocks.extract import propose
from aspd_jax.blocks.measures import estimate_tokens
from aspd_jax.blocks.regions import regions_of
from aspd_jax.blocks.spans import BlockSpan, BranchSpan, with_leads
from aspd_jax.errors import StructureError
from aspd_jax.pipeline import entries
from aspd_jax.pipeline.data_config import SelectSection

THOUGHT = "So:\n\n1. red is warm\n2. blue is cold\n3. green is new\n"
ANSWER = "1. **Red**: it is warm.\n2. **Blue**: it is cold.\n3. **Green**: it is new."
FORMS = {
    "DeepSeek, Qwen": f"<think>\n{THOUGHT}</think>\n\n{ANSWER}",
    "the template opened it": f"{THOUGHT}</think>\n\n{ANSWER}",
    "R1-Zero": f"<think>{THOUGHT}</think>\n<answer>{ANSWER}</answer>",
    "thinking": f"<thinking>\n{THOUGHT}</thinking>\n{ANSWER}",
    "reasoning": f"<reasoning>\n{THOUGHT}</reasoning>\n<answer>\n{ANSWER}\n</answer>",
    "Sky-T1": f"<|begin_of_thought|>\n\n{THOUGHT}\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n{ANSWER}\n\n"
    "<|end_of_solution|>",
    "Magistral": f"[THINK]{THOUGHT}[/THINK]{ANSWER}",
    "Kimi": f"◁think▷{THOUGHT}◁/think▷{ANSWER}",
    "Seed": f"<seed:think>\n{THOUGHT}</seed:think>{ANSWER}",
    "Cohere": f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>",
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
    "one-sided tokens": f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}",
    "an element of another name": f"<brain_storm>\n{THOUGHT}</brain_storm>\n{ANSWER}",
    "code that stays open in the thought": f"<think>\n{THOUGHT}\n```py\nx = 1\n</think>\n\n{ANSWER}\n\n```py\ny\n```",
    "between two answers": f"{ANSWER}\n\n<think>\n{THOUGHT}</think>\n\n{ANSWER}",
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("name", FORMS)
def test_a_thought_and_an_answer_have_lists_of_their_own(name: str, newline: str) -> None:
    answer = FORMS[name].replace("\n", newline)
    (blocks,) = propose(answer)
    texts = [[answer[b.start : b.end].strip() for b in with_leads(answer, block).branches] for block in blocks]
    expected = [["1. red is warm", "2. blue is cold", "3. green is new"], ANSWER.split("\n")]
    assert texts == ([expected[1], *expected] if name.startswith("between") else expected)
    assert [list(find_defects(answer, with_leads(answer, block))) for block in blocks] == [[]] * len(texts)


def test_a_thought_without_tags_would_be_cut_with_the_answer() -> None:
    """Negative control of the test above."""
    (blocks,) = propose(FORMS["DeepSeek, Qwen"].replace("<think>", "").replace("</think>", ""))
    assert len(blocks) != 2 or len(blocks[0].branches) != 3


def test_tags_in_code_are_text() -> None:
    answer = "1. Tags: `<think>` and `</think>` are tokens.\n2. Others: `<|im_end|>` ends it.\n\n```\n<think>\n```\n"
    ((block,),) = propose(answer)
    assert len(block.branches) == 2 and not regions_of(answer).tags


MORE = "+ one of these is long\n+ two of these are short\n+ three of these are new"
WHOLE = {
    "dollars": f"$$\nx = 1\n{MORE}\n$$",
    "dollars in a sentence": f"The sum is $$x = 1\n{MORE}$$ as one sees.",
    "an empty line between dollars": f"$$\nx = 1\n\n{MORE}\n$$",
    "brackets": f"\\[\nx = 1\n{MORE}\n\\]",
    "parentheses": f"It is \\(x = 1\n{MORE}\\) here.",
    "one dollar": f"It is $x = 1\n{MORE}$ here.",
    "align": f"\\begin{{align*}}\nx &= 1 \\\\\n{MORE}\n\\end{{align*}}",
    "a fence of maths": f"```math\nx = 1\n{MORE}\n```",
    "a fence": f"~~~~diff\n~~~\n{MORE}\n~~~~",
    "a quote": "> Say:\n>\n" + re.sub("(?m)^", "> ", MORE),
    "details": f"<details>\n<summary>More</summary>\n\n{MORE}\n\n</details>",
    "nested divisions": f"<div>\n<div>\n</div>\n\n{MORE}\n\n</div>",
    "a comment": f"<!--\n{MORE}\n-->",
    "a fenced division": f"::: {{.note}}\n{MORE}\n:::",
    "front matter": "---\ntitle: Colours\nkind: List\ntags:\n- red things\n- blue things\n---",
    "TOML": "+++\ntitle = 1\n- red things\n- blue things\n+++",
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_never_cut_has_no_block(name: str, newline: str) -> None:
    before = "" if name in ("front matter", "TOML") else "So it is:\n\n"
    answer = f"{before}{WHOLE[name]}\n\nThat is all of it."
    assert propose(answer.replace("\n", newline)) == []
    opened = re.sub(
        r"(?m)\$\$?|\\[\[\]()]|\\(begin|end)\S+|[`~]{3,}\w*|^>|</?\w+>|<!--|-->|^:::.*|^(---|\+\+\+)$", "", answer
    )
    assert propose(opened)  # the same lines without what makes them one
    within = f"1. Red: it is warm.\n2. Blue: it is cold.\n\n{before}{WHOLE[name]}\n\n3. Green: it is new.\n"
    if before:
        starts = [b.start for blocks in propose(within) for block in blocks for b in block.branches]
        assert starts and not set(starts) & {place.start() for place in re.finditer(r"(?m)^[+>] ", within)}


MARKS = re.compile(
    r"\$\$?|\\[\[\]()]|\\(begin|end)\S+|[`~]{3,}\w*|^>|</?\w+>|<!--|-->|^:::.*|^(---|\+\+\+)$", re.MULTILINE
)
NOT_WHOLE = {
    "prices": "Places:\n\n- **Anna**: $$\n- **Bert**: $$\n- **Carl**: $$$\n",
    "amounts": "Costs:\n\n- Rent is $500 = half\n- Food is $300 = less\n",
    "a placeholder": "1. Dear <name>, we write.\n2. To [Company] we say\nno.\n",
    "line breaks": "- one<br>\n- two<br>\n",
    "an open element": "<p>\n- one thing\n- two things\n",
    "an open formula": "\\[\n\n- one thing\n- two things\n",
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_marks_of_another_meaning_protect_nothing(name: str) -> None:
    assert propose(NOT_WHOLE[name])


def test_a_lead_does_not_end_within_a_formula() -> None:
    answer = "Laws:\n\n- \\[ a + b + c + d = e \\] is one law.\n- \\[ f + g + h + i = j \\] is another law.\n"
    ((block,),) = propose(answer)
    leads = [answer[b.start : b.start + b.lead] for b in with_leads(answer, block).branches]
    assert leads == ["\n\n- \\[ a + b + c + d = e \\]", "\n- \\[ f + g + h + i = j \\]"]


def test_a_lead_ends_within_its_part() -> None:
    """Two backticks are code of Markdown that reaches over the parts; negative control: without them."""
    answer = "Kinds:\n\n- **Rock `n Roll**: loud music of the fifties.\n- **Drum `n Bass**: fast music.\n"
    ((block,),) = propose(answer)
    with pytest.raises(StructureError, match=r"the part '- \*\*Rock .* ends in another part"):
        with_leads(answer, block)
    plain = answer.replace("`", "'")
    assert [branch.lead for branch in with_leads(plain, propose(plain)[0][0]).branches] == [21, 20]


def test_a_block_lies_in_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "<think>First comes this one. Then comes that one.</think>\n\nHere is what I found."
    first, then, here = (answer.index(word) for word in ("First", "Then", "Here"))
    for start, middle, end, fits in ((first, then, answer.index("</think>"), True), (then, here, len(answer), False)):
        block = BlockSpan((BranchSpan("One", start, middle), BranchSpan("Two", middle, end)))
        monkeypatch.setattr(entries, "propose", lambda text, block=block: [(block,)])
        candidates, rejected = entries.propose_by_rules(SelectSection(min_tokens=1), estimate_tokens, answer)
        assert bool(candidates) == fits
        assert fits or "from one region into another" in rejected[0]["reason"]


LINES = st.sampled_from(
    ["1. one", "2. two", "- a b", "- c d", "+ e", "", "", "Text.", "```", "$$", "$$x$$", "\\[", "\\]", "<think>",
     "</think>", "<div>", "</div>", "<plan>", "</plan>", "[THINK]", "<|end|>", "a `b` <think> c", "$a = 1", "b$ c",
     "\\begin{align}", "\\end{align}", "<!--", "-->", "---", "a: b", ":::x", ":::", "## Head", "> q", "| a |", "|---|"]
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(LINES, max_size=25), st.sampled_from(["\n", "\r\n", "\r"]))
def test_no_edge_is_in_a_range_and_no_tag_in_a_branch(lines: list[str], newline: str) -> None:
    answer = newline.join(lines)
    regions = regions_of(answer)
    ranges = [*regions.tags, *regions]
    assert sorted(ranges) == sorted(set(ranges)) and "".join(answer[a:b] for a, b in sorted(ranges)) == answer
    protected = [span for span in regions.protected if not any(span[0] < b and a < span[1] for a, b in regions.tags)]
    blocks = [block for proposal in propose(answer) for block in proposal]
    for block in blocks:
        assert not any(block.start < end and start < block.end for start, end in regions.tags)
        edges = [block.end, *(branch.start for branch in block.branches)]
        assert not any(start < edge < end for edge in edges for start, end in protected)


@pytest.mark.parametrize(
    "part", ["$$", "<div>", "`", "\\[", "$5 ", "<a>", "```\n", "<think>", "\\begin{x}", "$a^\n", "<x>\n</x>\n"]
)
def test_marks_without_an_end_take_linear_time(part: str) -> None:
    """Text of 30,000 marks is scanned in a time that a quadratic search would exceed a hundredfold."""
    regions_of(part * 30_000)
