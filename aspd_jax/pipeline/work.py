"""What a run works on, and what its stages have made of it so far (protocol, section 7).

What a stage makes of an answer is stored with a hash of what it was made of. So a killed run goes on, and a changed
setting runs again what depends on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from aspd_jax.errors import ConfigError
from aspd_jax.pipeline.config import DataConfig
from aspd_jax.pipeline.measures import Count, estimate_tokens
from aspd_jax.pipeline.sources import Conversation, Unreadable, read_records
from aspd_jax.pipeline.spans import BlockSpan, blocks_from_json
from aspd_jax.store import Store

VERSION = 4  # of what stages make; another one runs them again


class Shard(NamedTuple):
    """Which records are one's own: every `of`-th, beginning with `number`."""

    number: int = 0
    of: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """From `i/n`.

        Raises:
            ConfigError: it is none.
        """
        number, found, of = text.partition("/")
        if not (found and number.isdigit() and of.isdigit() and int(number) < int(of)):
            raise ConfigError(f"--shard takes i/n with i from 0 to n - 1, got {text!r}")
        return Shard(int(number), int(of))

    def name(self, stem: str, suffix: str) -> str:
        """Of a file of this shard."""
        return f"{stem}{suffix}" if self.of == 1 else f"{stem}-{self.number:05d}-of-{self.of:05d}{suffix}"

    def records(self, source: str) -> Iterator[Conversation | Unreadable]:
        """Of this shard."""
        return islice(read_records(source), self.number, None, self.of)


WHOLE = Shard()


class Answer(NamedTuple):
    """An answer to work on: its key in the store, everything said before it, and its text."""

    key: str
    question: str
    text: str


class Candidate(NamedTuple):
    """Blocks proposed for an answer, and by whom: `form 1`, `teacher 2`."""

    source: str
    blocks: tuple[BlockSpan, ...]


def answers_of(record: Conversation) -> Iterator[tuple[int, Answer]]:
    """Every answer of a conversation with its place, and what was said before."""
    for place in record.answers:
        said = "\n\n".join(f"{content}" for _, content in record.messages[:place])
        yield place, Answer(f"{record.number}/{place}", said, record.messages[place][1])


def counter(folder: str) -> Count:
    """How tokens are counted: as the tokenizer of a model has them, or an estimate where none is named.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    if not folder:
        return estimate_tokens
    from aspd_jax.formats import open_tokenizer

    try:
        tokenizer = open_tokenizer(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{folder} holds no tokenizer that transformers can read: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


class Work:
    """The answers of a shard, and a store of what stages made of them.

    Args:
        prompts: of the teacher, by name; what it was asked belongs to what a candidate was made of.

    Attributes:
        count: tokens of a text.
        unanswered: keys of answers for which a call got no reply in this run, and why.

    Raises:
        ConfigError: the model whose tokens are counted has no tokenizer.
    """

    def __init__(self, config: DataConfig, source: str, shard: Shard, store: Store, prompts: Mapping[str, str]) -> None:
        self.config, self.source, self.shard = config, source, shard
        self.count = counter(config.tokenizer)
        self.unanswered: dict[str, str] = {}
        self._store = store
        s, teacher = config.select, asdict(config.teacher)
        asked = [teacher[name] for name in ("base_url", "model", "temperature", "max_tokens", "attempts")]
        settings = {
            "propose": [
                VERSION,
                config.rules,
                config.titles,
                config.tokenizer,
                s.min_tokens,
                *asked,
                config.teacher.candidates,
                dict(prompts),
            ],
            "score": [config.likelihood.model, config.likelihood.length],
            "judge": [config.check_references, asdict(config.likelihood), asdict(s), config.teacher.votes],
        }
        # Of each stage and all before it.
        whole = hashlib.sha256()
        self._settings: dict[str, str] = {}
        for stage, values in settings.items():
            whole.update(json.dumps(values).encode())
            self._settings[stage] = whole.hexdigest()

    def records(self) -> Iterator[Conversation | Unreadable]:
        """Of this shard."""
        return self.shard.records(self.source)

    def answers(self) -> Iterator[Answer]:
        """Of this shard, those that hold nothing left out."""
        for record in self.records():
            if isinstance(record, Conversation):
                yield from (answer for _, answer in answers_of(record) if answer.text.strip())

    def get(self, stage: str, answer: Answer) -> Any:
        """What a stage has made of an answer, or None."""
        return self._store.get(answer.key, stage, self._made_of(stage, answer))

    def put(self, stage: str, answer: Answer, value: Any) -> None:
        """Keep what a stage made of an answer."""
        self._store.put(answer.key, stage, self._made_of(stage, answer), value)

    def candidates(self, answer: Answer) -> list[Candidate]:
        """What the first stage has proposed."""
        value = self.get("propose", answer) or {"candidates": []}
        return [Candidate(c["source"], blocks_from_json(c["blocks"])) for c in value["candidates"]]

    def _made_of(self, stage: str, answer: Answer) -> str:
        """Hash of everything that a stage's outcome for an answer depends on."""
        what = [self._settings[stage], answer.question, answer.text]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()
