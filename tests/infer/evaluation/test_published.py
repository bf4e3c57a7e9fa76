"""Tasks of published benchmarks, in miniatures of their forms; requests beside those of a client over HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax.errors import DataError, RequestError
from infer import Engine
from infer.evaluation import published
from infer.evaluation.extraction import MODES, decode_task, decode_tasks, summarise_extraction
from infer.evaluation.published import CATEGORIES, CallTask, _json_schema, read_calls, read_sob
from tests.helpers.serving import ask, serving

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "rows": {"type": "array"}}}
RECORD = {
    "record_id": "r1", "context": "Ana: 3, 4", "question": "Who, and what?", "json_schema": SCHEMA,
    "ground_truth": {"name": "Ana", "rows": [{"n": 3}, {"n": 4}]},
}  # fmt: skip


def test_records_of_sob(tmp_path: Path) -> None:
    """The form of the data set, with JSON as text, and that of the answers in its repository give the same record."""
    file = tmp_path / "sob.jsonl"
    asked = {key: RECORD[key] for key in ("context", "question", "json_schema")}
    nested = {
        "metadata": {"record_id": "r1"}, "input": asked,
        "output": {"candidate_response": {}, "ground_truth": RECORD["ground_truth"]},
    }  # fmt: skip
    flat = RECORD | {key: json.dumps(RECORD[key]) for key in ("json_schema", "ground_truth")}
    file.write_text(json.dumps(flat) + "\n" + json.dumps(nested) + "\n")
    one, other = read_sob(file)
    assert one == other and one.groups == ("SOB",) and one.modes == MODES
    assert one.prompt.startswith("Who, and what?\n\nContext: Ana: 3, 4\n\n") and json.dumps(SCHEMA) in one.prompt
    assert one.right({"name": "ana", "rows": [{"n": 3}]}) == {"/name": False, "/rows/0/n": True, "/rows/1/n": False}
    assert all(one.right(RECORD["ground_truth"]).values())  # type: ignore[arg-type]
    assert one.right({"name": "Ana", "rows": []}) == {"/name": True, "/rows/0/n": False, "/rows/1/n": False}
    assert replace(one, gold={"rows": []}).right({"rows": []}) == {}, "as SOB, which counts no empty list"

    for wrong in ("[]", json.dumps(RECORD | {"json_schema": 5}), json.dumps({"input": asked}), "{"):
        file.write_text(json.dumps(RECORD) + "\n" + wrong + "\n")
        with pytest.raises(DataError, match=r"sob\.jsonl, line 2: expected record_id, context"):
            read_sob(file)
    file.write_text("")
    with pytest.raises(DataError, match="expected at least one record of SOB"):
        read_sob(file)


# A miniature of the package: its files, and a checker with its signature and imports, which compares without a type.
KIND = {
    "type": "dict", "required": ["good"], "properties": {"good": {"type": "any", "enum": ["pen", "cup"]}},
    "additionalProperties": False,
}  # fmt: skip
PRICE = {
    "name": "shop.price", "description": "Return a price.",
    "parameters": {
        "type": "dict", "required": ["kind", "new"],
        "properties": {"kind": KIND, "new": {"type": "boolean"}},
    },
}  # fmt: skip
CHECKER = """
from bfcl_eval.constants.enums import Language
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING

def ast_checker(func_description, model_output, possible_answer, language, test_category, model_name):
    assert language is Language.PYTHON and not MODEL_CONFIG_MAPPING[model_name].underscore_to_dot
    right = len(model_output) == len(possible_answer) and all(
        list(call) == list(answer) and all(value in answer[name][key] for key, value in call[name].items())
        for call, answer in zip(model_output, possible_answer) for name in call
    )
    return {"valid": right}
