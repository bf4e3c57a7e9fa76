"""JSON fields read from texts, and arguments of tool calls: serial, exact and parallel fields, in one run.

All modes feed known tokens without steps of their own. Texts and gold values are invented.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from aspd_jax.errors import DataError, RequestError
from aspd_jax.journal import append, open_journal, resume
from aspd_jax.jsonl import read_lines
from aspd_jax.progress import Bar
from aspd_jax.tables import markdown_table
from infer.bench.records import describe_fields, parse_object, record_prompt, run_compiled
from infer.engine import Engine
from infer.evaluation.intervals import difference, interval, ratio
from infer.request import Fields, SamplingParams

INCLUDED = ("field_texts.jsonl", "tool_requests.jsonl")
MODES: tuple[Fields, ...] = ("serial", "exact", "parallel")


@dataclass(frozen=True)
class AnyTask(ABC):
    """A task of a benchmark.

    Attributes:
        id: identifier.
    """

    id: str

    @property
    @abstractmethod
    def groups(self) -> Sequence[str]:
        """Return the groups of the report that the task belongs to, beside all tasks."""

    @property
    def modes(self) -> Sequence[Fields]:
        """Return how its fields are decoded; serial mode is the first."""
        return MODES

    @abstractmethod
    def request(self, engine: Engine, params: SamplingParams, mode: Fields) -> tuple[Any, SamplingParams]:
        """Return the prompt and the sampling parameters in a mode."""

    @abstractmethod
    def read(self, engine: Engine, text: str) -> dict[str, Any]:
        """Return the values of an answer by field; empty if it has none."""

    @abstractmethod
    def right(self, values: Mapping[str, Any]) -> dict[str, bool]:
        """Return whether each field has the right value."""


@dataclass(frozen=True)
class Task(AnyTask):
    """A text and the values of its fields.

    Attributes:
        text: text to read, or a request for a tool call.
        schema: JSON schema of an object.
        gold: right values by field.
        function: name and description of the function that is called; empty: fields are extracted.
    """

    text: str
    schema: Mapping[str, Any]
    gold: Mapping[str, Any]
    function: Mapping[str, str]

    @property
    def prompt(self) -> str:
        """Return the request to the model."""
        if self.function:
            fields = describe_fields(self.schema)
            asked = f"Call the function {self.function['name']} ({self.function['description']}) for the request below."
            return (
                f"{asked} Write its arguments as one JSON object with these fields: {fields}.\n\nRequest: {self.text}"
            )
        return record_prompt(self.text, self.schema)

    @property
    def groups(self) -> Sequence[str]:
        if self.function:
            return ("tool calls",)
        count = len(self.gold)
        return "texts", "4 to 6 fields" if count < 7 else "7 to 9 fields" if count < 10 else "10 to 16 fields"

    def request(self, engine: Engine, params: SamplingParams, mode: Fields) -> tuple[Any, SamplingParams]:
        prompt: Any = self.prompt
        if getattr(engine.lm.tokenizer, "chat_template", None):
            prompt = [{"role": "user", "content": prompt}]
        return prompt, replace(params, json_schema=self.schema, fields=mode)

    def read(self, engine: Engine, text: str) -> dict[str, Any]:
        return parse_object(text) or {}

    def right(self, values: Mapping[str, Any]) -> dict[str, bool]:
        return {name: name in values and equal(values[name], gold) for name, gold in self.gold.items()}


@dataclass(frozen=True)
class Decoded:
    """A task decoded in one mode.

    Attributes:
        id: identifier of the task.
        mode: how the fields were decoded.
        fields: number of fields.
        values: values by field; empty if the text is no JSON object.
        right: whether each field has the right value.
        steps: steps after prefill.
        seconds: wall time from submission to the last token.
        decoding_seconds: wall time after prefill.
        token_ids: tokens of the answer.
        drafted_fields: number of fields that were drafted (`Statistics`).
        groups: see `AnyTask`.
    """

    id: str
    mode: str
    fields: int
    values: Mapping[str, Any]
    right: Mapping[str, bool]
    steps: int
    seconds: float
    decoding_seconds: float
    token_ids: Sequence[int]
    drafted_fields: int = 0
    groups: Sequence[str] = ()


def spread(tasks: Sequence[AnyTask], limit: int) -> list[Any]:
    """Return at most `limit` tasks, spread over all."""
    count = min(limit, len(tasks))
    return [tasks[number * len(tasks) // count] for number in range(count)]


def read_tasks(file: Path | None) -> list[Task]:
    """Read tasks from a JSONL file, or the included ones.

    Raises:
        DataError: a line has another form, and the message names the line; or the file has no task.
    """
    if file is not None:
        tasks = list(_read(file))
        if not tasks:
            raise DataError(f"{file}: expected at least one task, got none")
        return tasks
    return [task for name in INCLUDED for task in _read(Path(str(files(__package__) / name)))]


def _read(file: Path) -> Iterator[Task]:
    for number, record, reason in read_lines(file):
        if reason or not isinstance(record, dict):
            raise DataError(f"{file}, line {number}: {reason or 'expected a JSON object'}")
        values: list[Any] = [record.get(name) for name in ("schema", "gold", "function")]
        schema, gold, function = values
        properties = schema.get("properties") if isinstance(schema, dict) else None
        known = isinstance(properties, dict) and isinstance(gold, dict) and gold and gold.keys() <= properties.keys()
        named = not function or (isinstance(function, dict) and {"name", "description"} <= function.keys())
        if not isinstance(record.get("text"), str) or not known or not named:
            raise DataError(
                f"{file}, line {number}: expected text, schema with properties, gold with values of some of them, and "
                f"function with name and description or none, got {record!r:.80}"
            )
        identifier = str(number if record.get("id") is None else record["id"])
        yield Task(identifier, record["text"], schema, gold, function or {})


def decode_task(engine: Engine, task: AnyTask, mode: Fields, max_new_tokens: int) -> Decoded:
    """Decode a task greedily, without anything of its prompt in the cache, and compare its values with the right ones.

    A run in which programs were compiled is repeated.

    Raises:
        RequestError: the engine refuses the request; the message names the task.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens, repetition_penalty=1.0, seed=0)
    try:
        prompt, params = task.request(engine, params, mode)
        result, _ = run_compiled(engine, lambda: engine.generate([prompt], params, "serial")[0])
    except RequestError as error:
        raise RequestError(f"task {task.id}: {error}") from None
    values = task.read(engine, result.text)
    right, seconds = task.right(values), result.stats.seconds
    after = seconds["total"] - seconds["first_token"]
    stats = result.stats
    measured = (stats.steps, seconds["total"], after, result.token_ids, stats.drafted_fields)
    return Decoded(task.id, mode, len(right), values, right, *measured, groups=list(task.groups))


