"""The pipeline as a whole: shapes of records, faults of the endpoint, resumption, shards, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax import LanguageModel, load_model
from aspd_jax.configuration import read_config
from aspd_jax.errors import AspdError, ConfigError, RequestError
from aspd_jax.pipeline.config import DataConfig, LikelihoodSection, SelectSection, TeacherSection
from aspd_jax.pipeline.measures import estimate_tokens, measure, saved
from aspd_jax.pipeline.run import Shard, build
from aspd_jax.pipeline.spans import spans_of
from aspd_jax.structure import from_json, plain_text
from tests.conftest import ROOT
from tests.teacher_server import Reply, TeacherServer, section
from train.config import DataSection
from train.records import Records
from train.tasks import problem

LIST = (
    "Here are ideas:\n\n"
    "1. Sleep: eight hours every night, in a dark and quiet room, help you more than any coffee can.\n\n"
    "2. Food: eat fruit and fish, drink water, and leave sugar to the birthdays of your friends.\n\n"
    "3. Sport: run, swim or dance for half an hour each day, wherever you happen to live.\n\nGood luck!"
)
PROSE = "The moon is far away. " * 12
CHAIN = (
    "1. Cost of pens: three pens at twenty dollars make 3 x 20 = 60 dollars in the shop today.\n"
    "2. Tax on top: ten percent of 60 is 6, which makes it 66 dollars all in all for you.\n"
)
SMALL = SelectSection(min_tokens=20)
NO_TEACHER = DataConfig(select=SMALL)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "records.jsonl"
    rows = [
        {"id": "list", "question": "How to live?", "answer": LIST},
        {"id": "prose", "question": "Tell me.", "answer": PROSE},
        {"id": "chain", "question": "What does it cost?", "answer": CHAIN},
        {"id": "short", "question": "Say hi.", "answer": "- hi\n- ho"},
        {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": LIST},
                      {"role": "user", "content": "B?"}, {"role": "assistant", "content": PROSE}]},
        {"no": "answer"},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return file


def faithful(body: dict[str, Any], before: int) -> Reply:
    """A teacher that marks numbered items, and takes all groups for independent."""
    prompt = body["messages"][0]["content"]
    if "<groups>" in prompt:
        return 200, json.dumps({"groups": [{"independent": True, "reason": ""}] * prompt.count("<group number")})
    answer = section(prompt, "answer")
    head, *parts = answer.replace("\n\nGood luck!", "").split("\n\n")
    items: list[dict[str, Any]] = [{"type": "serial", "text": head, "branches": []}]
    if len(parts) > 1:
        branches = [{"title": part.split(":")[0][3:], "text": part} for part in parts]
        items.append({"type": "parallel", "text": "", "branches": branches})
        items.append({"type": "serial", "text": "Good luck!", "branches": []})
    return 200, json.dumps({"items": items})


def teacher(server: TeacherServer, **changes: Any) -> DataConfig:
    settings = {"model": "m", "candidates": 1, "votes": 1, "retries": 2} | changes
    return DataConfig(rules=False, select=SMALL, teacher=TeacherSection(base_url=server.url, **settings))


def test_answers_are_kept_and_dependent_ones_stay_serial(source: Path, tmp_path: Path) -> None:
    outcome = build(NO_TEACHER, str(source), tmp_path / "out", progress=False)
    structured, plain = lines(tmp_path / "out" / "structured.jsonl"), lines(tmp_path / "out" / "plain.jsonl")
    answers = [LIST, PROSE, CHAIN, "- hi\n- ho", LIST, PROSE]
    found = [from_json(m["structure"]) for row in structured for m in row["messages"] if m["role"] == "assistant"]
    assert [plain_text(structure) for structure in found] == answers
    assert [m["content"] for row in plain for m in row["messages"] if m["role"] == "assistant"] == answers
    assert [bool(spans_of(structure)) for structure in found] == [True, False, False, False, True, False]
    assert [b.title for b in spans_of(found[0])[0].branches] == ["Sleep", "Food", "Sport"]
    rejected = lines(tmp_path / "out" / "rejected.jsonl")
    assert {(row["id"], row["stage"]) for row in rejected} == {
        ("chain", "check"), ("short", "short"), ("6", "read"), ("7", "read")
    }  # fmt: skip
    report = outcome.report.as_dict()
    assert report["records"] == 7 and report["unreadable"] == 2 and report["statistics"]["with_block"] == 2
    assert report["statistics"]["PPD"] == pytest.approx(2 / 6) and report["statistics"]["ABN"] == 3
    assert "back reference" not in (tmp_path / "out" / "report.md").read_text()


def test_training_reads_what_is_left(source: Path, tmp_path: Path, lm: LanguageModel) -> None:
    build(NO_TEACHER, str(source), tmp_path / "out", progress=False)
    for name in ("structured", "plain"):
        records = Records(lm, [str(tmp_path / "out" / f"{name}.jsonl")], DataSection(length=4096), tmp_path / "cache")
        assert len(records) == 5 and not records.problems
        forks = [lm.codec.special.parallel_start in example.tokens for example in (records[0], records[1])]
        assert forks == ([True, False] if name == "structured" else [False, False])


def test_measures_are_those_of_the_linearisation(lm: LanguageModel) -> None:
    """Against tokens counted one by one off the sequence that is trained on."""
    structure = problem(1, True, "orders", "conclusion").structure
    answer, special = plain_text(structure), lm.codec.special
    found = measure(answer, spans_of(structure), lambda text: len(lm.codec.text.encode(text)))
    sequence = lm.codec.linearise(structure)
    serial, branches, inside = 0, [], False
    for token, fed in zip(sequence.tokens, sequence.fed, strict=True):
        if token == special.branch_start:
            inside = True
            branches.append(0)
        if not fed and inside:
            branches[-1] += 1
        elif not fed:
            serial += 1
        inside = inside and token != special.branch_end
    assert found.critical_path == serial + 1 + max(branches)
    assert found.branch_tokens == sum(branches) - len(branches)
    (block,) = spans_of(structure)
    plain = measure(answer, (), lambda text: len(lm.codec.text.encode(text)))
    assert plain.critical_path - found.critical_path == saved(answer, block, lambda t: len(lm.codec.text.encode(t)))


def test_the_teacher_proposes_and_votes(source: Path, tmp_path: Path) -> None:
    with TeacherServer(faithful) as server:
        config = teacher(server, votes=3, candidates=2)
        outcome = build(config, str(source), tmp_path / "out", progress=False)
        first = lines(tmp_path / "out" / "structured.jsonl")[0]
        assert len(spans_of(from_json(first["messages"][1]["structure"]))[0].branches) == 3
        assert first["pipeline"][0]["source"] == "teacher 1" and outcome.report.proposed == {"teacher": 2}
        assert server.bodies[0]["response_format"]["json_schema"]["strict"] is True
        asked = len(server.bodies)
        assert asked == outcome.report.account.replies == 2 * 5 + 3 * 2  # equal candidates come to one vote
        assert outcome.report.account.prompt_tokens == 100 * asked
        build(config, str(source), tmp_path / "out", progress=False)
        assert len(server.bodies) == asked  # nothing is asked for twice
        other = DataConfig(rules=False, teacher=config.teacher, select=SelectSection(min_tokens=20, min_saved=10_000))
        again = build(other, str(source), tmp_path / "out", progress=False)
        assert len(server.bodies) == asked and again.report.failed["select"] == 2


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
    "cut off": (200, '{"items": [{"type": "serial", "te'),
    "another form": (200, '{"items": 3}'),
    "rewritten": (200, '{"items": [{"type": "serial", "text": "Something else.", "branches": []}]}'),
    "another language": (200, '{"items": [{"type": "serial", "text": "这里有一些建议", "branches": []}]}'),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_replies_are_rejected_with_their_reason(name: str, source: Path, tmp_path: Path) -> None:
    with TeacherServer(lambda body, before: FAULTS[name]) as server:
        outcome = build(teacher(server), str(source), tmp_path / "out", progress=False)
        assert outcome.report.failed["align"] == 5 and not outcome.unanswered
        attempts = 1 if name in ("rewritten", "another language") else 3
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
        assert outcome.unanswered == 2 and outcome.report.unanswered == 2
        assert len(lines(tmp_path / "out" / "plain.jsonl")) == 3
        broken, before = False, len(server.bodies)
        assert not build(config, str(source), tmp_path / "out", progress=False).unanswered
        assert len(server.bodies) == before + 2
        assert len(lines(tmp_path / "out" / "plain.jsonl")) == 5


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
    assert outcome.report.failed["align"] == 2 and outcome.report.statistics()["with_block"] == 2


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


def test_shards_make_the_whole(source: Path, tmp_path: Path) -> None:
    build(NO_TEACHER, str(source), tmp_path / "whole", progress=False)
    for number in range(3):
        build(NO_TEACHER, str(source), tmp_path / "parts", Shard(number, 3), progress=False)
    for name in ("structured", "plain", "rejected"):
        parts = [row for file in (tmp_path / "parts").glob(f"{name}-*.jsonl") for row in lines(file)]
        whole = lines(tmp_path / "whole" / f"{name}.jsonl")
        assert sorted(parts, key=lambda row: row["line"]) == whole


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed twice while calls are under way: nothing finished is asked for again, and the result is as undisturbed."""
    file = tmp_path / "many.jsonl"
    rows = [{"question": f"q{n}", "answer": LIST.replace("eight", f"{n}")} for n in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with TeacherServer(faithful, delay=0.05) as server:
        settings = [f"teacher.base_url={server.url}", "teacher.model=m", "teacher.candidates=1", "teacher.votes=1"]
        settings += ["teacher.concurrency=2", "select.min_tokens=20"]
        command = [
            sys.executable,
            "-m",
            "aspd",
            "data",
            "build",
            str(file),
            *settings,
            "--output",
            str(tmp_path / "out"),
        ]
        for target in (20, 80):
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while sum(server.seen.values()) < target and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
        calls = sum(server.seen.values())
        assert 2 * 60 <= calls <= 2 * 60 + 2 * 2  # an annotation and a vote each; those in flight may come twice
        config = DataConfig(
            select=SMALL, teacher=TeacherSection(base_url=server.url, model="m", candidates=1, votes=1, concurrency=9)
        )
        build(config, str(file), tmp_path / "undisturbed", progress=False)
    assert (tmp_path / "out" / "structured.jsonl").read_text() == (
        tmp_path / "undisturbed" / "structured.jsonl"
    ).read_text()


def test_likelihood_decides(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm: LanguageModel) -> None:
    monkeypatch.setattr("aspd_jax.language_model.load_model", lambda name: lm)

    def blocks(**limits: Any) -> tuple[int, Any]:
        section = LikelihoodSection(model="demo", batch=2, **limits)
        report = build(
            DataConfig(select=SMALL, likelihood=section), str(source), tmp_path / "out", progress=False
        ).report
        return report.statistics()["with_block"], report

    found, report = blocks(mean_rise=1e9, peak_rise=1e9)
    assert found == 2 and len(report.rises) == 3 + 2 + 3 and report.as_dict()["likelihood"]["mean_rise"]
    for limits in ({"mean_rise": 0.0, "peak_rise": 1e9}, {"mean_rise": 1e9, "peak_rise": 0.0}, {"length": 10}):
        found, report = blocks(**limits)
        assert found == 0 and report.failed["likelihood"] == 2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    rows = [{"id": "<a>", "question": "How & why?", "answer": LIST}, {"id": "b", "question": "?", "answer": CHAIN}]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        aspd.main(["data", "build", str(folder / "in.jsonl"), "select.min_tokens=20", "--output", str(folder / "out")])
        == 0
    )
    return folder


