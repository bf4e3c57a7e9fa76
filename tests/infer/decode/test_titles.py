"""No block with two equal titles: the one that repeats another is discarded, as if it had never been fed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import infer.decode.grammar
import infer.decode.guidance
import infer.decode.sampling
import infer.decode.speculation
import infer.scheduling.admission
from aspd_jax import LanguageModel
from aspd_jax.structure import Parallel
from infer import Engine, SamplingParams
from infer.control.tags import completes_plan
from infer.decode.guidance import Guidance, _take_back
from infer.decode.state import A_TITLE, DecodeState
from infer.decode.token_classes import LINE, TEXT, TokenClasses, number_of, token_classes
from tests.conftest import SIZES, patched, with_one_program
from tests.helpers.answers import SEPARATOR, critical_path, linearise
from tests.infer.decode.test_speculation import knowing

FIRST, SECOND = ([5], [6, 7, 8]), ([9, 2], [1, 1])
PARTS: list[Any] = [[3, 4], [FIRST, SECOND], [7, 7]]


def engine_of(lm: LanguageModel, draft_tokens: int = 0) -> Engine:
    return Engine(
        lm, max_length=256, max_batch=2, max_branches=4, max_title_tokens=3, separator_ids=SEPARATOR,
        drafts="lookup" if draft_tokens else "none", draft_tokens=max(1, draft_tokens), force_drafts=True,
    )  # fmt: skip


def script(engine: Engine, serial: list[int]) -> list[list[int]]:
    """Return serial tokens, titles included, and the two branches of PARTS; the model samples the rest."""
    return [serial, *([*text, engine.config.special.branch_end] for _, text in (FIRST, SECOND))]


def serial_tokens(engine: Engine, titles: list[list[int]], after: list[int]) -> list[int]:
    special = engine.config.special
    marked = [token for title in titles for token in (special.title_start, *title, special.title_end)]
    return [3, 4, *marked, *after]


@pytest.mark.further
@pytest.mark.parametrize("draft_tokens", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("again", [[5], [9, 2]])
def test_a_repeated_title_ends_the_list(again: list[int], draft_tokens: int, bare_lm: LanguageModel) -> None:
    engine = engine_of(bare_lm, draft_tokens)
    special = engine.config.special
    titles = [FIRST[0], SECOND[0], again]
    repeating = script(engine, serial_tokens(engine, titles, [7, 7, 0]))
    plain = script(engine, serial_tokens(engine, titles[:2], [special.parallel_start, 7, 7, 0]))
    for scripted, discarded in ((repeating, 1 + len(again)), (plain, 0)):
        with patched(infer.decode.speculation, drafts_from_text=knowing()):
            result = engine.generate([[1, 2, 3]], SamplingParams(script=scripted))[0]
        assert result.token_ids == linearise(special, PARTS) and result.finish_reason == "stop"
        assert result.stats.discarded_tokens == discarded
        assert result.stats.critical_path == critical_path(special, PARTS)
        if not draft_tokens:
            assert result.stats.steps == result.stats.critical_path - 1 + discarded


@pytest.mark.further
def test_what_follows_never_saw_it(bare_lm: LanguageModel) -> None:
    """Check that greedy tokens after the block equal those after a list that ended by itself, whatever the prompt."""
    engine = engine_of(bare_lm)
    titles = [FIRST[0], SECOND[0], FIRST[0]]
    repeating = script(engine, serial_tokens(engine, titles, []))
    plain = script(engine, serial_tokens(engine, titles[:2], [engine.config.special.parallel_start]))
    prompts = [[token, 3, token] for token in range(1, 15)]

    def free(scripted: list[list[int]], budget: int) -> list[list[int]]:
        results = engine.generate(prompts, SamplingParams(max_new_tokens=budget, script=scripted))
        return [result.token_ids for result in results]

    expected = free(plain, 58)  # what is discarded counts
    block = len(linearise(engine.config.special, PARTS[:2], end=None))
    assert sum(len(ids) - block for ids in expected) > 50 and len({tuple(ids[block:]) for ids in expected}) > 5
    assert free(repeating, 60) == expected

    # Negative control: where it stays in the cache, later tokens see it.
    with patched(infer.decode.guidance, _take_back=without_hiding):
        assert free(repeating, 60) != expected


def without_hiding(state: DecodeState, guidance: Guidance) -> DecodeState:
    """Take tokens back, but leave them in the cache."""
    return _take_back(state, guidance)._replace(cache=state.cache)


@pytest.mark.further
def test_a_title_has_no_line_break(lm: LanguageModel, monkeypatch: Any) -> None:
    """Check titles sampled nearly evenly; negative controls: without the table, and in serial text."""
    codec = lm.codec.text
    table = token_classes(lm.config.vocab_size, lm.special_tokens.ids, lm.end_ids, (), codec)  # type: ignore[union-attr]
    assert (table.kind[codec.encode("\n")] == LINE).all() and (table.kind[codec.encode("x z")] == TEXT).all()
    asked = [SamplingParams(temperature=30.0, max_new_tokens=400, max_branch_tokens=8, seed=n) for n in range(32)]

    def titles_and_texts(engine: Engine) -> tuple[list[str], str]:
        found, text = [], ""
        for result in engine.generate(["Hi"] * len(asked), asked):
            text += result.text
            blocks = [item for item in result.structure if isinstance(item, Parallel)]
            found += [branch.title for block in blocks for branch in block.branches]
        return found, text

    titles, text = titles_and_texts(Engine(lm, **SIZES))
    assert len(titles) > 15 and not any("\n" in title for title in titles) and "\n" in text

    def without_line_breaks(*args: Any) -> TokenClasses:
        classes = token_classes(*args)
        return classes._replace(kind=np.where(classes.kind == LINE, TEXT, classes.kind))

    monkeypatch.setattr(infer.scheduling.admission, "token_classes", without_line_breaks)
    titles, _ = titles_and_texts(Engine(lm, **SIZES))
    assert any("\n" in title for title in titles), "negative control"


@pytest.mark.further
def test_markers_do_not_tell_titles_apart(lm: LanguageModel) -> None:
    codec = lm.codec.text
    table = token_classes(lm.config.vocab_size, lm.special_tokens.ids, lm.end_ids, (), codec)  # type: ignore[union-attr]
    texts = ("3", "/", " ", "**", ".", "a", "the", " b", "é")
    marked = {text: bool(table.marker[codec.encode(text)].all()) for text in texts}
    assert marked == dict.fromkeys(texts[:5], True) | dict.fromkeys(texts[5:], False)
    engine = Engine(lm, **SIZES)
    special = engine.config.special
    for titles, kept in (
        (["1/3 sun", "2/3 rain", "3/3 sun"], 2),
        (["1. sun", "2. rain", "3) rain"], 2),
        (["1/3 sun", "2/3 rain", "3/3 suns"], 3),
        (["1", "2", "3"], 3),
        (["1", "2", "1"], 2),
    ):
        serial = [t for x in titles for t in (special.title_start, *codec.encode(x), special.title_end)]
        serial += [special.parallel_start] * (kept == 3)
        told = [serial, *[[special.branch_end]] * 8]
        result = engine.generate(["Hi"], SamplingParams(max_new_tokens=200, script=told))[0]
        block = next(item for item in result.structure if hasattr(item, "branches"))
        assert [branch.title for branch in block.branches] == titles[:kept]


@pytest.mark.further
def test_the_second_title_differs_from_the_first(lm: LanguageModel) -> None:
    """A script may not repeat it: the token that would is never chosen by the grammar. Here: with equal logits."""
    engine = with_one_program(Engine(lm, max_length=256, max_batch=1))
    params = [SamplingParams(temperature=1e-3, max_new_tokens=120, seed=seed) for seed in range(4)]
    favoured = lm.codec.text.encode("a")[0]

    def always(logits: Any, *rest: Any) -> Any:
        """Return titles of the letter a, as far as the grammar permits them."""
        special, (state, _, lanes) = engine.config.special, rest
        s = state.sequence
        score = jnp.zeros(logits.shape[-1]).at[favoured].set(4.0).at[special.title_start].set(5.0)
        in_title = (s.cursor.writes == A_TITLE) & (s.segments.queue[:, 0, 0] != special.title_start)
        closes = in_title[lanes.row]
        score = score + 10 * (closes[:, None] & (jnp.arange(logits.shape[-1]) == special.title_end))
        return jnp.argmax(jnp.where(jnp.isfinite(logits), score, -jnp.inf), axis=-1).astype(jnp.int32)

    with patched(infer.decode.grammar, sample=always):
        results = engine.generate(["Hi"] * 4, params)
    for result in results:
        blocks = [item for item in result.structure if hasattr(item, "branches")]
        assert blocks
        for block in blocks:
            names = [branch.title for branch in block.branches]
            assert names[0] == "a" and len(set(names)) == len(names) == 2


PIECES = ["1", "2", "10", "/", " ", " a", "b", "12/12"]
NUMBERS = np.asarray([number_of(piece) for piece in PIECES], np.int16)


def says_it_is_last(title: list[int]) -> bool:
    """Return whether a text has equal numbers before and after the slash."""
    pieces = [PIECES[token] for token in title]
    if "/" not in pieces:
        return False
    place = pieces.index("/")
    before, after = pieces[:place], pieces[place + 1 :]
    behind = "".join(after[place : place + 1])
    return place > 0 and all(map(str.isdigit, before)) and after[:place] == before and not behind.isdigit()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=7), min_size=1, max_size=3))
@example([[4], [1, 3, 1, 4, 5]]).via("2/2 a")
@example([[1, 3, 1], [0, 3, 1, 5]]).via("only the last title counts")
@example([[0, 3, 0, 2]]).via("1/1 is not the beginning of 1/110")
def test_a_plan_ends_where_its_numbers_are_equal(titles: list[list[int]]) -> None:
    classes: Any = SimpleNamespace(number=NUMBERS)
    assert completes_plan(titles[-1], classes) == says_it_is_last(titles[-1])


@pytest.mark.further
def test_a_complete_plan_is_the_end_of_the_list(lm: LanguageModel) -> None:
    """Check a model that always prefers another title."""
    encode = lm.codec.text.encode
    engine = with_one_program(Engine(lm, max_length=256, max_batch=1, max_branches=8))
    special = engine.config.special

    def forking(logits: Any, *rest: Any) -> Any:
        wanted = jnp.zeros(logits.shape[-1]).at[special.title_start].set(5.0).at[special.parallel_start].set(4.0)
        chosen = jnp.argmax(jnp.where(jnp.isfinite(logits), wanted, -jnp.inf), axis=-1).astype(jnp.int32)
        return infer.decode.sampling.scripted(chosen, rest[0], rest[2])

    asked = []
    for prefix in ("{}/3 ", ""):
        titles = [encode(prefix.format(number) + name) for number, name in enumerate(("a", "b", "c"), 1)]
        serial = [token for title in titles for token in (special.title_start, *title, special.title_end)]
        if not prefix:
            serial += [special.title_start, *encode("d"), special.title_end, special.parallel_start]
        asked.append(SamplingParams(temperature=1e-3, max_new_tokens=150, script=[serial]))
    with patched(infer.decode.grammar, sample=forking):
        results = engine.generate(["Hi"] * 2, asked)
    for result, branches in zip(results, (3, 4), strict=True):
        block = next(item for item in result.structure if hasattr(item, "branches"))
        assert len(block.branches) == branches
