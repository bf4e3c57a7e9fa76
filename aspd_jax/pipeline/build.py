"""Run the pipeline over a source of records (protocol, section 7)."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from aspd_jax.files import writing
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, entry_of
from aspd_jax.pipeline.sets import Survey, write
from aspd_jax.pipeline.work import WHOLE, Shard, Work
from aspd_jax.progress import Bar


def build(config: DataConfig, source: str, output: Path, shard: Shard = WHOLE, progress: bool = True) -> Report:
    """Run all stages and write `structured.jsonl`, `plain.jsonl`, `rejected.jsonl`, `report.md` and `report.json`.

    Args:
        config: configuration of the pipeline.
        source: path or name of the records, see `read_records`.
        output: folder of the results.
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
