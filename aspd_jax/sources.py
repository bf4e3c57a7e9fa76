"""Read records of common formats as conversations; unreadable ones are returned with a reason (protocol, section 7)."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from aspd_jax.errors import AspdError, DataError, check_unicode
from aspd_jax.jsonl import BOM, Line, parse_json, read_line, read_lines
from aspd_jax.partitions import is_url, partitions
from aspd_jax.record_fields import (
    ANSWERS,
    CHOICES,
    CONTEXTS,
    CONVERSATIONS,
    IDS,
    QUESTIONS,
    SYSTEMS,
    check_learned,
    check_message,
    check_record,
    shown,
)
from aspd_jax.structure import Serial, Structure, from_json, plain_text

ROLES = {
    "human": "user", "user": "user", "prompter": "user", "system": "system", "developer": "system",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")
TURN = ("role", "from", "content", "value", "structure")  # fields of a message that are read
LONGEST_REASON = 300  # maximum characters of a reason
_JSON_MARK = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)


class Message(NamedTuple):
    """A message of a conversation.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: text of the message.
        structure: structure of an answer, if the record has it.
    """

    role: str
    content: str
    structure: Structure | None = None


@dataclass(frozen=True)
class Conversation:
    """A record: messages of `role` and `content`, the last one from the assistant.

    Attributes:
        number: number of the record in its file, from 1; the line number for JSONL.
        id: id of the record, or its number.
        messages: pairs of role and content.
        structures: structures of answers, by index of the message.
        unanswered: number of dropped messages after the last answer.
        kind: kind of its question, from the field `kind`; empty: none.
    """

    number: int
    id: str
    messages: tuple[tuple[str, str], ...]
    structures: Mapping[int, Structure] = field(default_factory=dict, compare=False)
    unanswered: int = 0
    kind: str = ""

    @property
    def answers(self) -> list[int]:
        """Return the indices of the messages of the assistant."""
        return [place for place, (role, _) in enumerate(self.messages) if role == "assistant"]

    def structure(self, place: int) -> Structure:
        """Return the structure of an answer; one serial segment if the record has none."""
        return self.structures.get(place, (Serial(self.messages[place][1]),))


@dataclass(frozen=True)
class Unreadable:
    """A record that is not a conversation.

    Attributes:
        number: number of the record in its file, from 1.
        id: id of the record, or its number.
        reason: reason why it cannot be read.
    """

    number: int
    id: str
    reason: str


def read_records(source: str) -> Iterator[Conversation | Unreadable]:
    """Yield the records of a JSONL or JSON file, or of a source that `datasets` reads (Parquet, folder, name).

    JSONL and Parquet may be a glob or a URL that fsspec opens; numbers run on through the files of a glob.

    Raises:
        DataError: the file or dataset does not exist or cannot be read.
    """
    return map(record_of, read_rows(source))


def record_of(row: Line) -> Conversation | Unreadable:
    """Convert a row of `read_rows` to a conversation, or to the reason why it is none."""
    number, value, reason = row
    return Unreadable(number, str(number), reason) if reason else conversation(value, number)


def read_rows(source: str) -> Iterator[Line]:
    """Yield the records of a source of `read_records` as they are, or the reasons why they cannot be read.

    Yields:
        For each record, its number in the file from 1 (the line number for JSONL), its value and the reason.

    Raises:
        DataError: the file or dataset does not exist or cannot be read.
    """
    path = Path(source)
    if path.suffix == ".json" and is_url(source):
        raise DataError(f"{source}: expected .jsonl, .ndjson, .parquet or .arrow at a URL, got .json")
    if path.suffix in (".jsonl", ".ndjson"):
        yield from read_lines(source)
    elif path.suffix == ".json" and (texts := _json_texts(path)) is not None:
        yield from (read_line(number, text) for number, text in enumerate(texts, 1))
    elif path.suffix == ".json":
        yield from read_lines(path)
    else:
        rows = _dataset(source)
        for number in range(1, len(rows) + 1):
            try:
                row = rows[number - 1]
            except Exception as error:  # a column of this row may not be decodable
                yield Line(number, None, f"the row cannot be read: {error}"[:LONGEST_REASON])
            else:
                yield Line(number, row)


def _json_texts(path: Path) -> list[bytes] | None:
    """Return the elements of a file that is one JSON array, or its one object; None: it is neither, so it may be JSONL.

    Elements are cut apart before they are parsed, so that a fault in one of them leaves the others.
    """
    try:
        data = path.read_bytes().removeprefix(BOM).strip(b" \t\r\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if not data.startswith(b"["):
        try:
            parse_json(data)
        except DataError:
            return None
        return [data]
    texts, depth, start = [], 1, 1
    for found in _JSON_MARK.finditer(data, start):
        mark = found[0]
        depth += (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
        if depth == 0 or (depth == 1 and mark == b","):
            texts.append(data[start : found.start()])
            start = found.end()
        if depth == 0:
            break
    if rest := data[start:].strip():
        texts.append(rest)
    return [] if not b"".join(texts).strip() else texts


def _dataset(source: str) -> Any:
    import datasets

    path = Path(source)
    kinds = {".parquet": "parquet", ".arrow": "arrow"}
    try:
        if path.is_file() or is_url(source) or (glob.has_magic(source) and path.suffix in kinds):
            kind = kinds.get(path.suffix)
            if kind is None:
                raise DataError(f"{source}: expected a file .jsonl, .ndjson, .json, {', '.join(kinds)}, got another")
            return datasets.load_dataset(kind, data_files=partitions(source), split="train")
        if (path / "dataset_info.json").exists():
            return datasets.load_from_disk(source)
        return datasets.load_dataset(source, split="train")
    except AspdError:
        raise
    except Exception as error:  # the types of errors depend on the format
        raise DataError(f"{source}: expected a dataset, got: {error}") from None


def conversation(row: Any, number: int) -> Conversation | Unreadable:
    """Convert a record to a conversation: chat messages, ShareGPT, Alpaca, preferences, or question and answer.

    Every field is read, is known to have no effect, or makes the record unreadable
    (`aspd_jax.record_fields`).
    """
    own = next((row[key] for key in IDS if row.get(key) is not None), number) if isinstance(row, Mapping) else number
    name = str(own).encode(errors="replace").decode()
    try:
        if not isinstance(row, Mapping):
            raise DataError(f"expected an object, got {type(row).__name__}")
        read = {"structure"}
        messages = _with_structure(_messages(row, read), row.get("structure"))
        for place, (_, content, _) in enumerate(messages):
            check_unicode(content, f"messages[{place}]")
        last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=-1)
        kept = messages[: last + 1]
        if not any(message.role == "assistant" and message.content.strip() for message in kept):
            raise DataError("expected an answer, got none")
        if not any(message.role == "user" for message in kept):
            raise DataError("expected a question before the answer, got none")
        check_learned(row, "")
        check_record(row, read, [message.content for message in messages])
    except AspdError as error:
        return Unreadable(number, name, str(error)[:LONGEST_REASON])
    structures = {place: message.structure for place, message in enumerate(kept) if message.structure is not None}
    texts = tuple((message.role, message.content) for message in kept)
    kind = row.get("kind")
    kind = kind if isinstance(kind, str) else ""
    return Conversation(number, name, texts, structures, len(messages) - len(kept), kind)


def _with_structure(messages: list[Message], value: Any) -> list[Message]:
    """Add a structure that is stored beside a conversation: as its last answer, or as the structure of the last answer.

    `aspd generate` writes both forms.

    Raises:
        DataError: the structure cannot be read, or is of another text than the last answer.
    """
    if value is None or not messages:
        return messages
    *others, last = messages
    structure = from_json(value)
    if last.role != "assistant":
        return [*messages, Message("assistant", plain_text(structure), structure)]
    if plain_text(structure) != last.content or last.structure not in (None, structure):
        raise DataError('"structure": expected the text of the last answer, got another')
    return [*others, last._replace(structure=structure)]


def _messages(row: Mapping[str, Any], read: set[str]) -> list[Message]:
    """Return the messages of a record, and add the names of the fields of which they are made to `read`."""
    system = _first(row, SYSTEMS, read)
    messages = _turns(row, read)
    if not messages:
        messages = _question(row, read)
    if not messages or messages[-1].role != "assistant":
        messages += _answer(row, read, messages)
    if system is not None and any(message.role == "system" for message in messages):
        read.discard(system)  # a conversation has one system message; another one is refused
    elif system is not None:
        messages.insert(0, Message("system", row[system]))
    return messages


def _first(row: Mapping[str, Any], keys: Iterable[str], read: set[str]) -> str | None:
    """Return the first of these fields that has text, and add it to `read`."""
    found = next((key for key in keys if isinstance(row.get(key), str) and row[key].strip() and key not in read), None)
    read |= {found} - {None}  # type: ignore[arg-type]
    return found


def _turns(row: Mapping[str, Any], read: set[str]) -> list[Message]:
    """Return the messages of a conversation, or of a prompt or a preferred answer that are lists of messages."""
    key = next((key for key in CONVERSATIONS if row.get(key) is not None), None)
    key = key or next((key for key in ("prompt", "chosen") if isinstance(row.get(key), (list, tuple))), None)
    if key is None:
        return []
    read.add(key)
    turns = row[key]
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):  # LIMA
        return [Message(("user", "assistant")[place % 2], turn) for place, turn in enumerate(turns)]
    messages = parse_messages(turns, key)
    if not messages and key in CONVERSATIONS:
        raise DataError(f'"{key}": expected messages, got none')
    if key == "chosen" and all(message.role == "assistant" for message in messages):
        messages = [*_question(row, read), *messages]
    return messages


def _question(row: Mapping[str, Any], read: set[str]) -> list[Message]:
    """Return the messages before the answer of a record with a question: a history, and the question with its texts."""
    messages = []
    history = row.get("history") or []
    if not isinstance(history, (list, tuple)):
        raise DataError(f'"history": expected a list of pairs of a question and an answer, got {shown(history)}')
    for place, pair in enumerate(history):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise DataError(f"history[{place}]: expected a pair of a question and an answer, got {shown(pair)}")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    key = _first(row, QUESTIONS, read)
    if key is None:
        raise _no_pair(row)
    read.add("history")
    text = row[key]
    if given := _first(row, ["input"], read):
        text += f"\n\n{row[given]}"
    for name, form in CONTEXTS.items():
        if _first(row, [name], read):
            text = form.format(text=row[name], question=text) if key == "question" else f"{text}\n\n{row[name]}"
    choices = next((name for name in CHOICES if _are_choices(row.get(name))), None)
    if choices is not None:
        read.add(choices)
        listed = zip(ascii_uppercase, row[choices], strict=False)
        text += "\n\n" + "\n".join(f"{letter}. {choice}" for letter, choice in listed)
    return [*messages, Message("user", text)]


def _are_choices(value: Any) -> bool:
    texts = isinstance(value, (list, tuple)) and all(isinstance(choice, str) for choice in value)
    return texts and 2 <= len(value) <= len(ascii_uppercase)


def _answer(row: Mapping[str, Any], read: set[str], before: Sequence[Message]) -> list[Message]:
    """Return the answer of a record whose messages do not end with one, as text or as messages.

    Messages that repeat the last ones before them are left out. No answer is returned if the record may have a
    structure.
    """
    turns = next((key for key in ANSWERS if isinstance(row.get(key), (list, tuple)) and row[key]), None)
    if turns is not None:
        read.add(turns)
        messages = parse_messages(row[turns], turns)
        lengths = range(min(len(before), len(messages)), -1, -1)
        repeated = next(n for n in lengths if list(before[len(before) - n :]) == messages[:n])
        return messages[repeated:]
    if (key := _first(row, ANSWERS, read)) is not None:
        others = [other for other in ANSWERS if other != "text" and row.get(other) is not None]
        if key != "text" or not (others or (before and all(message.content in row["text"] for message in before))):
            return [Message("assistant", row[key])]
        read.discard("text")  # the whole record, rendered
    if not any(row.get(key) is not None for key in (*ANSWERS, *CONVERSATIONS, "structure")):
        raise _no_pair(row)
    return []


def _no_pair(row: Mapping[str, Any]) -> DataError:
    return DataError(
        f"no question and answer among its keys ({', '.join(map(str, islice(row, 9))) or 'none'}); it needs "
        '"messages", "conversations", "instruction" and "output", or "question" and "answer"'
    )


def parse_messages(value: Any, where: str) -> list[Message]:
    """Parse the messages of a conversation in OpenAI's form (`role`, `content`) or ShareGPT's (`from`, `value`).

    Raises:
        DataError: a message cannot be read; the error names it.
    """
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise DataError(f'"{where}": expected a list of {{"role", "content"}} objects, got {shown(value)}')
    return [_message(turn, f"{where}[{place}]") for place, turn in enumerate(value)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: expected an object with a role and a content, got {shown(turn)}")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{where}.role: expected one of {', '.join(sorted(ROLES))}, got {shown(name)}")
    check_message(turn, TURN, where)
    content = turn.get("content", turn.get("value"))
    if role == "assistant":
        check_learned(turn, f"{where}.")
    if role == "assistant" and turn.get("structure") is not None:
        structure = from_json(turn["structure"])
        if content and text_content(content, where) != plain_text(structure):
            raise DataError(f"{where}.structure: expected the text of its content, got another")
        return Message(role, plain_text(structure), structure)
    return Message(role, text_content(content, where))


def text_content(content: Any, where: str) -> str:
    """Return the text of a message's `content`: a string, or a list of text parts.

    Raises:
        DataError: it is neither, or a part is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise DataError(f"{where}.content: expected a string or a list of text parts, got {shown(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise DataError(f'{where}.content[{number}]: expected a part of type "text", got {shown(kind or part)}')
        if not isinstance(part.get("text"), str):
            raise DataError(f"{where}.content[{number}].text: expected a string, got {shown(part.get('text'))}")
        texts.append(part["text"])
    return "".join(texts)


def no_record(source: str, left_out: Sequence[str]) -> DataError:
    """Return the error for a source that holds no record that can be used.

    Args:
        left_out: source, line and reason of each record that was left out.
    """
    first = f"; the first: {left_out[0]}" if left_out else ""
    return DataError(f"{source}: no record can be used{first}")
