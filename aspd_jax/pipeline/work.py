"""The answers of a run, and the stored results of its stages (protocol, section 7).

A result is stored with a hash of its inputs. A killed run therefore resumes, and a changed setting reruns the stages
that depend on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from aspd_jax.blocks.checks import repetition
from aspd_jax.blocks.measures import Count, estimate_tokens
from aspd_jax.blocks.spans import BlockSpan, blocks_from_json
from aspd_jax.errors import ConfigError
from aspd_jax.jsonl import Line
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.store import Store
from aspd_jax.sources import Conversation, Unreadable, read_rows, record_of

COUNTS = 1 << 10  # texts whose number of tokens is kept
VERSION = 11  # version of the stages; a change reruns all of them


class Shard(NamedTuple):
    """The part of the records that a process works on.

    Attributes:
        number: index of the first record.
        total: number of shards; the shard has every `total`-th record.
    """

    number: int = 0
    total: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """Parse `i/n`.

        Raises:
            ConfigError: the text has another form, or i is not less than n.
        """
        number, found, total = text.partition("/")
        if not (found and number.isdigit() and total.isdigit() and int(number) < int(total)):
            raise ConfigError(f"--shard: expected I/N with I from 0 to N - 1, got {text!r}")
        return Shard(int(number), int(total))

    def name(self, stem: str, suffix: str) -> str:
        """Return the name of a file of this shard."""
        return f"{stem}{suffix}" if self.total == 1 else f"{stem}-{self.number:05d}-of-{self.total:05d}{suffix}"

    def rows(self, source: str) -> Iterator[Line]:
        """Yield the rows of this shard (`read_rows`)."""
        return islice(read_rows(source), self.number, None, self.total)

    def records(self, source: str) -> Iterator[Conversation | Unreadable]:
        """Yield the records of this shard."""
        return map(record_of, self.rows(source))


WHOLE = Shard()


class Answer(NamedTuple):
    """An answer to process.

    Attributes:
        key: key in the store.
        messages: the messages before the answer.
        text: text of the answer.
    """

    key: str
    messages: tuple[str, ...]
    text: str

    @property
    def question(self) -> str:
        """All text before the answer."""
        return "\n\n".join(self.messages)


class Candidate(NamedTuple):
    """Blocks proposed for an answer.

    Attributes:
        source: source of the blocks, such as `form 1`.
        blocks: the blocks in order.
    """

    source: str
    blocks: tuple[BlockSpan, ...]


def candidates_of(proposed: Mapping[str, Any]) -> list[Candidate]:
    """Return the candidates of a result of the first stage."""
    return [Candidate(c["source"], blocks_from_json(c["blocks"])) for c in proposed["candidates"]]


def answers_of(record: Conversation) -> Iterator[tuple[int, Answer]]:
    """Yield the answers of a conversation with their index, each with the text before it."""
    for place in record.answers:
        said = tuple(f"{content}" for _, content in record.messages[:place])
        yield place, Answer(f"{record.number}/{place}", said, record.messages[place][1])


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
    """The answers of a shard, and the stored results of stages.

    Args:
        config: configuration of the pipeline.
        source: path or name of the records.
        shard: part of the records to process.
        store: store of the run.

    Attributes:
        store: where the results of stages are.
        count: function that counts the tokens of a text.

    Raises:
        ConfigError: the checkpoint that counts tokens has no tokenizer.
    """

    def __init__(self, config: DataConfig, source: str, shard: Shard, store: Store) -> None:
        self.config, self.source, self.shard = config, source, shard
        self.count = counter(config.tokenizer)
        self.store = store
        settings = {
            "propose": [VERSION, config.tokenizer, config.select.min_tokens],
            "score": [config.likelihood.model, config.likelihood.length],
            "judge": [config.check_dependence, config.check_defects, asdict(config.likelihood), asdict(config.select)],
        }
        # The hash of a stage includes the settings of all stages before it.
        whole = hashlib.sha256()
        self._settings: dict[str, str] = {}
        for stage, values in settings.items():
            whole.update(json.dumps(values).encode())
            self._settings[stage] = whole.hexdigest()

    def records(self) -> Iterator[Conversation | Unreadable]:
        """Yield the records of this shard."""
        return self.shard.records(self.source)

    def answers(self) -> Iterator[Answer]:
        """Yield the non-empty answers of this shard, except those of repetitive records, which are in neither set."""
        for record in self.records():
            if isinstance(record, Conversation) and not self.repetitive(record):
                yield from (answer for _, answer in answers_of(record) if answer.text.strip())

    def repetitive(self, record: Conversation) -> str | None:
        """Return the reason why a record is left out before all stages, because an answer repeats itself, or None."""
        most = self.config.select.max_repetition
        for place in record.answers if most < 1 else ():
            if (repeated := repetition(record.messages[place][1])) > most:
                return f"{repeated:.0%} of its words repeat what it said before, at most {most:.0%} may"
        return None

    def get(self, stage: str, answer: Answer) -> Any:
        """Return the stored result of a stage for an answer, or None."""
        return self.store.get(answer.key, stage, self._made_of(stage, answer))

    def put(self, stage: str, answer: Answer, value: Any) -> None:
        """Store the result of a stage for an answer."""
        self.store.put(answer.key, stage, self._made_of(stage, answer), value)

    def result(self, stage: str, answer: Answer, compute: Callable[[], Any]) -> Any:
        """Return the stored result of a stage for an answer; if it has none, compute and store it."""
        made_of = self._made_of(stage, answer)
        value = self.store.get(answer.key, stage, made_of)
        if value is None:
            value = compute()
            self.store.put(answer.key, stage, made_of, value)
        return value

    def _made_of(self, stage: str, answer: Answer) -> str:
        """Return a hash of all inputs of a stage for an answer."""
        what = [self._settings[stage], answer.messages, answer.text]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()
