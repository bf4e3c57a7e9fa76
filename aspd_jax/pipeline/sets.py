"""Write the results of a run: the best surviving candidate of each answer, the rejected ones, and the report."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

from aspd_jax.files import replacing, write_whole
from aspd_jax.pipeline.checks import asked_for, repetition
from aspd_jax.pipeline.data_report import Account, Report
from aspd_jax.pipeline.measures import Measures, best, measure
from aspd_jax.pipeline.sources import Conversation, Unreadable
from aspd_jax.pipeline.spans import BlockSpan, structure_of
from aspd_jax.pipeline.work import Answer, Work, answers_of
from aspd_jax.structure import to_json


def write(work: Work, output: Path, account: Account) -> Report:
    """Write the sets, the rejected records and blocks, and the report, each file atomically; return the report."""
    return _Sets(work, output, Report(account)).write()


class _Sets:
    def __init__(self, work: Work, output: Path, report: Report) -> None:
        self.work, self.output, self.report = work, output, report
        self._others: set[int] = set()

    def write(self) -> Report:
        work, report = self.work, self.report
        names = ("structured", "plain", "rejected")
        files = {name: self.output / work.shard.name(name, ".jsonl") for name in names}
        with ExitStack() as stack:
            handles = {name: stack.enter_context(replacing(file)) for name, file in files.items()}

            def put(name: str, value: dict[str, Any]) -> None:
                handles[name].write(json.dumps(value, ensure_ascii=False) + "\n")

            self._others, kept = self._survey()
            for record in self.work.records():
                report.records += 1
                if isinstance(record, Unreadable):
                    report.left_out.append(f"{work.source}, line {record.number}: {record.reason}")
                    put("rejected", {"id": record.id, "line": record.number, "stage": "read", "reason": record.reason})
                    continue
                self._write_record(record, put, kept)
        for suffix, text in ((".json", json.dumps(report.as_dict(), indent=1)), (".md", report.markdown())):
            write_whole(self.output / work.shard.name("report", suffix), text)
        return report

    def _survey(self) -> tuple[set[int], float]:
        """Return the numbers of the records that another answer to the same question is better than.

        The best one has the best block; of answers without a block, the first is kept. Also return the share of records
        without a block that `select.serial_ratio` keeps.
        """
        groups: dict[str, list[tuple[int, Measures]]] = defaultdict(list)
        forks: dict[int, bool] = {}  # of records that may be kept
        for record in self.work.records():
            if not isinstance(record, Conversation) or self._unfit(record):
                continue
            selected = [(answer, self._select(answer, Report(Account()))[0]) for _, answer in answers_of(record)]
            forked = any(blocks for _, blocks in selected)
            if forked or self._may_be_serial(record):
                forks[record.number] = forked
            if selected and not any(answer.key in self.work.unanswered for answer, _ in selected):
                answer, blocks = selected[-1]
                key = hashlib.sha256(json.dumps(record.messages[:-1]).encode()).hexdigest()
                groups[key].append((record.number, measure(answer.text, blocks, self.work.count)))
        others: set[int] = set()
        for samples in groups.values():
            first = best([measures for _, measures in samples]) or 0
            others |= {number for place, (number, _) in enumerate(samples) if place != first}
        forked_or_not = Counter(forked for number, forked in forks.items() if number not in others)
        ratio = self.work.config.select.serial_ratio
        return others, ratio * forked_or_not[True] / max(1, forked_or_not[False]) if ratio else 1.0

    def _write_record(self, record: Conversation, put: Callable[[str, dict[str, Any]], None], kept: float) -> None:
        report = self.report
        base = {"id": record.id, "line": record.number}
        missing = [self.work.unanswered[a.key] for _, a in answers_of(record) if a.key in self.work.unanswered]
        if missing:
            report.unanswered += 1
            put("rejected", base | {"stage": "teacher", "reason": missing[0]})
            return
        if unfit := self._unfit(record):
            report.unfit += 1
            put("rejected", base | {"stage": "record", "reason": unfit})
            return
        if record.number in self._others:
            report.samples += 1
            return
        if record.unanswered:
            put("rejected", base | {"message": len(record.messages), "stage": "read", "reason": "no answer follows"})
        plain: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in record.messages]
        structured = list(plain)
        details, forked = [], False
        for place, answer in answers_of(record):
            blocks, detail = self._select(answer, report)
            forked |= bool(blocks)
            for rejection in detail["rejected"]:
                put("rejected", base | {"message": place} | rejection)
            structure = to_json(structure_of(answer.text, blocks))
            structured[place] = {"role": "assistant", "structure": structure}
            details.append({"message": place} | detail)
        defects = [
            rejection["reason"]
            for detail in details
            for rejection in detail["rejected"]
            if rejection["stage"] == "defect"
        ]
        if not forked and defects:  # neither a block to learn nor an example of text that does not fork
            report.unfit += 1
            put("rejected", base | {"stage": "record", "reason": defects[0]})
            return
        if not forked and (not self._may_be_serial(record) or crc32(json.dumps(plain).encode()) >= kept * (1 << 32)):
            report.spared += 1
            return
        put("plain", base | {"messages": plain})
        put("structured", base | {"messages": structured, "pipeline": details})

    def _may_be_serial(self, record: Conversation) -> bool:
        kinds = self.work.config.select.serial_kinds
        return not kinds or record.kind in kinds

    def _unfit(self, record: Conversation) -> str | None:
        """Return the reason why a record belongs to neither set, whatever its structure, or None."""
        select = self.work.config.select
        for _, answer in answers_of(record):
            if (repeated := repetition(answer.text)) > select.max_repetition:
                return (
                    f"{repeated:.0%} of its words repeat what it said before, at most {select.max_repetition:.0%} may"
                )
            if select.as_asked and (asked := asked_for(answer.question)):
                sizes = {
                    len(block.branches) for candidate in self.work.candidates(answer) for block in candidate.blocks
                }
                if sizes and asked not in sizes:
                    return f"its question asks for {asked}, and its blocks have {', '.join(map(str, sorted(sizes)))}"
        return None

    def _select(self, answer: Answer, report: Report) -> tuple[tuple[BlockSpan, ...], dict[str, Any]]:
        """Return the best surviving candidate of an answer, and the details of the others."""
        proposed = self.work.get("propose", answer) or {"rejected": []}
        rejected = list(proposed["rejected"])
        verdicts = self.work.get("judge", answer) or []
        scores = self.work.get("score", answer) or [] if self.work.config.likelihood.model else []
        report.rises += [rise for of_candidate in scores if isinstance(of_candidate, list) for rise in of_candidate]
        surviving: list[tuple[BlockSpan, ...]] = []
        candidates = self.work.candidates(answer)
        for candidate, failures in zip(candidates, verdicts, strict=True):
            both = list(zip(candidate.blocks, failures, strict=True))
            surviving.append(tuple(block for block, failure in both if failure is None))
            for block, failure in both:
                if failure is not None:
                    where = {"source": candidate.source, "start": block.start, "end": block.end}
                    rejected.append(failure | where | {"titles": [branch.title for branch in block.branches]})
        measures = [measure(answer.text, blocks, self.work.count) for blocks in surviving]
        chosen = best(measures)
        blocks = () if chosen is None else surviving[chosen]
        of_answer: Measures = measure(answer.text, blocks, self.work.count)
        report.add(of_answer, [c.source for c in candidates], rejected, sum(len(c.blocks) for c in candidates))
        detail: dict[str, Any] = {
            "source": "" if chosen is None else candidates[chosen].source,
            "measures": of_answer._asdict() | {"ideal_speedup": round(of_answer.ideal_speedup, 3)},
            "rejected": rejected,
        }
        return blocks, detail