"""


@pytest.fixture
def bfcl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The miniature, importable; the installed package is hidden."""
    package = tmp_path / "bfcl_eval"
    for name, text in (
        ("__init__", ""),
        ("constants/enums", "from enum import Enum\n\nclass Language(Enum):\n    PYTHON = 'python'\n"),
        ("constants/model_config", "raise ImportError('clients of vendors')\n"),
        ("eval_checker/ast_eval/ast_checker", CHECKER),
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    (package / "data" / "possible_answer").mkdir(parents=True)
    for name in ("simple_python", "parallel", "irrelevance"):
        question = [[{"role": "user", "content": "What does a pen cost?"}]]
        entry = {"id": f"{name}_0", "question": question, "function": [PRICE]}
        (package / "data" / f"BFCL_v4_{name}.json").write_text(json.dumps(entry) + "\n")
        if name != "irrelevance":
            answers = [{"shop.price": {"kind": [{"good": "pen"}], "new": [True, ""]}}] * (1 + (name == "parallel"))
            possible = package / "data" / "possible_answer" / f"BFCL_v4_{name}.json"
            possible.write_text(json.dumps({"id": f"{name}_0", "ground_truth": answers}) + "\n")

    def forget() -> None:
        for module in [module for module in sys.modules if module.partition(".")[0] == "bfcl_eval"]:
            del sys.modules[module]

    forget()
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    forget()


def test_calls_of_bfcl(bfcl: Path) -> None:
    simple, parallel, irrelevance = read_calls(["simple_python", "parallel", "irrelevance"], "auto")
    pen, cup = ({"shop.price": {"kind": {"good": good}, "new": True}} for good in ("pen", "cup"))
    cut = {"shop.price": '{"kind": {"good": "pe'}
    for task, calls, right in (
        (simple, [pen], True), (simple, [cup], False), (simple, [], False), (simple, [cut], False),
        (parallel, [pen, pen], True), (parallel, [pen], False), (irrelevance, [], True), (irrelevance, [pen], False),
        (irrelevance, [cut], True), (replace(irrelevance, category="live_relevance"), [cut], False),
        (replace(irrelevance, category="live_relevance"), [pen], True),
    ):  # fmt: skip
        assert task.right({"calls": calls}) == {"calls": right}, (task.id, calls)
    assert [task.modes for task in (simple, parallel)] == [("serial",)] * 2
    assert [task.modes for task in read_calls(["simple_python", "parallel"], "required")] == [MODES, ("serial",)]
    with pytest.raises(DataError, match="expected the tool choice auto for irrelevance"):
        read_calls(["irrelevance"], "required")
    with pytest.raises(DataError, match=r"expected categories among simple_python.*got 'java'"):
        read_calls(["java"], "auto")
    (bfcl / "data" / "BFCL_v4_parallel.json").write_text("[]\n")
    with pytest.raises(DataError, match=r"BFCL_v4_parallel\.json, line 1: expected a JSON object"):
        read_calls(["parallel"], "auto")


def test_without_the_package_its_installation_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("infer.evaluation.published.find_spec", lambda name: None)
    assert aspd.main(["bench", "fields", "--bfcl", "multiple"]) == 2
    assert "Run: pip install --no-deps bfcl-eval" in capsys.readouterr().err


@pytest.mark.further
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_requests_are_those_of_a_client(bfcl: Path, demo_engine: Engine, choice: Any) -> None:
    """The same calls come over HTTP, from a request with the types of JSON schema."""
    (task,) = read_calls(["simple_python"], choice)
    ours = {mode: decode_task(demo_engine, task, mode, 300).values["calls"] for mode in task.modes}
    good = {"type": "string", "enum": ["pen", "cup"]}
    kind = KIND | {"type": "object", "properties": {"good": good}}
    parameters = {
        "type": "object",
        "required": ["kind", "new"],
        "properties": {"kind": kind, "new": {"type": "boolean"}},
    }
    described = {"description": f"{PRICE['description']}{published.HINT}", "parameters": parameters}
    tools = [{"type": "function", "function": PRICE | described}]
    more = {"tool_choice": choice} | ({"parallel_tool_calls": False} if choice == "required" else {})
    with serving(demo_engine) as server:
        for mode, calls in ours.items():
            body = ask(messages=task.messages, tools=tools, temperature=0, max_tokens=300, **more)
            body |= {"extra_body": {"aspd": {"fields": mode, "mode": "serial"}}}
            message = server.client().chat.completions.create(**body).choices[0].message
            theirs = [call.function for call in message.tool_calls or () if call.type == "function"]
            assert [{call.name: published._object(call.arguments)} for call in theirs] == calls
            assert len(calls) == 1 or choice == "auto"
    assert list(ours) == (["serial"] if choice == "auto" else list(MODES))
    assert choice == "auto" or ours["serial"] == ours["exact"]


def test_types_of_bfcl_are_those_of_json_schema() -> None:
    floats = {"type": "tuple", "items": {"type": "float", "description": "any"}}
    plain, half = {"type": "integer"}, {"type": "float", "description": "Half."}
    schema = {"type": "dict", "properties": {"type": {"type": "any"}, "at": floats, "plain": plain, "half": half}}
    schema["properties"] |= {"none": {"description": "no type"}}  # type: ignore[operator]
    numbers = {"type": "array", "items": {"type": "number", "description": "any"}}
    properties = {"type": {"type": "string"}, "at": numbers, "plain": plain}
    properties |= {
        "half": {"type": "number", "format": "float", "description": "Half. This is a float type value."},
        "none": {"type": "string", "description": "no type"},
    }
    assert _json_schema(schema) == {"type": "object", "properties": properties}


@pytest.mark.further
def test_refused_tasks_are_left_out(bfcl: Path, demo_engine: Engine, tmp_path: Path) -> None:
    """And modes that only some tasks of a group have get no row."""
    good, other = read_calls(["simple_python"], "required") + read_calls(["parallel"], "auto")
    never = {"type": "dict", "required": ["a"], "properties": {"a": {"type": "array", "enum": ["x"]}}}
    refused = CallTask("bad", "simple_python", good.messages, [PRICE | {"parameters": never}], good.answers, "required")
    for _ in range(2):  # the second time from the journal
        left_out: list[str] = []
        done = decode_tasks(demo_engine, [good, refused, other], 40, tmp_path / "journal", {}, left_out)
        assert len(left_out) == 1 and left_out[0].startswith("task bad: ")
        assert [(one.id, one.mode) for one in done] == [(good.id, mode) for mode in MODES] + [(other.id, "serial")]
    rows = [(row["tasks"], row["mode"], row["count"]) for row in summarise_extraction(done)]
    assert rows == [("all", "serial", 2), *[("simple_python", mode, 1) for mode in MODES], ("parallel", "serial", 1)]
    with pytest.raises(
        RequestError, match="expected tasks that the engine can decode, got none; first error: task bad"
    ):
        decode_tasks(demo_engine, [refused], 40, None, {}, [])


@pytest.mark.further
def test_the_real_package() -> None:
    """The first answer that it names is right, and not without a call or with one more, in all categories."""
    pytest.importorskip("bfcl_eval")
    tasks = read_calls(CATEGORIES, "auto")
    assert len(tasks) == 3491

    def value(one: Any) -> Any:
        """Return the first possible value; those of an object are lists of possible values, or plain."""
        if isinstance(one, dict):
            firsts = {key: each[0] if isinstance(each, list) and each else each for key, each in one.items()}
            return {key: value(first) for key, first in firsts.items() if first != ""}
        return [value(each) if isinstance(each, dict) else each for each in one] if isinstance(one, list) else one

    scored = [task for task in tasks if task.answers]
    right = 0
    for task in scored:
        calls = [{name: value(arguments)} for answer in task.answers for name, arguments in answer.items()]
        right += task.right({"calls": calls})["calls"]
        assert (
            not task.right({"calls": calls[1:]})["calls"] and not task.right({"calls": [*calls, *calls[:1]]})["calls"]
        )
    assert right / len(scored) > 0.95
