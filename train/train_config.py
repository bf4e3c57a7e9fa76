"""What a training run is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aspd_jax.configuration import at_least, read_config
from aspd_jax.errors import ConfigError
from aspd_jax.layout import PositionScheme, Siblings, check_choice
from aspd_jax.model.attention import FULL_PASS_BACK_ENDS
from aspd_jax.model.model_config import Weights


@dataclass(frozen=True)
class ModelSection:
    """What is trained.

    Attributes:
        checkpoint: a Hugging Face folder to fine-tune; empty: a Qwen3-style model from scratch, of the shape below.
        vocab_size: tokens in all, special tokens included (from scratch).
        layers, hidden_size, heads, kv_heads, head_dim, feed_forward: shape of the model (from scratch).
        positions, siblings: position scheme and mask (protocol, sections 3 and 4).
        dtype: of activations: `float32` or `bfloat16`.
        parameters: dtype of what is trained: `float32`, or `bfloat16`, rounded stochastically after each update. The
            optimiser is float32.
        weights: `int8` keeps the kernels of the layers in int8; only with LoRA.
        lora_rank: train low-rank adapters beside the kernels of the layers, and of embedding and head the rows of the
            special tokens; 0: train everything.
        lora_alpha: adapters count `lora_alpha / lora_rank`.
        scan: compile one layer and run it over stacked parameters.
        remat: recompute the inside of each layer in the backward pass.
        attention: a back end for full passes: `chunked`, `flash` (kernels on TPU and H100) or `reference`.
    """

    checkpoint: str = ""
    vocab_size: int = 768
    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    feed_forward: int = 384
    positions: PositionScheme = "sequential"
    siblings: Siblings = "invisible"
    dtype: str = "float32"
    parameters: str = "float32"
    weights: Weights = "float"
    lora_rank: int = 0
    lora_alpha: float = 16.0
    scan: bool = False
    remat: bool = False
    attention: str = "chunked"

    def __post_init__(self) -> None:
        check_choice("model.positions", self.positions, PositionScheme)
        check_choice("model.siblings", self.siblings, Siblings)
        check_choice("model.weights", self.weights, Weights)
        check_choice("model.attention", self.attention, FULL_PASS_BACK_ENDS)
        for name in ("dtype", "parameters"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ConfigError(f"model.{name} must be float32 or bfloat16, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.heads ({self.heads}) must be a multiple of model.kv_heads ({self.kv_heads})")
        if self.weights == "int8" and not (self.lora_rank and self.checkpoint):
            raise ConfigError(
                "model.weights: int8 needs model.checkpoint and model.lora_rank: int8 is not trained itself"
            )


@dataclass(frozen=True)
class DataSection:
    """What it is trained on.

    Attributes:
        train: JSONL files of conversations (docs/training.md); none: the synthetic tasks.
        held_out: JSONL files for the evaluation loss; none: the held-out side of the synthetic tasks, or nothing.
        cache: folder for tokenised records, so that the next run finds them; empty: beside the run.
        strict: the first record that cannot be used is an error; else it is counted and reported.
        chat_template: Jinja file, for a tokenizer that has no template of its own.
        structured: train on linearisations (ASPD) or on the plain text of the same answers (Seq).
        plain_every: in a structured run, one in so many records has the plain answer, so that the model can answer
            in serial mode too; 0: none.
        fed_loss: also put loss on the tokens that the engine feeds instead of sampling.
        reread: train for servers that read branches again behind their block (`train.records.reread`).
        rows, length: shape of a batch of packed rows.
        bins: rows that are being filled at a time; more fit tighter, and mix less (JSONL).
        short_steps: so many of the first steps use `short_rows` rows of `short_length` tokens, and with that
            short problems only: copying from a context is learned faster on them (synthetic tasks).
        recital_every: among the short steps, one in so many examples is a recital (`train.tasks.recital`); 0: none.
    """

    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    cache: str = ""
    strict: bool = False
    chat_template: str = ""
    structured: bool = True
    plain_every: int = 8
    fed_loss: bool = False
    reread: bool = False
    rows: int = 6
    length: int = 448
    bins: int = 64
    short_steps: int = 1500
    short_rows: int = 16
    short_length: int = 144
    recital_every: int = 2

    def __post_init__(self) -> None:
        for name in ("rows", "length", "bins", "short_rows", "short_length"):
            at_least(f"data.{name}", getattr(self, name), 1)
        for name in ("plain_every", "short_steps", "recital_every"):
            at_least(f"data.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class OptimiserSection:
    """AdamW behind a bound on the global norm.

    Attributes:
        learning_rate: peak; a cosine down to the share `final` of it after a linear warm-up over the share `warmup`
            of all steps.
        weight_decay: of everything but norms, biases and scales.
        clip: bound on the global norm of the gradient.
        accumulate: parts that a batch is taken in, one after another; the update is that of the whole batch.
    """

    learning_rate: float = 3e-3
    warmup: float = 0.03
    final: float = 0.01
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    accumulate: int = 1

    def __post_init__(self) -> None:
        at_least("optimiser.accumulate", self.accumulate, 1)
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"optimiser.warmup is a share between 0 and 1, got {self.warmup}")


@dataclass(frozen=True)
class MeshSection:
    """Devices along each axis: whole copies, parameters spread, matrices split."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "fsdp", "tensor"):
            at_least(f"mesh.{axis}", getattr(self, axis), 1)


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        steps: optimiser steps in all; 0: as many as `epochs` over the records take.
        epochs: passes over the records, where `steps` is 0.
        seed: of weights and the order of data.
        save_every: steps between checkpoints, from which a killed run goes on.
        keep: checkpoints that stay, the latest ones; with evaluations the best one stays too.
        evaluate_batches: batches of held-out data that are evaluated before each checkpoint; 0: none.
        log_every: steps between lines of metrics.
        tensorboard: write TensorBoard events beside metrics.jsonl.
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimiser: OptimiserSection = field(default_factory=OptimiserSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    steps: int = 8500
    epochs: int = 0
    seed: int = 0
    save_every: int = 200
    keep: int = 2
    evaluate_batches: int = 0
    log_every: int = 20
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "log_every"):
            at_least(name, getattr(self, name), 1)
        for name in ("steps", "epochs", "evaluate_batches"):
            at_least(name, getattr(self, name), 0)
        if self.steps == 0 and (self.epochs == 0 or not self.data.train):
            raise ConfigError("set steps, or epochs and data.train")
        split = self.mesh.data * self.mesh.fsdp * self.optimiser.accumulate
        for name in ("rows", "short_rows") if self.data.short_steps and not self.data.train else ("rows",):
            rows = getattr(self.data, name)
            if rows % split:
                raise ConfigError(
                    f"data.{name} ({rows}) must be a multiple of mesh.data x mesh.fsdp x optimiser.accumulate ({split})"
                )
        if self.evaluate_batches and self.data.train and not self.data.held_out:
            raise ConfigError("evaluate_batches needs data.held_out")
        if self.data.reread and (self.model.positions, self.model.siblings) != ("sequential", "invisible"):
            raise ConfigError("data.reread needs model.positions: sequential and model.siblings: invisible")
        if self.model.checkpoint and not self.data.train:
            raise ConfigError("model.checkpoint needs data.train: the synthetic tasks have a tokenizer of their own")

    def batch_shape(self, step: int) -> tuple[int, int]:
        """Rows and tokens of a row at a step of the synthetic tasks."""
        data = self.data
        return (data.short_rows, data.short_length) if step < data.short_steps else (data.rows, data.length)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for records of a run."""
        return asdict(self)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """See `aspd_jax.configuration.read_config`."""
    return read_config(TrainConfig, path, overrides)
