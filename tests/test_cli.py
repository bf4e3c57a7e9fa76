from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax import load_model
from infer import Engine, Result, SamplingParams
from tests.conftest import SHARED, tiny_config, write_checkpoint
from train.tasks import problem

PROBLEM = problem(1, True, "orders", "parallel")


@pytest.fixture(scope="module")
def answer() -> Result:
    """What the engine answers."""
    messages = [{"role": "user", "content": PROBLEM.question}]
    return Engine(load_model("demo")).generate([messages], SamplingParams(max_new_tokens=512))[0]


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = aspd.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_prints_the_answer(capsys: Any, answer: Result) -> None:
    code, out, _ = run(capsys, "generate", "--prompt", PROBLEM.question)
    assert (code, out) == (0, answer.text + "\n")
    assert answer.text.startswith("Here is what each line costs.\n")


def test_stream_prints_the_same_text_in_reading_order(capsys: Any, answer: Result) -> None:
    code, out, _ = run(capsys, "generate", "--prompt", PROBLEM.question, "--stream")
    assert (code, out) == (0, answer.text + "\n")


def test_generate_json(capsys: Any, tmp_path: Path, answer: Result) -> None:
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": PROBLEM.question}]))
    code, out, _ = run(capsys, "generate", "--messages", str(messages), "--json")
    value = json.loads(out)
    assert code == 0 and value["text"] == answer.text and value["finish_reason"] == "stop"
    assert value["stats"]["passes"] == value["stats"]["critical_path"] - 1
    assert [item["type"] for item in value["structure"]] == ["serial", "parallel"]
    assert value["stats"]["branches"] == len(value["structure"][1]["branches"]) >= 3
    code, serial, _ = run(capsys, "generate", "--messages", str(messages), "--json", "--mode", "serial")
    assert code == 0 and all(item["type"] == "serial" for item in json.loads(serial)["structure"])


def test_messages_from_standard_input(capsys: Any, monkeypatch: Any, answer: Result) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([{"role": "user", "content": PROBLEM.question}])))
    assert run(capsys, "generate", "--messages", "-")[1] == answer.text + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "a", "--model", "nowhere"], "aspd: nowhere is not a folder"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "aspd: temperature must be 0 or more, got -1.0"),
        (["generate", "--prompt", "a", "--max-length", "1"], "aspd: max_length must be at least 2, got 1"),
        (["generate", "--messages", "none.json"], "none.json"),
        (["train", "none.yaml", "--output", "x"], "aspd: none.yaml does not exist"),
        (["bench", "--widths", "2", "4"], "--widths must be powers of two and start with 1, got [2, 4]"),
        (["demo", "--questions", "0"], "--questions must be at least 1"),
    ],
)
def test_mistakes_get_one_line_and_no_traceback(capsys: Any, arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "messages.json, line 1: "),
        ("[]", "must hold a list of"),
        ('[{"role": "user"}]', "message 0: 'content' must be a string"),
        ('[{"role": "user", "content": "a"}, 3]', "message 1: 'role' must be a string"),
    ],
)
def test_bad_message_files_say_where(capsys: Any, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "messages.json"
    file.write_text(text)
    code, _, err = run(capsys, "generate", "--messages", str(file))
    assert code == 2 and message in err


def test_a_model_without_a_tokenizer_says_so(capsys: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    code, _, err = run(capsys, "generate", "--model", str(folder), "--prompt", "a", "--mode", "serial")
    assert code == 2 and "no tokenizer" in err


def test_demo_prints_plainly_without_a_terminal(capsys: Any) -> None:
    code, out, _ = run(capsys, "demo", "--questions", "1")
    assert code == 0 and "\x1b" not in out
    for column in ("content tokens", "passes", "ms", "speed-up", "ideal"):
        assert column in out
    assert out.count("adaptive") >= 2 and out.count("serial") >= 2


def test_eval_prints_a_table_and_keeps_every_answer(capsys: Any, tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, "eval", "--models", "demo", "--problems", "12", "--output", str(tmp_path / "answers.json")
    )
    assert code == 0 and out.count("| demo |") == 13
    records = json.loads((tmp_path / "answers.json").read_text())["demo"]
    assert len(records) == 12 and {"question", "answer", "exact", "forked"} <= records[0].keys()


def test_real_checkpoint_from_the_command_line(capsys: Any) -> None:
    folder = SHARED / "data" / "checkpoints" / "stories260k"
    if not folder.exists():
        pytest.skip("no shared/ beside the project")
    expected = json.loads((folder / "greedy_expected.json").read_text())["greedy_tokens"]
    arguments = ["generate", "--model", str(folder), "--prompt", "", "--mode", "serial", "--json"]
    value = json.loads(run(capsys, *arguments)[1])
    assert (value["prompt_token_ids"] + value["token_ids"])[: len(expected)] == expected
