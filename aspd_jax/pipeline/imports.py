"""Import records of other projects with parallel answers as structured records (`aspd_jax.pipeline.tag_formats`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from aspd_jax.errors import AspdError, DataError, RequestError, StructureError
from aspd_jax.files import replacing
from aspd_jax.jsonl import Line
from aspd_jax.pipeline.tag_formats import FORMATS, ImportedAnswer, import_answer, recognise
from aspd_jax.sources import (
    LONGEST_REASON,
    Conversation,
    Unreadable,
    conversation,
    no_record,
    read_rows,
)
from aspd_jax.structure import Parallel, to_json

SAMPLE = 200  # records by which a format is recognised
IDS = ("id", "unique_id", "index")
RENDERED = ("qwen_text", "text")  # columns of a conversation in ChatML
THOUGHT, ATTEMPT = "deepseek_thinking_trajectory_parallel", "deepseek_attempt"  # columns of Multiverse-1K
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\s*", re.DOTALL)


@dataclass
class ImportReport:
    """Counts over the records of a file.

    Attributes:
        source: file or dataset.
        format: name of its format.
        records, written: numbers of records read and written.
        blocks, branches: numbers of blocks and branches written.
        single: number of blocks with fewer than two branches, which are serial text.
        nested: number of blocks within branches, which are text of their branch.
        unequal: number of blocks with another number of branches than announced.
        serial: number of other blocks that are serial text.
        left_out: source, line and reason of each record that was left out, and of each block of `serial`.
    """

    source: str
    format: str
    records: int = 0
    written: int = 0
    blocks: int = 0
    branches: int = 0
    single: int = 0
    nested: int = 0
    unequal: int = 0
    serial: int = 0
    left_out: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the report as lines of text."""
        named = FORMATS[self.format].named
        lines = [
            f"{self.records} records of {self.source} read as {self.format}, {self.written} written: "
            f"{self.blocks} blocks with {self.branches} branches",
            f"titles are {'names' if named else 'leads'}: train with model.titles={'names' if named else 'leads'}",
        ]
        for count, what in (
            (self.records - self.written, "records left out"),
            (self.nested, "blocks within branches are text of their branch"),
            (self.single, "blocks with fewer than two branches are serial text"),
            (self.serial, "other blocks are serial text"),
            (self.unequal, "blocks have another number of branches than announced"),
        ):
            lines += [f"{count} {what}"] if count else []
        if self.format == "parallel-r1":
            lines.append("the alternatives of a question are read as branches")
        return "\n".join(lines)


def import_records(source: str, output: Path, name: str | None = None) -> ImportReport:
    """Convert records of another format to structured records, which `aspd train` reads.

    Args:
        source: file or dataset, in the forms of `read_rows`.
        output: JSONL file of structured records; `left_out_file` names what was left out.
        name: name of the format; None: it is recognised by the tags of the first records.

    Returns:
        Counts, and what was left out.

    Raises:
        DataError: the source cannot be read, or no record can be used.
        RequestError: the name is unknown, or the format cannot be recognised.
    """
    if name is not None and name not in FORMATS:
        raise RequestError(f"--from: expected one of {', '.join(FORMATS)}, got {name!r}")
    records = (tagged_conversation(line) for line in read_rows(source))
    first = list(islice(records, SAMPLE))
    if name is None:
        answers = [r.messages[place][1] for r in first if isinstance(r, Conversation) for place in r.answers]
        if first and not answers:
            raise no_record(
                source, [f"{source}, line {r.number}: {r.reason}" for r in first if isinstance(r, Unreadable)]
            )
        try:
            name = recognise(answers)
        except RequestError as error:
            raise RequestError(f"{source}: {error}") from None
    report = ImportReport(source, name)
    with replacing(output) as out, replacing(left_out_file(output)) as rest:
        for record in chain(first, records):
            report.records += 1
            value, problems = _imported(record, report)
            for stage, reason in problems:
                report.left_out.append(f"{source}, line {record.number}: {reason}")
                problem = {"id": record.id, "line": record.number, "stage": stage, "reason": reason}
                rest.write(json.dumps(problem, ensure_ascii=False) + "\n")
            if value is not None:
                report.written += 1
                out.write(json.dumps(value, ensure_ascii=False) + "\n")
        if not report.written:
            raise no_record(source, report.left_out)
    return report


