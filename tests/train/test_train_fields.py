"""Every field of a training configuration changes the run."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers.training import changed, prepared, small
from train.config import TrainConfig
from train.loop import train as run_training

CHANGED: dict[str, Any] = {
    "model.checkpoint": None, "model.vocab_size": None, "model.layers": None, "model.hidden_size": None,
    "model.heads": None, "model.kv_heads": None, "model.head_dim": None, "model.feed_forward": None,
    "model.positions": "max",
    "model.siblings": "shared", "model.titles": None, "model.dtype": "bfloat16", "model.parameters": "bfloat16",
    "model.weights": None, "model.lora_rank": 2, "model.lora_alpha": None, "model.scan": True, "model.remat": True,
    "model.attention": "reference",
    "data.train": None, "data.held_out": None,
    "data.cache": None, "data.strict": None, "data.chat_template": None, "data.structured": False,
    "data.plain_every": 2, "data.rows": 1, "data.length": 400,
    "data.bins": None,
    "optimiser.learning_rate": 1e-2, "optimiser.warmup": 1.0, "optimiser.final": 0.5, "optimiser.weight_decay": 0.5,
    "optimiser.beta1": 0.5, "optimiser.beta2": 0.5, "optimiser.clip": 1e-4, "optimiser.accumulate": None,
    "draft.heads": None, "mesh.data": None, "mesh.fsdp": None, "mesh.tensor": None, "steps": 3, "epochs": None,
    "seed": 1, "save_every": 3, "keep": 1, "evaluate_batches": None, "log_every": 2,
}  # fmt: skip

ELSEWHERE = {
    "model.vocab_size", "model.layers", "model.hidden_size", "model.heads", "model.kv_heads", "model.head_dim",
    "model.feed_forward", "model.checkpoint", "model.titles", "model.weights", "model.lora_alpha", "data.train",
    "data.held_out", "data.cache", "data.strict", "data.chat_template", "data.bins", "optimiser.accumulate",
    "draft.heads", "mesh.data", "mesh.fsdp", "mesh.tensor", "epochs", "evaluate_batches",
}  # fields of a plan, a checkpoint, files or a mesh, which other tests change  # fmt: skip

NAMES = [
    f"{section.name}.{inner.name}" if is_dataclass(section.default_factory) else section.name
    for section in fields(TrainConfig)
    for inner in (fields(section.default_factory) if is_dataclass(section.default_factory) else [section])
]

REFERENCE: dict[str, Any] = {}


def test_every_field_is_in_the_table() -> None:
    assert set(NAMES) == set(CHANGED)
    assert {name for name, value in CHANGED.items() if value is None} == ELSEWHERE


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", [name for name in NAMES if CHANGED[name] is not None])
def test_every_field_changes_the_run(name: str, tmp_path: Path) -> None:
    base = changed(small(), log_every=1)
    if "whole" not in REFERENCE:
        REFERENCE["whole"] = outcome(base, tmp_path / "reference")
    other = outcome(changed(base, **{name.replace(".", "__"): CHANGED[name]}), tmp_path / "changed")
    assert other != REFERENCE["whole"]


def outcome(config: TrainConfig, output: Path) -> Any:
    """Return what a run leaves behind, and the form of its model."""
    trained = run_training(config, output, progress=False)
    leaves = [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(trained.params)]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
    saved = sorted(int(folder.name) for folder in (output / "checkpoints").iterdir() if folder.name.isdigit())
    model = prepared(config).model
    form = model.scan, model.remat, model.config.attention  # the same numbers by another program
    return leaves, metrics, saved, sorted(p.name for p in output.iterdir()), form
