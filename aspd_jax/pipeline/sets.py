"""Write the results of a run: the best surviving candidate of each answer, the rejected ones, and the report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from aspd_jax.blocks.measures import Measures, ranked
from aspd_jax.files import replacing, write_whole
from aspd_jax.pipeline.data_config import SelectSection
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, line


class Survey:
    """Comparison of the records that may be in the sets; its memory is the only one that grows with their number."""

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[int, Measures]]] = defaultdict(list)
        self._forked: dict[int, bool] = {}  # by number of a record that may be kept: whether it has a block

    def add(self, entry: Entry) -> None:
        """Add a record, unless it is in neither set."""
        if entry.forked or entry.serial:
            self._forked[entry.number] = entry.forked
            self._groups[entry.question].append((entry.number, entry.selections[-1].measures))

    def others(self, count: int) -> set[int]:
        """Return the numbers of records for whose question `count` other records are preferred; 0: none.

        Records with the best blocks are preferred; of those without a block, the first.
        """
        others: set[int] = set()
        for samples in self._groups.values() if count else ():
            order = ranked([measures for _, measures in samples])
            others |= {samples[place][0] for place in order[count:]}
        return others

    def share(self, others: set[int], ratio: float) -> float:
        """Return the share of records without a block that `select.serial_ratio` keeps."""
        kinds = Counter(forked for number, forked in self._forked.items() if number not in others)
        return ratio * kinds[True] / max(1, kinds[False]) if ratio else 1.0


def write(select: SelectSection, source: str, output: Path, survey: Survey, entries: Iterable[Entry]) -> Report:
    """Write the sets, the rejected records and blocks, and the report, each file atomically.

    Args:
        select: configuration.
        source: path or name of the records, for messages.
        output: folder of the files.
        survey: comparison of the records of all entries.
        entries: entries in the order of the source.

    Every record is in both sets, or has one line without `message` in `rejected.jsonl`.

    Returns:
        The report of the run.
    """
    report = Report()
    others = survey.others(select.per_question)
    share = survey.share(others, select.serial_ratio)
    files = {name: output / f"{name}.jsonl" for name in ("structured", "plain", "rejected")}
    with ExitStack() as stack:
        handles = {name: stack.enter_context(replacing(file)) for name, file in files.items()}
        for entry in entries:
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
