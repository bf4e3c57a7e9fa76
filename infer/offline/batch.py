"""Offline batches: answers to a JSONL file of prompts, written as a JSONL file in the same order.

Finished answers are appended to a journal beside the output; the output is written when all have ended. An interrupted
job resumes from the journal.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from aspd_jax.errors import AspdError, DataError, RequestError
from aspd_jax.files import replacing
from aspd_jax.journal import append, open_journal, resume
from aspd_jax.jsonl import Line, read_lines
from aspd_jax.partitions import digest
from aspd_jax.progress import Bar, waiting
from aspd_jax.record_fields import ANSWERS, check_record
from aspd_jax.sources import parse_messages, read_rows
from aspd_jax.structure import to_json
from infer.answers.answer import Result
from infer.engine import Engine, Prompt
from infer.request import Mode, SamplingParams
from infer.scheduling.handle import run_together

SAMPLE_SEEDS = 1_000_003  # difference between the seeds of two samples of a line
READ = ("prompt", "messages", "structure", *ANSWERS)  # fields of a line that are read, and those of its answer


class Item(NamedTuple):
    """A line of the input.

    Attributes:
        line: number of the line.
        id: identifier in the record; the number of the line if it has none.
        prompt: text or messages; None: the line is invalid.
        source: fields of the line that the record of the answer repeats.
        error: why the line is invalid.
        sample: number of the sample, from 0.
    """

    line: int
    id: str | int
    prompt: Prompt | None
    source: dict[str, Any]
    error: str = ""
    sample: int = 0


class Outcome(NamedTuple):
    """Summary of a job: all records, records of an earlier run, and records with an error."""

    records: int
    resumed: int
    errors: int


def read_prompts(file: Path | str, chat: bool, instruction: str = "") -> list[Item]:
    """Read records of `{"prompt": "..."}` or `{"messages": [...]}`, from JSONL or Parquet.

    Optional fields are `id`, and `kind`, which the record of the answer repeats. Answers and neutral fields
    (`aspd_jax.record_fields`) are ignored; a line with another field is invalid.

    Args:
        file: path, glob or URL; Parquet if its name ends with `.parquet`.
        chat: whether a `prompt` is a message of the user, which the chat template renders.
        instruction: text after every prompt; the records of the answers do not repeat it.

    Raises:
        DataError: the file cannot be read, or has only blank lines.
    """
    lines = read_rows(str(file)) if str(file).endswith(".parquet") else read_lines(file)
    items = [_item(line, chat, instruction) for line in lines]
    if not items:
        raise DataError(f"{file}: expected at least one prompt, got none")
    return items


def _item(line: Line, chat: bool, instruction: str) -> Item:
    number, record, reason = line
    name: str | int = number
    more = f" {instruction}" if instruction else ""
    try:
        if reason or not isinstance(record, dict):
            raise DataError(reason or "not a JSON object")
        name = record["id"] if isinstance(record.get("id"), (str, int)) else number
        prompt, messages = record.get("prompt"), record.get("messages")
        is_text = isinstance(prompt, str) and messages is None
        if not is_text and (messages is None or messages == [] or prompt is not None):
            raise DataError('expected "prompt", a string, or "messages", a list of messages')
        found = [("user", str(prompt), None)] if is_text else parse_messages(messages, "messages")
        parsed = [{"role": role, "content": content} for role, content, _ in found]
        check_record(record, READ, [message["content"] for message in parsed])
    except AspdError as error:
        return Item(number, name, None, {}, str(error))
    source = {"kind": record["kind"]} if "kind" in record else {}
    source |= {"prompt": prompt} if is_text else {"messages": parsed}
    asked = [*parsed[:-1], parsed[-1] | {"content": parsed[-1]["content"] + more}]
    return Item(number, name, asked if chat or not is_text else asked[0]["content"], source)


def _answer(engine: Engine, job: Job, item: Item) -> Generator[None, None, tuple[Item, dict[str, Any]]]:
    """Answer an item. Its seed follows from its line and sample, so that answers do not depend on interruptions."""
    try:
        if item.prompt is None:
            raise DataError(item.error)
        seed = (job.params.seed or 0) + item.line + item.sample * SAMPLE_SEEDS
        handle = engine.submit(item.prompt, replace(job.params, seed=seed % (1 << 32)), job.mode)
    except AspdError as error:
        return item, {"id": item.id, "error": f"{job.source}, line {item.line}: {error}"}
    while handle.result is None:
        yield
    return item, _record(item, handle.result)


@dataclass(frozen=True)
class Job:
    """Prompts of a file to answer.

    Attributes:
        source: JSONL or Parquet file of prompts, see `read_prompts`.
        output: JSONL file of records; must not exist.
        params: sampling parameters. The seed of an item is `params.seed` (default 0) plus its line, and different for
            every sample.
        mode: decoding mode.
        chat, instruction: see `read_prompts`.
        samples: answers to every prompt, one record each, with the number of the `sample` if there are several.
        progress: whether to show a progress bar.
        model: settings of the engine on which answers depend, such as the name of the model.
    """

    source: Path | str
    output: Path
    params: SamplingParams
    mode: Mode
    chat: bool
    instruction: str = ""
    samples: int = 1
    progress: bool = True
    model: Mapping[str, Any] = field(default_factory=dict)


def generate_file(engine: Engine, job: Job) -> Outcome:
    """Answer every prompt of a file. The record of an invalid line or of a refused prompt has an `error`.

    Raises:
        DataError: the input cannot be read, or is empty.
        RequestError: the output exists, or its journal has answers to another input or with other settings.
    """
    prompts = read_prompts(job.source, job.chat, job.instruction)
    items = [item._replace(sample=number) for item in prompts for number in range(job.samples)]
    settings = {"input": digest(str(job.source)), "mode": job.mode, "chat": job.chat, "samples": job.samples}
    settings |= {"instruction": job.instruction, "params": asdict(job.params), **job.model}
    journal = job.output.with_name(f"{job.output.name}.journal")
    if job.output.exists():
        raise RequestError(
            f"{job.output}: expected a new file, got an existing one. Delete it, or choose another file."
        )
    answered = resume(journal, settings)
    done = {(record.pop("line"), record.get("sample", 0)): record for record in answered}
    resumed = len(done)
    todo = [item for item in items if (item.line, item.sample) not in done]
    with open_journal(journal, settings) as log:
        # Twice the batch is submitted, so that rows do not wait for new requests.
        records = run_together(engine.step, (_answer(engine, job, item) for item in todo), 2 * engine.max_batch)
        with waiting("compiling, and answering the first prompts", job.progress):
            first = list(islice(records, 1))
        with Bar(total=len(items), initial=resumed, unit="answer", disable=not job.progress) as bar:
            for item, record in chain(first, records):
                if job.samples > 1:
                    record["sample"] = item.sample
                append(log, {"line": item.line} | record)
                done[item.line, item.sample] = record
                bar.update()
    with replacing(job.output) as file:
        for item in items:
            file.write(json.dumps(done[item.line, item.sample], ensure_ascii=False) + "\n")
    journal.unlink()
    return Outcome(len(items), resumed, sum("error" in record for record in done.values()))


def _record(item: Item, result: Result) -> dict[str, Any]:
    source = dict(item.source)
    if "messages" in source:  # `aspd data build` reads such conversations
        source["messages"] = [*source["messages"], {"role": "assistant", "content": result.text}]
    return {
        "id": item.id,
        **source,
        "text": result.text,
        "structure": to_json(result.structure),
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
        **({"error": result.error} if result.error else {}),
    }
