"""Budgets of all tokens and of the plain text, and the statistics of cut branches (protocol, section 5)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import infer.answers.answer
from aspd_jax import LanguageModel
from infer import Engine, Result, SamplingParams
from infer.answers.answer import content_places, content_segments
from tests.conftest import deferred_branches
from tests.helpers.answers import SEPARATOR
from tests.infer.decode.test_grammar import well_formed

WAVE = 48


def engine_of(lm: LanguageModel) -> Engine:
    return Engine(lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR)


def answers(engine: Engine, content: list[int | None], **changes: int) -> list[Result]:
    params = [
        SamplingParams(
            **{"temperature": 100.0, "max_new_tokens": 150, "seed": seed, "max_content_tokens": of} | changes
        )  # type: ignore[arg-type]
        for seed, of in enumerate(content)
    ]
    return engine.generate([[1, 2, 3]] * len(content), params)


def content(engine: Engine, result: Result) -> list[int]:
    """Return the tokens of the plain text in reading order, without end of text."""
    return [result.token_ids[place] for place in content_places(engine.config, result.token_ids)]


@pytest.fixture(scope="module")
def own(bare_lm: LanguageModel) -> Engine:
    return engine_of(bare_lm)


@pytest.mark.further
def test_a_limit_of_text_keeps_the_first_tokens_in_reading_order(own: Engine) -> None:
    """Check that `max_content_tokens = n` gives the first n tokens of the answer without a limit, blocks included."""
    limits = [int(n) for n in np.random.default_rng(0).integers(1, 40, WAVE)]
    free, bound = answers(own, [None] * WAVE), answers(own, list(limits))
    in_block = 0
    for limit, unbound, result in zip(limits, free, bound, strict=True):
        whole = content(own, unbound)
        assert content(own, result) == whole[:limit] and result.stats.content_tokens == min(limit, len(whole))
        assert well_formed(own, result.token_ids)
        if limit < len(whole):
            assert result.finish_reason == "length"
            in_block += bool(result.stats.blocks) and own.config.special.parallel_end == result.token_ids[-1]
        if limit > len(whole):
            assert result.token_ids == unbound.token_ids, "a limit that is not reached changes nothing"
    assert in_block > 8, "many ended inside a block"


@pytest.mark.further
def test_a_limit_of_all_tokens_keeps_a_beginning_of_the_text_and_of_each_branch(own: Engine) -> None:
    limits = [int(n) for n in np.random.default_rng(1).integers(1, 110, WAVE)]
    free = answers(own, [None] * WAVE)
    cut, some, whole_siblings = 0, 0, 0
    params = [SamplingParams(temperature=100.0, max_new_tokens=limit, seed=seed) for seed, limit in enumerate(limits)]
    results = own.generate([[1, 2, 3]] * WAVE, params)
    for limit, unbound, result in zip(limits, free, results, strict=True):
        whole, kept = segments_of(own, unbound), segments_of(own, result)
        ends_in_block = bool(result.stats.blocks) and result.token_ids[-1] == own.config.special.parallel_end
        before = max(0, len(kept) - (last_width(own, result) if ends_in_block else 1))
        assert kept[:before] == whole[:before] and len(result.token_ids) <= limit
        assert all(part == all_of_it[: len(part)] for part, all_of_it in zip(kept, whole, strict=False))
        assert well_formed(own, result.token_ids)
        if kept != whole:
            assert result.finish_reason == "length"
            cut += 1
            some += ends_in_block
            shorter = [part != all_of_it for part, all_of_it in zip(kept[before:], whole[before:], strict=False)]
            whole_siblings += ends_in_block and any(a and not b for a, b in pairwise(shorter))
    assert cut > WAVE // 3 and some > 2, "some ended inside a block"
    assert whole_siblings, "a branch that was cut has a whole sibling behind it"


def segments_of(engine: Engine, result: Result) -> list[list[int]]:
    """Return the tokens of serial texts and branches in reading order."""
    ids = result.token_ids
    return [[ids[place] for place in part] for part in content_segments(engine.config, ids)]


def last_width(engine: Engine, result: Result) -> int:
    """Return the number of branches of the last block."""
    special = engine.config.special
    last = max(place for place, token in enumerate(result.token_ids) if token == special.parallel_start)
    return result.token_ids[last:].count(special.branch_start)


@pytest.mark.further
@pytest.mark.parametrize("long", [0, 2])
def test_a_branch_that_runs_to_the_budget_leaves_its_siblings_whole(own: Engine, long: int) -> None:
    """Negative control: where a budget of plain text ends the answer, later branches are dropped."""
    special = own.config.special
    titles, texts = ([5], [6], [8]), [[11, 12], [13, 14, 15], [16]]
    texts[long] = []
    serial = [3, *(token for title in titles for token in (special.title_start, *title, special.title_end))]
    script = [[*serial, special.parallel_start], *([*text, special.branch_end] if text else [] for text in texts)]
    asked = SamplingParams(max_new_tokens=60, script=script, logit_bias={"10": 100.0})  # what the long one writes
    result = own.generate([[1, 2]], asked)[0]
    found = segments_of(own, result)[1:]
    assert result.finish_reason == "length" and 58 <= len(result.token_ids) <= 60
    assert [text for n, text in enumerate(found) if n != long] == [text for n, text in enumerate(texts) if n != long]
    assert set(found[long]) == {10} and len(found[long]) > 20
    for count in (1, 2):
        with deferred_branches(count):
            assert own.generate([[1, 2]], asked)[0].token_ids == result.token_ids
    limited = own.generate([[1, 2]], replace(asked, max_content_tokens=20))[0]
    behind = segments_of(own, limited)[2 + long :]
    assert sum(map(len, segments_of(own, limited))) == 20 and not any(behind)


@pytest.mark.further
def test_a_block_that_does_not_fit_is_not_opened(own: Engine) -> None:
    """Check that the answer is the text before the titles if the budget ends inside them."""
    free = answers(own, [None] * WAVE)
    special, starts, params = own.config.special, list[list[int]](), list[SamplingParams]()
    for seed, unbound in enumerate(free):
        ids = unbound.token_ids
        if special.title_start in ids[1:] and ids[0] != special.title_start:
            starts.append(ids[: ids.index(special.title_start)])
            params.append(SamplingParams(temperature=100.0, max_new_tokens=len(starts[-1]) + 3, seed=seed))
    for start, result in zip(starts, own.generate([[1, 2, 3]] * len(starts), params), strict=True):
        assert result.token_ids == start and result.finish_reason == "length" and result.stats.blocks == 0
    assert len(starts) > 5


@pytest.mark.further
def test_without_the_limit_of_the_reader_later_branches_show(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that answers on the device contain fragments of later branches (negative control)."""
    limits: list[int | None] = [int(n) for n in np.random.default_rng(0).integers(1, 40, WAVE)]
    free = answers(own, [None] * WAVE)
    monkeypatch.setattr(infer.answers.answer, "shortened", lambda items, *_: items)
    bound = answers(own, limits)
    assert any(content(own, a) != content(own, b)[: a.stats.content_tokens] for a, b in zip(bound, free, strict=True))