def decode_tasks(
    engine: Engine,
    tasks: Sequence[AnyTask],
    max_new_tokens: int,
    journal: Path | None,
    settings: dict[str, Any],
    left_out: list[str],
) -> list[Decoded]:
    """Decode tasks in all their modes, those that a journal holds excepted.

    Args:
        engine: the engine.
        tasks: the tasks.
        max_new_tokens: maximum tokens of an answer.
        journal: file to which finished tasks are appended; None: nothing is kept.
        settings: what the answers depend on.
        left_out: list to which an error is appended for each task that the engine refuses, such as one whose schema
            has no value; these are not decoded.

    Raises:
        RequestError: the journal was written with other settings, or all tasks are refused.
    """
    done = {record["task"]: record for record in resume(journal, settings)} if journal else {}
    todo = [number for number in range(len(tasks)) if number not in done]
    with open_journal(journal, settings) if journal else nullcontext() as log:
        for number in Bar(todo, total=len(tasks), initial=len(tasks) - len(todo), unit="task"):
            task = tasks[number]
            try:
                modes = [asdict(decode_task(engine, task, mode, max_new_tokens)) for mode in task.modes]
            except RequestError as error:
                left_out.append(str(error))
                continue
            done[number] = {"task": number, "modes": modes}
            if log:
                append(log, done[number])
    if not done:
        raise RequestError(f"expected tasks that the engine can decode, got none; first error: {left_out[0]}")
    return [Decoded(**one) for number in sorted(done) for one in done[number]["modes"]]


