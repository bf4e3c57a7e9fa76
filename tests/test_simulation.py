"""A simulated server: times follow from passes and their cost, which are counted here by hand."""

from __future__ import annotations

import json

import pytest

from aspd_jax.errors import DataError, RequestError
from aspd_jax.language_model import load_model
from infer.bench.load import best_goodput, load_table
from infer.bench.simulation import AnswerShape, Simulation, computed_cost, shapes_of
from infer.scheduling.policy import StepCost

FORKS = AnswerShape(20, 10, ((2, 12), (3, 20), (1, 8)), 6)
PLAIN = AnswerShape(20, 40, (), 0)
COST = StepCost(10.0, 0.0, 0.0)  # milliseconds of a pass, whatever it feeds


def passes(shape: AnswerShape) -> int:
    """Of an answer alone, its prompt in one pass, which also gives the first token."""
    titles = sum(title + 2 for title, _ in shape.branches)
    longest = max(text + 1 for _, text in shape.branches)  # its closing tag
    return 1 + shape.before - 1 + titles + 1 + longest + shape.after + 1


def test_an_answer_alone_takes_the_time_of_its_passes() -> None:
    one = Simulation([PLAIN], 2, COST).load("serial", 0.001, 2, 1.0)
    assert one.last[0] == pytest.approx(0.010 * (PLAIN.content + 1))
    assert one.first[0] == pytest.approx(0.010)
    twice = Simulation([PLAIN], 2, StepCost(20.0, 0.0, 0.0)).load("serial", 0.001, 2, 1.0)
    assert twice.last[0] == pytest.approx(2 * one.last[0])


def test_branches_share_passes() -> None:
    server = Simulation([FORKS], 2, COST)
    serial, adaptive = (server.load(mode, 0.001, 2, 1.0) for mode in ("serial", "adaptive"))
    assert serial.last[0] == pytest.approx(0.010 * (FORKS.content + 1))
    assert adaptive.last[0] == pytest.approx(0.010 * passes(FORKS), abs=0.021)  # fork and merge share passes
    assert adaptive.last[0] < serial.last[0]
    assert adaptive.content_rate / serial.content_rate == pytest.approx(1, abs=0.01)  # set by who asks


def test_branches_that_a_policy_holds_back_take_longer() -> None:
    def last(policy: str) -> float:
        found = Simulation([FORKS], 2, StepCost(1.0, 10.0, 0.0), policy).load("adaptive", 0.001, 2, 9.0)
        assert found.mode == ("adaptive" if policy == "all" else f"adaptive, {policy}")
        return found.last[0]

    assert last("slo:25") > 1.1 * last("all")  # three branches take 31 ms
    assert last("slo:1000") == pytest.approx(last("all"))


def test_a_full_server_has_requests_wait() -> None:
    server = Simulation([PLAIN], 2, COST)
    calm, full = server.load("serial", 0.5, 12, 0.5), server.load("serial", 100.0, 12, 0.5)
    assert calm.in_time == 12 and calm.first[0] == pytest.approx(0.010, abs=0.002)
    alone = 0.010 * (PLAIN.content + 1)
    assert full.seconds >= 12 / 2 * alone  # two rows
    assert full.in_time < 12
    assert server.load("serial", 100.0, 12, 0.5) == full  # nothing of the machine is in it


def test_lengths_are_those_of_the_file(tmp_path) -> None:
    lm = load_model("demo")
    count = lambda text: len(lm.codec.text.encode(text))  # noqa: E731
    branches = [{"title": "one", "text": "One is here. "}, {"title": "two", "text": "Two."}]
    structure = [{"type": "serial", "text": "Well: "}, {"type": "parallel", "branches": branches}]
    answers = [{"structure": structure}, {"content": "Well: nothing."}]
    file = tmp_path / "data.jsonl"
    records = [
        {"id": n, "messages": [{"role": "user", "content": "What?"}, {"role": "assistant", **answer}]}
        for n, answer in enumerate(answers)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    forks, plain = shapes_of(lm, file, 8)
    assert shapes_of(lm, file, 1) == [forks]
    assert forks.branches == tuple((count(b["title"]), count(b["text"])) for b in branches)
    assert (forks.before, forks.after) == (count("Well: "), 0)
    assert (plain.before, plain.branches) == (count("Well: nothing."), ())
    assert forks.prompt == plain.prompt > count("What?")
    file.write_text('{"messages": 3}\n')
    with pytest.raises(DataError, match="line 1"):
        shapes_of(lm, file, 8)


def test_a_cost_is_fitted_to_compiled_passes() -> None:
    def program(width: int, batch: int, slots: int, ms: float | None) -> dict:
        return {"width": width, "batch": batch, "slots": slots, "figures": {"milliseconds": ms}}

    kinds = [(1, 1, 512), (8, 1, 512), (1, 8, 1024), (8, 8, 1024)]
    made = [program(w, b, s, 8 + 0.01 * w * b + 0.0002 * b * s) for w, b, s in kinds]
    cost = computed_cost({"passes": [*made, program(16, 16, 4096, None)]})
    assert (cost.base, cost.per_token, cost.per_slot) == pytest.approx((8, 0.01, 0.0002))
    with pytest.raises(RequestError, match="two widths"):
        computed_cost({"passes": made[:1]})


def test_tables_have_every_policy() -> None:
    loads = [
        Simulation([FORKS], 1, COST, policy).load(mode, 2, 4, 1.0)
        for mode, policy in (("serial", "all"), ("adaptive", "cap:2"))
    ]
    assert "adaptive, cap:2" in load_table(loads, 1.0)
    assert "x" in best_goodput(loads, 1.0).rsplit(":", 1)[1]