@pytest.mark.further
def test_it_is_spent_alike_whatever_waits(bare_lm: LanguageModel, own: Engine) -> None:
    """Check that branches that wait end where they end side by side."""
    limits: list[int | None] = [int(n) for n in np.random.default_rng(1).integers(2, 40, WAVE)]
    together = answers(own, limits)
    for count in (1, 2):
        with deferred_branches(count):
            held = answers(engine_of(bare_lm), limits)
        assert [result.token_ids for result in held] == [result.token_ids for result in together]
        assert [result.finish_reason for result in held] == [result.finish_reason for result in together]


@pytest.mark.further
def test_a_branch_that_was_cut_is_told(own: Engine) -> None:
    """Check a branch that `max_branch_tokens` cuts; the answer goes on and ends by itself."""
    engine = own
    free = answers(engine, [None] * WAVE, max_new_tokens=200)
    cut = answers(engine, [None] * WAVE, max_new_tokens=200, max_branch_tokens=3)
    end = engine.config.end[0]
    ended = [result for result in cut if result.token_ids[-1] == end]
    special = engine.config.special

    def longest(result: Result) -> int:
        """Return the tokens sampled in the longest branch, its closing tag included."""
        ids, sizes, size = result.token_ids, [0], 0
        for token in ids:
            size = 0 if token == special.branch_start else size + 1
            if token == special.branch_end:
                sizes.append(size)
        return max(sizes)

    whole = [result for result in ended if not result.stats.blocks]
    assert whole and all(result.finish_reason == "stop" for result in whole)
    told = {result.finish_reason for result in ended if result.stats.blocks}
    assert "length" in told and len(ended) > 5
    assert all(result.finish_reason == "stop" for result in free if result.token_ids[-1] == end)
    assert max(map(longest, free)) > max(map(longest, cut))
