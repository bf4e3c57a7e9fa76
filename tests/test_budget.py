"""Budgets: of all tokens and of those of the plain text; who was cut off is told so (protocol, section 5)."""

from __future__ import annotations

import numpy as np

from aspd_jax import LanguageModel
from infer import Engine, Result, SamplingParams
from infer.scheduling.policy import Policy
from tests.answers import SEPARATOR

WAVE = 48


def engine_of(lm: LanguageModel, policy: str = "all") -> Engine:
    return Engine(
        lm, max_length=256, max_batch=8, max_branches=4, max_title_tokens=2, separator_ids=SEPARATOR,
        branch_policy=policy,
    )  # fmt: skip


def answers(engine: Engine, content: list[int | None], **changes: int) -> list[Result]:
    params = [
        SamplingParams(
            **{"temperature": 100.0, "max_new_tokens": 150, "seed": seed, "max_content_tokens": of} | changes
        )  # type: ignore[arg-type]
        for seed, of in enumerate(content)
    ]
    return engine.generate([[1, 2, 3]] * len(content), params)


def test_the_budget_of_text_is_never_exceeded(bare_lm: LanguageModel) -> None:
    engine = engine_of(bare_lm)
    random = np.random.default_rng(0)
    limits = [int(n) for n in random.integers(1, 40, WAVE)]
    free, bound = answers(engine, [None] * WAVE), answers(engine, list(limits))
    used_up = 0
    for limit, unbound, result in zip(limits, free, bound, strict=True):
        assert result.stats.content_tokens <= limit
        if unbound.stats.content_tokens < limit:
            assert result.token_ids == unbound.token_ids, "a bound that is not reached changes nothing"
        if result.stats.content_tokens == limit:
            assert result.finish_reason == "length"
            used_up += 1
    assert used_up > WAVE // 3
    assert sum(result.stats.blocks for result in bound) > 5
    # Titles, heads and tags are none of it: as many tokens in all would leave less text.
    in_all = answers(engine, [None] * WAVE, max_new_tokens=20)
    of_text = answers(engine, [20] * WAVE)
    told = [
        (a.stats.content_tokens, b.stats.content_tokens) for a, b in zip(in_all, of_text, strict=True) if a.stats.blocks
    ]
    assert told and all(a < b for a, b in told if b == 20)


def test_it_is_spent_alike_whatever_waits(bare_lm: LanguageModel) -> None:
    """Branches that are held back end where they would have side by side."""
    limits: list[int | None] = [int(n) for n in np.random.default_rng(1).integers(2, 40, WAVE)]
    together = answers(engine_of(bare_lm), limits)
    for policy in ("cap:1", "cap:2"):
        assert Policy.parse(policy)
        held = answers(engine_of(bare_lm, policy), limits)
        assert [result.token_ids for result in held] == [result.token_ids for result in together]
        assert [result.finish_reason for result in held] == [result.finish_reason for result in together]


def test_a_branch_that_was_cut_is_told(bare_lm: LanguageModel) -> None:
    """By `max_branch_tokens` here, so that the answer goes on and ends by itself."""
    engine = engine_of(bare_lm)
    free = answers(engine, [None] * WAVE, max_new_tokens=200)
    cut = answers(engine, [None] * WAVE, max_new_tokens=200, max_branch_tokens=3)
    end = engine.config.end[0]
    ended = [result for result in cut if result.token_ids[-1] == end]
    special = engine.config.special

    def longest(result: Result) -> int:
        """Tokens sampled in the longest branch, its closing tag included."""
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
