"""Tasks of published benchmarks: structured output (SOB) and function calling (BFCL).

Their data are not included: SOB is a file of the user, BFCL the package `bfcl-eval`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from aspd_jax.errors import DataError
from aspd_jax.jsonl import read_lines
from aspd_jax.tool_format import read_tool_format
from infer.engine import Engine
from infer.evaluation.extraction import MODES, AnyTask, Task
from infer.request import Fields, SamplingParams
from infer.server.tool_calls import Function, ToolCalls, ToolChoice

# Categories of BFCL with one turn and functions in Python's types; those of Java and JavaScript need their parsers.
CATEGORIES = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_multiple",
    "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # BFCL's names, as its handlers do
HINT = " Note that the provided function is in Python 3 syntax."  # at the end of each description, as in BFCL
Choice = Literal["auto", "required"]


@dataclass(frozen=True)
class Record(Task):
    """A record of SOB: a context, a question and the JSON object that answers it. Its fields are leaves of the object.

    Attributes:
        question: the question.
    """

    question: str

    @property
    def prompt(self) -> str:
        """Return the request to the model."""
        schema = json.dumps(self.schema, ensure_ascii=False)
        return f"{self.question}\n\nContext: {self.text}\n\nAnswer with one JSON object of this JSON schema: {schema}"

    @property
    def groups(self) -> Sequence[str]:
        return ("SOB",)

    def right(self, values: Mapping[str, Any]) -> dict[str, bool]:
        """Return whether each leaf has exactly the right value, as SOB's truth score compares it."""
        found = _leaves(values)
        return {path: path in found and found[path] == gold for path, gold in _leaves(self.gold).items()}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a JSON value that are neither objects nor arrays, by their path."""
    if not isinstance(value, (dict, list)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, item in items for place, leaf in _leaves(item, f"{path}/{key}").items()}


def read_sob(file: Path) -> list[Record]:
    """Read the records of SOB from JSONL: those of its data set, or a file of answers in its repository.

    Raises:
        DataError: a line has another form, and the message names the line; or the file has no record.
    """
    records = []
    for number, line, reason in read_lines(file):
        try:
            parts = (
                line
                if isinstance(line, dict) and "input" in line
                else dict.fromkeys(("metadata", "input", "output"), line)
            )
            asked, right = parts["input"], parts["output"]["ground_truth"]
            schema, gold = (json.loads(one) if isinstance(one, str) else one for one in (asked["json_schema"], right))
            id, context, question = parts["metadata"]["record_id"], asked["context"], asked["question"]
            schema["properties"], gold.items()
        except (AttributeError, KeyError, TypeError, ValueError):
            raise DataError(
                f"{file}, line {number}: expected record_id, context, question, json_schema with properties and "
                f"ground_truth of SOB, got {reason or line!r:.80}"
            ) from None
        records.append(Record(id, context, schema, gold, {}, question))
    if not records:
        raise DataError(f"{file}: expected at least one record of SOB, got none")
    return records


@dataclass(frozen=True)
class CallTask(AnyTask):
    """A request of BFCL with functions, as a client sends it to the server.

    With `required`, a category of single calls also has `parallel_tool_calls: false`.

    Attributes:
        category: category of BFCL.
        messages: the conversation.
        functions: descriptions of the functions, with BFCL's names of types.
        answers: possible values of the arguments of each right call; none where BFCL only asks whether there is a call.
        choice: the request's `tool_choice`.
    """

    category: str
    messages: Sequence[Mapping[str, str]]
    functions: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]
    choice: Choice

    @property
    def groups(self) -> Sequence[str]:
        return (self.category,)

    @property
    def modes(self) -> Sequence[Fields]:
        """Return all modes where the answer is one call of a known function; the others have no known structure."""
        known = self.choice == "required" and len(self.functions) == 1 and not self._several
        return MODES if known else MODES[:1]

    def request(self, engine: Engine, params: SamplingParams, mode: Fields) -> tuple[Any, SamplingParams]:
        calls = self._calls(engine)
        tools = [function.tool for function in calls.functions]
        return engine.encode([dict(one) for one in self.messages], tools=tools), calls.params(params, mode)

    def read(self, engine: Engine, text: str) -> dict[str, Any]:
        """Return the calls of an answer, and its other text. Arguments that were cut off are a text."""
        other, calls = self._calls(engine).reader().read_whole(text)
        return {"calls": [{name: _object(arguments)} for name, arguments in calls], "text": other}

    def right(self, values: Mapping[str, Any]) -> dict[str, bool]:
        """Return whether the calls are right: by BFCL's checker, or because there is one where there should be."""
        calls = values["calls"]
        whole = all(isinstance(arguments, dict) for call in calls for arguments in call.values())
        if "relevance" in self.category:  # a call that was cut is none, as for BFCL
            return {"calls": bool(calls and whole) == self.category.endswith("_relevance")}
        return {"calls": whole and _check(self.functions, calls, self.answers, self.category)}

    @property
    def _several(self) -> bool:
        """Return whether the request permits several calls: by default, as for OpenAI's API."""
        return self.choice == "auto" or "parallel" in self.category

    def _calls(self, engine: Engine) -> ToolCalls:
        functions = [
            Function(one["name"], one.get("description", "") + HINT, _json_schema(one["parameters"]))
            for one in self.functions
        ]
        choice = ToolChoice(self.choice, parallel=self._several)
        return ToolCalls(functions, choice, read_tool_format(engine.lm.tokenizer), engine.lm.codec.text)


