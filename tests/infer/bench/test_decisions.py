"""The benchmark of decisions: the same questions in every way, counted independently."""

from __future__ import annotations

from typing import Any

import pytest

import aspd
from infer import Engine
from infer.bench.decisions import (
    EACH,
    MESSAGE,
    ORDERS,
    SERIAL,
    WHOLE,
    decision_table,
    decision_times,
    many_questions,
)

pytestmark = pytest.mark.further


def test_ways(demo_engine: Engine) -> None:
    """Check tokens and steps against the requests of `Engine.ask`."""
    asked = many_questions(9)
    assert len(set(asked)) == 9 and asked[8].instructions == f"{asked[0].instructions} (2)"
    times = {one.way: one for one in decision_times(demo_engine, 9, 1)}
    assert list(times) == [WHOLE, ORDERS, EACH, f"{EACH}, {demo_engine.max_batch} together", SERIAL]
    request = demo_engine.ask(MESSAGE, asked, "none").asked[0].request
    branches = sum(len(branch.tokens) for branch in request.scored)
    assert times[WHOLE].tokens == len(request.prompt) + branches
    assert times[EACH].tokens == times[WHOLE].tokens + 8, "the last token of a cached prompt is fed again"
    assert times[ORDERS].tokens > 1.5 * times[WHOLE].tokens
    assert times[EACH].steps >= 18 > (times[WHOLE].steps or 99)
    assert all(one.fastest <= one.seconds <= one.slowest for one in times.values())
    table = decision_table(list(times.values()))
    assert table.count("\n") == 6 and "| 1.00x |" in table


def test_command(capsys: Any) -> None:
    small = ["--questions", "1", "--batch", "1", "--repeats", "1"]
    assert aspd.main(["bench", "decisions", "--model", "demo", *small]) == 0
    printed = capsys.readouterr().out
    assert "| 1 | one pass |" in printed and "together" not in printed
