"""The configuration of the data pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from aspd_jax.configuration import at_least


@dataclass(frozen=True)
class SelectSection:
    """Selection of the blocks and records that become parallel.

    Attributes:
        tokenizer: checkpoint folder whose tokenizer counts tokens; empty: the number is estimated.
        min_tokens: minimum tokens of an answer with blocks.
        max_branches: maximum branches of a block.
        min_saved: minimum steps that a block saves, by its critical path.
        max_repetition: maximum repetition of an answer (`aspd_jax.blocks.checks.repetition`, 0 to 1); records above
            it are left out of both sets.
        as_asked: whether records are left out of both sets if their question asks for a number of parts that no block
            of the answer has.
        per_question: maximum records with the same messages before the last answer, those with the best blocks; 0: all.
        serial_kinds: kinds of questions (the field `kind` of records) whose answers are kept without a block; empty:
            all. Otherwise the model learns prose for questions that request lists. Lists that a rule finds dependent
            are kept as serial text for every kind: they teach when not to fork.
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
        select: its section.
    """

    select: SelectSection = field(default_factory=SelectSection)
