"""Offline batches: order, errors by line, and resumption after kill -9; conversations by their text."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import aspd
import aspd_jax.journal
import infer.offline.batch
from aspd_jax import LanguageModel
from aspd_jax.errors import DataError, RequestError
from aspd_jax.language_model import save_model
from infer import Engine, SamplingParams
from infer.offline.batch import Job, generate_file, read_prompts
from infer.request import Mode
from tests.conftest import SIZES
from tests.helpers.engine_state import engine_state

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24)


@pytest.fixture(scope="module")
def own(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": f"Run {number}", "id": f"q{number}"} for number in range(7)]
    lines[3] = {"messages": [{"role": "user", "content": "Hi"}]}
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n" + json.dumps({"prompt": "x" * 2000}) + "\n")
    return file


def job(source: Path, output: Path, params: SamplingParams = PARAMS, mode: Mode = "adaptive", **more: Any) -> Job:
    return Job(source, output, params, mode, chat=False, progress=False, **more)


def records(file: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text().split("\n") if line]
    for record in found:
        record.get("stats", {}).pop("seconds", None)
        record.get("stats", {}).pop("reused_tokens", None)
    return found


def test_answers_come_in_the_order_of_the_input(own: Engine, source: Path, tmp_path: Path) -> None:
    outcome = generate_file(own, job(source, tmp_path / "out.jsonl"))
    found = records(tmp_path / "out.jsonl")
    assert outcome == (8, 0, 1)
    assert [record["id"] for record in found] == ["q0", "q1", "q2", 4, "q4", "q5", "q6", 9]
    assert "prompt: expected at most" in found[-1]["error"]
    for number in (0, 5):
        alone = own.generate([f"Run {number}"], SamplingParams(temperature=1.0, max_new_tokens=24, seed=number + 1))[0]
        assert found[number]["text"] == alone.text and found[number]["finish_reason"] == alone.finish_reason
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "out.jsonl"}
    with pytest.raises(RequestError, match="expected a new file"):
        generate_file(own, job(source, tmp_path / "out.jsonl"))


@pytest.mark.parametrize("line", [{"prompt": "Run"}, {"messages": [{"role": "user", "content": "Run"}]}])
def test_an_instruction_is_asked_and_not_recorded(own: Engine, tmp_path: Path, line: dict[str, Any]) -> None:
    asked, source = tmp_path / "asked.jsonl", tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"kind": "tips"} | line) + "\n")
    asked.write_text(json.dumps(line).replace("Run", "Run fast") + "\n")
    generate_file(own, job(asked, tmp_path / "one.jsonl"))
    generate_file(own, job(source, tmp_path / "two.jsonl", instruction="fast"))
    generate_file(own, job(source, tmp_path / "none.jsonl"))
    one, two, none = (records(tmp_path / f"{name}.jsonl")[0] for name in ("one", "two", "none"))
    assert two["text"] == one["text"] != none["text"]
    assert (one.get("kind"), two["kind"]) == (None, "tips")
    assert "fast" not in json.dumps([two.get("prompt"), two.get("messages", [None])[0]])
    assert read_prompts(source, True, "fast")[0].prompt == [{"role": "user", "content": "Run fast"}]


@pytest.mark.further
def test_samples_of_a_question_differ_and_are_resumed(
    own: Engine, source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    once = generate_file(own, job(source, tmp_path / "out.jsonl"))
    outcome = generate_file(own, job(source, tmp_path / "three.jsonl", samples=3))
    assert outcome == (3 * once.records, 0, 3 * once.errors)
    found, single = records(tmp_path / "three.jsonl"), records(tmp_path / "out.jsonl")
    assert [record.pop("sample") for record in found] == [0, 1, 2] * once.records
    assert found[::3] == single and [record["id"] for record in found[1::3]] == [record["id"] for record in single]
    assert len({record["text"] for record in found[:3]}) == 3
    settings = {"samples": 3}
    journal = tmp_path / "cut.jsonl.journal"
    append, lines = infer.offline.batch.append, list[Any]()
    for module in (infer.offline.batch, aspd_jax.journal):
        monkeypatch.setattr(module, "append", lambda log, value: lines.append(value) or append(log, value))
    generate_file(own, job(source, tmp_path / "cut.jsonl", samples=3))
    assert lines[0]["samples"] == settings["samples"]
    (tmp_path / "cut.jsonl").unlink()
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines[:8]))
    assert generate_file(own, job(source, tmp_path / "cut.jsonl", samples=3)).resumed == 7
    assert [record | {"sample": n % 3} for n, record in enumerate(found)] == records(tmp_path / "cut.jsonl")


def test_an_interrupted_job_goes_on(own: Engine, source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    generate_file(own, job(source, tmp_path / "whole.jsonl"))
    append, written = infer.offline.batch.append, []

    def failing(log: Any, value: dict[str, Any]) -> None:
        if len(written) == 4:
            log.write('{"line": 5, "id"')  # what a kill leaves of a record
            raise KeyboardInterrupt
        written.append(value)
        append(log, value)

    cut = tmp_path / "cut.jsonl"
    with monkeypatch.context() as patch:
        for module in (infer.offline.batch, aspd_jax.journal):
            patch.setattr(module, "append", failing)
        with pytest.raises(KeyboardInterrupt):
            generate_file(own, job(source, cut))
    for handle in engine_state(own).rows:  # requests under way end with the process
        if handle is not None:
            handle.cancel()
    while own.step():
        pass
    assert not cut.exists() and len(written) == 4
    with pytest.raises(
        RequestError, match=r"journal: expected records with the same mode, temperature, got others\. Delete it"
    ):
        generate_file(own, job(source, cut, params=SamplingParams(max_new_tokens=24), mode="serial"))
    seen: list[str] = []
    submit = own.submit
    monkeypatch.setattr(own, "submit", lambda prompt, *rest: seen.append(prompt) or submit(prompt, *rest))
    outcome = generate_file(own, job(source, cut))
    assert outcome == (8, 3, 1) and len(seen) == 5, "what was there is not done again"
    assert records(cut) == records(tmp_path / "whole.jsonl")


@pytest.mark.further
def test_answers_of_another_model_are_not_resumed(
    lm: LanguageModel, source: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """A resumed job continues on other hardware settings, but not with another model or another limit."""
    for name in ("one", "two"):
        save_model(lm, tmp_path / name)
    append, written = infer.offline.batch.append, []

    def failing(log: Any, value: dict[str, Any]) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(value)
        append(log, value)

    def run(model: str, length: int, batch: int) -> int:
        command = ["generate", "--model", str(tmp_path / model), "--raw", "--input", str(source), "--output"]
        command += [str(tmp_path / "out.jsonl"), "--max-new-tokens", "8", "--batch", str(batch)]
        return aspd.main([*command, "--max-length", str(length)])

    with monkeypatch.context() as patch:
        for module in (infer.offline.batch, aspd_jax.journal):
            patch.setattr(module, "append", failing)
        assert run("one", 96, 2) == 130
    assert len(written) == 4 and not (tmp_path / "out.jsonl").exists()
    for model, length, names in (("two", 96, "model"), ("one", 64, "max_length"), ("two", 64, "max_length, model")):
        assert run(model, length, 2) == 2
        assert f"journal: expected records with the same {names}, got others." in capsys.readouterr().err
    assert run("one", 96, 1) == 0
    assert "3 of them there already" in capsys.readouterr().out


@pytest.mark.further
def test_kill_9(lm: LanguageModel, source: Path, tmp_path: Path, capsys: Any) -> None:
    save_model(lm, tmp_path / "model")
    cut = tmp_path / "cut.jsonl"
    command = ["generate", "--model", str(tmp_path / "model"), "--raw", "--input", str(source)]
    command += ["--max-length", "96", "--max-new-tokens", "24", "--batch", "1", "--output"]
    journal = tmp_path / "cut.jsonl.journal"
    process = subprocess.Popen(
        [sys.executable, "-m", "aspd", *command, str(cut)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and (not journal.exists() or journal.read_text().count("\n") < 3):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not cut.exists()
    done = journal.read_text().count("\n") - 1
    assert aspd.main([*command, str(cut)]) == 0
    assert f"8 records written to {cut}, {done} of them there already; 1 hold an error" in capsys.readouterr().out
    assert aspd.main([*command, str(tmp_path / "whole.jsonl")]) == 0
    assert records(cut) == records(tmp_path / "whole.jsonl") and len(records(cut)) == 8


def test_a_bad_line_gets_an_error_and_the_others_an_answer(own: Engine, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    parts = [{"type": "text", "text": None}]
    lines = [
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b", "id": [1]}', b'{"prompt": 1, "id": "one"}', b"", b'{"prompt": "b"',
        b"[]",         b'{"prompt": "\\ud83d"}', b'{"prompt": "\xe9"}', b"[" * 100_000, b'{"prompt": NaN}',
        b'{"id": %s}' % (b"9" * 5000),
        json.dumps({"messages": [{"role": "user", "content": parts}]}).encode(),
        json.dumps({"messages": [{"role": "alien", "content": "x"}]}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}).encode(),
        b'{"prompt": "Who?", "context": "The text of a document"}',
        b'{"prompt": "c", "source": "a", "answer": "d"}\r',
    ]  # fmt: skip
    file.write_bytes(b"\n".join(lines))
    assert generate_file(own, job(file, tmp_path / "out.jsonl")) == (14, 0, 12)
    found = records(tmp_path / "out.jsonl")
    assert [record["id"] for record in found] == [1, "one", *range(4, 16)]
    assert found[0]["prompt"] == "a\u2028b" and found[-1]["prompt"] == "c" and "text" in found[-1]
    reasons = [
        'expected "prompt"', "not JSON", "not a JSON object", "not JSON", "not UTF-8: byte 12", "recursion limit",
        "not JSON", "number out of range", "messages[0].content[0].text: expected a string, got null",
        'got "alien"', "expected a last message of the user", '"context": expected no content beside the conversation',
    ]  # fmt: skip
    numbers = [2, *range(4, 15)]
    for number, record, reason in zip(numbers, found[1:-1], reasons, strict=True):
        assert record["error"].startswith(f"{file}, line {number}: ") and reason in record["error"]
    file.write_text("\n")
    with pytest.raises(DataError, match="expected at least one prompt, got none"):
        read_prompts(file, chat=False)
    with pytest.raises(DataError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl", chat=False)


@pytest.mark.further
def test_a_conversation_goes_on_with_the_tokens_of_its_answers() -> None:
    """Check that nothing is fed twice if the client sends the tokens back. By text alone, the answer enters as plain
    text, in every process.
    """
    from aspd_jax import load_model
    from tests.helpers.tasks import problem

    demo = Engine(load_model("demo"), max_length=1024, max_batch=1)
    question = problem(3, True, "orders", "conclusion").question
    messages = [{"role": "user", "content": question}]
    first = demo.generate([messages], SamplingParams(max_new_tokens=400))[0]
    assert first.stats.blocks == 1
    said = {"role": "assistant", "content": first.text}
    plain = [*messages, said, {"role": "user", "content": "Again?"}]
    follow = [*messages, {**said, "token_ids": first.token_ids}, plain[-1]]
    other = Engine(demo.lm, max_length=1024, max_batch=1)
    assert demo.encode(plain) == other.encode(plain) and demo.encode(follow) == other.encode(follow)
    params = SamplingParams(max_new_tokens=10)
    assert demo.generate([plain], params)[0].text == other.generate([plain], params)[0].text
    first = demo.generate([messages], SamplingParams(max_new_tokens=400))[0]
    ids = demo.encode(follow)
    assert ids[: len(first.prompt_token_ids) + len(first.token_ids)] == first.prompt_token_ids + first.token_ids
    second = demo.generate([follow], params)[0]
    assert second.stats.reused_tokens == len(first.prompt_token_ids) + len(first.token_ids) - 1
    special = demo.config.special
    assert special.branch_start in ids and special.branch_start not in demo.encode(plain)
    without_end = first.token_ids[:-1]
    for wrong, message in (
        ([*without_end[:-1]], "message 1: token_ids: expected the tokens of the message's content"),
        (without_end[: without_end.index(special.branch_end)], "got the end of the answer"),
        ([*without_end, demo.lm.tokenizer.convert_tokens_to_ids("<|user|>")], "message 1: token_ids: expected"),
        ([10**6], "message 1: token_ids: expected ids from 0"),
    ):
        with pytest.raises(RequestError, match=message):
            demo.encode([follow[0], {**said, "token_ids": wrong}, follow[2]])
    with pytest.raises(RequestError, match="expected a last message of the user"):
        demo.encode(follow[:2])
    with pytest.raises(RequestError, match="message 0: expected strings in 'role' and 'content'"):
        demo.encode([{"role": "user"}])
    for content in (5, [{"type": "text", "text": 5}]):
        with pytest.raises(RequestError, match="message 0: expected strings in 'role' and 'content'"):
            demo.check([{"role": "user", "content": content}])
