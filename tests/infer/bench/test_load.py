"""Load on a server: what is measured is what was sent, and when nothing is compiled beside it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import aspd
from aspd_jax import load_model
from infer.bench.load import MAX_ROUNDS, Load, best_goodput, load, load_table, median_round, undisturbed
from tests.helpers.serving import QUESTIONS, Running

SENT = Load("serial", 8, 1, 1, 0, 0, (1.0,) * 3, (2.0,) * 3, 1, 0.5, 100, 1, 2, (2.0,))


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
    assert "|  | 8 | serial |" in load_table([of], 600)
    assert 0.9 < of.ideal <= 1, "nothing is parallel in serial mode"
    others = [replace(of, last=(seconds, 9.0, 9.0), sent=n) for n, seconds in enumerate((3.0, 1.0, 2.0))]
    assert median_round(others).sent == 2 and median_round(others).medians == (3.0, 1.0, 2.0)
    assert "| 1000 - 3000 |" in load_table([median_round(others)], 600)
    nobody = asyncio.run(load("http://127.0.0.1:9/v1", "", "demo", questions, "serial", 8, 0.5, 1, 400))
    assert nobody.failed == nobody.sent > 0 and nobody.answered == 0


@pytest.mark.slow
def test_servers_of_the_benchmark_refuse_what_may_not_wait(tmp_path: Path, capsys: Any) -> None:
    """One row and no place to wait: of requests that come at once, most are refused; with places, or rows, none."""
    found: list[dict[str, Any]] = []
    plot = tmp_path / "load.svg"
    for waiting, batches in (("0", ["1", "32"]), ("100", ["1"])):
        file = tmp_path / f"{waiting}.json"
        sent = ["--rates", "200", "--seconds", "0.1", "--repeats", "1", "--max-new-tokens", "8", "--json", str(file)]
        command = ["bench", "serve", "--batch", *batches, "--max-waiting", waiting, *sent, "--plot", str(plot)]
        assert aspd.main(command) == 0
        found += json.loads(file.read_text())
        if waiting == "0":
            for mode, rows in product(("serial", "adaptive"), ("1 row", "32 rows")):
                assert f"{mode} ({rows}), median" in plot.read_text()
    assert [(of["rows"], of["mode"]) for of in found] == list(product((1, 32, 1), ("serial", "adaptive")))
    for of in found[:2]:
        assert 0 < of["answered"] < of["sent"] and of["refused"] == of["sent"] - of["answered"]
    for of in found[2:]:
        assert of["answered"] == of["sent"] > 5 and of["refused"] == 0
    assert "best within 1 s, per second" in capsys.readouterr().out


def test_the_best_server_of_each_mode() -> None:
    """Speed-ups are of the same server; which answers most in time may be another one for each mode."""
    loads = [
        replace(SENT, mode=mode, rate=rate, rows=rows, goodput=goodput, last=(last,) * 3, medians=(last,))
        for rate, rows, mode, goodput, last in (
            (2, 1, "serial", 2.0, 4.0), (2, 1, "adaptive", 2.0, 2.0), (40, 1, "serial", 20.0, 4.0),
            (40, 1, "adaptive", 24.0, 5.0), (2, 4, "serial", 2.0, 3.0), (2, 4, "adaptive", 2.0, 2.5),
            (40, 4, "serial", 16.0, 2.0), (40, 4, "adaptive", 8.0, 4.0),
        )
    ]  # fmt: skip
    gains = [line.split("|")[-2].strip() for line in load_table(loads, 1).splitlines()[2:]]
    assert gains == ["", "2.00x", "", "0.80x", "", "1.20x", "", "0.50x"]
    assert best_goodput(loads, 1).splitlines() == [
        "2 requests/s, best within 1 s, per second: 2.00 serial (4 rows), 2.00 adaptive (1 row): 1.00x",
        "40 requests/s, best within 1 s, per second: 20.00 serial (1 row), 24.00 adaptive (1 row): 1.20x",
    ]
    none = [replace(of, rows=None, goodput=0.0) for of in loads[:2]]
    assert best_goodput(none, 1) == "2 requests/s, best within 1 s, per second: 0.00 serial, 0.00 adaptive"


def test_a_load_is_measured_when_nothing_is_left_to_compile(server: Running) -> None:
    rounds: list[Load] = []

    def send() -> Load:
        if len(rounds) < 2:
            jax.jit(lambda x: x * 3 + 1)(np.zeros(len(rounds) + 1))
        rounds.append(replace(SENT, sent=len(rounds)))
        return rounds[-1]

    for sent in (3, 4):
        assert undisturbed(send, f"{server.url}/v1", "none") == rounds[-1] and len(rounds) == sent
    assert undisturbed(send, "http://127.0.0.1:9/v1", "none") == rounds[4], "a server that does not tell"


def test_where_all_rounds_compile_the_last_one_counts(server: Running) -> None:
    rounds: list[Load] = []

    def send() -> Load:
        jax.jit(lambda x: x * 5 + 1)(np.zeros(len(rounds) + 1))
        rounds.append(replace(SENT, sent=len(rounds)))
        return rounds[-1]

    assert undisturbed(send, f"{server.url}/v1", "none") is rounds[-1] and len(rounds) == MAX_ROUNDS


def _content(number: int) -> int:
    """Tokens of the right answer's text."""
    return len(load_model("demo").codec.text.encode(QUESTIONS[number].references[0]))
