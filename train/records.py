"""Records of conversations in JSONL -> tokenised examples, once, with every record that cannot be used accounted for.

A line is `{"messages": [...]}`. An assistant message holds `content`, its plain text, or `structure`, the JSON form of
a structured answer. The last answer may stand outside: `{"messages": [...], "structure": [...]}` or `"answer": "..."`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from aspd_jax.chat import encode_turns
from aspd_jax.errors import AspdError, ConfigError, DataError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import build_layout
from aspd_jax.structure import Serial, from_json, plain_text
from aspd_jax.tokens import SpecialTokens
from train.config import DataSection

SHOWN = 5  # problems that are printed; all of them go to the report


class Example(NamedTuple):
    """One conversation.

    Attributes:
        tokens: int32 [T].
        loss: bool [T], true where a token is learned.
        flat: bool [T], true where a tag opens and closes nothing: it is read like serial text.
    """

    tokens: np.ndarray
    loss: np.ndarray
    flat: np.ndarray


class Problem(NamedTuple):
    """A record that was left out: where it stands, which kind of problem it has, and what it is."""

    file: str
    line: int
    kind: str
    reason: str


def parse_record(line: str) -> list[dict[str, Any]]:
    """Messages of a line; answers as `structure` (`aspd_jax.structure`), everything else as `content`.

    Raises:
        AspdError: what is wrong with it.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at column {error.colno}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError('"messages" must be a list of {"role", "content"} objects')
    messages = list(messages)
    if "structure" in record:
        messages.append({"role": "assistant", "structure": record["structure"]})
    elif "answer" in record:
        messages.append({"role": "assistant", "content": record["answer"]})
    parsed: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"message {number}"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise DataError(f'{where}: "role" must be a string')
        if role == "assistant" and "structure" in message:
            parsed.append({"role": role, "structure": from_json(message["structure"])})
            continue
        if not isinstance(message.get("content"), str):
            raise DataError(f'{where}: "content" must be a string')
        content = message["content"]
        parsed.append(
            {"role": role, "structure": (Serial(content),)}
            if role == "assistant"
            else {"role": role, "content": content}
        )
    if parsed[-1]["role"] != "assistant":
        raise DataError('the last message is not an answer; add an assistant message, "structure" or "answer"')
    return parsed


def encode_conversation(
    lm: LanguageModel, messages: Sequence[dict[str, Any]], structured: bool, fed_loss: bool
) -> Example:
    """Tokens of a conversation, every turn kept; loss on the answers and on what ends them.

    Raises:
        ConfigError: the chat template does not put answers into the text as they stand.
        DataError: an answer is empty.
    """
    first, *others = encode_turns(lm.tokenizer, lm.codec.text, lm.end_ids, messages, prompt=False)
    tokens, loss = list(first), [False] * len(first)
    answers = [(n, message["structure"]) for n, message in enumerate(messages) if message["role"] == "assistant"]
    for (number, structure), after in zip(answers, others, strict=True):
        answer = lm.codec.linearise(structure if structured else (Serial(plain_text(structure)),))
        if not answer.tokens.size:
            raise DataError(f"message {number}: the answer is empty")
        tokens += [*answer.tokens.tolist(), *after]
        loss += [*(~answer.fed | fed_loss).tolist(), True, *[False] * (len(after) - 1)]
    if unused := [token for token in tokens if lm.config.is_unused(token)]:
        raise DataError(f"token id {unused[0]} has no row in the embedding")
    return Example(np.asarray(tokens, np.int32), np.asarray(loss, bool), np.zeros(len(tokens), bool))


def reread(example: Example, special: SpecialTokens, chosen: int) -> Example:
    """A conversation as a server without our mask has it, which reads branches again behind their block.

    One block keeps its branches side by side. Behind it they stand again, one after the other, and with all that
    follows make one more branch of it: that sees what is before the block, and of the block what was read again. Other
    blocks are flat. Branches are learned where they are written, not where they are read.

    Args:
        chosen: which block; beyond the last it begins anew with the first. Without a block nothing changes.
    """
    block = build_layout(example.tokens[None], special).block[0]
    if not block.any():
        return example
    own = 1 + chosen % block.max()
    place = np.flatnonzero(block == own)
    start, stop = place[0], place[-1] + 1
    learned = example.loss & ((block == 0) | (block == own))
    return Example(
        tokens=np.concatenate([example.tokens[:stop], example.tokens[start:]]),
        loss=np.concatenate([learned[:stop], learned[start:] & (block[start:] != own)]),
        flat=np.concatenate([block[:stop] != own, np.arange(start, block.size) > start]),
    )


