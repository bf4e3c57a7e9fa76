"""Run the pipeline over a source of records (protocol, section 7).

Entries of finished records are appended to a journal in the output folder, from which a killed run resumes; the results
are written when all have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from aspd_jax import __version__
from aspd_jax.files import exclusive, writing
from aspd_jax.journal import append, open_journal, resume
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, entry_of
from aspd_jax.pipeline.sets import Survey, write
from aspd_jax.pipeline.work import Work
from aspd_jax.progress import Bar, waiting

CHUNK = 256  # records that the journal makes durable at once; a killed run repeats fewer than these


def build(config: DataConfig, source: str, output: Path, progress: bool = True) -> Report:
    """Run all stages and write `structured.jsonl`, `plain.jsonl`, `rejected.jsonl`, `report.md` and `report.json`.

    Args:
        config: configuration of the pipeline.
        source: path or name of the records, see `read_records`.
        output: folder of the results, and of the journal until they are written.
        progress: whether to show progress bars.

    Returns:
        The report of the run.

    Raises:
        AspdError: the source cannot be read, a setting is not valid, or the journal belongs to a run with other
            settings or another source.
    """
    work = Work(config, source)
    journal = output / "entries.journal"
    with writing(output), exclusive(journal):  # other processes with this journal wait
        with waiting(f"reading {source}", progress):
            total, settings = _read_source(work)
        survey = _process(work, journal, settings, total, progress)
        report = write(work, output, survey, _entries(journal, settings))
        journal.unlink()
    return report


def _read_source(work: Work) -> tuple[int, dict[str, Any]]:
    """Return the number of records, and what their entries depend on: the records, all settings and the version."""
    total, content = 0, sha256()
    for record in work.records():
        content.update(repr(record).encode())
        total += 1
    settings = {f"select.{name}": value for name, value in asdict(work.config.select).items()}
    return total, settings | {"source": content.hexdigest(), "version": __version__}


def _process(work: Work, journal: Path, settings: dict[str, Any], total: int, progress: bool) -> Survey:
    """Append the entries of all records that a journal does not hold yet."""
    survey, done = Survey(), 0
    for entry in _entries(journal, settings):
        survey.add(entry)
        done += 1
    records = islice(work.records(), done, None)
    bar = Bar(total=total, initial=done, desc="records", unit="record", disable=not progress)
    with open_journal(journal, settings) as log, bar:
        while entries := [entry_of(work, record) for record in islice(records, CHUNK)]:
            append(log, *entries)
            for entry in entries:
                survey.add(entry)
            bar.update(len(entries))
    return survey


def _entries(journal: Path, settings: dict[str, Any]) -> Iterator[Entry]:
    """Return the entries of a journal."""
    return map(Entry.from_json, resume(journal, settings))
