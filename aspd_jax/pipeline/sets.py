"""Write the results of a run: the best surviving candidate of each answer, the rejected ones, and the report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from aspd_jax.blocks.measures import Measures, ranked
from aspd_jax.files import replacing, write_whole
from aspd_jax.pipeline.data_config import SelectSection
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, line


def write(select: SelectSection, source: str, output: Path, entries: Callable[[], Iterable[Entry]]) -> Report:
    """Write the sets, the rejected records and blocks, and the report, each file atomically.

    Args:
        select: configuration.
        source: path or name of the records, for messages.
        output: folder of the files.
        entries: function that returns the entries in the order of the source.

    Every record is in both sets, or has one line without `message` in `rejected.jsonl`.

    Returns:
        The report of the run.
    """
    report = Report()
    others, share = _compared(select, entries())
    files = {name: output / f"{name}.jsonl" for name in ("structured", "plain", "rejected")}
    with ExitStack() as stack:
        handles = {name: stack.enter_context(replacing(file)) for name, file in files.items()}
        for entry in entries():
            handles["rejected"].write(entry.rejected)
            for of in entry.selections:
                report.add(of.rejected, of.proposed)
            stage, reason = _left_out(entry, select, others, share)
            report.count(stage)
            if stage:
                handles["rejected"].write(line(entry.base | {"stage": stage, "reason": reason}))
                if stage == "read":
                    report.unreadable.append(f"{source}, line {entry.number}: {reason}")
            else:
                handles["plain"].write(entry.plain)
                handles["structured"].write(entry.structured)
                report.answers += [of.measures for of in entry.selections]
    for suffix, text in ((".json", json.dumps(report.as_dict(), indent=1)), (".md", report.markdown())):
        write_whole(output / f"report{suffix}", text)
    return report


def _compared(select: SelectSection, entries: Iterable[Entry]) -> tuple[set[int], float]:
    """Compare the records that may be in the sets.

    Of the answers to a question, those with the best blocks are preferred; of those without a block, the first.

    Returns:
        The numbers of the records for whose question `select.per_question` others are preferred, and the share of
        records without a block that `select.serial_ratio` keeps.
    """
    groups: dict[str, list[tuple[int, Measures]]] = defaultdict(list)
    forked: dict[int, bool] = {}
    for entry in entries:
        if entry.forked or entry.serial:
            forked[entry.number] = entry.forked
            groups[entry.question].append((entry.number, entry.selections[-1].measures))
    others: set[int] = set()
    for samples in groups.values() if select.per_question else ():
        order = ranked([measures for _, measures in samples])
        others |= {samples[place][0] for place in order[select.per_question :]}
    kinds = Counter(has_block for number, has_block in forked.items() if number not in others)
    return others, select.serial_ratio * kinds[True] / max(1, kinds[False]) if select.serial_ratio else 1.0


def _left_out(entry: Entry, select: SelectSection, others: set[int], share: float) -> tuple[str, str]:
    """Return the stage at which a record is left out of both sets, and the reason; empty: it is in both."""
    if entry.refused:
        return entry.refused, entry.reason
    if entry.number in others:
        return "question", f"other answers to its question are preferred, select.per_question is {select.per_question}"
    if entry.defect:  # the record has no block, and is no example of serial text
        return "record", entry.defect
    if not entry.forked and not entry.serial:
        return "serial", "no block, and select.serial_kinds has another kind"
    if not entry.forked and entry.draw >= share * (1 << 32):
        return "serial", f"no block, and select.serial_ratio is {select.serial_ratio}"
    return "", ""
