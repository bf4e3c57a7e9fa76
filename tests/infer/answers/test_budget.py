"""Budgets of all tokens and of the plain text, and the statistics of cut branches (protocol, section 5)."""

from __future__ import annotations

import numpy as np
import pytest

import infer.answers.answer
from aspd_jax import LanguageModel
from infer import Engine, Result, SamplingParams
from infer.answers.answer import content_places
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


def test_a_limit_of_all_tokens_keeps_a_beginning_of_the_text(own: Engine) -> None:
    limits = [int(n) for n in np.random.default_rng(1).integers(1, 110, WAVE)]
    free = answers(own, [None] * WAVE)
    cut, some = 0, 0
    params = [SamplingParams(temperature=100.0, max_new_tokens=limit, seed=seed) for seed, limit in enumerate(limits)]
    results = own.generate([[1, 2, 3]] * WAVE, params)
    for limit, unbound, result in zip(limits, free, results, strict=True):
        whole, kept = content(own, unbound), content(own, result)
        assert kept == whole[: len(kept)] and len(result.token_ids) <= limit
        assert well_formed(own, result.token_ids)
        if len(kept) < len(whole):
            assert result.finish_reason == "length"
            cut += 1
            some += bool(result.stats.blocks) and result.token_ids[-1] == own.config.special.parallel_end
    assert cut > WAVE // 3 and some > 2, "some ended inside a block"


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
