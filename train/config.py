"""Configuration of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aspd_jax.configuration import at_least, read_config
from aspd_jax.errors import ConfigError
from aspd_jax.layout import PositionScheme, Siblings, Titles, check_choice
from aspd_jax.model.attention import FULL_PASS_BACK_ENDS
from aspd_jax.model.config import Weights


@dataclass(frozen=True)
class ModelSection:
    """Model to train.

    Attributes:
        checkpoint: checkpoint to fine-tune: Hugging Face folder, GGUF file or a name.
        vocab_size, layers, hidden_size, heads, kv_heads, head_dim, feed_forward: shape of the checkpoint, for `--plan`
            where the checkpoint does not exist.
        positions, siblings: position scheme and mask (protocol, sections 3 and 4).
        titles: form of the titles (protocol, section 2); the structure of the records has to have it.
        dtype: dtype of activations: `float32` or `bfloat16`.
        parameters: dtype of trained parameters: `float32`, or `bfloat16` with stochastic rounding. The optimiser is
            float32.
        weights: `int8` stores the kernels of the layers in int8; only with LoRA.
        lora_rank: rank of the adapters of the layers' kernels; with adapters, only they and the embedding and head rows
            of the special tokens are trained. 0: all parameters are trained.
        lora_alpha: adapters are scaled by `lora_alpha / lora_rank`.
        scan: whether to compile one layer and scan it over stacked parameters.
        remat: whether to recompute the activations of each layer in the backward pass.
        attention: attention back end for full passes: `chunked` or `reference`.
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
    titles: Titles = "leads"
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
        check_choice("model.titles", self.titles, Titles)
        check_choice("model.weights", self.weights, Weights)
        check_choice("model.attention", self.attention, FULL_PASS_BACK_ENDS)
        for name in ("vocab_size", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "feed_forward"):
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.lora_rank", self.lora_rank, 0)
        if not self.lora_alpha > 0:
            raise ConfigError(f"model.lora_alpha: expected a number above 0, got {self.lora_alpha}")
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim: expected an even number, got {self.head_dim}")
        for name in ("dtype", "parameters"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise ConfigError(f"model.{name}: expected float32 or bfloat16, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.heads: expected a multiple of model.kv_heads ({self.kv_heads}), got {self.heads}")
        if self.weights == "int8" and not self.lora_rank:
            raise ConfigError("model.weights: int8: expected model.lora_rank, got 0")


@dataclass(frozen=True)
class DataSection:
    """Training data.

    Attributes:
        train: local files of conversations (docs/training.md).
        held_out: local files for the held-out loss.
        cache: folder of tokenised records, which other runs can share; empty: in the folder of the run.
        strict: whether a record that cannot be used is an error; otherwise it is reported.
        chat_template: Jinja file, for a tokenizer without a chat template.
        structured: whether to train on linearisations (ASPD) or on the plain text of the same answers (Seq).
        plain_every: every n-th record of a structured run has a plain answer, so that the model can also answer in
            serial mode; 0: none.
        rows, length: rows of a batch, and tokens of a row.
        bins: number of rows that are packed at a time; more rows waste less space and mix less.
    """

    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    cache: str = ""
    strict: bool = False
    chat_template: str = ""
    structured: bool = True
    plain_every: int = 8
    rows: int = 6
    length: int = 448
    bins: int = 64

    def __post_init__(self) -> None:
        for name in ("rows", "length", "bins"):
            at_least(f"data.{name}", getattr(self, name), 1)
        at_least("data.plain_every", self.plain_every, 0)


@dataclass(frozen=True)
class OptimiserSection:
    """AdamW with gradient clipping.

    Attributes:
        learning_rate: peak learning rate.
        warmup: share of all steps with a linear warm-up; 0: the first step has the peak rate.
        final: final learning rate of the cosine decay as a share of the peak.
        weight_decay: weight decay; norms, biases and scales have none.
        beta1, beta2: decay rates of the moments.
        clip: maximum global norm of the gradient.
        accumulate: number of parts of a batch that are processed one after another, with one update.
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
        for name in ("learning_rate", "weight_decay"):
            at_least(f"optimiser.{name}", getattr(self, name), 0)
        for name in ("warmup", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optimiser.{name}: expected a share from 0 to 1, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimiser.{name}: expected a rate from 0 to below 1, got {getattr(self, name)}")
        if not self.clip > 0:
            raise ConfigError(f"optimiser.clip: expected a norm above 0, got {self.clip}")


@dataclass(frozen=True)
class DraftSection:
    """Draft heads (docs/training.md).

    Attributes:
        heads: number of draft heads to train on a model that stays as it is; 0: the model is trained.
    """

    heads: int = 0

    def __post_init__(self) -> None:
        at_least("draft.heads", self.heads, 0)


@dataclass(frozen=True)
class MeshSection:
    """Devices along each mesh axis.

    Attributes:
        data: data parallelism with replicated parameters.
        fsdp: data parallelism with sharded parameters.
        tensor: tensor parallelism.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "fsdp", "tensor"):
            at_least(f"mesh.{axis}", getattr(self, axis), 1)


@dataclass(frozen=True)
class TrainConfig:
    """Training run.

    Attributes:
        model, data, optimiser, draft, mesh: sections of the configuration.
        steps: total number of steps; 0: determined by `epochs`.
        epochs: epochs over the records if `steps` is 0; one of both must be positive.
        seed: seed of the data order.
        save_every: steps between checkpoints.
        keep: number of latest checkpoints to keep; with held-out data the best one is kept too.
        evaluate_batches: held-out batches to evaluate before each checkpoint; 0: none, without data.held_out.
        log_every: steps between lines of metrics.
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimiser: OptimiserSection = field(default_factory=OptimiserSection)
    draft: DraftSection = field(default_factory=DraftSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    steps: int = 0
    epochs: int = 0
    seed: int = 0
    save_every: int = 200
    keep: int = 2
    evaluate_batches: int = 0
    log_every: int = 20

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "log_every"):
            at_least(name, getattr(self, name), 1)
        for name in ("steps", "epochs", "evaluate_batches", "seed"):
            at_least(name, getattr(self, name), 0)
        split = self.mesh.data * self.mesh.fsdp * self.optimiser.accumulate
        if self.data.rows % split:
            raise ConfigError(
                f"data.rows: expected a multiple of mesh.data x mesh.fsdp x optimiser.accumulate ({split}), "
                f"got {self.data.rows}"
            )
        trained = {Path(file).resolve() for file in self.data.train}
        if both := [file for file in self.data.held_out if Path(file).resolve() in trained]:
            raise ConfigError(f"data.held_out: expected other files than data.train, got {both[0]!r} in both")
        if self.evaluate_batches and not self.data.held_out:
            raise ConfigError("evaluate_batches: expected data.held_out, got none")
        if self.data.held_out and not self.evaluate_batches:
            raise ConfigError("evaluate_batches: expected at least 1 for data.held_out, got 0")
        if self.draft.heads and self.model.lora_rank:
            raise ConfigError(
                "draft.heads: expected model.lora_rank: 0, because the model is not trained, "
                f"got {self.model.lora_rank}"
            )
        if self.steps == 0 and self.epochs == 0:
            raise ConfigError("steps: expected steps or epochs, got none")
        for name, value in (("model.checkpoint", self.model.checkpoint), ("data.train", self.data.train)):
            if not value:
                raise ConfigError(f"{name}: expected a value, got none. See configs/lora_7b.yaml for an example.")

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values."""
        return asdict(self)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration; see `aspd_jax.configuration.read_config`."""
    return read_config(TrainConfig, path, overrides)
