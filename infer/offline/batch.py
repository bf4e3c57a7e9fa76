"""Offline batches: a JSONL file of prompts in, a JSONL file of answers out, in its order.

Answers end in any order. Each is added to a journal beside the output as soon as it is there; the output is written
when all are. So a job that is killed goes on with what is missing, and nothing is lost or done twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from aspd_jax.errors import AspdError, DataError, RequestError
from aspd_jax.files import Log, replacing
from aspd_jax.jsonl import Line, read_lines
from aspd_jax.pipeline.sources import parse_messages
from aspd_jax.structure import to_json
from infer.answers.answer import Result
from infer.engine import Engine, Prompt
from infer.offline.journal import append, read_journal
from infer.request import Mode, SamplingParams
from infer.scheduling.handle import Handle

STEPS = 256  # passes between two looks at who has ended


class Item(NamedTuple):
    """A line of the input.

    Attributes:
        line: its number.
        id: its own, or else the number.
        prompt: text or messages; None where the line holds neither.
        source: what the answer's record repeats of the line.
        error: why there is no prompt.
    """

    line: int
    id: str | int
    prompt: Prompt | None
    source: dict[str, Any]
    error: str = ""


class Outcome(NamedTuple):
    """What became of a job: records in all, those that were there already, and those that hold an error."""

    records: int
    resumed: int
    errors: int


def read_prompts(file: Path, chat: bool) -> list[Item]:
    """Prompts of a JSONL file: `{"prompt": "..."}` or `{"messages": [...]}`, and an optional `"id"`.

    Args:
        chat: a `prompt` is a message of the user, and goes through the chat template.

    Raises:
        DataError: the file cannot be read, or has no line that is not blank.
    """
    items = [_item(line, chat) for line in read_lines(file)]
    if not items:
        raise DataError(f"{file} holds no prompt")
    return items


def _item(line: Line, chat: bool) -> Item:
    number, record, reason = line
    if reason:
        return Item(number, number, None, {}, reason)
    if not isinstance(record, dict):
        return Item(number, number, None, {}, "not a JSON object")
    own = record.get("id")
    name = own if isinstance(own, (str, int)) else number
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str) and messages is None:
        whole: Prompt = [{"role": "user", "content": prompt}] if chat else prompt
        return Item(number, name, whole, {"prompt": prompt})
    if messages is None or messages == [] or prompt is not None:
        reason = 'it must hold "prompt", a string, or "messages", a list of messages'
        return Item(number, name, None, {}, reason)
    try:
        said = [{"role": role, "content": content} for role, content, _ in parse_messages(messages, "messages")]
    except AspdError as error:
        return Item(number, name, None, {}, str(error))
    return Item(number, name, said, {"messages": said})


def generate_file(
    engine: Engine, source: Path, output: Path, params: SamplingParams, mode: Mode, chat: bool, progress: bool = True
) -> Outcome:
    """Answer every prompt of a file. A line that holds no prompt, or one that breaks a limit, gets an `error`.

    Args:
        params: of all; the seed of a line is `params.seed` (0 if none is given) plus its number, so that answers do
            not depend on where a job was interrupted.

    Raises:
        DataError: the input cannot be read, or is empty.
        RequestError: the output holds answers to another input or with other settings.
    """
    items = read_prompts(source, chat)
    settings = {"input": hashlib.sha256(source.read_bytes()).hexdigest(), "mode": mode, "chat": chat}
    settings |= {"params": json.loads(json.dumps(asdict(params)))}
    journal = output.with_name(f"{output.name}.journal")
    if output.exists():
        raise RequestError(f"{output} exists; delete it, or choose another file")
    done = _answers_of(journal, settings)
    resumed = len(done)
    seed = params.seed or 0
    waiting = [item for item in items if item.line not in done][::-1]
    running: list[tuple[Item, Handle]] = []
    with (
        Log(journal) as log,
        tqdm(total=len(items), initial=resumed, unit="answer", disable=not progress) as bar,
    ):
        if not resumed and journal.stat().st_size == 0:
            append(log, settings)

        def note(item: Item, record: dict[str, Any]) -> None:
            append(log, {"line": item.line} | record)
            done[item.line] = record
            bar.update()

        while waiting or running:
            while waiting and len(running) < 2 * engine.max_batch:
                item = waiting.pop()
                try:
                    if item.prompt is None:
                        raise DataError(item.error)
                    asked = replace(params, seed=(seed + item.line) % (1 << 32))
                    running.append((item, engine.submit(item.prompt, asked, mode)))
                except AspdError as error:
                    note(item, {"id": item.id, "error": f"{source}, line {item.line}: {error}"})
            engine.step(STEPS)
            for item, handle in running:
                if handle.result is not None:
                    note(item, _record(item, handle.result))
            running = [(item, handle) for item, handle in running if handle.result is None]
    with replacing(output) as file:
        for item in items:
            file.write(json.dumps(done[item.line], ensure_ascii=False) + "\n")
    journal.unlink()
    return Outcome(len(items), resumed, sum("error" in record for record in done.values()))


def _record(item: Item, result: Result) -> dict[str, Any]:
    source = dict(item.source)
    if "messages" in source:  # with its answer a conversation, as `aspd data build` reads it
        source["messages"] = [*source["messages"], {"role": "assistant", "content": result.text}]
    return {
        "id": item.id,
        **source,
        "text": result.text,
        "structure": to_json(result.structure),
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }


def _answers_of(journal: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Records that are there already, by line."""
    whole = read_journal(journal)
    if not whole:
        return {}
    first, *records = whole
    different = _different(first, settings)
    if different:
        raise RequestError(
            f"{journal} holds answers with another {', '.join(different)}; delete it, or choose another output"
        )
    return {record.pop("line"): record for record in records}


def _different(there: dict[str, Any], here: dict[str, Any]) -> Sequence[str]:
    flat = [{**value, **value.get("params", {})} for value in (there, here)]
    return sorted(key for key in flat[0] | flat[1] if key != "params" and flat[0].get(key) != flat[1].get(key))
