"""Records in the shapes that people keep them in -> conversations; unreadable ones are named (protocol, section 7)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aspd_jax.errors import AspdError, DataError
from aspd_jax.structure import from_json, plain_text

ROLES = {
    "human": "user", "user": "user", "prompter": "user", "system": "system", "developer": "system",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
QUESTIONS = ("question", "prompt", "instruction", "query", "input", "user", "problem")
ANSWERS = ("answer", "response", "output", "completion", "chosen", "assistant", "solution", "text")
IDS = ("id", "question_id", "uuid", "conversation_id")


@dataclass(frozen=True)
class Conversation:
    """A record: messages of `role` and `content`; at least one is an assistant's.

    Attributes:
        number: which record of its file it is, from 1; the line, for JSONL.
        id: its own name, or else its number.
    """

    number: int
    id: str
    messages: tuple[tuple[str, str], ...]

    @property
    def answers(self) -> list[int]:
        """Places of the assistant's messages."""
        return [place for place, (role, _) in enumerate(self.messages) if role == "assistant"]


@dataclass(frozen=True)
class Unreadable:
    """A record that is no conversation, and why."""

    number: int
    id: str
    reason: str


def read_records(source: str) -> Iterator[Conversation | Unreadable]:
    """Records of a JSONL file, or of anything `datasets` reads: a JSON, CSV or Parquet file, a folder, or a name.

    Raises:
        DataError: there is no such file or dataset.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _read_lines(path)
        return
    for number, row in enumerate(_dataset(source), 1):
        yield conversation(row, number)


def _read_lines(path: Path) -> Iterator[Conversation | Unreadable]:
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield Unreadable(number, str(number), f"not JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError as error:
                yield Unreadable(number, str(number), f"not UTF-8: byte {error.start} of the line")
            else:
                yield conversation(row, number)


def _dataset(source: str) -> Any:
    import datasets

    path = Path(source)
    kinds = {".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
    try:
        if path.is_file():
            kind = kinds.get(path.suffix)
            if kind is None:
                raise DataError(f"{source}: files may be .jsonl, {', '.join(kinds)}")
            return datasets.load_dataset(kind, data_files=source, split="train")
        if (path / "dataset_info.json").exists():
            return datasets.load_from_disk(source)
        return datasets.load_dataset(source, split="train")
    except AspdError:
        raise
    except Exception as error:  # what `datasets` raises depends on the format
        raise DataError(f"{source} cannot be read: {error}") from None


def conversation(row: Any, number: int) -> Conversation | Unreadable:
    """A record as a conversation: chat messages, ShareGPT, Alpaca, FastChat answers, or question and answer."""
    own = next((row[key] for key in IDS if row.get(key) is not None), number) if isinstance(row, Mapping) else number
    try:
        if not isinstance(row, Mapping):
            raise DataError(f"it must be an object, got {type(row).__name__}")
        messages = tuple(_messages(row))
        if not any(role == "assistant" and content.strip() for role, content in messages):
            raise DataError("it holds no answer")
        if row.get("finish_reason") == "length":
            raise DataError('its answer was cut off: "finish_reason" is "length"')
        for _, content in messages:
            content.encode()  # lone surrogates, which JSON can hold and no file can
    except UnicodeEncodeError:
        return Unreadable(number, str(own), "it holds half a surrogate pair, which is no text")
    except AspdError as error:
        return Unreadable(number, str(own), str(error))
    return Conversation(number, str(own), messages)


def _messages(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("messages", "conversations", "conversation"):
        if isinstance(row.get(key), list):
            messages = [_message(turn, f"{key}[{place}]") for place, turn in enumerate(row[key])]
            yield from messages
            if messages and messages[-1][0] == "assistant":  # `aspd generate` writes the last answer here, too
                return
            if key == "messages" and "structure" in row:
                yield "assistant", plain_text(from_json(row["structure"]))
            elif key == "messages" and isinstance(row.get("answer"), str):
                yield "assistant", row["answer"]
            return
    if isinstance(row.get("system"), str) and row["system"].strip():
        yield "system", row["system"]
    for place, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise DataError(f"history[{place}] must be a pair of a question and an answer")
        yield "user", pair[0]
        yield "assistant", pair[1]
    question = next((key for key in QUESTIONS if isinstance(row.get(key), str) and row[key].strip()), None)
    answer = next((key for key in ANSWERS if isinstance(row.get(key), str) and key != question), None)
    if question is None or answer is None:
        raise DataError(
            f'no question and answer among its keys ({", ".join(map(str, row)) or "none"}); it needs "messages", '
            '"conversations", "instruction" and "output", or "question" and "answer"'
        )
    text = row[question]
    if question == "instruction" and answer != "input" and isinstance(row.get("input"), str) and row["input"].strip():
        text += f"\n\n{row['input']}"
    yield "user", text
    yield "assistant", row[answer]


def _message(turn: Any, where: str) -> tuple[str, str]:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} must be an object with a role and a content")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(str(name).lower())
    if role is None:
        raise DataError(f"{where} has the role {name!r}; known are {', '.join(sorted(ROLES))}")
    if role == "assistant" and "structure" in turn:
        return role, plain_text(from_json(turn["structure"]))
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where} has no text")
    return role, content
