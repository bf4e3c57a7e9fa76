"""Training configurations: YAML in, a frozen dataclass out; unknown keys are refused."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from aspd_jax.errors import ConfigError
from aspd_jax.layout import PositionScheme, Siblings, check_choice

Optimiser = Literal["adamw", "muon"]


@dataclass(frozen=True)
class TrainConfig:
    """A run from scratch on the synthetic tasks.

    Attributes:
        structured: train on linearisations (ASPD) or on the plain text of the same answers (Seq).
        positions, siblings: position scheme and mask (spec, sections 3 and 4).
        vocabulary: tokens in all, special tokens included.
        layers, embed, heads, kv_heads, head, feed_forward: shape of the model.
        length: tokens of a packed row.
        rows: rows of a batch.
        steps: optimiser steps.
        optimiser: `adamw`, or `muon` for the matrices with AdamW for the rest (better from scratch).
        learning_rate: AdamW's peak; a cosine after a linear warm-up over the share `warmup` of all steps.
        matrix_learning_rate: Muon's peak, on the same schedule.
        weight_decay, beta2, clip: of either optimiser; AdamW's; bound on the global norm of the gradient.
        fed_loss: also put loss on the tokens that the engine feeds instead of sampling.
        seed: of weights and data.
        save_every: steps between checkpoints, from which a killed run goes on.
    """

    structured: bool = True
    positions: PositionScheme = "sequential"
    siblings: Siblings = "invisible"
    vocabulary: int = 768
    layers: int = 4
    embed: int = 128
    heads: int = 2
    kv_heads: int = 1
    head: int = 64
    feed_forward: int = 384
    length: int = 512
    rows: int = 8
    steps: int = 3000
    optimiser: Optimiser = "muon"
    learning_rate: float = 3e-3
    matrix_learning_rate: float = 2e-2
    warmup: float = 0.03
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    fed_loss: bool = False
    seed: int = 0
    save_every: int = 200

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, PositionScheme)
        check_choice("siblings", self.siblings, Siblings)
        check_choice("optimiser", self.optimiser, Optimiser)
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        for name in ("layers", "length", "rows", "steps", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for records of a run."""
        return asdict(self)


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML file and apply `key=value` overrides.

    Raises:
        ConfigError: file, field and what would be right.
    """
    file = Path(path)
    if not file.exists():
        raise ConfigError(f"{file} does not exist")
    try:
        values = yaml.safe_load(file.read_text()) or {}
        for override in overrides or []:
            key, separator, value = override.partition("=")
            if not separator:
                raise ConfigError(f"{override!r} is not key=value")
            values[key] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold `key: value` lines")
    hints = get_type_hints(TrainConfig)
    known = [field.name for field in fields(TrainConfig)]
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ConfigError(f"{file}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        kind = hints[key]
        wanted = kind if kind in (bool, int, float) else str
        if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            try:
                values[key] = value = float(value)  # YAML reads 3e-4 as a string
            except ValueError:
                pass
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(f"{file}: {key} must be {wanted.__name__}, got {value!r}")
    return TrainConfig(**values)
