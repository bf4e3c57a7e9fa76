"""The teacher: its prompts, its votes, and faults of the endpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from aspd_jax.blocks.spans import spans_of
from aspd_jax.errors import ConfigError, RequestError
from aspd_jax.pipeline.build import build
from aspd_jax.pipeline.data_config import DataConfig, SelectSection
from aspd_jax.structure import from_json
from tests.helpers.pipeline_data import PROSE, faithful, lines, teacher
from tests.helpers.teacher_server import Reply, TeacherServer


def test_the_teacher_proposes_and_votes(source: Path, tmp_path: Path) -> None:
    with TeacherServer(faithful) as server:
        config = teacher(server, votes=3, candidates=2)
        outcome = build(config, str(source), tmp_path / "out", progress=False)
        first = lines(tmp_path / "out" / "structured.jsonl")[0]
        assert len(spans_of(from_json(first["messages"][1]["structure"]))[0].branches) == 3
        assert first["pipeline"][0]["source"] == "teacher 1" and outcome.report.proposed == {"teacher": 3}
        assert server.bodies[0]["response_format"]["json_schema"]["strict"] is True
        asked = len(server.bodies)
        assert asked == outcome.report.account.replies == 2 * 5 + 3 * 2  # equal candidates come to one vote
        assert outcome.report.account.prompt_tokens == 100 * asked
        build(config, str(source), tmp_path / "out", progress=False)
        assert len(server.bodies) == asked  # nothing is asked for twice
        other = DataConfig(rules=False, teacher=config.teacher, select=SelectSection(min_tokens=20, min_saved=10_000))
        again = build(other, str(source), tmp_path / "out", progress=False)
        assert len(server.bodies) == asked and again.report.failed["select"] == 3


def test_one_vote_against_is_enough(source: Path, tmp_path: Path) -> None:
    def one_against(body: dict[str, Any], before: int) -> Reply:
        status, text = faithful(body, before)
        return status, text.replace("true", "false") if before == 1 else text

    with TeacherServer(one_against) as server:
        outcome = build(teacher(server, votes=3, concurrency=1), str(source), tmp_path / "out", progress=False)
    assert outcome.report.failed["vote"] == 2 and outcome.report.statistics()["with_block"] == 0
    assert "1 of 3 votes against" in (tmp_path / "out" / "rejected.jsonl").read_text()


FAULTS: dict[str, Any] = {
    "not JSON": (200, "I cannot do that."),
    "cut off": (200, '{"groups": [{"parts": [{"fir'),
    "another form": (200, '{"groups": 3}'),
    "no such pieces": (
        200,
        '{"groups": [{"parts": [{"first": 1, "title": "A"}, {"first": 9, "title": "B"}], "last": 90}]}',
    ),
    "another language": (
        200,
        '{"groups": [{"parts": [{"first": 1, "title": "这里"}, {"first": 2, "title": "建议"}], "last": 2}]}',
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_replies_are_rejected_with_their_reason(name: str, source: Path, tmp_path: Path) -> None:
    with TeacherServer(lambda body, before: FAULTS[name]) as server:
        outcome = build(teacher(server), str(source), tmp_path / "out", progress=False)
        assert outcome.report.failed["annotate"] == 5 and not outcome.unanswered
        attempts = 1 if name in ("no such pieces", "another language") else 3
        assert set(server.seen.values()) == {attempts} or max(server.seen.values()) <= 2 * attempts
    assert [len(row["messages"]) for row in lines(tmp_path / "out" / "plain.jsonl")] == [2, 2, 2, 2, 4]


def test_faults_that_pass_are_waited_out(source: Path, tmp_path: Path) -> None:
    def shaky(body: dict[str, Any], before: int) -> Reply:
        faults = [(429, "{}"), (500, "oops"), (0, "")]
        return faults[before] if before < len(faults) else faithful(body, before)

    with TeacherServer(shaky) as server:
        outcome = build(teacher(server, retries=4), str(source), tmp_path / "out", progress=False)
    assert not outcome.unanswered and outcome.report.statistics()["with_block"] == 2


def test_what_failed_is_asked_for_again_by_the_next_run(source: Path, tmp_path: Path) -> None:
    broken = True

    def down(body: dict[str, Any], before: int) -> Reply:
        return (500, "{}") if broken and "moon" in body["messages"][0]["content"] else faithful(body, before)

    with TeacherServer(down) as server:
        config = teacher(server, retries=0)
        outcome = build(config, str(source), tmp_path / "out", progress=False)
        assert outcome.unanswered == 2 and outcome.report.left_out["teacher"] == 2
        assert len(lines(tmp_path / "out" / "plain.jsonl")) == 3
        broken, before = False, len(server.bodies)
        assert not build(config, str(source), tmp_path / "out", progress=False).unanswered
        assert len(server.bodies) == before + 2
        assert len(lines(tmp_path / "out" / "plain.jsonl")) == 5


def test_a_vote_without_a_reply_leaves_the_record_for_the_next_run(source: Path, tmp_path: Path) -> None:
    broken = True

    def down(body: dict[str, Any], before: int) -> Reply:
        return (500, "{}") if broken and "<groups>" in body["messages"][0]["content"] else faithful(body, before)

    with TeacherServer(down) as server:
        config = teacher(server, retries=0)
        outcome = build(config, str(source), tmp_path / "out", progress=False)
        assert outcome.unanswered == 2 and outcome.report.left_out["teacher"] == 2
        reasons = [row["reason"] for row in lines(tmp_path / "out" / "rejected.jsonl") if row["stage"] == "teacher"]
        assert len(reasons) == 2 and all(reason.startswith("judge: ") for reason in reasons)
        broken = False
        assert not build(config, str(source), tmp_path / "out", progress=False).unanswered
    with TeacherServer(faithful) as server:
        build(teacher(server), str(source), tmp_path / "whole", progress=False)
    for name in ("structured", "plain", "rejected"):
        assert (tmp_path / "out" / f"{name}.jsonl").read_text() == (tmp_path / "whole" / f"{name}.jsonl").read_text()


@pytest.mark.parametrize("status, message", [(401, "refuses"), (404, "refuses"), (503, "in a row")])
def test_an_endpoint_that_will_not_do_stops_the_run(status: int, message: str, source: Path, tmp_path: Path) -> None:
    with (
        TeacherServer(lambda body, before: (status, '{"error": {"message": "no"}}')) as server,
        pytest.raises(RequestError, match=message),
    ):
        build(teacher(server, retries=0, give_up_after=3), str(source), tmp_path / "out", progress=False)


NOT_TAKEN = [
    ("response_format", "response_format is not supported"),
    ("seed", "Unsupported parameter: 'seed'"),
    ("temperature", "Unsupported value: 'temperature' does not support 0.7"),
    ("max_tokens", "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
]


@pytest.mark.parametrize("name, message", NOT_TAKEN)
def test_endpoints_that_take_less(name: str, message: str, source: Path, tmp_path: Path) -> None:
    def old(body: dict[str, Any], before: int) -> Reply:
        return (400, json.dumps({"error": {"message": message}})) if name in body else faithful(body, before)

    with TeacherServer(old) as server:
        outcome = build(teacher(server, concurrency=1), str(source), tmp_path / "out", progress=False)
        refused = sum(name in body for body in server.bodies)
    assert outcome.report.statistics()["with_block"] == 2
    assert refused == (2 if name == "response_format" else 1)  # structured outputs, then JSON mode


def test_a_call_that_is_too_long_costs_its_record_only(source: Path, tmp_path: Path) -> None:
    def short(body: dict[str, Any], before: int) -> Reply:
        too_long = "moon" in body["messages"][0]["content"]
        return (400, '{"error": {"message": "maximum context length"}}') if too_long else faithful(body, before)

    with TeacherServer(short) as server:
        outcome = build(teacher(server), str(source), tmp_path / "out", progress=False)
        assert all("response_format" in body for body in server.bodies)
    assert outcome.report.failed["annotate"] == 2 and outcome.report.statistics()["with_block"] == 2


def test_calls_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{n}", "answer": PROSE}) + "\n" for n in range(40)))
    with TeacherServer(faithful, delay=0.05) as server:
        build(teacher(server, concurrency=7), str(file), tmp_path / "out", progress=False)
        assert server.together == 7
    with TeacherServer(faithful) as server:
        begun = time.monotonic()
        build(teacher(server, requests_per_minute=1200), str(file), tmp_path / "paced", progress=False)
        assert time.monotonic() - begun >= 39 * 0.05


def test_own_prompts(two: Path, tmp_path: Path) -> None:
    (tmp_path / "annotate.md").write_text("Mine.\n<question>\n{question}\n</question>\n<answer>\n{answer}\n</answer>")
    with TeacherServer(faithful) as server:
        build(teacher(server, prompts=str(tmp_path)), str(two), tmp_path / "out", progress=False)
        prompts = [body["messages"][0]["content"] for body in server.bodies]  # in any order
        assert any(prompt.startswith("Mine.\n<question>\nHow & why?") for prompt in prompts)
        (tmp_path / "annotate.md").write_text("Mine: {answer}")
        with pytest.raises(ConfigError, match=r"expected the placeholder \{question\}"):
            build(teacher(server, prompts=str(tmp_path)), str(two), tmp_path / "out", progress=False)
        (tmp_path / "annotate.md").write_bytes("{question} {answer} café".encode("latin-1"))
        with pytest.raises(ConfigError, match=r"annotate\.md: expected text in UTF-8, got"):
            build(teacher(server, prompts=str(tmp_path)), str(two), tmp_path / "out", progress=False)


REQUEST_FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({"model": "other"}, "model", "other"),
    ({"temperature": 0.25}, "temperature", 0.25),
    ({"max_tokens": 77}, "max_tokens", 77),
    ({"schema": "object"}, "response_format", {"type": "json_object"}),
    ({"schema": "none"}, "response_format", None),
]


@pytest.mark.parametrize("changes, name, value", REQUEST_FIELDS)
def test_settings_reach_the_endpoint(changes: Any, name: str, value: Any, two: Path, tmp_path: Path) -> None:
    with TeacherServer(faithful) as server:
        build(teacher(server, **changes), str(two), tmp_path / "out", progress=False)
        assert all(body.get(name) == value for body in server.bodies) and server.bodies


def test_the_key_comes_from_its_variable(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with TeacherServer(faithful) as server:
        build(teacher(server, key_variable="MY_KEY"), str(two), tmp_path / "out", progress=False)
        assert set(server.keys) == {"Bearer secret"}
    assert b"secret" not in (tmp_path / "out" / "work.sqlite").read_bytes()


def test_slow_calls_time_out(two: Path, tmp_path: Path) -> None:
    with TeacherServer(faithful, delay=0.5) as server:
        config = teacher(server, timeout=0.1, retries=0)
        assert build(config, str(two), tmp_path / "out", progress=False).unanswered == 2
