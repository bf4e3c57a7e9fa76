"""Run the pipeline over a source of records (protocol, section 7).

Entries of finished records are appended to a journal in the output folder, from which a killed run resumes; the results
are written when all have ended.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from aspd_jax import __version__
from aspd_jax.blocks.measures import Count, estimate_tokens
from aspd_jax.errors import ConfigError
from aspd_jax.files import exclusive, writing
from aspd_jax.journal import append, open_journal, resume
from aspd_jax.pipeline.data_config import DataConfig, SelectSection
from aspd_jax.pipeline.data_report import Report
from aspd_jax.pipeline.entries import Entry, entry_of
from aspd_jax.pipeline.sets import write
from aspd_jax.progress import Bar, waiting
from aspd_jax.sources import read_records

COUNTS = 1 << 10  # texts whose number of tokens is kept
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
    select = config.select
    count = _counter(select.tokenizer)
    journal = output / "entries.journal"
    with writing(output), exclusive(journal):  # other processes with this journal wait
        with waiting(f"reading {source}", progress):
            total, settings = _read_source(select, source)
        done = sum(1 for _ in resume(journal, settings))
        records = islice(read_records(source), done, None)
        bar = Bar(total=total, initial=done, desc="records", unit="record", disable=not progress)
        with open_journal(journal, settings) as log, bar:
            while entries := [entry_of(select, count, record) for record in islice(records, CHUNK)]:
                append(log, *entries)
                bar.update(len(entries))
        report = write(select, source, output, lambda: map(Entry.from_json, resume(journal, settings)))
        journal.unlink()
    return report


def _read_source(select: SelectSection, source: str) -> tuple[int, dict[str, Any]]:
    """Return the number of records, and what their entries depend on: the records, all settings and the version."""
    total, content = 0, sha256()
    for record in read_records(source):
        content.update(repr(record).encode())
        total += 1
    settings = {f"select.{name}": value for name, value in asdict(select).items()}
    return total, settings | {"source": content.hexdigest(), "version": __version__}


def _counter(folder: str) -> Count:
    """Return a function that counts tokens: with the tokenizer of a checkpoint, or by an estimate without a folder.

    Checks and measures count the same pieces of an answer, so the latest counts are kept.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
    """
    if not folder:
        return lru_cache(COUNTS)(estimate_tokens)
    from aspd_jax.formats import open_tokenizer

    try:
        tokenizer = open_tokenizer(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{folder}: expected a tokenizer that transformers can read, got: {error}") from None
    return lru_cache(COUNTS)(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
