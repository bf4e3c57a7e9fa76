"""Run the pipeline over a source of records, stage by stage and several answers at a time (protocol, section 7).

Every stage processes all answers that it has not processed before with the same inputs.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from aspd_jax.errors import DataError
from aspd_jax.files import writing
from aspd_jax.pipeline.annotate import annotate, independence
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.data_report import Account, Report
from aspd_jax.pipeline.endpoint import Unanswered
from aspd_jax.pipeline.entries import Entry, entry_of
from aspd_jax.pipeline.rule_stages import by_form, check, propose_by_rules, too_short, well_formed
from aspd_jax.pipeline.sets import Survey, write
from aspd_jax.pipeline.store import Store
from aspd_jax.pipeline.teacher import Teacher
from aspd_jax.pipeline.work import WHOLE, Answer, Candidate, Shard, Work
from aspd_jax.progress import Bar
from aspd_jax.sizes import next_power
from aspd_jax.sources import record_of

PART = 64  # records whose results are stored together; a killed run repeats those of one part
MIN_ROW = 256  # minimum padded length of a scored row in tokens


class Outcome(NamedTuple):
    """Result of a run.

    Attributes:
        report: report of the run.
        unanswered: number of answers without a reply of the teacher.
    """

    report: Report
    unanswered: int


def build(
    config: DataConfig,
    source: str,
    output: Path,
    shard: Shard = WHOLE,
    progress: bool = True,
) -> Outcome:
    """Run all stages and write `structured.jsonl`, `plain.jsonl`, `rejected.jsonl`, `report.md` and `report.json`.

    Args:
        config: configuration of the pipeline.
        source: path or name of the records, see `read_records`.
        output: folder of the results and of the store of the run.
        shard: part of the records to process.
        progress: whether to show progress bars.

    Raises:
        AspdError: the source cannot be read, the endpoint refuses, or a setting is not valid.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _build(config, source, output, shard, progress)
    with ThreadPoolExecutor(1) as pool:  # a notebook has a running loop
        return pool.submit(_build, config, source, output, shard, progress).result()


def _build(config: DataConfig, source: str, output: Path, shard: Shard, progress: bool) -> Outcome:
    store = Store(output / shard.name("work", ".sqlite"))
    try:
        teacher = Teacher(config.teacher, store) if config.teacher.base_url else None
        work = Work(config, source, shard, store, teacher.prompts if teacher else {})
        if teacher is not None or config.likelihood.model:
            asyncio.run(_Run(work, teacher, progress).run())
        report = Report(Account(*store.account(), config.teacher.input_price, config.teacher.output_price))
        with _spool(output) as spool:
            survey = _process(work, store, output, spool, progress)
            return Outcome(write(work, output, report, survey, _entries(spool)), len(work.unanswered))
    finally:
        store.close()


