"""Dependence between fields: costs beside a model whose fields depend on each other by construction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infer.evaluation.extraction
import infer.evaluation.field_dependence
from aspd_jax import LanguageModel
from aspd_jax.errors import DataError, RequestError
from aspd_jax.fields import fields_template
from infer import Engine
from infer.evaluation.extraction import MODES, Decoded, Task, decode_tasks, equal, read_tasks, summarise_extraction
from infer.evaluation.field_dependence import field_reports, field_table
from tests.conftest import SIZES
from tests.infer.scheduling.test_filling import LATER, WORD
from tests.infer.scheduling.test_structured_output import record

SCHEMA = record(a=WORD, b=WORD, c={**WORD, "x-after": ["a"]})


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


@pytest.mark.further
def test_a_field_that_needs_another_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for which `c` costs 9 nats unless `a` precedes it; the others cost 1 nat a token wherever they stand."""
    decode = engine.lm.codec.text.decode

    def made_up(lm: Any, config: Any, ids: np.ndarray, adapter: int) -> tuple[np.ndarray, None, None]:
        text = decode(ids)
        chosen = np.full(len(ids), -1.0)
        if text.rfind('"c":') > max(text.rfind('"a":'), text.rfind('"b":')) and '"a":' not in text:
            chosen -= 9
        return chosen, None, None

    monkeypatch.setattr(infer.evaluation.field_dependence, "likeliest", made_up)
    reports = {report.name: report for report in field_reports(engine, SCHEMA, ["Hi", "Say it:"], 300)}
    assert reports["c"].after == ("a",) and reports["c"].cost > 9
    assert reports["a"].after == reports["b"].after == () and reports["a"].cost == 0
    assert all(report.records == 2 and 0 <= report.differs <= 1 for report in reports.values())
    assert "| c | 2 |" in field_table(list(reports.values()))


