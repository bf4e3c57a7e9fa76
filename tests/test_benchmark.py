from __future__ import annotations

from dataclasses import replace

import pytest

from aspd_jax.errors import RequestError
from aspd_jax.shapes import SHAPES, benchmark_model
from infer import benchmark
from infer.benchmark import copy_bandwidth, pass_times, table
from train.benchmark import step_times
from train.benchmark import table as steps_table


def test_it_times_the_widths_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pass_times` itself raises when a width changed under way; here: what it reports."""
    tiny = replace(SHAPES["27m"], embed=64, feed_forward=64, layers=1, vocabulary=2048)
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    monkeypatch.setattr(benchmark, "COPY_BYTES", 1 << 20)
    results = pass_times(benchmark_model("tiny", "float32"), [1, 4], context=16, repeats=3, steps=4)
    assert [result.width for result in results] == [1, 4]
    for result in results:
        assert 0 < result.fastest <= result.median <= result.slowest
    weights = 4 * (64 * (8 + 2 + 2 + 8) * 64 + 3 * 64 * 64 + 3 * 64 + 64 * 2048)
    cache = 4 * 2 * 128 * 2 * 64
    assert results[0].bandwidth * results[0].median / 1000 == pytest.approx(weights + cache, rel=1e-6)
    text = table(results, copy_bandwidth(2))
    assert "| 1 | " in text and "| 1.00 |" in text and "| 4 | " in text


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(RequestError, match="unknown shape '70b'; known are 27m, 1b, 7b"):
        benchmark_model("70b", "float32")


def test_training_steps_are_timed_beside_a_causal_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPES["27m"], embed=64, feed_forward=64, layers=1, vocabulary=512))
    results = step_times("tiny", "float32", rows=1, length=256, repeats=2)
    assert [result.attention for result in results] == ["chunked", "causal"]
    for result in results:
        assert 0 < result.fastest <= result.median <= result.slowest
        assert result.tokens_per_second == pytest.approx(256 / result.median * 1000)
    assert "| causal | " in steps_table(results) and "| 1.00 |" in steps_table(results)