@contextmanager
def _spool(output: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file without a name; it goes with the process, however that ends."""
    with ExitStack() as stack:
        with writing(output):
            spool = stack.enter_context(TemporaryFile(dir=output))
        yield spool


def _process(work: Work, store: Store, output: Path, spool: IO[bytes], progress: bool) -> Survey:
    """Process all records, store the results of their stages, and write their entries to a file."""
    survey = Survey()
    total = sum(1 for _ in work.shard.rows(work.source))
    rows = work.shard.rows(work.source)
    with Bar(total=total, desc="records", unit="record", disable=not progress) as bar:
        while part := list(islice(rows, PART)):
            with store.together():
                entries = [entry_of(work, record_of(row)) for row in part]
            with writing(output):
                pickle.dump(entries, spool)
                spool.flush()
            for entry in entries:
                if entry.sample is not None:
                    survey.add(entry.sample)
            bar.update(len(part))
    return survey


def _entries(spool: IO[bytes]) -> Iterator[Entry]:
    """Yield the entries of a file, which holds a pickled list for each part."""
    spool.seek(0)
    with suppress(EOFError):
        while True:
            yield from pickle.load(spool)


class _Run:
    """The stages that call a teacher or a model, with the rules in between."""

    def __init__(self, work: Work, teacher: Teacher | None, progress: bool) -> None:
        self.config, self.work, self.teacher, self.progress = work.config, work, teacher, progress

    async def run(self) -> None:
        total = sum(1 for _ in self.work.answers())
        try:
            await self._stage("propose", self._propose, total)
            if self.config.likelihood.model:
                self._score(total)
            await self._stage("judge", self._judge, total)
        except ExceptionGroup as group:  # concurrent calls usually fail for one reason, so the first is raised
            raise group.exceptions[0] from None
        finally:
            if self.teacher is not None:
                await self.teacher.close()

    async def _stage(self, name: str, make: Callable[[Answer], Awaitable[Any]], total: int) -> None:
        """Apply a stage to every answer without a stored result, several at a time."""
        left = self.work.answers()
        workers = self.config.teacher.concurrency if self.teacher else 1
        with Bar(total=total, desc=name, unit="answer", disable=not self.progress) as bar:

            async def worker() -> None:
                for answer in left:
                    if answer.key not in self.work.unanswered and self.work.get(name, answer) is None:
                        try:
                            value = await make(answer)
                        except Unanswered as error:
                            self.work.unanswered[answer.key] = f"{name}: {error}"
                        else:
                            self.work.put(name, answer, value)
                    if self.teacher is not None:
                        bar.set_postfix(self.teacher.spent, refresh=False)
                    bar.update()

            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(worker())

    async def _propose(self, answer: Answer) -> dict[str, Any]:
        if self.teacher is None or not self.config.teacher.candidates:
            return propose_by_rules(self.work, answer)
        if short := too_short(self.work, answer):
            return short
        candidates = by_form(answer.text) if self.config.rules else []
        annotated, reasons = await annotate(self.teacher, answer.question, answer.text)
        rejected = [{"stage": "annotate", "source": "teacher", "reason": reason} for reason in reasons]
        candidates += [Candidate(f"teacher {n}", blocks) for n, blocks in enumerate(annotated, 1)]
        proposed = well_formed(answer.text, candidates)
        return proposed | {"rejected": [*rejected, *proposed["rejected"]]}

    def _score(self, total: int) -> None:
        """Score all candidates in batches of rows with similar lengths."""
        from aspd_jax.language_model import load_model
        from aspd_jax.likelihood import encode, nll_increases

        waiting: dict[int, list[Any]] = defaultdict(list)
        lm: Any = None
        length = self.config.likelihood.length
        with Bar(total=total, desc="score", unit="answer", disable=not self.progress) as bar:

            def flush(size: int) -> None:
                rows = [row for _, _, _, row in waiting[size]]
                filled = [*rows, *[rows[-1]] * (self.config.likelihood.batch - len(rows))]
                for (answer, number, scores, _), of_row in zip(
                    waiting[size], nll_increases(lm, filled, size), strict=False
                ):
                    scores[number] = [list(rise) for rise in of_row]
                    self._store_scores(answer, scores)
                waiting[size] = []

            for answer in self.work.answers():
                bar.update()
                if answer.key in self.work.unanswered or self.work.get("score", answer) is not None:
                    continue
                candidates = self.work.candidates(answer)
                blocks = [block for candidate in candidates for block in candidate.blocks]
                if all(check(self.work, answer, block) for block in blocks):
                    continue  # no block can be selected, whatever its score
                scores: list[Any] = [None] * len(candidates)
                rows = []
                for number, candidate in enumerate(candidates):
                    lm = lm or load_model(self.config.likelihood.model)
                    row = encode(lm, answer.question, answer.text, candidate.blocks)
                    if len(row.tokens) > length:
                        scores[number] = f"{len(row.tokens)} tokens, likelihood.length is {length}"
                    else:
                        rows.append((number, row))
                self._store_scores(answer, scores)
                for number, row in rows:
                    size = max(MIN_ROW, next_power(len(row.tokens)))
                    waiting[size].append((answer, number, scores, row))
                    if len(waiting[size]) == self.config.likelihood.batch:
                        flush(size)
            for size in sorted(size for size, rows in waiting.items() if rows):
                flush(size)

    def _store_scores(self, answer: Answer, scores: Sequence[Any]) -> None:
        if all(score is not None for score in scores):
            self.work.put("score", answer, scores)

    async def _judge(self, answer: Answer) -> list[list[dict[str, str] | None]]:
        """Return, for every block of every candidate, the stage at which it fails and the reason; None: it passes."""
        candidates = self.work.candidates(answer)
        scores = self.work.get("score", answer) if self.config.likelihood.model else None
        verdicts = []
        for number, candidate in enumerate(candidates):
            failed: list[dict[str, str] | None] = []
            first = 0
            for block in candidate.blocks:
                of_block = None if scores is None else scores[number]
                if isinstance(of_block, list):
                    of_block = of_block[first : first + len(block.branches)]
                first += len(block.branches)
                failed.append(check(self.work, answer, block, of_block))
            left = [place for place, failure in enumerate(failed) if failure is None]
            if left and self.teacher is not None and self.config.teacher.votes:
                blocks = [candidate.blocks[place] for place in left]
                try:
                    votes = await independence(self.teacher, answer.question, answer.text, blocks)
                    failures = [None if v.in_favour else {"stage": "vote", "reason": v.reason} for v in votes]
                except DataError as error:
                    failures = [{"stage": "vote", "reason": str(error)}] * len(left)
                for place, failure in zip(left, failures, strict=True):
                    failed[place] = failure
            verdicts.append(failed)
        return verdicts
