"""What a run of the data pipeline is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aspd_jax.configuration import at_least
from aspd_jax.errors import ConfigError
from aspd_jax.layout import check_choice

Schema = Literal["auto", "schema", "object", "none"]


@dataclass(frozen=True)
class TeacherSection:
    """The annotating language model: any endpoint that speaks OpenAI's chat completions.

    Attributes:
        base_url: of the endpoint, such as `http://127.0.0.1:8000/v1`; empty: no annotator, no votes.
        model: its name there.
        key_variable: environment variable that holds the API key.
        candidates: annotations asked for every answer; 0: candidates come from the answer's form only.
        votes: on independence, and on agreement where a candidate's wording differs; all must agree. 0: none.
        temperature: of annotations and votes.
        max_tokens: of a reply.
        schema: how replies are held to their form: `schema` (structured outputs), `object` (JSON mode), `none`, or
            `auto`: the first of them that the endpoint takes.
        concurrency: calls at a time.
        requests_per_minute: 0: no limit.
        timeout: seconds that a call may take.
        retries: of a call that failed for the endpoint's sake, with back-off.
        attempts: replies asked for until one has the right form.
        give_up_after: calls in a row that fail before the run stops.
        input_price, output_price: of a million tokens, for the account and the estimate.
        prompts: folder with prompts of your own; files that it lacks are the project's.
    """

    base_url: str = ""
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"
    candidates: int = 3
    votes: int = 3
    temperature: float = 0.7
    max_tokens: int = 4096
    schema: Schema = "auto"
    concurrency: int = 32
    requests_per_minute: int = 0
    timeout: float = 120.0
    retries: int = 6
    attempts: int = 3
    give_up_after: int = 50
    input_price: float = 0.0
    output_price: float = 0.0
    prompts: str = ""

    def __post_init__(self) -> None:
        check_choice("teacher.schema", self.schema, Schema)
        if self.base_url and not self.model:
            raise ConfigError("teacher.base_url needs teacher.model, the model's name there")
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"teacher.base_url must begin with http:// or https://, got {self.base_url!r}")
        for name in ("max_tokens", "concurrency", "attempts", "give_up_after"):
            at_least(f"teacher.{name}", getattr(self, name), 1)
        numbers = (
            "candidates",
            "votes",
            "temperature",
            "requests_per_minute",
            "retries",
            "input_price",
            "output_price",
        )
        for name in numbers:
            at_least(f"teacher.{name}", getattr(self, name), 0)
        if self.timeout <= 0:
            raise ConfigError(f"teacher.timeout must be more than 0 seconds, got {self.timeout}")


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
    mean_rise: float = 0.2
    peak_rise: float = 1.5
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
    """

    tokenizer: str = ""
    min_tokens: int = 128
    max_branches: int = 32
    min_saved: int = 1

    def __post_init__(self) -> None:
        at_least("select.min_tokens", self.min_tokens, 0)
        at_least("select.max_branches", self.max_branches, 2)


@dataclass(frozen=True)
class DataConfig:
    """All of it.

    Attributes:
        rules: propose blocks by the answer's form, without a model.
        check_references: refuse branches that refer to a sibling, count on, or use what a sibling works out.
    """

    rules: bool = True
    check_references: bool = True
    teacher: TeacherSection = field(default_factory=TeacherSection)
    likelihood: LikelihoodSection = field(default_factory=LikelihoodSection)
    select: SelectSection = field(default_factory=SelectSection)

    @property
    def tokenizer(self) -> str:
        """Folder whose tokens are counted; empty: they are estimated."""
        return self.select.tokenizer or self.likelihood.model

    def __post_init__(self) -> None:
        if not self.rules and not (self.teacher.base_url and self.teacher.candidates):
            raise ConfigError("nothing proposes blocks: set rules, or teacher.base_url and teacher.candidates")