def read_calls(categories: Sequence[str], choice: Choice) -> list[CallTask]:
    """Read categories of BFCL from its package.

    Raises:
        DataError: the package is not installed, or a category is not among `CATEGORIES`, or needs no call and the
            choice requires one.
    """
    if unknown := [name for name in categories if name not in CATEGORIES]:
        raise DataError(f"bfcl: expected categories among {', '.join(CATEGORIES)}, got {unknown[0]!r}")
    if choice == "required" and (without := [name for name in categories if name.endswith("irrelevance")]):
        raise DataError(f"bfcl: expected the tool choice auto for {without[0]}, where no call is right, got required")
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise DataError("bfcl: expected the package bfcl-eval, got none. Run: pip install --no-deps bfcl-eval")
    folder, tasks = Path(spec.origin).parent / "data", []
    for category in categories:
        file = folder / f"BFCL_v4_{category}.json"
        possible = folder / "possible_answer" / file.name
        answers = {one["id"]: one["ground_truth"] for one in _entries(possible)} if possible.exists() else {}
        for one in _entries(file):
            (messages,) = one["question"]
            right = answers.get(one["id"], ())
            tasks.append(CallTask(one["id"], category, messages, one["function"], right, choice))
    return tasks


def _entries(file: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of BFCL."""
    lines = list(read_lines(file))
    if wrong := [(number, reason) for number, entry, reason in lines if reason or not isinstance(entry, dict)]:
        raise DataError(f"{file}, line {wrong[0][0]}: {wrong[0][1] or 'expected a JSON object'}")
    return [entry for _, entry, _ in lines]


def _object(text: str) -> Any:
    """Return the JSON value of a text, or the text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a schema with BFCL's names of types, as BFCL states it to models."""
    found = dict(schema)
    if "type" in schema:
        found["type"] = TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        found["properties"] = {name: _parameter(one) for name, one in schema["properties"].items()}
    if "items" in schema:
        found["items"] = _json_schema(schema["items"])
    return found


def _parameter(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = {"type": "string"} | _json_schema(schema)
    if schema.get("type") == "float":
        found |= {"format": "float", "description": f"{schema.get('description', '')} This is a float type value."}
    return found


def _check(functions: Any, calls: Any, answers: Any, category: str) -> bool:
    """Return whether BFCL's checker accepts calls."""
    models = "bfcl_eval.constants.model_config"
    if (
        models not in sys.modules
    ):  # BFCL's table of models imports a client of every vendor; it is read for `.` in names
        sys.modules[models] = table = ModuleType(models)
        table.__dict__["MODEL_CONFIG_MAPPING"] = {"aspd": SimpleNamespace(underscore_to_dot=False)}
    checker = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    python = import_module("bfcl_eval.constants.enums").Language.PYTHON
    return bool(checker(list(functions), calls, list(answers), python, category, "aspd")["valid"])
