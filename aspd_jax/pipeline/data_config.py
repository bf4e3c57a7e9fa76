"""The configuration of the data pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aspd_jax.configuration import at_least
from aspd_jax.errors import ConfigError
from aspd_jax.layout import check_choice

Schema = Literal["auto", "schema", "object", "none"]


@dataclass(frozen=True)
class TeacherSection:
    """The language model that annotates answers, at an endpoint with OpenAI's chat completions.

    Attributes:
        base_url: URL of the endpoint, such as `http://127.0.0.1:8000/v1`; empty: no endpoint.
        model: name of the model at the endpoint.
        key_variable: environment variable that holds the API key.
        temperature: sampling temperature.
        max_tokens: maximum tokens of a reply.
        concurrency: maximum concurrent calls.
        requests_per_minute: rate limit; 0: no limit.
        timeout: timeout of a call in seconds.
        retries: retries of a call after a failure of the endpoint, with back-off.
        attempts: maximum replies requested until one has the required form.
        give_up_after: consecutive failed calls after which the run stops.
        input_price, output_price: price per million tokens, for the report and the estimate.
        candidates: annotations per answer; 0: candidates come only from the form of the answer.
        votes: votes on the independence of each block, which must all be in favour; 0: no votes.
        schema: how the form of replies is enforced: `schema` (structured outputs), `object` (JSON mode), `none`, or
            `auto`: the first of these that the endpoint supports.
        prompts: folder with custom prompts; missing files are replaced by those of the project.
    """

    base_url: str = ""
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"
    temperature: float = 0.7
    max_tokens: int = 4096
    concurrency: int = 32
    requests_per_minute: int = 0
    timeout: float = 120.0
    retries: int = 6
    attempts: int = 3
    give_up_after: int = 50
    input_price: float = 0.0
    output_price: float = 0.0
    candidates: int = 3
    votes: int = 3
    schema: Schema = "auto"
    prompts: str = ""

    def __post_init__(self) -> None:
        if self.base_url and not self.model:
            raise ConfigError("teacher.model: expected the model's name at teacher.base_url, got none")
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"teacher.base_url: expected http://… or https://…, got {self.base_url!r}")
        for name in ("max_tokens", "concurrency", "attempts", "give_up_after"):
            at_least(f"teacher.{name}", getattr(self, name), 1)
        for name in (
            *("temperature", "requests_per_minute", "retries", "input_price", "output_price"),
            *("candidates", "votes"),
        ):
            at_least(f"teacher.{name}", getattr(self, name), 0)
        if self.timeout <= 0:
            raise ConfigError(f"teacher.timeout: expected more than 0 seconds, got {self.timeout}")
        check_choice("teacher.schema", self.schema, Schema)


@dataclass(frozen=True)
class LikelihoodSection:
    """Independence measured by a local model: how much less likely a branch is when its siblings are hidden.

    Attributes:
        model: checkpoint folder, or `demo`; empty: no model.
        mean_rise: maximum increase of the negative log-likelihood of a branch, nats per token.
        peak_rise: maximum increase over the eight consecutive tokens with the largest one, nats per token.
        length: maximum tokens of question and answer; the blocks of longer answers fail.
        batch: answers per batch.
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
    """Selection of the blocks and records that become parallel.

    Attributes:
        tokenizer: checkpoint folder whose tokenizer counts tokens; empty: that of `likelihood.model`, else an estimate.
        min_tokens: minimum tokens of an answer with blocks.
        max_branches: maximum branches of a block.
        min_saved: minimum steps that a block saves, by its critical path.
        max_repetition: maximum repetition of an answer (`aspd_jax.blocks.checks.repetition`, 0 to 1); records above
            it are left out of both sets.
        as_asked: whether records are left out of both sets if their question asks for a number of parts that no block
            of the answer has.
        per_question: maximum records with the same messages before the last answer, those with the best blocks; 0: all.
            Records are compared within a shard, after all calls.
        serial_kinds: kinds of questions (the field `kind` of records) whose answers are kept without a block; empty:
            all. Otherwise the model learns prose for questions that request lists. Lists that `check_dependence`
            refuses are kept as serial text for every kind: they teach when not to fork.
        serial_ratio: maximum records without a block per record with one, chosen by a hash of the text; 0: no limit.
    """

    tokenizer: str = ""
    min_tokens: int = 128
    max_branches: int = 32
    min_saved: int = 1
    max_repetition: float = 1.0
    as_asked: bool = False
    per_question: int = 0
    serial_kinds: tuple[str, ...] = ()
    serial_ratio: float = 0.0

    def __post_init__(self) -> None:
        at_least("select.min_tokens", self.min_tokens, 0)
        at_least("select.max_branches", self.max_branches, 2)
        at_least("select.per_question", self.per_question, 0)
        at_least("select.serial_ratio", self.serial_ratio, 0)
        at_least("select.max_repetition", self.max_repetition, 0)


@dataclass(frozen=True)
class DataConfig:
    """The configuration of the data pipeline.

    Attributes:
        rules: whether the form of an answer proposes blocks, without a model.
        check_dependence: whether blocks are refused whose branches refer to a sibling, continue a count, use a
            sibling's result, tell a course of events, derive a number that the question asks for, or explain a
            program (`aspd_jax.blocks.checks.find_dependence`).
        check_defects: whether blocks are refused that have unequal gaps, similar titles or repeated sentences
            (`aspd_jax.blocks.checks.find_defect`).
        teacher, likelihood, select: sections.
    """

    rules: bool = True
    check_dependence: bool = True
    check_defects: bool = True
    teacher: TeacherSection = field(default_factory=TeacherSection)
    likelihood: LikelihoodSection = field(default_factory=LikelihoodSection)
    select: SelectSection = field(default_factory=SelectSection)

    @property
    def tokenizer(self) -> str:
        """Return the folder whose tokenizer counts tokens; empty: the number is estimated."""
        return self.select.tokenizer or self.likelihood.model

    def __post_init__(self) -> None:
        if not self.rules and not (self.teacher.base_url and self.teacher.candidates):
            raise ConfigError(
                "rules: expected true, or teacher.base_url and teacher.candidates, got none that proposes blocks"
            )
