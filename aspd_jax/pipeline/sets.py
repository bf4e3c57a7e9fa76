"""Write the results of a run: the best surviving candidate of each answer, the rejected ones, and the report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from aspd_jax.blocks.measures import Measures, best
from aspd_jax.files import replacing, write_whole
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, Sample
from aspd_jax.pipeline.work import Work


class Survey:
    """Comparison of the records that may be in the sets."""

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[int, Measures]]] = defaultdict(list)
        self._forked: dict[int, bool] = {}  # by number of a record that may be kept: whether it has a block

    def add(self, sample: Sample) -> None:
        """Add a record."""
        if sample.forked or sample.serial:
            self._forked[sample.number] = sample.forked
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

    def share(self, others: set[int], ratio: float) -> float:
        """Return the share of records without a block that `select.serial_ratio` keeps."""
        kinds = Counter(forked for number, forked in self._forked.items() if number not in others)
        return ratio * kinds[True] / max(1, kinds[False]) if ratio else 1.0


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
    kept = survey.share(others, work.config.select.serial_ratio)
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
                elif not entry.sample.forked and (not entry.sample.serial or entry.draw >= kept * (1 << 32)):
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
