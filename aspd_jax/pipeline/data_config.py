"""The configuration of the data pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from aspd_jax.configuration import Check, Natural, NonNegative, Section


@dataclass(frozen=True)
class SelectSection(Section, prefix="select."):
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
    min_tokens: Natural = 128
    max_branches: Annotated[int, Check("at least 2", lambda value: value >= 2)] = 32
    min_saved: int = 1
    max_repetition: NonNegative = 1.0
    as_asked: bool = False
    per_question: Natural = 0
    serial_kinds: tuple[str, ...] = ()
    serial_ratio: NonNegative = 0.0


@dataclass(frozen=True)
class DataConfig:
    """The configuration of the data pipeline.

    Attributes:
        select: its section.
    """

    select: SelectSection = field(default_factory=SelectSection)
