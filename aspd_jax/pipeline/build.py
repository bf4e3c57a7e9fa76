"""Run the pipeline over a source of records: the likelihood of candidates, if a model is given, then all records.

Source: protocol, section 7.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from aspd_jax.files import writing
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, entry_of
from aspd_jax.pipeline.rule_stages import check, propose_by_rules
from aspd_jax.pipeline.sets import Survey, write
from aspd_jax.pipeline.store import Store
from aspd_jax.pipeline.work import WHOLE, Answer, Candidate, Shard, Work
from aspd_jax.progress import Bar
from aspd_jax.sizes import next_power

MIN_ROW = 256  # minimum padded length of a scored row in tokens


def build(config: DataConfig, source: str, output: Path, shard: Shard = WHOLE, progress: bool = True) -> Report:
    """Run all stages and write `structured.jsonl`, `plain.jsonl`, `rejected.jsonl`, `report.md` and `report.json`.

    Args:
        config: configuration of the pipeline.
        source: path or name of the records, see `read_records`.
        output: folder of the results and of the stored scores.
        shard: part of the records to process.
        progress: whether to show progress bars.

    Returns:
        The report of the run.

    Raises:
        AspdError: the source cannot be read, or a setting is not valid.
    """
    with ExitStack() as stack:
        work = Work(config, source, shard)
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
            spool = stack.enter_context(TemporaryFile(dir=output))  # has no name, and goes with the process
        if config.likelihood.model:
            work.store = stack.enter_context(closing(Store(output / shard.name("work", ".sqlite"))))
            _score(work, progress)
        survey = _process(work, output, spool, progress)
        return write(work, output, Report(), survey, _entries(spool))


def _process(work: Work, output: Path, spool: IO[bytes], progress: bool) -> Survey:
    """Process all records, and write their entries to a file."""
    survey = Survey()
    total = sum(1 for _ in work.records())
    with Bar(total=total, desc="records", unit="record", disable=not progress) as bar:
        for record in work.records():
            entry = entry_of(work, record)
            with writing(output):
                pickle.dump(entry, spool)
            if entry.sample is not None:
                survey.add(entry.sample)
            bar.update()
    return survey


def _entries(spool: IO[bytes]) -> Iterator[Entry]:
    """Yield the entries of a file of `_process`."""
    spool.seek(0)
    with suppress(EOFError):
        while True:
            yield pickle.load(spool)


def _score(work: Work, progress: bool) -> None:
    """Score the candidates of all answers in batches of rows with similar lengths, and store the scores."""
    from aspd_jax.language_model import load_model
    from aspd_jax.likelihood import encode, nll_increases

    section = work.config.likelihood
    waiting: dict[int, list[Any]] = defaultdict(list)
    lm: Any = None

    def store(answer: Answer, candidates: Sequence[Candidate], scores: Sequence[Any]) -> None:
        if all(score is not None for score in scores):
            work.put_score(answer, candidates, scores)

    def flush(size: int) -> None:
        rows = [row for *_, row in waiting[size]]
        filled = [*rows, *[rows[-1]] * (section.batch - len(rows))]
        increases = nll_increases(lm, filled, size)
        for (answer, candidates, number, scores, _), of_row in zip(waiting[size], increases, strict=False):
            scores[number] = [list(rise) for rise in of_row]
            store(answer, candidates, scores)
        waiting[size] = []

    total = sum(1 for _ in work.answers())
    with Bar(total=total, desc="score", unit="answer", disable=not progress) as bar:
        for answer in work.answers():
            bar.update()
            candidates = propose_by_rules(work, answer).candidates
            if work.score(answer, candidates) is not None:
                continue
            if all(check(work, answer, block) for candidate in candidates for block in candidate.blocks):
                continue  # no block can be selected, whatever its score
            scores: list[Any] = [None] * len(candidates)
            rows = []
            for number, candidate in enumerate(candidates):
                lm = lm or load_model(section.model)
                row = encode(lm, answer.question, answer.text, candidate.blocks)
                if len(row.tokens) > section.length:
                    scores[number] = f"{len(row.tokens)} tokens, likelihood.length is {section.length}"
                else:
                    rows.append((number, row))
            store(answer, candidates, scores)
            for number, row in rows:
                size = max(MIN_ROW, next_power(len(row.tokens)))
                waiting[size].append((answer, candidates, number, scores, row))
                if len(waiting[size]) == section.batch:
                    flush(size)
        for size in sorted(size for size, rows in waiting.items() if rows):
            flush(size)