def left_out_file(output: Path) -> Path:
    """Return the file beside an output that names what was left out."""
    return output.with_name(f"{output.stem}.left_out.jsonl")


def tagged_conversation(line: Line) -> Conversation | Unreadable:
    """Return the conversation of a record, answers with their tags.

    Beyond the records of `aspd_jax.sources`, these have rendered conversations, and a thought and an answer in columns
    of their own.
    """
    number, row = line.number, line.value
    if line.reason:
        return Unreadable(number, str(number), line.reason)
    if isinstance(row, Mapping):
        own = next((row[key] for key in IDS if row.get(key) is not None), None)
        row = dict(row) if own is None else {**row, "id": own}
        try:
            row = _columns(row) or row
        except AspdError as error:
            return Unreadable(number, str(row.get("id", number)), str(error)[:LONGEST_REASON])
    found = conversation(row, number)
    if isinstance(found, Conversation) and found.structures:
        return Unreadable(number, found.id, "expected an answer with tags, got a structured answer")
    return found


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages of a record whose columns are those of another project; nothing for common records.

    These columns are the whole conversation; other columns of the projects are statistics and other attempts.
    """
    own = {"id": row["id"]} if "id" in row else {}
    for key in RENDERED:
        if isinstance(row.get(key), str) and "<|im_start|>" in row[key]:
            return own | {"messages": _turns(row[key], key)}
    if isinstance(row.get(THOUGHT), str) and isinstance(row.get("question"), str):
        answer = "\n\n".join(part for part in (row[THOUGHT], row.get(ATTEMPT)) if isinstance(part, str) and part)
        question = {"role": "user", "content": row["question"]}
        return own | {"messages": [question, {"role": "assistant", "content": answer}]}
    return {}


def _turns(text: str, where: str) -> list[dict[str, str]]:
    """Return the messages of a conversation that is rendered in ChatML.

    Raises:
        DataError: the text has another form.
    """
    turns, place = [], 0
    while found := _TURN.match(text, place):
        turns.append({"role": found[1], "content": found[2]})
        place = found.end()
    if text[place:].strip() not in ("", "<|endoftext|>"):
        raise DataError(
            f"{where}, character {place}: expected <|im_start|>ROLE … <|im_end|>, got {text[place:][:40]!r}"
        )
    return turns


def _imported(
    record: Conversation | Unreadable, report: ImportReport
) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
    """Convert a record, and count it.

    Returns:
        The structured record, or None, and stages and reasons of what was left out.
    """
    if isinstance(record, Unreadable):
        return None, [("read", record.reason)]
    answers = dict[int, ImportedAnswer]()
    for place in record.answers:
        try:
            answers[place] = import_answer(record.messages[place][1], report.format)
        except StructureError as error:
            return None, [("record", f"messages[{place}], {error}"[:LONGEST_REASON])]
    for answer in answers.values():
        blocks = [item for item in answer.structure if isinstance(item, Parallel)]
        report.blocks += len(blocks)
        report.branches += sum(len(block.branches) for block in blocks)
        report.single += answer.single
        report.nested += answer.nested
        report.unequal += answer.unequal
        report.serial += len(answer.serial)
    messages: list[dict[str, Any]] = [
        {"role": role, "structure": to_json(answers[place].structure)}
        if place in answers
        else {"role": role, "content": content}
        for place, (role, content) in enumerate(record.messages)
    ]
    last = messages.pop()
    value = {"id": record.id, "line": record.number, "messages": messages, "structure": last["structure"]}
    reasons = [("block", f"messages[{place}], {why}") for place, of in answers.items() for why in of.serial]
    if record.unanswered:
        reasons.append(("turn", f"messages[{len(record.messages)}]: no answer follows"))
    return value, reasons
