"""What an evaluation is told."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, Literal

from aspd_jax.configuration import at_least
from aspd_jax.endpoint import EndpointSection, Schema
from aspd_jax.errors import ConfigError
from aspd_jax.layout import check_choice
from aspd_jax.model.model_config import Weights
from infer.request import PARAMETERS, SamplingParams

Role = Literal["ori", "seq", "aspd"]
Kind = Literal["chat", "maths", "choice", "exact", "synthetic", "synthetic-long"]


@dataclass(frozen=True)
class ModelSection:
    """A model under evaluation.

    Attributes:
        path: a checkpoint: folder, GGUF file or name.
        adapter: folder of an adapter for it (PEFT's format); empty: none.
        role: `aspd` answers in adaptive and in serial mode; `ori` (before fine-tuning) and `seq` (fine-tuned on plain
            answers) in serial mode.
        dtype: `float32` or `bfloat16`.
        weights: `int8` keeps the kernels of the layers in int8.
        chat_template: Jinja file, for a tokenizer that has no template of its own.
    """

    path: str = ""
    adapter: str = ""
    role: Role = "aspd"
    dtype: str = "float32"
    weights: Weights = "float"
    chat_template: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("models: every model needs a path")
        check_choice("models.*.role", self.role, Role)
        check_choice("models.*.weights", self.weights, Weights)
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"models.*.dtype must be float32 or bfloat16, got {self.dtype!r}")


@dataclass(frozen=True)
class BenchmarkSection:
    """Questions, and what counts as a right answer.

    Attributes:
        file: JSONL of questions; none for the synthetic kinds.
        kind: `chat` (FastChat's question files, with `documents` for answers from given texts), `maths` (a question and
            an answer to be found; GSM8K and MATH too), `choice` (with `choices`), `exact` (the answer is the whole
            text), `synthetic` (the project's own tasks, held out), `synthetic-long` (those with long parts).
        references: FastChat's model_answer file with answers to compare with, by the same question ids; optional.
        limit: questions taken, from all categories in turn; 0: all (of the synthetic kinds: 240).
    """

    file: str = ""
    kind: Kind = "chat"
    references: str = ""
    limit: int = 0

    def __post_init__(self) -> None:
        check_choice("benchmarks.*.kind", self.kind, Kind)
        at_least("benchmarks.*.limit", self.limit, 0)
        if bool(self.file) == self.synthetic:
            raise ConfigError(
                "benchmarks: every benchmark needs a file, but those of a synthetic kind, which have none"
            )

    @property
    def synthetic(self) -> bool:
        """Whether the questions are made, not read."""
        return self.kind in ("synthetic", "synthetic-long")


def _sampling_keys() -> list[tuple[str, type, Any]]:
    """Return the name, type and default of each sampling parameter that a configuration offers."""
    return [
        (name, parameter.kind, field(default=parameter.yaml.default))
        for name, parameter in PARAMETERS.items()
        if parameter.yaml is not None
    ]


SamplingSection: Any = make_dataclass("SamplingSection", _sampling_keys(), frozen=True)


@dataclass(frozen=True)
class DecodingSection(SamplingSection):
    """How answers are decoded: the fields of `SamplingParams` that a configuration offers, and these.

    A question's own `required_temperature` takes the place of `temperature`. Every question has its own random stream,
    derived from `seed` and its place, so that results do not depend on the rest of the batch.

    Attributes:
        max_length: tokens of a conversation.
        batch: conversations that are answered together. Their speed is not what is reported: see `SpeedSection`.
    """

    max_length: int = 4096
    batch: int = 8

    def __post_init__(self) -> None:
        at_least("decoding.batch", self.batch, 1)
        at_least("decoding.max_length", self.max_length, 2)
        self.params(None, 0)

    def params(self, temperature: float | None, place: int) -> SamplingParams:
        """Return the sampling parameters of a question.

        Args:
            temperature: temperature that the question requires; None: that of the section.
            place: number of the question in its benchmark.

        Raises:
            RequestError: a value is out of bounds; the message names it.
        """
        values = {name: getattr(self, name) for name, parameter in PARAMETERS.items() if parameter.yaml is not None}
        if temperature is not None:
            values["temperature"] = temperature
        return SamplingParams(**values | {"seed": (self.seed + place) % (1 << 32)})


@dataclass(frozen=True)
class SpeedSection:
    """How speed is measured: one conversation at a time, nothing beside it, after a run that compiles.

    Attributes:
        questions: of each benchmark that are timed, from all categories in turn; 0: none.
        repeats: runs of each; the median counts.
    """

    questions: int = 16
    repeats: int = 3

    def __post_init__(self) -> None:
        at_least("speed.questions", self.questions, 0)
        at_least("speed.repeats", self.repeats, 1)


@dataclass(frozen=True)
class JudgeSection(EndpointSection):
    """The judging language model.

    Attributes:
        prompts: FastChat's judge_prompts.jsonl, or one of your own in its form; empty: the project's. Where its
            `output_format` is `json`, replies are JSON.
        schema: how these are held to their form (`aspd_jax.endpoint.Endpoint`).
        single: ask for a score of every answer.
        pairs: compare the answers of two systems, in both orders: `aspd/seq` is the system `aspd` against `seq`.
    """

    section: ClassVar[str] = "judge"

    temperature: float = 0.0
    max_tokens: int = 2048
    prompts: str = ""
    schema: Schema = "auto"
    single: bool = True
    pairs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("judge.schema", self.schema, Schema)
        for pair in self.pairs:
            if len(pair.split("/")) != 2 or not all(pair.split("/")):
                raise ConfigError(f"judge.pairs: {pair!r} is not two systems, such as aspd/seq")


@dataclass(frozen=True)
class EvalConfig:
    """All of it.

    Attributes:
        models, benchmarks: by the names that they have in the report.
        likelihood: also measure how likely the references are to every model.
    """

    models: dict[str, ModelSection] = field(default_factory=dict)
    benchmarks: dict[str, BenchmarkSection] = field(default_factory=dict)
    decoding: DecodingSection = field(default_factory=DecodingSection)
    speed: SpeedSection = field(default_factory=SpeedSection)
    judge: JudgeSection = field(default_factory=JudgeSection)
    likelihood: bool = True

    def __post_init__(self) -> None:
        for what, named in (("models", self.models), ("benchmarks", self.benchmarks)):
            if not named:
                raise ConfigError(f"{what}: name at least one")
            for name in named:
                if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
                    raise ConfigError(f"{what}: {name!r} must consist of letters, digits, '-', '_' and '.'")
        known = {system.name for system in self.systems}
        for pair in self.judge.pairs:
            for name in pair.split("/"):
                if name not in known:
                    raise ConfigError(f"judge.pairs: {name!r} is none of the systems {', '.join(sorted(known))}")

    @property
    def systems(self) -> tuple[System, ...]:
        """What answers: every model in every mode that its role has."""
        found = []
        for name, model in self.models.items():
            if model.role == "aspd":
                found += [System(name, name, "adaptive"), System(f"{name}-serial", name, "serial")]
            else:
                found.append(System(name, name, "serial"))
        return tuple(found)


@dataclass(frozen=True)
class System:
    """A model in a mode, by the name it has in the report."""

    name: str
    model: str
    mode: Literal["adaptive", "serial"]