@pytest.mark.further
def test_only_earlier_fields_are_proposed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for which every field costs less after any other: the proposal has no cycle, and can be applied."""
    decode = engine.lm.codec.text.decode

    def made_up(lm: Any, config: Any, ids: np.ndarray, adapter: int) -> tuple[np.ndarray, None, None]:
        return np.full(len(ids), -9.0 / max(1, decode(ids).count('":'))), None, None

    monkeypatch.setattr(infer.evaluation.field_dependence, "likeliest", made_up)
    reports = field_reports(engine, SCHEMA, ["Hi"], 300)
    assert [set(report.after) for report in reports] == [set(), {"a"}, {"a", "b"}]
    fields = {report.name: {**WORD, "x-after": list(report.after)} for report in reports}
    assert fields_template(record(**fields)) is not None


@pytest.mark.further
def test_optional_properties_of_nested_objects_are_reported(engine: Engine) -> None:
    """Check that serial answers have every field that parallel ones write, also behind a reference."""
    inner = {"type": "object", "properties": {"a": WORD, "b": {"type": "boolean"}}}
    schema = {"$ref": "#/$defs/Outer", "$defs": {"Outer": {"properties": {"inner": inner, "c": WORD}}}}
    reports = field_reports(engine, schema, ["Hi", "Say it:"], 300)
    assert [(report.name, report.records) for report in reports] == [("inner.a", 2), ("inner.b", 2), ("c", 2)]


def test_answers_without_values_are_no_report(engine: Engine) -> None:
    for prompts, limit in (([], 300), (["Hi"], 40)):
        with pytest.raises(RequestError, match="prompts: expected at least one complete answer"):
            field_reports(engine, LATER, prompts, limit)


@pytest.mark.further
def test_costs_of_the_model_itself(engine: Engine) -> None:
    """The first field has no cost: what precedes it is the same in both contexts."""
    reports = field_reports(engine, LATER, ["Hi"], 300)
    assert abs(reports[0].cost) < 1e-3 and any(abs(report.cost) > 1e-3 for report in reports[1:])


def test_a_schema_without_fields_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="two or more fields"):
        field_reports(engine, {"type": "object"}, ["Hi"])


def test_included_tasks_have_values_of_their_schemas() -> None:
    import jsonschema

    tasks = read_tasks(None)
    assert len(tasks) == 124 and len({task.id for task in tasks}) == 124
    for task in tasks:
        jsonschema.validate(task.gold, task.schema)
        assert set(task.gold) == set(task.schema["properties"]) and json.loads(json.dumps(task.gold)) == task.gold
    assert equal(" Ana  Reis.", "ana reis") and equal(3, 3.0) and not equal(True, 1) and not equal("3", 3)


TASK = {"text": "t", "schema": {"properties": {"a": True, "b": WORD}}, "gold": {"a": 1, "b": "x"}}


@pytest.mark.parametrize(
    "change",
    [
        *({"text": 5}, {"schema": "x"}, {"schema": {"properties": [1]}}, {"gold": ["a"]}, {"gold": {}}),
        *({"gold": {"c": 1}}, {"function": "f"}, {"function": {"name": "f"}}),
    ],
)
def test_tasks_of_another_form_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(TASK) + "\n" + json.dumps(TASK | change) + "\n")
    with pytest.raises(DataError, match=r"tasks\.jsonl, line 2: expected text, schema with properties, gold"):
        read_tasks(file)
    file.write_text(json.dumps(TASK) + "\n")
    assert "these fields: a, b.\n\nText: t" in read_tasks(file)[0].prompt
    file.write_text("")
    with pytest.raises(DataError, match="expected at least one task, got none"):
        read_tasks(file)


def test_answers_without_a_field_do_not_agree_on_it() -> None:
    def decoded(mode: str, values: dict[str, Any]) -> Decoded:
        return Decoded("1", mode, 2, values, {"a": False, "b": False}, 4, 1.0, 0.5, [1])

    def agreement(serial: dict[str, Any], parallel: dict[str, Any]) -> float:
        return float(
            summarise_extraction([decoded("serial", serial), decoded("parallel", parallel)])[1]["agreement"]["mean"]
        )

    assert agreement({}, {}) == agreement({}, {"a": None}) == 0
    assert agreement({"a": None, "b": "x"}, {"a": None, "b": "y"}) == 0.5


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no task is decoded twice, also after a record that was cut, and that other settings are refused."""
    tasks, asked, journal = read_tasks(None)[:4], list[tuple[str, str]](), tmp_path / "fields.journal"

    def decode(engine: Any, task: Task, mode: str, max_new_tokens: int) -> Decoded:
        if len(asked) == 8:
            raise KeyboardInterrupt
        asked.append((task.id, mode))
        return Decoded(task.id, mode, 1, {"a": len(asked)}, {"a": True}, 3, 0.5, 0.25, [1, 2])

    monkeypatch.setattr(infer.evaluation.extraction, "decode_task", decode)
    engine: Any = None
    with pytest.raises(KeyboardInterrupt):
        decode_tasks(engine, tasks, 9, journal, {"model": "a"}, [])
    journal.write_bytes(journal.read_bytes()[:-20])  # cut as by a kill
    with pytest.raises(RequestError, match="the same model"):
        decode_tasks(engine, tasks, 9, journal, {"model": "b"}, [])
    first = asked.copy()
    asked.clear()
    decoded = decode_tasks(engine, tasks[:2], 9, journal, {"model": "a"}, [])
    assert first == [(task.id, mode) for task in tasks[:3] for mode in MODES][:8]
    assert asked == [(tasks[1].id, mode) for mode in MODES], "the task whose record was cut, and no other"
    assert [(one.id, one.mode) for one in decoded] == [(task.id, mode) for task in tasks[:2] for mode in MODES]
    assert decoded[0].values == {"a": 1} and decoded[0].token_ids == [1, 2]
