"""The records and answers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from aspd_jax.blocks.checks import repetition
from aspd_jax.blocks.measures import Count, estimate_tokens
from aspd_jax.errors import ConfigError
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.sources import Conversation, Unreadable, read_records

COUNTS = 1 << 10  # texts whose number of tokens is kept


class Answer(NamedTuple):
    """An answer to process.

    Attributes:
        messages: the messages before the answer.
        text: text of the answer.
    """

    messages: tuple[str, ...]
    text: str


def answers_of(record: Conversation) -> Iterator[tuple[int, Answer]]:
    """Yield the answers of a conversation with their index, each with the text before it."""
    for place in record.answers:
        said = tuple(content for _, content in record.messages[:place])
        yield place, Answer(said, record.messages[place][1])


def counter(folder: str) -> Count:
    """Return a function that counts tokens: with the tokenizer of a checkpoint, or by an estimate without a folder.

    Checks and measures count the same pieces of an answer, so the latest counts are kept.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
    """
    if not folder:
        return lru_cache(COUNTS)(estimate_tokens)
    from aspd_jax.formats import open_tokenizer

    try:
        tokenizer = open_tokenizer(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{folder}: expected a tokenizer that transformers can read, got: {error}") from None
    return lru_cache(COUNTS)(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))


class Work:
    """The records of a run, and what their stages share.

    Args:
        config: configuration of the pipeline.
        source: path or name of the records.

    Attributes:
        count: function that counts the tokens of a text.

    Raises:
        ConfigError: the checkpoint that counts tokens has no tokenizer.
    """

    def __init__(self, config: DataConfig, source: str) -> None:
        self.config, self.source = config, source
        self.count = counter(config.select.tokenizer)

    def records(self) -> Iterator[Conversation | Unreadable]:
        """Yield the records of the source."""
        return read_records(self.source)

    def repetitive(self, record: Conversation) -> str | None:
        """Return the reason why a record is left out before all stages, because an answer repeats itself, or None."""
        most = self.config.select.max_repetition
        for place in record.answers if most < 1 else ():
            if (repeated := repetition(record.messages[place][1])) > most:
                return f"{repeated:.0%} of its words repeat what it said before, at most {most:.0%} may"
        return None
