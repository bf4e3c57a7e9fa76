"""Tokenised examples of conversations, cached on disk, with a report of records and turns that cannot be used.

Records have the formats of `aspd_jax.sources`. An answer is trained after exactly the prompt that the engine renders
for it. Turns share an example while each prompt continues the tokens of the previous turn; otherwise each turn has its
own example.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter

from aspd_jax.chat import Chat, end_of_turn
from aspd_jax.errors import AspdError, ConfigError, DataError
from aspd_jax.files import exclusive
from aspd_jax.language_model import LanguageModel
from aspd_jax.progress import Bar
from aspd_jax.sources import Conversation, Unreadable, no_record, read_records
from aspd_jax.structure import Parallel, Serial, Structure, plain_text
from aspd_jax.tokens import Linearisation
from train.config import DataSection

SHOWN = 5  # maximum number of printed problems; left_out.jsonl has all
VERSION = 7  # format of the cache; files of other versions are not used
FEATURES = datasets.Features(
    {
        "tokens": datasets.List(datasets.Value("int32")),
        "loss": datasets.List(datasets.Value("bool")),
        "size": datasets.Value("int32"),
        "line": datasets.Value("int64"),
        "kind": datasets.Value("string"),
        "reason": datasets.Value("string"),
    }
)
_OPENED = re.compile(r"<\w+>\s*$")


class Example(NamedTuple):
    """One conversation.

    Attributes:
        tokens: token ids, int32 [T].
        loss: whether a token is a target, bool [T].
    """

    tokens: np.ndarray
    loss: np.ndarray


class Problem(NamedTuple):
    """A record or a turn that was left out: file, line, kind of problem and reason."""

    file: str
    line: int
    kind: str
    reason: str


def encode_conversation(
    lm: LanguageModel, record: Conversation, structured: bool
) -> tuple[list[Example], dict[int, str]]:
    """Encode a conversation with loss on its answers and the tokens that end them.

    Every answer follows the prompt that the engine renders for the messages before it. Answers share an example while
    the prompt of the next one begins with the tokens of the example. An answer ends with the token that the chat
    template writes behind it, or else with the first of `lm.end_ids`.

    Args:
        lm: language model with a chat template.
        record: conversation.
        structured: whether answers are linearised with their structure or as plain text.

    Returns:
        Examples, and the reason for each answer that is in none of them, by index of its message.
    """
    messages = [{"role": role, "content": content} for role, content in record.messages]
    skipped: dict[int, str] = {}
    examples: list[tuple[list[int], list[bool]]] = []  # tokens and loss
    chat, end = Chat(lm.tokenizer, lm.codec.text, messages), end_of_turn(lm.tokenizer)
    for place in record.answers:
        try:
            if not messages[place]["content"].strip():
                raise DataError("answer: expected text, got none")
            segments, shown = chat.prompt(place), chat.answers(place)
            whole = [record.structure(earlier) for earlier in record.answers if earlier < place]
            history = [_end_of(one, text) for one, text in zip(whole, shown, strict=True)]
            prompt = chat.join(segments, [_earlier(lm, one, structured) for one in history])
            answer = _linearise(lm, _behind(segments[-1], record.structure(place)), structured)
            tokens = [*answer.tokens.tolist(), lm.end_ids[0] if end is None else end]
            if unused := [token for token in (*prompt, *tokens) if lm.config.is_unused(token)]:
                raise DataError(f"token ids: expected rows of the embedding, got {unused[0]}")
        except AspdError as error:
            skipped[place] = str(error)
            continue
        before, loss = examples[-1] if examples else ([], [])
        if not before or prompt[: len(before)] != before:
            before, loss = [], []
            examples.append((before, loss))
        loss += [False] * (len(prompt) - len(before)) + [*(~answer.fed).tolist(), True]
        before[:] = [*prompt, *tokens]
    return [Example(np.asarray(tokens, np.int32), np.asarray(loss, bool)) for tokens, loss in examples], skipped


def _linearise(lm: LanguageModel, structure: Structure, structured: bool) -> Linearisation:
    """Return the linearisation of an answer, with its structure or as plain text."""
    return lm.codec.linearise(structure if structured else (Serial(plain_text(structure)),))


def _earlier(lm: LanguageModel, structure: Structure, structured: bool) -> str | list[int]:
    """Return an earlier answer for `Chat.join`: its linearisation if it has blocks, else its text."""
    if structured and any(isinstance(item, Parallel) for item in structure):
        return _linearise(lm, structure, True).tokens.tolist()
    return plain_text(structure)


def _end_of(structure: Structure, text: str) -> Structure:
    """Return the end of a structure whose text a chat template truncates at the beginning.

    Answers with blocks keep the white space around them.
    """
    whole = plain_text(structure)
    if whole.strip() == text.strip() and any(isinstance(item, Parallel) for item in structure):
        return structure
    dropped = len(whole) - len(text)
    first = structure[0] if structure else Serial("")
    if isinstance(first, Serial) and len(first.text) >= dropped and whole.endswith(text):
        return (Serial(first.text[dropped:]), *structure[1:])
    return (Serial(text),)


def _behind(prompt: str, structure: Structure) -> Structure:
    """Remove the first tag of an answer, such as `<think>`, if the prompt already ends with it."""
    opened, text = _OPENED.search(prompt), plain_text(structure).lstrip()
    if opened is None or not text.startswith(opened[0].rstrip()):
        return structure
    return _end_of(structure, text.removeprefix(opened[0].rstrip()).lstrip())


class Records:
    """Sequence of the examples of data files.

    Args:
        lm: language model with a chat template.
        files: files in the formats of `read_records`.
        data: data section of the configuration.
        cache: folder for tokenised records, whose names contain a hash of everything that they depend on.

    Attributes:
        problems: records and turns that cannot be used.
        files: names of the tokenised files, with hashes of their records.
        sizes: tokens of each example.

    Raises:
        DataError: a file is missing, no record can be used, or with `strict` any record cannot be used.
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, lm: LanguageModel, files: Sequence[str], data: DataSection, cache: Path) -> None:
        if not lm.tokenizer.chat_template:
            raise ConfigError(
                "data.chat_template: expected a Jinja file, because the tokenizer has no chat template, got none"
            )
        if not lm.end_ids:
            raise ConfigError("eos_token_id: expected the end-of-text token in config.json, got none")
        self.problems: list[Problem] = []
        self._total = self._used = 0
        tables, places = [], []
        for file in files:
            table = _tokenised(lm, Path(file), data, cache)
            sizes, lines = np.asarray(table["size"], int), np.asarray(table["line"], int)
            fits = (sizes > 0) & (sizes <= data.length)
            for index in np.flatnonzero(~fits):
                row = table[int(index)]
                reason = row["reason"] or f"{row['size']} tokens, data.length is {data.length}"
                self.problems.append(Problem(file, int(row["line"]), row["kind"] or "over-long", reason))
                if data.strict:
                    raise DataError(f"{file}, line {row['line']}: {reason}")
            self._total += np.unique(lines).size
            self._used += np.unique(lines[fits]).size
            places.append(np.flatnonzero(fits))
            tables.append(table)
        starts = np.cumsum([0, *[len(table) for table in tables]])
        self._rows = np.concatenate([place + start for place, start in zip(places, starts, strict=False)])
        if not self._rows.size:
            raise no_record(", ".join(files), [_where(problem) for problem in self.problems[:1]])
        whole = datasets.concatenate_datasets(tables)
        self.files = [Path(file["filename"]).name for file in whole.cache_files]
        self.sizes = np.asarray(whole["size"])[self._rows]
        self._table = whole.with_format("numpy", columns=list(Example._fields))

    def __len__(self) -> int:
        return int(self._rows.size)

    def __getitem__(self, index: int) -> Example:
        row = self._table[int(self._rows[index])]
        return Example(np.asarray(row["tokens"], np.int32), np.asarray(row["loss"], bool))

    def report(self) -> str:
        """Return a summary of the records that were left out."""
        if not self.problems:
            return f"{self._total} records, all used"
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(p.kind for p in self.problems).items()))
        lines = [f"{self._total} records, {self._used} used; left out: {counts}"]
        lines += [f"  {_where(problem)}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  … and {len(self.problems) - SHOWN} more, in left_out.jsonl")
        return "\n".join(lines)


