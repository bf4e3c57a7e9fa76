"""Load on a server: what is measured is what was sent, and when nothing is compiled beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from aspd_jax import load_model
from infer import Engine
from infer.load import Load, load, load_table, middle, until_compiled
from tests.serving import QUESTIONS, Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(Engine(load_model("demo"), max_length=1024, max_batch=2)) as running:
        yield running


def test_load(server: Running) -> None:
    """Requests come at their own pace; what is measured is what was sent."""
    questions = [question.turns[0] for question in QUESTIONS[:3]]

    def loaded(url: str, rate: float, target: float) -> Load:
        return asyncio.run(load(f"{url}/v1", "", "demo", questions, "serial", rate, 1.5, target, 400))

    of = loaded(server.url, 8, 600)
    assert of.sent == of.answered > 4 and of.refused == of.failed == 0 and of.in_time == of.sent
    assert 0 < of.first[0] <= of.last[0] and list(of.last) == sorted(of.last)
    assert of.content_rate == pytest.approx(sum(_content(n % 3) for n in range(of.sent)) / of.seconds)
    assert loaded(server.url, 8, 1e-6).goodput == 0
    assert "| 8 | serial |" in load_table([of], 600) and 0.9 < of.ideal <= 1, "nothing is parallel in serial mode"
    others = [replace(of, last=(seconds, 9.0, 9.0), sent=n) for n, seconds in enumerate((3.0, 1.0, 2.0))]
    assert middle(others).sent == 2 and middle(others).medians == (3.0, 1.0, 2.0)
    assert "| 1000 - 3000 |" in load_table([middle(others)], 600)
    nobody = asyncio.run(load("http://127.0.0.1:9/v1", "", "demo", questions, "serial", 8, 0.5, 1, 400))
    assert nobody.failed == nobody.sent > 0 and nobody.answered == 0


def test_a_load_is_measured_when_nothing_is_left_to_compile(server: Running) -> None:
    rounds: list[int] = []

    def send() -> int:
        rounds.append(0)
        if len(rounds) < 3:
            jax.jit(lambda x: x * 3 + 1)(np.zeros(len(rounds)))
        return len(rounds)

    assert until_compiled(send, f"{server.url}/v1", "none") == len(rounds) == 3
    assert until_compiled(send, f"{server.url}/v1", "none") == len(rounds) == 4
    assert until_compiled(send, "http://127.0.0.1:9/v1", "none") == len(rounds) == 5, "a server that does not tell"


def _content(number: int) -> int:
    """Tokens of the right answer's text."""
    return len(load_model("demo").codec.text.encode(QUESTIONS[number].references[0]))
