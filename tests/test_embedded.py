"""The models that ship with the package."""

from __future__ import annotations

from aspd_jax import load_model
from aspd_jax.language_model import model_folder
from infer.evaluate import evaluate, table
from train.tasks import held_out


def test_they_are_small() -> None:
    folder = model_folder("demo").parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 24 * 2**20


def test_the_aspd_model_knows_when_to_fork() -> None:
    """A small sample of what docs/embedded_models.md reports; the models still fail at looking things up."""
    records = evaluate(load_model("demo"), list(held_out(48, seed=5)), 16, "demo")
    assert [record["forked"] for record in records] == [record["should_fork"] for record in records]
    arithmetic = [record["exact"] for record in records if record["family"] == "machines"]
    assert sum(arithmetic) >= len(arithmetic) / 2
    assert "| demo | all | all | 48 |" in table({"demo": records})


def test_the_seq_model_never_forks() -> None:
    records = evaluate(load_model("demo-seq"), list(held_out(12, seed=5)), 12, "demo-seq")
    assert not any(record["forked"] for record in records)
    assert any(record["exact"] for record in records)
