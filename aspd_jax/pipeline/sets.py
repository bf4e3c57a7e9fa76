"""Write the results of a run: the best surviving candidate of each answer, the rejected ones, and the report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from aspd_jax.files import replacing, write_whole
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, Sample
from aspd_jax.pipeline.measures import Measures, best
from aspd_jax.pipeline.work import Work


class Survey:
    """Comparison of the records that may be in the sets."""

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[int, Measures]]] = defaultdict(list)
        self._kept: list[Sample] = []  # records that may be in the sets, if no answer is better

    def add(self, sample: Sample) -> None:
        """Add a record."""
        if sample.forked or sample.serial:
            self._kept.append(sample)
        self._groups[sample.question].append((sample.number, sample.measures))

    def others(self) -> set[int]:
        """Return the numbers of records with a better answer to the same question.

        The best one has the best block; of answers without a block, the first is kept.
        """
        others: set[int] = set()
        for samples in self._groups.values():
            first = best([measures for _, measures in samples]) or 0
            others |= {number for place, (number, _) in enumerate(samples) if place != first}
        return others

    def shares(self, others: set[int], ratio: float) -> dict[bool, float]:
        """Return the shares of records without a block that `select.serial_ratio` keeps.

        Returns:
            The share of records with a dependent list (True), which are kept first, and of the rest (False).
        """
        samples = [sample for sample in self._kept if sample.number not in others]
        serial = Counter(sample.dependent for sample in samples if not sample.forked)
        limit = ratio * (len(samples) - serial.total()) if ratio else serial.total()
        first = min(limit, serial[True])
        return {True: first / max(1, serial[True]), False: (limit - first) / max(1, serial[False])}


def write(work: Work, output: Path, report: Report, survey: Survey, entries: Iterable[Entry]) -> Report:
    """Write the sets, the rejected records and blocks, and the report, each file atomically.

    Args:
        work: configuration and shard.
        output: folder of the files.
        report: report to fill.
        survey: comparison of the records of all entries.
        entries: entries in the order of the source.

    Returns:
        The report.
    """
    others = survey.others()
    shares = survey.shares(others, work.config.select.serial_ratio)
    files = {name: output / work.shard.name(name, ".jsonl") for name in ("structured", "plain", "rejected")}
    with ExitStack() as stack:
        handles = {name: stack.enter_context(replacing(file)) for name, file in files.items()}
        for entry in entries:
            report.records += 1
            if entry.sample is None:
                _count_refused(report, work.source, entry)
                handles["rejected"].write(entry.rejected)
            elif entry.number in others:
                report.samples += 1
            else:
                handles["rejected"].write(entry.rejected)
                for of in entry.selections:
                    report.add(of.measures, of.sources, of.rejected, of.proposed)
                    report.rises += of.rises
                if entry.defect:  # the record has no block, and is no example of serial text
                    report.unfit += 1
                    handles["rejected"].write(entry.defect)
                elif not (entry.sample.forked or entry.sample.serial and entry.draw < shares[entry.sample.dependent]):
                    report.spared += 1
                else:
                    handles["plain"].write(entry.plain)
                    handles["structured"].write(entry.structured)
    for suffix, text in ((".json", json.dumps(report.as_dict(), indent=1)), (".md", report.markdown())):
        write_whole(output / work.shard.name("report", suffix), text)
    return report


def _count_refused(report: Report, source: str, entry: Entry) -> None:
    if entry.refused == "read":
        report.left_out.append(f"{source}, line {entry.number}: {entry.reason}")
    elif entry.refused == "teacher":
        report.unanswered += 1
    else:
        report.unfit += 1
