"""Requests share steps by age; none waits for another without need."""

from __future__ import annotations

import pytest

import infer.scheduling.buckets
from aspd_jax import LanguageModel
from infer import Engine, Result, SamplingParams
from infer.scheduling.handle import Handle
from tests.helpers.answers import SEPARATOR

pytestmark = pytest.mark.further


def block(engine: Engine, branches: int, text: list[int]) -> SamplingParams:
    """Return parameters of an answer that is one block of equal branches."""
    special = engine.config.special
    titles = [token for number in range(1, branches + 1) for token in (special.title_start, number, special.title_end)]
    serial = [3, *titles, special.parallel_start, 0]
    return SamplingParams(max_new_tokens=400, script=[serial, *[[*text, special.branch_end]] * branches])


def end_steps(engine: Engine, handles: list[Handle]) -> list[int]:
    """Return the step of the engine after which each request has ended."""
    steps, ends = 0, [0] * len(handles)
    while any(handle.result is None for handle in handles):
        engine.step(1)
        steps += 1
        for number, handle in enumerate(handles):
            if handle.result is not None and not ends[number]:
                ends[number] = steps
    return ends


def test_where_not_all_rows_fit_a_step_the_oldest_request_goes_on(
    bare_lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen rows of eight branches need 128 tokens of 64; later requests get the lowest rows."""
    monkeypatch.setattr(infer.scheduling.buckets, "MAX_TOKENS", 64)
    engine = Engine(bare_lm, max_length=256, max_batch=16, max_branches=8, max_title_tokens=2, separator_ids=SEPARATOR)
    asked = block(engine, 8, [5] * 6)
    handles = [engine.submit([1, 2, 3], asked) for _ in range(32)]
    ends = end_steps(engine, handles)
    assert ends == sorted(ends), "requests that are equal end in the order in which they came"
    assert len(set(ends)) > 2, "negative control: they do not end together"


def test_rows_with_draft_tokens_share_steps(bare_lm: LanguageModel) -> None:
    """Fourteen branches with four draft tokens each are 70 tokens of a row; four rows go on together."""
    engine = Engine(
        bare_lm, max_length=512, max_batch=4, max_branches=14, max_title_tokens=1, separator_ids=SEPARATOR,
        drafts="lookup", draft_tokens=4, force_drafts=True,
    )  # fmt: skip
    asked = block(engine, 14, [5, 6, 7, 8] * 3)
    ends = end_steps(engine, [engine.submit([1, 2, 3 + number], asked) for number in range(4)])
    assert max(ends) - min(ends) <= 2


def test_draft_tokens_are_found_in_a_branch_beside_its_siblings(bare_lm: LanguageModel) -> None:
    """Each branch repeats its own text, whose tokens lie between those of its siblings in the cache."""
    engine = Engine(
        bare_lm, max_length=512, max_batch=1, max_branches=4, max_title_tokens=1, separator_ids=SEPARATOR,
        drafts="lookup", draft_tokens=4, force_drafts=True,
    )  # fmt: skip
    special = engine.config.special
    asked = block(engine, 4, [])
    texts = [[number, 9, number + 4, 10] * 8 for number in range(1, 5)]
    asked = SamplingParams(
        max_new_tokens=400, script=[asked.script[0], *([*text, special.branch_end] for text in texts)]
    )
    result: Result = engine.generate([[1, 2, 3]], asked)[0]
    assert result.stats.blocks == 1
    assert result.stats.accepted_tokens > 0.6 * sum(map(len, texts))
    assert result.stats.steps < 0.7 * result.stats.critical_path


def test_a_prompt_that_waits_for_a_prefix_does_not_hold_up_others(bare_lm: LanguageModel) -> None:
    engine = Engine(bare_lm, max_length=512, max_batch=4)
    shared = [1 + place % 14 for place in range(300)]
    params = SamplingParams(max_new_tokens=4)
    first = engine.submit([*shared, 5], params, mode="serial", stream="text")
    second = engine.submit([*shared, 6], params, mode="serial")
    third = engine.submit([2, 3], params, mode="serial")
    engine.step(1)
    assert first.row is not None and second.row is None, "it waits for the prefix that the first one feeds"
    assert third.row is not None
    assert [handle.wait().stats.reused_tokens > 250 for handle in (first, second, third)] == [False, True, False]
