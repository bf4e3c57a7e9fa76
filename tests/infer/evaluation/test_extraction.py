"""Tasks of fields: what they hold, what is refused, how answers are compared, and a run that is killed."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from typing import Any

import pytest

import infer.evaluation.extraction
from aspd_jax.errors import DataError, RequestError
from infer.evaluation.extraction import MODES, Decoded, Task, decode_tasks, equal, read_tasks, summarise_extraction
from tests.infer.scheduling.test_filling import WORD


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

    twice = [decoded(mode, {"a": 1, "b": 2}) for mode in ("serial", "parallel") * 2]
    assert [row["count"] for row in summarise_extraction(twice)] == [2, 2], "tasks may have equal ids"
    assert isnan(agreement({}, {})) and isnan(agreement({}, {"a": None})), "serial mode has no field to agree on"
    assert agreement({"a": 1}, {}) == 0 and agreement({"a": 1}, {"a": 1}) == 1
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
