"""Run the pipeline over a source of records (protocol, section 7).

Every stage processes all answers that it has not processed before with the same inputs.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from aspd_jax.files import writing
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, entry_of, proposed_for
from aspd_jax.pipeline.rule_stages import check
from aspd_jax.pipeline.sets import Survey, write
from aspd_jax.pipeline.store import Store
from aspd_jax.pipeline.work import WHOLE, Answer, Shard, Work, candidates_of
from aspd_jax.progress import Bar
from aspd_jax.sizes import next_power
from aspd_jax.sources import record_of

PART = 64  # records whose results are stored together; a killed run repeats those of one part
MIN_ROW = 256  # minimum padded length of a scored row in tokens


def build(config: DataConfig, source: str, output: Path, shard: Shard = WHOLE, progress: bool = True) -> Report:
    """Run all stages and write `structured.jsonl`, `plain.jsonl`, `rejected.jsonl`, `report.md` and `report.json`.

    Args:
        config: configuration of the pipeline.
        source: path or name of the records, see `read_records`.
        output: folder of the results and of the store of the run.
        shard: part of the records to process.
        progress: whether to show progress bars.

    Returns:
        The report of the run.

    Raises:
        AspdError: the source cannot be read, or a setting is not valid.
    """
    store = Store(output / shard.name("work", ".sqlite"))
    try:
        work = Work(config, source, shard, store)
        if config.likelihood.model:
            _score(work, progress)
        with _spool(output) as spool:
            survey = _process(work, store, output, spool, progress)
            return write(work, output, Report(), survey, _entries(spool))
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


def _score(work: Work, progress: bool) -> None:
    """Score the candidates of all answers in batches of rows with similar lengths, and store the scores."""
    from aspd_jax.language_model import load_model
    from aspd_jax.likelihood import encode, nll_increases

    section = work.config.likelihood
    waiting: dict[int, list[Any]] = defaultdict(list)
    lm: Any = None

    def store(answer: Answer, scores: Sequence[Any]) -> None:
        if all(score is not None for score in scores):
            work.put("score", answer, scores)

    def flush(size: int) -> None:
        rows = [row for _, _, _, row in waiting[size]]
        filled = [*rows, *[rows[-1]] * (section.batch - len(rows))]
        for (answer, number, scores, _), of_row in zip(waiting[size], nll_increases(lm, filled, size), strict=False):
            scores[number] = [list(rise) for rise in of_row]
            store(answer, scores)
        waiting[size] = []

    total = sum(1 for _ in work.answers())
    with Bar(total=total, desc="score", unit="answer", disable=not progress) as bar:
        for answer in work.answers():
            bar.update()
            if work.get("score", answer) is not None:
                continue
            candidates = candidates_of(proposed_for(work, answer))
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
            store(answer, scores)
            for number, row in rows:
                size = max(MIN_ROW, next_power(len(row.tokens)))
                waiting[size].append((answer, number, scores, row))
                if len(waiting[size]) == section.batch:
                    flush(size)
        for size in sorted(size for size, rows in waiting.items() if rows):
            flush(size)
