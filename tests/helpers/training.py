"""Configurations of small training runs, and checks of their output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from aspd_jax.language_model import save_model
from aspd_jax.sharding import make_mesh
from aspd_jax.structure import to_json
from train.config import DataSection, ModelSection, TrainConfig
from train.setup import Setup, initial_model, load, set_up
from train.tasks import problem

SMALL = TrainConfig(
    model=ModelSection(titles="names", layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32),
    data=DataSection(rows=2, short_rows=3, short_length=96, short_steps=2, plain_every=0),
    steps=4,
    save_every=2,
)


def changed(config: TrainConfig, **values: Any) -> TrainConfig:
    """A configuration with other values; `section__field` reaches into a section."""
    top = {name: value for name, value in values.items() if "__" not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if "__" in name:
            section, _, field = name.partition("__")
            inner.setdefault(section, {})[field] = value
    return replace(config, **top, **{name: replace(getattr(config, name), **some) for name, some in inner.items()})


WIDE = changed(
    SMALL, model__layers=2, model__hidden_size=64, model__heads=4, model__kv_heads=2, data__rows=8, data__short_rows=8,
    data__short_length=128, steps=4, log_every=1,
)  # fmt: skip


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))
    return [line["loss"] for line in lines if "loss" in line]


def prepared(config: TrainConfig) -> Setup:
    mesh = make_mesh(vars(config.mesh))
    return set_up(config, load(config, mesh), mesh, config.steps)


def on_records(folder: Path) -> TrainConfig:
    """Fine-tuning of a small checkpoint on records in files, both of which are written to `folder`."""
    save_model(initial_model(SMALL), folder / "base")
    for name, first in (("train", 0), ("held_out", 1000)):
        made = [problem(first + seed, name == "held_out", "orders") for seed in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(
            json.dumps({"messages": [{"role": "user", "content": item.question}], "structure": to_json(item.structure)})
            + "\n"
            for item in made
        ))  # fmt: skip
    return changed(
        SMALL, model__checkpoint=str(folder / "base"), data__train=(str(folder / "train.jsonl"),),
        data__held_out=(str(folder / "held_out.jsonl"),), data__length=512, data__bins=4, evaluate_batches=1,
        optimiser__learning_rate=1e-2, steps=6, log_every=1,
    )  # fmt: skip
