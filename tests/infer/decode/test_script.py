"""Requests with a script of tokens, each its own, beside others; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from aspd_jax.errors import RequestError
from infer import Engine, SamplingParams
from infer.answers.answer import content_ids
from tests.helpers.answers import linearise

ONE: list[Any] = [[3, 4], [([5], [6, 7, 8]), ([9, 2], [1, 1])], [7, 7]]
OTHER: list[Any] = [[8], [([1], [2]), ([2], [3, 3, 3, 3]), ([3], [])]]


def script_of(engine: Engine, parts: list[Any]) -> list[list[int]]:
    special = engine.config.special
    titles = [token for title, _ in parts[1] for token in (special.title_start, *title, special.title_end)]
    after = [token for part in parts[2:] for token in part]
    return [
        [*parts[0], *titles, special.parallel_start, *after, 0],
        *([*text, special.branch_end] for _, text in parts[1]),
    ]


def test_every_request_has_its_own(engine: Engine) -> None:
    """Check rows that serve requests with different scripts and without one in turn: answers equal those alone."""
    free = SamplingParams(temperature=100.0, max_new_tokens=30, seed=7)
    told = [SamplingParams(max_new_tokens=100, script=script_of(engine, parts)) for parts in (ONE, OTHER)]
    beginning = SamplingParams(max_new_tokens=9, script=[[3, 3, 3]])
    asked = [told[0], free, told[1], free, told[0], beginning]
    results = engine.generate([[1, 2, 3]] * len(asked), asked)
    alone = engine.generate([[1, 2, 3]], free)[0].token_ids
    one, other = (linearise(engine.config.special, parts) for parts in (ONE, OTHER))
    assert [result.token_ids for result in results[:5]] == [one, alone, other, alone, one]
    assert alone not in (one, other)
    # What a script has no more tokens for, the model says: as after a prompt that ends with them.
    begun, said = results[5].token_ids, engine.generate([[1, 2, 3, 3, 3, 3]], SamplingParams(max_new_tokens=6))[0]
    assert begun == [3, 3, 3, *said.token_ids]


@pytest.mark.further
def test_serial_mode_says_what_branches_said(engine: Engine) -> None:
    told = SamplingParams(max_new_tokens=100, script=script_of(engine, ONE))
    adaptive = engine.generate([[1, 2]], told)[0]
    content = content_ids(engine.config, adaptive)
    assert content == [3, 4, 6, 7, 8, 1, 1, 7, 7, 0]
    serial = engine.generate([[1, 2]], told.saying(content), "serial")[0]
    assert serial.token_ids == content and serial.stats.blocks == 0 and serial.finish_reason == "stop"
    assert serial.stats.content_tokens == adaptive.stats.content_tokens


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([[1] * 9], "script: expected at most 8 tokens, got 9"),
        ([[1], [2], [2], [2], [2]], r"script: expected at most 4 segments \(max_branches \+ 1\), got 5"),
        ([[1, 24]], "script: expected ids from 0 to 23"),
        ([[-1]], "script: expected ids from 0 to 23"),
    ],
)
def test_a_script_that_cannot_be_followed_is_refused(engine: Engine, script: list[list[int]], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        engine.submit([1], SamplingParams(max_new_tokens=8, script=script))