def equal(value: Any, gold: Any) -> bool:
    """Return whether values are equal but for the case of letters, white space and a full stop at the end."""
    return bool(_normal(value) == _normal(gold))


def _agree(values: Mapping[str, Any], others: Mapping[str, Any], name: str) -> bool:
    """Return whether both answers have a field, with equal values."""
    return name in values and name in others and equal(values[name], others[name])


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.casefold().split()).rstrip(".")
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if isinstance(value, dict):
        return {name: _normal(item) for name, item in value.items()}
    if isinstance(value, bool):
        return "boolean", value  # true is not 1
    return float(value) if isinstance(value, int) else value


def summarise_extraction(decoded: Sequence[Decoded]) -> list[dict[str, Any]]:
    """Return a row for each group of tasks and mode: correctness, agreement with serial mode, steps and seconds.

    A mode in which some tasks of a group were not decoded has no row.

    Args:
        decoded: tasks, each in its modes one after the other, the first of which is serial mode.
    """
    tasks: list[dict[str, Decoded]] = []
    for one in decoded:
        if one.mode == "serial":
            tasks.append({})
        tasks[-1][one.mode] = one
    groups: dict[str, list[dict[str, Decoded]]] = {"all": tasks}
    for task in tasks:
        for name in task["serial"].groups:
            groups.setdefault(name, []).append(task)
    return [
        _row(name, [(task["serial"], task[mode]) for task in group])
        for name, group in groups.items()
        for mode in MODES
        if all(mode in task for task in group)
    ]


def _row(name: str, pairs: Sequence[tuple[Decoded, Decoded]]) -> dict[str, Any]:
    serial, own = ([pair[place] for pair in pairs] for place in (0, 1))
    right = [[sum(one.right.values()) / one.fields for one in column] for column in (serial, own)]
    known = [(a.values, b.values, a.right.keys() & a.values.keys()) for a, b in pairs]
    same = [sum(_agree(a, b, key) for key in keys) / len(keys) for a, b, keys in known if keys]
    return {
        "tasks": name,
        "mode": own[0].mode,
        "count": len(pairs),
        "fields": sum(one.fields for one in own),
        "right": sum(sum(one.right.values()) for one in own),
        "difference": difference(right[1], right[0])._asdict(),
        "agreement": interval(same)._asdict(),
        "equal": sum(_is_same(a, b) for a, b in pairs),
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in pairs),
        "drafted": sum(one.drafted_fields > 0 for one in own),
        "steps": sum(one.steps for one in own) / len(own),
        "step_ratio": sum(one.steps for one in serial) / max(1, sum(one.steps for one in own)),
        "seconds": sum(one.seconds for one in own) / len(own),
        "speedup": ratio([one.seconds for one in serial], [one.seconds for one in own])._asdict(),
        "decoding_speedup": sum(a.decoding_seconds for a in serial) / max(1e-9, sum(b.decoding_seconds for b in own)),
    }


def _is_same(one: Decoded, other: Decoded) -> bool:
    """Return whether answers have the same tokens or the same values. Branches have other tokens where they meet."""
    return one.token_ids == other.token_ids or bool(one.values and json.dumps(one.values) == json.dumps(other.values))


def extraction_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of `summarise_extraction` as a Markdown table."""
    return markdown_table([_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    gap, time, fields = row["difference"], row["speedup"], row["fields"]
    return {
        "tasks": f"{row['tasks']} ({row['count']})",
        "mode": row["mode"],
        "fields right": f"{row['right'] / fields:.1%} of {fields}",
        "difference (95 %)": f"{100 * gap['mean']:+.1f} ({100 * gap['low']:+.1f} to {100 * gap['high']:+.1f}) points",
        "fields as in serial mode": f"{row['agreement']['mean']:.1%}",
        "answers equal": f"{row['equal']}{', token for token' * (0 < row['equal'] == row['same_tokens'])}",
        "drafted": row["drafted"],
        "steps": f"{row['steps']:.1f}",
        "ratio": f"{row['step_ratio']:.2f}x",
        "seconds": f"{row['seconds']:.2f}",
        "speed-up (95 %)": f"{time['mean']:.2f}x ({time['low']:.2f} to {time['high']:.2f})",
        "without prefill": f"{row['decoding_speedup']:.2f}x",
    }