def test_show_and_stats(built: Path, capsys: Any) -> None:
    file = str(built / "out" / "structured.jsonl")
    assert aspd.main(["data", "show", file, "--id", "b"]) == 0
    assert "left out at check: shared result: branch 2 uses 60" in " ".join(capsys.readouterr().out.split())
    page = built / "page.html"
    assert aspd.main(["data", "show", file, "--html", str(page)]) == 0
    text = page.read_text()
    assert "&lt;a&gt;" in text and "<a>" not in text and text.count('class="branch"') == 3 and "shared result" in text
    capsys.readouterr()
    assert aspd.main(["data", "stats", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((built / "out" / "report.json").read_text())["statistics"]
    assert aspd.main(["data", "show", file, "--id", "none"]) == 2


def test_dry_run_asks_nobody(built: Path, capsys: Any) -> None:
    with TeacherServer(faithful) as server:
        settings = [
            f"teacher.base_url={server.url}",
            "teacher.model=m",
            "teacher.input_price=1",
            "select.min_tokens=20",
        ]
        command = ["data", "build", str(built / "in.jsonl"), *settings, "--output", str(built / "dry"), "--dry-run"]
        assert aspd.main(command) == 0
        out = capsys.readouterr().out
        # Two answers, each with 3 candidates and one reading of its form: 3 + 3 x 4 calls.
        assert "2 answers, 2 of 20 tokens or more" in out and "at most 30 calls" in out and "a million tokens" in out
        assert not server.bodies and not (built / "dry").exists()


def test_own_prompts(built: Path, tmp_path: Path) -> None:
    (tmp_path / "annotate.md").write_text("Mine.\n<question>\n{question}\n</question>\n<answer>\n{answer}\n</answer>")
    with TeacherServer(faithful) as server:
        build(teacher(server, prompts=str(tmp_path)), str(built / "in.jsonl"), tmp_path / "out", progress=False)
        assert server.bodies[0]["messages"][0]["content"].startswith("Mine.\n<question>\nHow & why?")
        (tmp_path / "annotate.md").write_text("Mine: {answer}")
        with pytest.raises(ConfigError, match=r"no \{question\}"):
            build(teacher(server, prompts=str(tmp_path)), str(built / "in.jsonl"), tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    "override, message",
    [
        ("teacher.base_url=http://x", "teacher.model"),
        ("teacher.base_url=ftp://x", "teacher.model|http"),
        ("teacher.schema=xml", "schema"),
        ("rules=false", "nothing proposes"),
        ("select.max_branches=1", "max_branches"),
        ("teacher.vote=1", "did you mean 'teacher.votes'"),
        ("likelihood.batch=0", "likelihood.batch"),
        ("likelihood.model=none", "none"),
        ("select.tokenizer=tests", "tests holds no tokenizer"),
    ],
)
def test_mistakes_are_named(built: Path, override: str, message: str, capsys: Any, tmp_path: Path) -> None:
    assert aspd.main(["data", "build", str(built / "in.jsonl"), override, "--output", str(tmp_path / "o")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_two_processes_cannot_share_a_store(built: Path, tmp_path: Path) -> None:
    from aspd_jax.store import Store

    store = Store(tmp_path / "work.sqlite")
    store.add_reply("key", ("text", 1, 2))  # type: ignore[arg-type]
    with pytest.raises(AspdError, match="another process"):
        Store(tmp_path / "work.sqlite")
    store.close()
    again = Store(tmp_path / "work.sqlite")
    assert again.reply("key") == ("text", 1, 2) and again.reply("other") is None
    again.close()
    (tmp_path / "text.sqlite").write_bytes(os.urandom(5000))
    with pytest.raises(AspdError, match="no store"):
        Store(tmp_path / "text.sqlite")


def test_estimated_tokens_are_near_real_ones(lm: LanguageModel) -> None:
    assert estimate_tokens("") == 0 and estimate_tokens("你好") == 2
    assert 0.7 < estimate_tokens(LIST) / (len(LIST.split()) * 1.3) < 1.3


REQUEST_FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({"model": "other"}, "model", "other"),
    ({"temperature": 0.25}, "temperature", 0.25),
    ({"max_tokens": 77}, "max_tokens", 77),
    ({"schema": "object"}, "response_format", {"type": "json_object"}),
    ({"schema": "none"}, "response_format", None),
]


@pytest.mark.parametrize("changes, name, value", REQUEST_FIELDS)
def test_settings_reach_the_endpoint(changes: Any, name: str, value: Any, built: Path, tmp_path: Path) -> None:
    with TeacherServer(faithful) as server:
        build(teacher(server, **changes), str(built / "in.jsonl"), tmp_path / "out", progress=False)
        assert all(body.get(name) == value for body in server.bodies) and server.bodies


def test_the_key_comes_from_its_variable(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with TeacherServer(faithful) as server:
        build(teacher(server, key_variable="MY_KEY"), str(built / "in.jsonl"), tmp_path / "out", progress=False)
        assert set(server.keys) == {"Bearer secret"}
    assert b"secret" not in (tmp_path / "out" / "work.sqlite").read_bytes()


def test_slow_calls_time_out(built: Path, tmp_path: Path) -> None:
    with TeacherServer(faithful, delay=0.5) as server:
        config = teacher(server, timeout=0.1, retries=0)
        assert build(config, str(built / "in.jsonl"), tmp_path / "out", progress=False).unanswered == 2


def test_checks_can_be_left_to_others(built: Path, tmp_path: Path) -> None:
    for check, forks in ((True, 1), (False, 2)):
        config = DataConfig(check_references=check, select=SMALL)
        report = build(config, str(built / "in.jsonl"), tmp_path / "out", progress=False).report
        assert report.statistics()["with_block"] == forks


def test_blocks_may_have_too_many_branches(built: Path, tmp_path: Path) -> None:
    config = DataConfig(select=SelectSection(min_tokens=20, max_branches=2))
    report = build(config, str(built / "in.jsonl"), tmp_path / "out", progress=False).report
    assert report.failed["select"] == 1


def test_a_tokenizer_counts_its_own_tokens(built: Path, tmp_path: Path) -> None:
    lm = load_model("demo")
    config = DataConfig(select=SelectSection(min_tokens=20, tokenizer="demo"))
    report = build(config, str(built / "in.jsonl"), tmp_path / "out", progress=False).report
    (block,) = spans_of(from_json(lines(tmp_path / "out" / "structured.jsonl")[0]["messages"][1]["structure"]))
    pieces = [LIST[: block.start], *(LIST[b.start : b.end] for b in block.branches), LIST[block.end :]]
    assert report.answers[0].tokens == sum(len(lm.codec.text.encode(piece)) for piece in pieces)


def test_the_shipped_configuration_is_the_default() -> None:
    assert read_config(DataConfig, ROOT / "configs" / "data.yaml") == DataConfig()
