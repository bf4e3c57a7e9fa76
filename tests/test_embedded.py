"""The models that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from aspd.evaluation import synthetic_questions
from aspd_jax import load_model
from aspd_jax.formats import find_model
from infer.engine import Engine
from infer.evaluation.answers import answer_questions
from infer.evaluation.config import DecodingSection, System
from infer.evaluation.seeds import forked


def test_they_are_small() -> None:
    folder = find_model("demo").parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 24 * 2**20


@pytest.mark.parametrize("name", ["demo", "demo-seq"])
def test_they_answer_rightly_and_fork_where_they_should(name: str, tmp_path: Path) -> None:
    """A small sample of what docs/embedded_models.md reports."""
    questions = synthetic_questions(12)
    engine = Engine(load_model(name), max_length=1024, max_batch=1)
    system = System(name, name, "adaptive")
    records = answer_questions(engine, system, questions, DecodingSection(), tmp_path / "answers.jsonl", name)
    assert [forked(record) for record in records] == [q.forks if name == "demo" else False for q in questions]
    assert sum(record["correct"] for record in records) >= 11
