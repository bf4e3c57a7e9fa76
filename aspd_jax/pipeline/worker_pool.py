"""Process the records of a run part by part, in this process or in several, with results in the order of the source.

Only the calling process opens the store. A part goes to a worker with its stored results, and returns with new ones,
in a file: `ProcessPoolExecutor` waits forever if a worker is killed within a result that is longer than one write to a
pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from aspd_jax.errors import RequestError
from aspd_jax.jsonl import Line
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.entries import Sample, entry_of
from aspd_jax.pipeline.work import Shard, Work
from aspd_jax.sources import record_of
from aspd_jax.store import Results, Row, Store

PART = 64  # records of a part; a killed run repeats the parts that it has not stored
AHEAD = 3  # parts per worker that wait or are processed


class Part(NamedTuple):
    """Rows of the source and what the store holds for them.

    Attributes:
        rows: rows of the source.
        stored: results of earlier runs.
    """

    rows: list[Line]
    stored: list[Row]


class Processed(NamedTuple):
    """A part that has been processed.

    Attributes:
        size: number of records.
        samples: samples of the records that may be in the sets.
        entries: entries of all records, pickled.
        added: results to store.
    """

    size: int
    samples: list[Sample]
    entries: bytes
    added: list[Row]


def parts_of(work: Work, store: Store) -> Iterator[Part]:
    """Yield consecutive parts of a run with their stored results."""
    rows = work.shard.rows(work.source)
    while part := list(islice(rows, PART)):
        yield Part(part, store.rows(row.number for row in part))


def process(work: Work, part: Part) -> Processed:
    """Return the entries of a part, and the results that were computed for them."""
    results = Results(part.stored)
    work = work.replace_store(results)
    entries = [entry_of(work, record_of(row)) for row in part.rows]
    samples = [entry.sample for entry in entries if entry.sample is not None]
    return Processed(len(entries), samples, pickle.dumps(entries, pickle.HIGHEST_PROTOCOL), results.added)


def process_all(work: Work, store: Store, workers: int) -> Generator[Processed]:
    """Yield all parts of a run in the order of the source.

    Args:
        work: configuration and source.
        store: store of the run.
        workers: number of processes; 1: this one.

    Raises:
        RequestError: a worker process was killed.
    """
    parts = parts_of(work, store)
    if workers == 1:
        yield from (process(work, part) for part in parts)
        return
    results = TemporaryDirectory()
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        _start,
        (work.config, work.source, work.shard, work.prompts, work.unanswered),
    )
    try:
        waiting: deque[Future[Path]] = deque()
        for number, part in enumerate(parts):
            waiting.append(pool.submit(_process, part, Path(results.name, str(number))))
            if len(waiting) == AHEAD * workers:
                yield _read(waiting.popleft().result())
        while waiting:
            yield _read(waiting.popleft().result())
    except BrokenProcessPool:
        raise RequestError(
            "--workers: expected running worker processes, got one that was killed or ran out of memory. "
            "Results so far are stored; run the same command to resume."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        results.cleanup()


_work: Work  # of a worker process


def _start(
    config: DataConfig, source: str, shard: Shard, prompts: Mapping[str, str], unanswered: dict[str, str]
) -> None:
    """Prepare a worker process."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = Work(config, source, shard, Results(), prompts)
    _work.unanswered = unanswered


def _end_with_parent() -> None:
    """End this process when its parent ends; otherwise it would wait forever after a kill."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _process(part: Part, file: Path) -> Path:
    file.write_bytes(pickle.dumps(process(_work, part), pickle.HIGHEST_PROTOCOL))
    return file


def _read(file: Path) -> Processed:
    processed: Processed = pickle.loads(file.read_bytes())
    file.unlink()
    return processed
