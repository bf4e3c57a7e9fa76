"""The models that ship with the package."""

from __future__ import annotations

import pytest

from aspd_jax import load_model
from aspd_jax.language_model import model_folder
from infer.evaluate import evaluate, table
from train.tasks import held_out


def test_they_are_small() -> None:
    folder = model_folder("demo").parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 24 * 2**20


@pytest.mark.parametrize("name", ["demo", "demo-seq"])
def test_they_answer_rightly_and_fork_where_they_should(name: str) -> None:
    """A small sample of what docs/embedded_models.md reports."""
    records = evaluate(load_model(name), list(held_out(48, seed=5)), 4, name)
    forks = [record["should_fork"] if name == "demo" else False for record in records]
    assert [record["forked"] for record in records] == forks
    assert sum(record["exact"] for record in records) >= 44
    assert f"| {name} | all | all | 48 |" in table({name: records})
