"""Configuration of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from aspd_jax.configuration import Check, Count, Dtype, Natural, NonNegative, Section
from aspd_jax.errors import ConfigError
from aspd_jax.layout import PositionScheme, Siblings, Titles, check_choice
from aspd_jax.model.attention import FULL_PASS_BACK_ENDS
from aspd_jax.model.config import Weights

Share = Annotated[float, Check("a share from 0 to 1", lambda value: 0 <= value <= 1)]
Rate = Annotated[float, Check("a rate from 0 to below 1", lambda value: 0 <= value < 1)]


@dataclass(frozen=True)
class ModelSection(Section, prefix="model."):
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
    vocab_size: Count = 768
    layers: Count = 4
    hidden_size: Count = 128
    heads: Count = 4
    kv_heads: Count = 4
    head_dim: Count = 32
    feed_forward: Count = 384
    positions: PositionScheme = "sequential"
    siblings: Siblings = "invisible"
    titles: Titles = "leads"
    dtype: Dtype = "float32"
    parameters: Dtype = "float32"
    weights: Weights = "float"
    lora_rank: Natural = 0
    lora_alpha: Annotated[float, Check("a number above 0", lambda value: value > 0)] = 16.0
    scan: bool = False
    remat: bool = False
    attention: str = "chunked"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.attention", self.attention, FULL_PASS_BACK_ENDS)
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim: expected an even number, got {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.heads: expected a multiple of model.kv_heads ({self.kv_heads}), got {self.heads}")
        if self.weights == "int8" and not self.lora_rank:
            raise ConfigError("model.weights: int8: expected model.lora_rank, got 0")


@dataclass(frozen=True)
class DataSection(Section, prefix="data."):
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
    plain_every: Natural = 8
    rows: Count = 6
    length: Count = 448
    bins: Count = 64


@dataclass(frozen=True)
class OptimiserSection(Section, prefix="optimiser."):
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

    learning_rate: NonNegative = 3e-3
    warmup: Share = 0.03
    final: Share = 0.01
    weight_decay: NonNegative = 0.05
    beta1: Rate = 0.9
    beta2: Rate = 0.98
    clip: Annotated[float, Check("a norm above 0", lambda value: value > 0)] = 1.0
    accumulate: Count = 1


@dataclass(frozen=True)
class DraftSection(Section, prefix="draft."):
    """Draft heads (docs/training.md).

    Attributes:
        heads: number of draft heads to train on a model that stays as it is; 0: the model is trained.
    """

    heads: Natural = 0


@dataclass(frozen=True)
class MeshSection(Section, prefix="mesh."):
    """Devices along each mesh axis.

    Attributes:
        data: data parallelism with replicated parameters.
        fsdp: data parallelism with sharded parameters.
        tensor: tensor parallelism.
    """

    data: Count = 1
    fsdp: Count = 1
    tensor: Count = 1


@dataclass(frozen=True)
class TrainConfig(Section):
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
    steps: Natural = 0
    epochs: Natural = 0
    seed: Natural = 0
    save_every: Count = 200
    keep: Count = 2
    evaluate_batches: Natural = 0
    log_every: Count = 20

    def __post_init__(self) -> None:
        super().__post_init__()
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
