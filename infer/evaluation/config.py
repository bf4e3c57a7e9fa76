"""Configuration of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal

from aspd_jax.configuration import Count, Dtype, Natural, Section, at_least
from aspd_jax.errors import ConfigError
from aspd_jax.model.config import Weights
from infer.request import PARAMETERS, Mode, SamplingParams

MAX_LENGTH = 4096  # default of `decoding.max_length`

Role = Literal["ori", "seq", "aspd"]
Kind = Literal["chat", "numbers"]


@dataclass(frozen=True)
class ModelSection(Section, prefix="models.*."):
    """A model under evaluation.

    Attributes:
        path: checkpoint: folder, GGUF file or name of an embedded model.
        adapter: folder of an adapter in PEFT's format; empty: none.
        role: `aspd` is evaluated in adaptive and in serial mode; `ori` (before fine-tuning) and `seq` (fine-tuned on
            plain answers) in serial mode only.
        dtype: `float32` or `bfloat16`.
        weights: `int8` stores the kernels of the layers in int8.
        chat_template: Jinja file, for a tokenizer without a chat template.
    """

    path: str = ""
    adapter: str = ""
    role: Role = "aspd"
    dtype: Dtype = "float32"
    weights: Weights = "float"
    chat_template: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("models: expected a path of every model, got none.")
        super().__post_init__()


@dataclass(frozen=True)
class BenchmarkSection(Section, prefix="benchmarks.*."):
    """Questions of a benchmark.

    Attributes:
        file: JSONL file of questions, FastChat's form.
        kind: `chat`, or `numbers`: the last number of an answer is compared with that of the reference (GSM8K's files).
        suitable: CSV file of Skeleton-of-Thought, with `label;request` in each row: 1 if a question is suitable for
            parallel parts, else 0; empty: none.
        limit: maximum number of questions, spread evenly over the categories; 0: all.
    """

    file: str = ""
    kind: Kind = "chat"
    suitable: str = ""
    limit: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.file:
            raise ConfigError("benchmarks.*.file: expected a file of questions, got none")


SamplingSection: Any = make_dataclass(
    "SamplingSection",
    [
        (name, parameter.kind, field(default=parameter.yaml.default))
        for name, parameter in PARAMETERS.items()
        if parameter.yaml is not None
    ],
    frozen=True,
)


@dataclass(frozen=True)
class DecodingSection(SamplingSection, Section, prefix="decoding."):
    """Settings of decoding: the fields of `SamplingParams` that a configuration offers, and those below.

    `required_temperature` of a question takes precedence over `temperature`. `seed` is the base of the seeds: every
    question has a seed of its own, so that results do not depend on the batch. `fork_bias` holds in adaptive mode.

    Attributes:
        max_length: maximum tokens of a conversation; 0: 4096, or the model's context length if that is less.
        batch: number of conversations that are decoded together. Reported speed is measured separately, see
            `SpeedSection`.
    """

    max_length: int = 0
    batch: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length:
            at_least("decoding.max_length", self.max_length, 2)
        self.params(None, 0, "adaptive")

    def length(self, context_length: int) -> int:
        """Return the maximum tokens of a conversation with a model of this context length."""
        return self.max_length or min(MAX_LENGTH, context_length)

    def params(self, temperature: float | None, place: int, mode: Mode) -> SamplingParams:
        """Return the sampling parameters of a question.

        Args:
            temperature: temperature that the question requires; None: the configured one.
            place: index of the question in the benchmark, which determines the seed.
            mode: decoding mode of the system.

        Raises:
            RequestError: a value is out of range.
        """
        values = {name: getattr(self, name) for name, parameter in PARAMETERS.items() if parameter.yaml is not None}
        if temperature is not None:
            values["temperature"] = temperature
        if mode == "serial":
            values["fork_bias"] = 0.0  # models without tags refuse others
        return SamplingParams(**values | {"seed": (self.seed + place) % (1 << 32)})


@dataclass(frozen=True)
class SpeedSection(Section, prefix="speed."):
    """Settings of speed measurements: one conversation at a time, after a run that compiles.

    Attributes:
        questions: number of timed questions per benchmark, spread evenly over the categories; 0: none.
        repeats: timed runs per question; the median is reported.
    """

    questions: Natural = 16
    repeats: Count = 3


@dataclass(frozen=True)
class EvalConfig:
    """Configuration of an evaluation.

    Attributes:
        models, benchmarks: sections by their name in the report.
    """

    models: dict[str, ModelSection] = field(default_factory=dict)
    benchmarks: dict[str, BenchmarkSection] = field(default_factory=dict)
    decoding: DecodingSection = field(default_factory=DecodingSection)
    speed: SpeedSection = field(default_factory=SpeedSection)

    def __post_init__(self) -> None:
        for what, named in (("models", self.models), ("benchmarks", self.benchmarks)):
            if not named:
                raise ConfigError(f"{what}: expected at least one name, got none.")
            for name in named:
                if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
                    raise ConfigError(f"{what}: expected letters, digits, '-', '_' and '.', got {name!r}.")
        systems = [system.name for system in self.systems]
        if again := [name for name in systems if systems.count(name) > 1]:
            raise ConfigError(
                f"models: expected different names of systems, got {again[0]!r} twice. A model of role aspd has a "
                "second system, with `-serial` behind its name."
            )

    @property
    def systems(self) -> tuple[System, ...]:
        """Every model in every mode of its role."""
        systems = []
        for name, model in self.models.items():
            if model.role == "aspd":
                systems += [System(name, name, "adaptive"), System(f"{name}-serial", name, "serial")]
            else:
                systems.append(System(name, name, "serial"))
        return tuple(systems)


@dataclass(frozen=True)
class System:
    """A model in a decoding mode.

    Attributes:
        name: name in the report.
        model: key of `EvalConfig.models`.
        mode: decoding mode.
    """

    name: str
    model: str
    mode: Mode
