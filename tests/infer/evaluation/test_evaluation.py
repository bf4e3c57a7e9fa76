"""Evaluations: answers that resume, speed on the same content, structure, and the report."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import aspd
from aspd_jax import load_model
from aspd_jax.errors import RequestError
from aspd_jax.journal import read_journal
from aspd_jax.structure import Branch, Parallel, Serial
from infer import Engine, Option, SamplingParams
from infer import Question as Decided
from infer.answers.answer import content_ids
from infer.evaluation.config import DecodingSection, EvalConfig, SpeedSection, System
from infer.evaluation.conversations import answer_questions
from infer.evaluation.health import health
from infer.evaluation.intervals import difference, interval, ratio
from infer.evaluation.questions import Question
from infer.evaluation.speed import time_questions
from notebooks.figures import timeline
from tests.conftest import tiny_config, write_checkpoint
from tests.helpers.tasks import synthetic_questions

ADAPTIVE = System("demo", "demo", "adaptive")
DECODING = DecodingSection(max_length=1024, max_new_tokens=400, batch=4)


def two_turns() -> list[Question]:
    """Questions of the tasks, two at a time."""
    one = synthetic_questions(8)
    return [
        replace(first, id=f"q{first.id}", turns=(*first.turns, *second.turns))
        for first, second in zip(one[:4], one[4:], strict=True)
    ]


@pytest.mark.further
def test_second_turns_go_on_the_cache_of_the_first(demo_engine: Engine, tmp_path: Path) -> None:
    """Also where there are more conversations than rows."""
    demo_engine.reset_cache()
    questions = two_turns()[:3]
    records = answer_questions(demo_engine, ADAPTIVE, questions, DECODING, tmp_path / "a.jsonl", "")
    for record in records:
        first, second = record["turns"]
        # Everything but the tokens that were pending when the first answer ended.
        assert (
            second["stats"]["reused_tokens"] >= first["stats"]["prompt_tokens"] + first["stats"]["generated_tokens"] - 4
        )
    alone = Engine(demo_engine.lm, max_length=1024, max_batch=1, reuse=False)
    again = answer_questions(alone, ADAPTIVE, questions, DECODING, tmp_path / "b.jsonl", "")
    texts = [[[turn["text"] for turn in r["turns"]] for r in some] for some in (records, again)]
    assert texts[0] == texts[1]
    assert all(turn["stats"]["reused_tokens"] == 0 for r in again for turn in r["turns"])


@pytest.mark.further
def test_a_killed_run_goes_on(demo_engine: Engine, tmp_path: Path) -> None:
    questions = synthetic_questions(6)
    whole = answer_questions(demo_engine, ADAPTIVE, questions, DECODING, tmp_path / "whole.jsonl", "")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])  # killed while it wrote the third
    before = [json.loads(line) for line in lines[:2]]
    again = answer_questions(demo_engine, ADAPTIVE, questions, DECODING, tmp_path / "cut.jsonl", "")
    there = list(read_journal(tmp_path / "cut.jsonl"))
    assert there[:2] == before and sorted(r["question_id"] for r in there) == list(range(6))
    assert [r["turns"][0]["text"] for r in again] == [r["turns"][0]["text"] for r in whole]


@pytest.mark.further
def test_questions_with_options_are_decisions(demo_engine: Engine, tmp_path: Path) -> None:
    """Check the probabilities against `Engine.decide`, beside text answers, and a question that is too long."""
    options = ("Paris", "Rome", "Oslo")
    asked = [Question(n, "x", (f"What is the capital of {name}?",), options=options, right=options[n])
             for n, name in enumerate(("France", "Italy"))]  # fmt: skip
    long = replace(asked[0], id=2, turns=("x y " * 2000,))
    records = answer_questions(
        demo_engine, ADAPTIVE, [*asked, *two_turns()[:1], long], DECODING, tmp_path / "a.jsonl", ""
    )
    for question, record in zip(asked, records, strict=False):
        (decision,) = demo_engine.decide(
            question.turns[0], [Decided("choice", "Which answer is right?", tuple(map(Option, options)))]
        )
        assert record["probabilities"] == pytest.approx(decision.probabilities, abs=1e-5) and not record["turns"]
        assert record["correct"] == (options[decision.best] == question.right)
    assert len(records[2]["turns"]) == 2 and "probabilities" not in records[2]
    assert "expected at most" in records[3]["error"] and records[3]["correct"] is False


@pytest.mark.further
def test_questions_that_cannot_be_asked_hold_an_error(demo_engine: Engine, tmp_path: Path) -> None:
    long = Question("long", "all", ("word " * 5000,))
    record, other = answer_questions(
        demo_engine, ADAPTIVE, [long, *synthetic_questions(1)], DECODING, tmp_path / "a", ""
    )
    assert "prompt: expected at most" in record["error"] and record["turns"] == []
    assert "error" not in other


def test_a_fork_bias_leaves_models_without_tags_alone(tmp_path: Path) -> None:
    engine = Engine(load_model(write_checkpoint(tmp_path / "plain", tiny_config())), max_length=64)
    decoding = replace(DECODING, fork_bias=1.5, max_new_tokens=8)
    adaptive, serial = (decoding.params(None, 0, mode) for mode in ("adaptive", "serial"))
    assert adaptive.fork_bias == 1.5 and serial.fork_bias == 0
    engine.submit([1, 2], serial, "serial")
    with pytest.raises(RequestError, match="fork_bias: expected a model whose tags are special tokens"):
        engine.submit([1, 2], adaptive, "serial")


@pytest.mark.further
def test_speed_compares_the_same_content(demo_engine: Engine, tmp_path: Path) -> None:
    engine = demo_engine
    questions = [question for question in synthetic_questions(4) if question.forks][:1]
    (record,) = time_questions(
        engine, ADAPTIVE, questions, DECODING, SpeedSection(questions=1, repeats=2), tmp_path / "speed.jsonl", ""
    )
    (turn,) = record["turns"]
    assert len(turn["runs"]) == len(turn["serial_runs"]) == 2 and turn["blocks"] == 1
    assert turn["ideal"] == turn["content_tokens"] / turn["critical_path"] > 1
    assert all(run["total"] >= run["prefill"] + run["serial"] + run["parallel"] - 1e-6 for run in turn["runs"])
    assert all(run["parallel"] == 0 for run in turn["serial_runs"])


@pytest.mark.further
def test_the_serial_run_says_what_the_adaptive_answer_said(demo_engine: Engine) -> None:
    from infer.evaluation.speed import converse

    engine = demo_engine
    question = next(question for question in two_turns() if question.forks)
    params = SamplingParams(max_new_tokens=400, seed=0)
    adaptive = list(converse(engine, "adaptive", question, params, [None, None]))
    content = [content_ids(engine.config, result) for result in adaptive]
    serial = list(converse(engine, "serial", question, params, content))
    assert [result.text for result in serial] == [result.text for result in adaptive]
    for one, other, ids in zip(adaptive, serial, content, strict=True):
        assert other.token_ids == ids and other.stats.blocks == 0
        assert other.stats.content_tokens == one.stats.content_tokens == len(ids) - 1
        assert other.stats.steps == len(ids) - 1  # one step for each token after the first
    wrong = [list(ids) for ids in content]
    wrong[0][3] = wrong[0][3] % 300 + 20  # the script decides, not the model
    assert next(converse(engine, "serial", question, params, wrong)).token_ids == wrong[0]


@pytest.mark.further
def test_timeline_ends_at_the_critical_path(demo_engine: Engine) -> None:
    messages = [[{"role": "user", "content": question.turns[0]}] for question in synthetic_questions(12)]
    for result in demo_engine.generate(messages, SamplingParams(max_new_tokens=400)):
        spans = timeline(demo_engine.config, result)
        assert max(span.end for span in spans) == result.stats.critical_path
        ended = result.finish_reason == "stop"
        assert sum(span.content for span in spans) == result.stats.content_tokens + ended
        branches = [span for span in spans if span.kind == "branch"]
        assert len(branches) == result.stats.branches
        assert [span.label for span in branches] == [
            b.title for i in result.structure for b in getattr(i, "branches", ())
        ]


def count(text: str) -> int:
    return len(text.split())


def test_health_of_a_structure() -> None:
    repeated = "the cat sat on the mat all day long"
    structure = (
        Serial("Two things:\n"),
        Parallel(
            [
                Branch("one", f"one: {repeated}\n"),
                Branch("two", f"two: {repeated}\n"),
                Branch("three", "three is short\n"),
            ]
        ),
        Serial("Done."),
    )
    of = health(["What?"], structure, True, count, "names")
    assert of["forked"] and of["well_formed"] and of["branches"] == [3] and of["dependent"] == 0
    assert (of["tokens"], of["branch_tokens"], of["title_tokens"]) == (2 + 10 + 10 + 3 + 1, 23, 3)
    assert not health(["What?"], structure, False, count, "names")["well_formed"]
    chained = (Parallel([Branch("a", "a: 3 + 4 = 7 pens\n"), Branch("b", "b: As mentioned above, 7 pens\n")]),)
    assert health(["What?"], chained, True, count, "names")["dependent"] == 1
    plain = health(["What?"], (Serial("Nothing."),), True, count, "names")
    assert not plain["forked"] and plain["well_formed"]


def test_intervals_cover_the_mean() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(40):
        of = interval(random.normal(3, 1, 30).tolist())
        hits += of.low <= 3 <= of.high
    assert 33 <= hits <= 40
    values = random.normal(0, 1, 200)
    of = interval(values.tolist())
    exact = stats.t.interval(0.95, 199, values.mean(), stats.sem(values))
    assert (of.low, of.high) == pytest.approx(exact, abs=0.03)
    assert interval([2.0]) == (2.0, 2.0, 2.0, 1) and interval([1.0, 1.0]) == (1.0, 1.0, 1.0, 2)
    assert ratio([], []).values == 0 and ratio([4.0], [2.0]) == (2.0, 2.0, 2.0, 1)


def test_differences_are_paired() -> None:
    random = np.random.default_rng(1)
    base = random.normal(0, 10, 40)
    shifted = difference((base + 1 + random.normal(0, 0.5, 40)).tolist(), base.tolist())
    assert shifted.p < 0.001 and shifted.low > 0.5 and shifted.high < 1.5
    nothing = difference((base + random.normal(0, 0.5, 40)).tolist(), base.tolist())
    assert nothing.p > 0.01 and nothing.low < 0 < nothing.high
    assert difference([1.0, 2.0], [1.0, 2.0]).p == 1.0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small run of the command, and its configuration."""
    folder = tmp_path_factory.mktemp("eval")
    questions = folder / "questions.jsonl"
    tasks = synthetic_questions(4)
    rows = [
        {
            "question_id": 1,
            "category": "math",
            "turns": [tasks[0].turns[0], tasks[1].turns[0]],
            "reference": ["A", "B"],
        },
        {"question_id": 2, "category": "writing | odd", "turns": [tasks[2].turns[0]]},
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = synthetic_questions(3)
    rows = [{"question_id": q.id, "turns": list(q.turns)} for q in asked]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "suitable.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([int(bool(q.forks)), *q.turns] for q in asked)
    config = folder / "config.yaml"
    config.write_text(
        "models: {ours: {path: demo}, plain: {path: demo, role: seq}}\n"
        f"benchmarks: {{mt-small: {{file: {questions}}}, "
        f"tasks: {{file: {folder / 'tasks.jsonl'}, suitable: {folder / 'suitable.csv'}, limit: 3}}}}\n"
        "decoding: {max_length: 1024, max_new_tokens: 300, batch: 1}\n"
        "speed: {questions: 2, repeats: 2}\n"
    )
    assert aspd.main(["eval", "run", str(config), "--output", str(folder / "run")]) == 0
    return folder / "run", config


@pytest.mark.further
def test_a_run_leaves_a_report(finished: tuple[Path, Path]) -> None:
    folder, _ = finished
    report = json.loads((folder / "report.json").read_text())
    of = report["figures"]["tasks"]["systems"]
    assert set(of) == {"ours", "ours-serial", "plain"}
    assert of["ours"]["all"]["structure"]["trigger_rate"] == 1.0
    assert (
        of["ours"]["all"]["structure"]["rightly_forked"] == 1.0 and of["plain"]["all"]["structure"]["trigger_rate"] == 0
    )
    speed = of["ours"]["all"]["speed"]
    assert speed["answers"] == 2 and speed["runs"] == 2 and speed["realised"]["values"] == 2
    assert speed["realised_quantiles"]["1.0"] == max(speed["realised_all"])
    text = (folder / "report.md").read_text()
    for said in (
        "## mt-small",
        "### Structure",
        "### Lists of ours",
        "Reproduction",
        "writing \\| odd",
        "content tokens/s, ratio",
    ):
        assert said in text
    line = json.loads((folder / "model_answer" / "mt-small" / "ours.jsonl").read_text().splitlines()[0])
    assert line["question_id"] == 1 and line["model_id"] == "ours" and len(line["choices"][0]["turns"]) == 2


@pytest.mark.further
def test_nothing_is_done_twice_and_other_settings_are_refused(finished: tuple[Path, Path], capsys: Any) -> None:
    folder, config = finished
    before = {file: file.read_bytes() for file in folder.rglob("*.jsonl")}
    assert aspd.main(["eval", "run", str(config), "--output", str(folder)]) == 0
    assert {file: file.read_bytes() for file in before if "model_answer" not in file.parts} == {
        file: text for file, text in before.items() if "model_answer" not in file.parts
    }
    capsys.readouterr()
    for change, said in (("decoding.seed=5", "same decoding"), ("benchmarks.tasks.limit=4", "same benchmarks")):
        assert aspd.main(["eval", "run", str(config), change, "--output", str(folder)]) == 2
        assert said in capsys.readouterr().err
    file = folder / "environment.json"
    stored = json.loads(file.read_text())
    other = {key: ["another"] for key in stored["models"]}
    for change, said in (({"processor": "another"}, "same processor"), ({"models": other}, "same contents of ")):
        file.write_text(json.dumps(stored | change))
        assert aspd.main(["eval", "run", str(config), "--output", str(folder)]) == 2
        assert said in capsys.readouterr().err
    file.write_text(json.dumps(stored))


def test_a_damaged_run_is_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("{")
    assert aspd.main(["eval", "report", str(tmp_path)]) == 2
    assert "config.json: expected a JSON object, got invalid JSON" in capsys.readouterr().err


def test_mistakes_in_a_configuration(tmp_path: Path) -> None:
    from aspd_jax.configuration import read_config

    good = "models: {a: {path: demo}}\nbenchmarks: {t: {file: x}}\n"
    for text, said in (
        ("", "models: expected at least one name"),
        ("models: {a: {path: demo}}\n", "benchmarks: expected at least one name"),
        (good + "models: {b: {path: demo}}\n", "expected different keys, got 'models' twice"),
        (
            good.replace("{a:", "{a-serial: {path: demo, role: seq}, a:"),
            "models: expected different names of systems, got 'a-serial' twice",
        ),
        ("models: {a: {pth: demo}}\n", r"unknown key 'models.a.pth'; did you mean 'models.\*.path'"),
        ("models: {a: {}}\nbenchmarks: {t: {file: x}}", "expected a path of every model"),
        ("models: {a: demo}\n", "models.a: expected"),
        ("models: {a/b: {path: demo}}\nbenchmarks: {t: {file: x}}", "expected letters"),
        ("models: {a: {path: demo}}\nbenchmarks: {t: {limit: 1}}", "expected a file of questions"),
        (good + "decoding: {temperature: -1}", "temperature"),
    ):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(Exception, match=said):
            read_config(EvalConfig, tmp_path / "c.yaml")
    changed = read_config(EvalConfig, None, ["models.a.path=demo", "benchmarks.t.file=x", "models.b.path=x"])
    assert list(changed.models) == ["a", "b"]


def test_the_length_of_conversations_is_at_most_that_of_the_model() -> None:
    assert DecodingSection().length(512) == 512 and DecodingSection().length(1 << 17) == 4096
    assert DecodingSection(max_length=1024).length(512) == 1024, "the engine refuses it"
