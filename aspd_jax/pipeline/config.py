"""What a run of the data pipeline is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from aspd_jax.configuration import at_least
from aspd_jax.endpoint import EndpointSection, Schema
from aspd_jax.errors import ConfigError
from aspd_jax.layout import check_choice

Titles = Literal["plan", "plain"]


@dataclass(frozen=True)
class TeacherSection(EndpointSection):
    """The annotating language model.

    Attributes:
        candidates: annotations asked for every answer; 0: candidates come from the answer's form only.
        votes: on the independence of every block; all must agree. 0: none.
        schema: how replies are held to their form (`aspd_jax.endpoint.Endpoint`).
        prompts: folder with prompts of your own; files that it lacks are the project's.
    """

    section: ClassVar[str] = "teacher"

    candidates: int = 3
    votes: int = 3
    schema: Schema = "auto"
    prompts: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("teacher.schema", self.schema, Schema)
        for name in ("candidates", "votes"):
            at_least(f"teacher.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class LikelihoodSection:
    """Independence by a model of ours: how much less likely a branch is when its siblings are hidden.

    Attributes:
        model: checkpoint folder, or `demo`; empty: not asked.
        mean_rise: most that a branch's negative log-likelihood may rise, nats per token.
        peak_rise: the same, over the eight tokens in a row where it rises most.
        length: tokens of question and answer; longer ones are not scored, and their blocks fail.
        batch: answers scored at a time.
    """

    model: str = ""
    mean_rise: float = 0.8
    peak_rise: float = 1.6
    length: int = 2048
    batch: int = 4

    def __post_init__(self) -> None:
        for name in ("length", "batch"):
            at_least(f"likelihood.{name}", getattr(self, name), 1)
        for name in ("mean_rise", "peak_rise"):
            at_least(f"likelihood.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class SelectSection:
    """Which blocks and answers become parallel.

    Attributes:
        tokenizer: checkpoint folder whose tokens are counted; empty: that of `likelihood.model`, else an estimate.
        min_tokens: shorter answers stay serial.
        max_branches: blocks with more stay serial.
        min_saved: passes that a block has to save, by its critical path.
        max_repetition: records with an answer that repeats itself more than this are left out of both sets (share of
            words that go on with what was said before, `aspd_jax.pipeline.checks.repetition`); 1: none are.
        serial_ratio: most records without a block for each that has one, chosen by their text; 0: all stay.
        as_asked: leave records out of both sets whose question names a number of parts that no block of its answer has.
    """

    tokenizer: str = ""
    min_tokens: int = 128
    max_branches: int = 32
    min_saved: int = 1
    max_repetition: float = 1.0
    as_asked: bool = False
    serial_ratio: float = 0.0

    def __post_init__(self) -> None:
        at_least("select.min_tokens", self.min_tokens, 0)
        at_least("select.max_branches", self.max_branches, 2)


@dataclass(frozen=True)
class DataConfig:
    """All of it.

    Attributes:
        rules: propose blocks by the answer's form, without a model.
        check_references: refuse branches that refer to a sibling, count on, or use what a sibling works out.
        titles: `plan`: with their number and how many there are (`aspd_jax.pipeline.titles.planned`); `plain`: without.
    """

    rules: bool = True
    check_references: bool = True
    titles: Titles = "plan"
    teacher: TeacherSection = field(default_factory=TeacherSection)
    likelihood: LikelihoodSection = field(default_factory=LikelihoodSection)
    select: SelectSection = field(default_factory=SelectSection)

    @property
    def tokenizer(self) -> str:
        """Folder whose tokens are counted; empty: they are estimated."""
        return self.select.tokenizer or self.likelihood.model

    def __post_init__(self) -> None:
        check_choice("titles", self.titles, Titles)
        if not self.rules and not (self.teacher.base_url and self.teacher.candidates):
            raise ConfigError("nothing proposes blocks: set rules, or teacher.base_url and teacher.candidates")
