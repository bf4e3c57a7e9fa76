"""Process the records of a run part by part, in this process or in several, with results in the order of the source.

Only the calling process opens the store. A part goes to a worker with its stored results, and returns with new ones.
Processes share no pipe and no lock: `concurrent.futures.ProcessPoolExecutor` waits forever when a worker is killed
while it writes to the queue of results.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from aspd_jax.errors import RequestError
from aspd_jax.jsonl import Line
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.entries import Sample, entry_of
from aspd_jax.pipeline.sources import record_of
from aspd_jax.pipeline.work import WHOLE, Shard, Work
from aspd_jax.ray_pool import RayOptions, Task, cluster, run_on_ray
from aspd_jax.store import Results, Row, Store

PART = 64  # records of a part; a killed run repeats the parts that it has not stored
AHEAD = 3  # parts per worker that wait or are processed
HELD = 2  # parts in a worker process: while it processes one, the next one is sent


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


Job: TypeAlias = tuple[Future[Processed], Part]


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


def process_all(work: Work, store: Store, workers: int, ray: RayOptions | None = None) -> Generator[Processed]:
    """Yield all parts of a run in the order of the source.

    Args:
        work: configuration and source.
        store: store of the run.
        workers: number of processes; 1: this one.
        ray: cluster whose actors process the parts instead; None: none.

    Raises:
        RequestError: a worker process was killed.
    """
    parts = parts_of(work, store)
    if ray is not None:
        yield from _process_on_ray(work, parts, ray)
        return
    if workers == 1:
        yield from (process(work, part) for part in parts)
        return
    jobs = SimpleQueue[Job | None]()
    settings = (work.config, work.source, work.shard, work.prompts, work.unanswered)
    pool = [WorkerProcess(jobs, settings) for _ in range(workers)]
    try:
        waiting: deque[Future[Processed]] = deque()
        for part in parts:
            waiting.append(Future())
            jobs.put((waiting[-1], part))
            if len(waiting) == AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for worker in pool:
            worker.kill()
        for worker in pool:
            worker.join()


class WorkerProcess:
    """Process that processes parts, and the thread that sends them and receives results.

    After the death of the process, all jobs of the thread fail with `RequestError`.

    Args:
        jobs: queue of jobs, shared by the workers; None ends the thread that takes it.
        settings: arguments of `_work_on_parts` after the pipe.
    """

    def __init__(self, jobs: SimpleQueue[Job | None], settings: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._jobs = jobs
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work_on_parts, args=(other, *settings), daemon=True)
        self._process.start()
        other.close()  # the process has the only copy, so the pipe ends with it
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Kill the process, and tell one of the threads to end."""
        self._process.kill()
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the ends of the process and the thread, after `kill` of all workers."""
        self._process.join()
        self._thread.join()
        self._pipe.close()

    def _exchange(self) -> None:
        held: deque[Future[Processed]] = deque()
        try:
            while self._send(held):
                outcome = self._pipe.recv()
                if isinstance(outcome, BaseException):
                    held.popleft().set_exception(outcome)
                else:
                    held.popleft().set_result(outcome)
        except Exception as error:
            failure = _killed() if isinstance(error, (EOFError, OSError)) else error
            for future in held:
                future.set_exception(failure)
            while job := self._jobs.get():
                job[0].set_exception(failure)

    def _send(self, held: deque[Future[Processed]]) -> bool:
        """Send jobs until the process holds `HELD` parts or no more wait; return False at the end of the jobs."""
        with suppress(Empty):
            while len(held) < HELD:
                job = self._jobs.get(block=not held)
                if job is None:
                    return False
                held.append(job[0])
                self._pipe.send(job[1])
        return True


def _killed() -> RequestError:
    return RequestError(
        "--workers: expected running worker processes, got one that was killed or ran out of memory. "
        "Results so far are stored; run the same command to resume."
    )


class PartWorker:
    """Worker that processes parts, as an actor of a cluster (`aspd_jax.ray_pool.Worker`)."""

    capacity = AHEAD

    def __init__(self, config: DataConfig, prompts: Mapping[str, str], unanswered: dict[str, str]) -> None:
        self._work = Work(config, "", WHOLE, Results(), prompts)
        self._work.unanswered = unanswered

    def advance(self, new: Sequence[Task]) -> list[Task]:
        """Process parts."""
        return [(number, process(self._work, part)) for number, part in new]


def _process_on_ray(work: Work, parts: Iterator[Part], ray: RayOptions) -> Iterator[Processed]:
    """Yield parts in order. Parts of a dead actor are repeated first, so that few others wait for them in memory."""
    make = partial(PartWorker, work.config, work.prompts, work.unanswered)
    waiting: dict[int, Processed] = {}
    first = 0
    with cluster(ray) as workers:
        for number, part in run_on_ray(make, enumerate(parts), ray, workers, "part {}".format, urgent=True):
            waiting[number] = part
            while first in waiting:
                yield waiting.pop(first)
                first += 1


def _work_on_parts(
    pipe: Connection,
    config: DataConfig,
    source: str,
    shard: Shard,
    prompts: Mapping[str, str],
    unanswered: dict[str, str],
) -> None:
    """Process the parts that arrive, in a worker process, and send their results or errors in the same order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the others
    parts = SimpleQueue[Part]()
    threading.Thread(target=_receive, args=(pipe, parts), daemon=True).start()
    work = Work(config, source, shard, Results(), prompts)
    work.unanswered = unanswered
    while True:
        outcome: Processed | Exception
        try:
            outcome = process(work, parts.get())
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))  # the pipe carries no tracebacks
            outcome = error
        try:
            pipe.send(outcome)
        except OSError:
            os._exit(1)  # the parent has ended


def _receive(pipe: Connection, parts: SimpleQueue[Part]) -> None:
    """Receive parts, so that the parent never waits to send one; end this process when the parent ends."""
    try:
        while True:
            parts.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)
