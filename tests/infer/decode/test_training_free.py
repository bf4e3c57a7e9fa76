"""Tags written as text, by a model that has no tokens for them."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax import LanguageModel
from aspd_jax.errors import ConfigError, RequestError
from aspd_jax.structure import Branch, Parallel, Serial, Structure
from infer import Engine, SamplingParams, TextTags
from infer.decode.slots import snapshot
from infer.decode.tag_automaton import TagAutomaton, text_automaton, token_texts
from tests.conftest import patched

TAGS = TextTags()
t, T, p, P, b, B = TAGS.strings


@pytest.fixture(scope="module")
def free(lm: LanguageModel) -> Engine:
    return Engine(lm, max_length=512, max_batch=2, max_branches=3, max_title_tokens=6, text_tags=TAGS)


@pytest.fixture(scope="module")
def spellings(lm: LanguageModel) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    special = {*lm.tokenizer.all_special_ids}
    for token, text in enumerate(token_texts(lm.codec.text, lm.config.vocab_size)):
        if text and token not in special:
            found.setdefault(text, []).append(token)
    return found


def spell(text: str, spellings: dict[str, list[int]], random: Random) -> list[int]:
    """Return one of the ways to cut a text into tokens."""
    ids: list[int] = []
    while text:
        length = random.choice([n for n in range(1, 9) if text[:n] in spellings and n <= len(text)])
        ids.append(random.choice(spellings[text[:length]]))
        text = text[length:]
    return ids


def script_of(
    structure: Structure, spellings: dict[str, list[int]], random: Random, end: int
) -> tuple[list[list[int]], list[list[int]]]:
    """A script that says a structure with tags of text, and its titles as tokens. A token may hold the end of a text
    and the beginning of a tag, but for titles; never the end of a tag and more.
    """
    serial: list[int] = []
    branches: list[list[int]] = [[], [], []]
    titles = []
    text = ""
    for item in structure:
        if isinstance(item, Serial):
            text = item.text
            continue
        for number, branch in enumerate(item.branches):
            serial += spell(text + t, spellings, random)
            titles.append(spell(branch.title, spellings, random))
            serial += titles[-1] + spell(T, spellings, random)
            branches[number] = spell(branch.text + B, spellings, random)
            text = ""
        serial += spell(p, spellings, random)
    serial += [*spell(text, spellings, random), end]
    return [serial, *branches], titles


STRUCTURES: list[Structure] = [
    (
        Serial("Two: a<b, <ti and"),
        Parallel((Branch("Pears", "soft <3 <<"), Branch("A b", ""))),
        Serial("So.<"),
    ),
    (Parallel((Branch("One", "x<pa"), Branch("One", "</pa y, long " * 3), Branch("Two", "z"))),),
    (Serial("no parts, <tit le>"),),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=range(len(STRUCTURES)))
def test_tags_are_recognised_however_they_are_spelled(
    free: Engine, spellings: dict[str, list[int]], structure: Structure
) -> None:
    end = free.config.end[0]
    for seed in range(8):
        random = Random(seed)
        script, _ = script_of(structure, spellings, random, end)
        params = SamplingParams(max_new_tokens=400, script=script)
        events = list(free.submit("Hi", params, max_steps=random.choice([1, 3, 50])))
        result = events[-1].result
        assert result is not None and result.structure == structure and result.finish_reason == "stop"
        serial = [event.text for event in events if event.kind == "token" and not event.block]
        assert "".join(serial) == "".join(item.text for item in structure if isinstance(item, Serial))
        told = [event.text for event in events if event.kind == "branch"]
        blocks = [item for item in structure if isinstance(item, Parallel)]
        assert sorted(told) == sorted(branch.text for block in blocks for branch in block.branches)
        assert result.stats.blocks == len(blocks) and result.stats.steps == result.stats.critical_path - 1
        serial_length, *lengths = map(len, script)
        assert result.stats.critical_path == serial_length + max(lengths)


def test_mask_and_positions_are_those_of_blocks(
    free: Engine, lm: LanguageModel, spellings: dict[str, list[int]]
) -> None:
    """Compare the cache with the definition: branches side by side after `<parts>`, the rest in order."""
    script, titles = script_of(STRUCTURES[0], spellings, Random(3), free.config.end[0])
    result = free.generate(["Hi"], SamplingParams(max_new_tokens=400, script=script))[0]
    shot = snapshot(free.debug_state().decode, np.asarray([0, 1]), free.config).read()
    row = next(r for r in (0, 1) if np.asarray(shot.layout.block)[r].any())
    decode, encode = lm.codec.text.decode, lm.codec.text.encode
    ids = result.prompt_token_ids + result.token_ids
    head = [len(encode(b)) + len(title) + len(free.config.form.separator) for title in titles]
    opened = next(n for n in range(len(ids)) if decode(ids[len(result.prompt_token_ids) : n]).endswith(p))
    expected, place = [(n, 0) for n in range(opened)], opened
    for number in range(2):
        size = head[number]
        while not decode(ids[place : place + size]).endswith(B):
            size += 1
        expected += [(opened + n, number + 1) for n in range(size)]
        place += size
    expected += [(n, 0) for n in range(place, len(ids))]
    known = np.asarray(shot.layout.sequence)[row] > 0
    position, branch = (np.asarray(field)[row][known].tolist() for field in (shot.layout.position, shot.layout.branch))
    seen = list(zip(position, branch, strict=True))
    assert sorted(seen) == sorted(expected[:-1]), "all but the end of text, which is never fed"
    assert np.asarray(shot.layout.block)[row].max() == 1


INSIDE = r"((?!</?title>|</?parts?>).)"
BLOCK = rf"(<title>{INSIDE}+</title>)+<parts>(<part>{INSIDE}*</part>)+</parts>"


def well_formed(text: str) -> bool:
    return bool(re.fullmatch(rf"({INSIDE}*{BLOCK})+{INSIDE}*", text, re.DOTALL))


def opening_only(lm: LanguageModel) -> list[list[int]]:
    """Return parameters that open a block and leave the rest to the model."""
    return [lm.codec.text.encode(t)]


@pytest.mark.slow
def test_random_answers_are_well_formed_and_in_budget(free: Engine, lm: LanguageModel) -> None:
    """Check random answers after a forced block: all tags are closed, whatever the budget."""
    random = np.random.default_rng(0)
    budgets = [int(n) for n in random.integers(100, 260, 10)]
    params = [
        SamplingParams(
            temperature=float(random.choice([1.0, 100.0])),
            max_new_tokens=n,
            seed=seed,
            max_branch_tokens=m,
            script=opening_only(lm),
        )
        for seed, (n, m) in enumerate(zip(budgets, random.choice([1, 9, 30, 200], 10).tolist(), strict=True))
    ]
    blocks = 0
    for budget, result in zip(budgets, free.generate(["Hi"] * 10, params), strict=True):
        assert len(result.token_ids) <= budget
        assert result.stats.steps == result.stats.critical_path - 1
        text = lm.codec.text.decode(result.token_ids)
        assert well_formed(text), text
        for found in re.finditer(BLOCK, text, re.DOTALL):
            titles = re.findall(r"<title>(.+?)</title>", found[0], re.DOTALL)
            parts = re.findall(r"<part>(.*?)</part>", found[0], re.DOTALL)
            assert 2 <= len(titles) == len(parts) <= 3
            assert all(part.startswith(f"{title}: ") for title, part in zip(titles, parts, strict=True))
            blocks += 1
        assert result.stats.blocks == len(re.findall(BLOCK, text, re.DOTALL))
    assert blocks >= 10


@pytest.mark.slow
def test_without_the_grammar_random_answers_are_malformed(free: Engine, lm: LanguageModel) -> None:
    """Negative control."""

    def anything(state: Any, derived: Any, config: Any, lanes: Any) -> Any:
        return jnp.ones((lanes.row.size, 1), bool)

    script = opening_only(lm)
    params = [SamplingParams(temperature=100.0, max_new_tokens=100, seed=seed, script=script) for seed in range(4)]
    with patched(legal_tokens=anything):
        results = free.generate(["Hi"] * 4, params)
    assert not any(well_formed(lm.codec.text.decode(result.token_ids)) for result in results)


def test_end_of_text_in_a_branch_closes_it(free: Engine, spellings: dict[str, list[int]]) -> None:
    end = free.config.end[0]
    script, _ = script_of(STRUCTURES[1], spellings, Random(0), end)
    script[1] = [end]
    result = free.generate(["Hi"], SamplingParams(max_new_tokens=400, script=script))[0]
    block = result.structure[0]
    assert isinstance(block, Parallel) and block.branches[0].text == ""
    assert end not in result.token_ids[:-1]


@pytest.mark.slow
def test_guesses_change_nothing(lm: LanguageModel, free: Engine, spellings: dict[str, list[int]]) -> None:
    own = Engine(
        lm, max_length=512, max_batch=2, max_branches=3, max_title_tokens=6, text_tags=TAGS,
        drafts="lookup", draft_tokens=3
    )  # fmt: skip
    for structure in STRUCTURES:
        script, _ = script_of(structure, spellings, Random(1), free.config.end[0])
        params = SamplingParams(max_new_tokens=400, script=script)
        results = [engine.generate(["Hi"], params)[0] for engine in (free, own)]
        assert results[0].token_ids == results[1].token_ids and results[1].structure == structure


def test_the_prompt_asks_for_the_tags(lm: LanguageModel, free: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    monkeypatch.setattr(lm.tokenizer, "chat_template", template)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name fruits."}]
    asked = lm.tokenizer.decode(free.encode(messages))
    assert TAGS.instruction in asked and asked.index("Be brief.") < asked.index(TAGS.instruction)
    assert TAGS.instruction not in lm.tokenizer.decode(free.encode(messages, "serial"))


def test_mistakes_are_named(bare_lm: LanguageModel, free: Engine) -> None:
    for changed, message in (
        ({"title_start": ""}, "title_start: expected ASCII text"),
        ({"branch_end": "«"}, "branch_end: expected ASCII"),
        (
            {"branch_start": "<p", "parallel_start": "<pp"},
            "branch_start: expected no part of parallel_start '<pp', got '<p'",
        ),
        ({"title_start": "x" * 100}, "110 characters"),
    ):
        with pytest.raises(ConfigError, match=message):
            TextTags(**changed)
    with pytest.raises(RequestError, match="text_tags: expected a model with a tokenizer"):
        Engine(bare_lm, text_tags=TAGS)
    with pytest.raises(RequestError, match="special tokens"):
        free.replay([1], [2])
    with pytest.raises(RequestError, match="fork_bias: expected a model whose tags are special tokens, got text_tags"):
        free.generate([[1]], SamplingParams(fork_bias=1.0))


@pytest.fixture(scope="module")
def tables(lm: LanguageModel) -> TagAutomaton:
    return text_automaton(lm.codec.text, lm.config.vocab_size, TAGS, (), ())


@settings(max_examples=300)
@given(data=st.data())
def test_the_automaton_finds_what_is_there(tables: TagAutomaton, spellings: dict[str, list[int]], data: Any) -> None:
    """Compare the tables with a search of the text."""
    alphabet = st.sampled_from(["<", "/", "t", "title", ">", "part", "parts", "s>", " ", "a", "</", *TAGS.strings])
    text = "".join(data.draw(st.lists(alphabet, max_size=12)))
    random = Random(data.draw(st.integers(0, 999)))
    tag_state, states, read = 0, tables.next.shape[0], ""
    while text:
        sizes = [n for n in range(1, 9) if text[:n] in spellings and n <= len(text)]
        size = random.choice(sizes)
        token = random.choice(spellings[text[:size]])
        before, read, text = read, read + text[:size], text[size:]
        following = int(tables.next[tag_state, token])
        whole = [tag for tag in TAGS.strings if read.endswith(tag)]
        inside = [
            tag for tag in TAGS.strings for stop in range(len(before) + 1, len(read)) if read[:stop].endswith(tag)
        ]
        if inside:
            assert tables.bits[tag_state, token] == 0, "a token that goes past a tag is never allowed"
            return
        assert (following >= states) == bool(whole)
        if whole:
            assert TAGS.strings[following - states - 1] == whole[0]
            return
        tag_state = following
