"""Ablation of masks and positions: one fine-tuning in every form, compared by held-out loss (protocol, section 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from aspd_jax.errors import ConfigError
from aspd_jax.files import write_whole
from aspd_jax.layout import PositionScheme, Siblings
from aspd_jax.tables import markdown_table
from train.batches import PARTS
from train.config import TrainConfig
from train.loop import train

HEADS = ("all", "serial text", "titles", "branches")  # of the losses: of all tokens, and of `PARTS`
FORMS = tuple((siblings, positions) for siblings in get_args(Siblings) for positions in get_args(PositionScheme))


def ablate(config: TrainConfig, output: Path) -> str:
    """Train a configuration with every mask and position scheme, and return a table of the held-out losses.

    Each run has its folder in `output`, and a run that is complete is not repeated. The table is also written to
    ablation.md.

    Raises:
        ConfigError: the configuration has no held-out batches.
        AspdError: see `train.loop.train`.
    """
    if not config.evaluate_batches:
        raise ConfigError("evaluate_batches: expected held-out batches to compare the runs by, got 0")
    runs = {}
    for siblings, positions in FORMS:
        name = f"{siblings}-{positions}"
        runs[name] = output / name
        train(replace(config, model=replace(config.model, siblings=siblings, positions=positions)), runs[name])
    text = loss_table(runs)
    write_whole(output / "ablation.md", text + "\n")
    return text


def loss_table(runs: Mapping[str, Path]) -> str:
    """Return a Markdown table of the held-out losses at the end of runs, by name and folder; nats per token."""
    rows = []
    for name, run in runs.items():
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        losses = [last["held_out_loss"], *(last[f"held_out_loss_{part}"] for part in PARTS)]
        rows.append({"model": name} | {head: f"{loss:.3f}" for head, loss in zip(HEADS, losses, strict=True)})
    return markdown_table(rows)