class Records:
    """Tokenised records of some files, by index; those that cannot be used are in `problems`.

    Args:
        files: JSONL.
        cache: folder in which tokenised records are kept, under a name made of everything that they depend on.

    Raises:
        DataError: a file is missing or nothing is left; with `strict`, also the first record that is left out.
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, lm: LanguageModel, files: Sequence[str], data: DataSection, cache: Path) -> None:
        if not lm.tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; set data.chat_template to a Jinja file")
        if not lm.end_ids:
            raise ConfigError("the checkpoint names no end-of-text token; set eos_token_id in its config.json")
        self.problems: list[Problem] = []
        tables, places = [], []
        for file in files:
            if not Path(file).is_file():
                raise DataError(f"{file} does not exist; data files are JSONL")
            table = _tokenised(lm, Path(file), data, cache)
            sizes = np.asarray(table["size"])
            for line in np.flatnonzero((sizes == 0) | (sizes > data.length)):
                row = table[int(line)]
                reason = row["reason"] or f"{row['size']} tokens, data.length is {data.length}"
                kind = row["kind"] or "over-long"
                self.problems.append(Problem(file, int(line) + 1, kind, reason))
                if data.strict:
                    raise DataError(f"{file}, line {line + 1}: {reason}")
            places.append(np.flatnonzero((sizes > 0) & (sizes <= data.length)))
            tables.append(table)
        starts = np.cumsum([0, *[len(table) for table in tables]])
        self._rows = np.concatenate([place + start for place, start in zip(places, starts, strict=False)])
        if not self._rows.size:
            first = f"; the first: {self.problems[0].reason}" if self.problems else ""
            raise DataError(f"{', '.join(files)}: no record can be used{first}")
        whole = datasets.concatenate_datasets(tables)
        self.sizes = np.asarray(whole["size"])[self._rows]
        self._table = whole.with_format("numpy", columns=list(Example._fields))

    def __len__(self) -> int:
        return int(self._rows.size)

    def __getitem__(self, index: int) -> Example:
        row = self._table[int(self._rows[index])]
        return Example(
            np.asarray(row["tokens"], np.int32), np.asarray(row["loss"], bool), np.asarray(row["flat"], bool)
        )

    def report(self) -> str:
        """What was left out, and where."""
        total = len(self) + len(self.problems)
        if not self.problems:
            return f"{total} records, all used"
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(p.kind for p in self.problems).items()))
        lines = [f"{total} records, {len(self)} used; left out: {counts}"]
        lines += [f"  {p.file}, line {p.line}: {p.reason}" for p in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  … and {len(self.problems) - SHOWN} more, in left_out.jsonl")
        return "\n".join(lines)


def _tokenised(lm: LanguageModel, file: Path, data: DataSection, cache: Path) -> datasets.Dataset:
    """One row per line: an example, its size, and for a line that cannot be used its kind of problem and the reason."""
    key = hashlib.sha256(file.read_bytes())
    settings = (data.structured, data.plain_every, data.fed_loss, data.reread, lm.end_ids, lm.tokenizer.chat_template)
    key.update(repr(settings).encode())
    key.update(lm.tokenizer.backend_tokenizer.to_str().encode())
    name = key.hexdigest()[:20]
    cache.mkdir(parents=True, exist_ok=True)

    def tokenise(row: dict[str, Any], index: int) -> dict[str, Any]:
        plain = data.structured and data.plain_every and index % data.plain_every == data.plain_every - 1
        nothing = Example(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, bool))
        none: dict[str, Any] = nothing._asdict() | {"size": 0}
        if not row["text"].strip():
            return none | {"kind": "empty", "reason": "the line is empty"}
        try:
            messages = parse_record(row["text"])
            if not any(plain_text(m["structure"]) for m in messages if m["role"] == "assistant"):
                return none | {"kind": "empty", "reason": "the answer is empty"}
            made = encode_conversation(lm, messages, data.structured and not plain, data.fed_loss)
            made = reread(made, lm.codec.special, index) if data.reread else made
        except AspdError as error:
            return none | {"kind": "malformed", "reason": str(error)}
        return made._asdict() | {"size": len(made.tokens), "kind": "", "reason": ""}

    lines = datasets.load_dataset("text", data_files=str(file), split="train", cache_dir=str(cache))
    return lines.map(
        tokenise,
        with_indices=True,
        remove_columns=["text"],
        features=datasets.Features(
            {
                "tokens": datasets.List(datasets.Value("int32")),
                "loss": datasets.List(datasets.Value("bool")),
                "flat": datasets.List(datasets.Value("bool")),
                "size": datasets.Value("int32"),
                "kind": datasets.Value("string"),
                "reason": datasets.Value("string"),
            }
        ),
        cache_file_name=str(cache / f"{file.stem}-{name}.arrow"),
        new_fingerprint=name,
        load_from_cache_file=True,
        desc=f"tokenising {file.name}",
    )
