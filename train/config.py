"""Training configurations: YAML in, a frozen dataclass out; unknown keys are refused."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from aspd_jax.errors import ConfigError
from aspd_jax.layout import PositionScheme, Siblings, check_choice


@dataclass(frozen=True)
class TrainConfig:
    """A run from scratch on the synthetic tasks.

    Attributes:
        structured: train on linearisations (ASPD) or on the plain text of the same answers (Seq).
        positions, siblings: position scheme and mask (spec, sections 3 and 4).
        vocabulary: tokens in all, special tokens included.
        layers, embed, heads, kv_heads, head, feed_forward: shape of the model.
        rows, length: shape of a batch of packed rows; problems that fit no row are left out.
        short_steps: so many of the first steps use `short_rows` rows of `short_length` tokens, and with that
            short problems only: copying from a context is learned faster on them.
        plain_every: after the short steps, one in so many examples of a structured run has the plain answer, so that
            the model can answer in serial mode too; 0: none.
        steps: optimiser steps in all.
        learning_rate: peak; a cosine down to a hundredth after a linear warm-up over the share `warmup` of all steps.
        weight_decay, beta2, clip: AdamW's, and the bound on the global norm of the gradient.
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
    heads: int = 4
    kv_heads: int = 4
    head: int = 32
    feed_forward: int = 384
    rows: int = 6
    length: int = 448
    short_steps: int = 1600
    short_rows: int = 16
    short_length: int = 144
    plain_every: int = 8
    steps: int = 4200
    learning_rate: float = 3e-3
    warmup: float = 0.03
    weight_decay: float = 0.05
    beta2: float = 0.98
    clip: float = 1.0
    fed_loss: bool = False
    seed: int = 0
    save_every: int = 200

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, PositionScheme)
        check_choice("siblings", self.siblings, Siblings)
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        for name in ("layers", "rows", "length", "short_rows", "short_length", "steps", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def batch_shape(self, step: int) -> tuple[int, int]:
        """Rows and tokens of a row at a step."""
        return (self.short_rows, self.short_length) if step < self.short_steps else (self.rows, self.length)

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
            with contextlib.suppress(ValueError):
                values[key] = float(value)  # YAML reads 3e-4 as a string
        value = values[key]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(f"{file}: {key} must be {wanted.__name__}, got {value!r}")
    return TrainConfig(**values)