def _where(problem: Problem) -> str:
    return f"{problem.file}, line {problem.line}: {problem.reason}"


def _tokenised(lm: LanguageModel, file: Path, data: DataSection, cache: Path) -> datasets.Dataset:
    """Return the rows of a file: examples, and rows of size 0 with kind and reason for what is left out."""
    try:
        with file.open("rb") as content:
            key = hashlib.file_digest(content, "sha256")
    except OSError as error:
        raise DataError(f"{file}: expected a file of records, got: {error.strerror}") from None
    data_settings = (data.structured, data.plain_every)
    model_settings = (lm.end_ids, lm.tokenizer.chat_template, lm.config.titles, lm.config.unused_tokens)
    names = lm.tokenizer.special_tokens_map  # templates write some of them
    key.update(repr((VERSION, file.suffix, *data_settings, *model_settings, names)).encode())
    key.update(lm.tokenizer.backend_tokenizer.to_str().encode())
    cached = cache / f"{file.stem}-{key.hexdigest()[:20]}.arrow"
    if not cached.exists():
        with exclusive(cached) as partial:
            if not cached.exists():  # another run may have written it while this one waited
                with ArrowWriter(path=str(partial), features=FEATURES) as writer:
                    for record in Bar(read_records(str(file)), desc=f"tokenising {file.name}", unit="record"):
                        for row in _rows(lm, record, data):
                            writer.write(row)
                    writer.finalize()
                partial.replace(cached)
    return datasets.Dataset.from_file(str(cached))


def _rows(lm: LanguageModel, record: Conversation | Unreadable, data: DataSection) -> Iterator[dict[str, Any]]:
    empty = Example(np.zeros(0, np.int32), np.zeros(0, bool))
    left_out = empty._asdict() | {"size": 0, "line": record.number}
    if isinstance(record, Unreadable):
        yield left_out | {"kind": "malformed", "reason": record.reason}
        return
    index = record.number - 1
    plain = data.plain_every and index % data.plain_every == data.plain_every - 1
    examples, skipped = encode_conversation(lm, record, data.structured and not plain)
    for example in examples:
        yield example._asdict() | {"size": len(example.tokens), "line": record.number, "kind": "", "reason": ""}
    if not examples:
        yield left_out | {"kind": "malformed", "reason": "; ".join(dict.fromkeys(map(_turn, skipped.items())))}
        return
    if record.unanswered:
        skipped[len(record.messages)] = "no answer follows"
    for turn in skipped.items():
        yield left_out | {"kind": "turn", "reason": _turn(turn)}


def _turn(turn: tuple[int, str]) -> str:
    place, reason = turn
    return reason if reason.startswith("messages") else f"messages[{place}]: {reason}"
