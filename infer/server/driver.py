"""The engine in a thread of its own: requests in, events out; one that breaks the engine takes no other with it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import jax

from infer.answers.events import Event
from infer.answers.logprobs import TokenLogprob
from infer.engine import Engine
from infer.lockstep import Asked, Lockstep, StepCommand
from infer.request import Job
from infer.scheduling.handle import Handle, Stream
from infer.server.server_config import ServerConfig

log = logging.getLogger("aspd.server")
FIRST_STEPS = 4  # passes of the first chunk, before it is known how long one takes
MAX_STEPS = 256
HEARTBEAT = 5.0  # seconds between turns when there is nothing to do, where other processes wait for the next


class Busy(Exception):
    """More requests wait than may; after how many seconds it may be different."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests wait; try again in {seconds} s")
        self.seconds = seconds


class Broken(Exception):
    """The engine failed on this request, alone too."""


class Ticket:
    """A request on its way through the driver. Events are read on the event loop that it was made on.

    Args:
        stream: which events are wanted while the answer grows; reading it costs time.
        alternatives, echo: see `infer.lockstep.Asked`.

    Attributes:
        number: that no other ticket has, once the engine has it.
        logprobs: where they were asked for, and could be computed; there before the end is told.
    """

    def __init__(self, job: Job, stream: Stream, alternatives: int | None = None, echo: bool = False) -> None:
        self.job, self.stream, self.alternatives, self.echo = job, stream, alternatives, echo
        self.number = 0
        self.logprobs: list[TokenLogprob] | None = None
        self.events: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self.cancelled = False
        self._loop = asyncio.get_running_loop()

    def tell(self, news: list[Event] | None) -> None:
        """Pass events on; None: there will be no more, because the engine failed. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, news)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.cancelled = True

    async def listen(self) -> AsyncIterator[list[Event]]:
        """What each look at the answer found, up to `done`.

        Raises:
            Broken: the engine failed.
        """
        while True:
            news = await self.events.get()
            if news is None:
                raise Broken
            yield news
            if news[-1].kind == "done":
                return


class Change:
    """An adapter that clients may ask for from now on, or no longer.

    Args:
        name: of the adapter.
        folder: of it; empty: it goes.

    Attributes:
        done: its result says why it was refused; empty: it was not.
    """

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, folder
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[str] = self._loop.create_future()

    def tell(self, refused: str) -> None:
        """From any thread."""

        def tell() -> None:
            if not self.done.done():
                self.done.set_result(refused)

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(tell)


class Occupancy(NamedTuple):
    """Requests that run, and that wait."""

    running: int
    waiting: int


class Driver:
    """Keeps an engine going.

    Attributes:
        ready: set when everything is compiled.
    """

    def __init__(self, engine: Engine, config: ServerConfig, seen: Callable[[float, int], None] | None = None) -> None:
        """Args: seen: called with the seconds and the passes of every chunk."""
        self.engine, self._config = engine, config
        self.ready = threading.Event()
        self._seen = seen
        self._lockstep = Lockstep(engine)
        self._several = jax.process_count() > 1
        self._numbers = count()
        self._inbox: queue.SimpleQueue[Ticket | Change | None] = queue.SimpleQueue()
        self._live: list[Ticket] = []
        self._admitted = 0  # tickets that have not ended, counted where they are submitted
        self._count = threading.Lock()
        self._steps = FIRST_STEPS
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End: requests under way are given up."""
        self._inbox.put(None)
        self._thread.join(timeout=self._config.drain)

    @property
    def occupancy(self) -> Occupancy:
        """What there is to do."""
        running = min(self._admitted, self.engine.max_batch)
        return Occupancy(running, self._admitted - running)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(
        self, jobs: list[Job], stream: Stream = None, alternatives: int | None = None, echo: bool = False
    ) -> list[Ticket]:
        """Queue requests, all or none; `stream`, `alternatives`, `echo`: see `Ticket`.

        Raises:
            Busy: more would wait than may.
        """
        with self._count:
            if self._admitted + len(jobs) > self.engine.max_batch + self._config.max_waiting:
                raise Busy(1 + (self._admitted - self.engine.max_batch) // self.engine.max_batch)
            self._admitted += len(jobs)
        tickets = [Ticket(job, stream, alternatives, echo) for job in jobs]
        for ticket in tickets:
            self._inbox.put(ticket)
        return tickets

    async def change(self, name: str, folder: str) -> str:
        """See `Change`; why it was refused."""
        change = Change(name, folder)
        self._inbox.put(change)
        return await change.done

    def cancel(self, ticket: Ticket) -> None:
        """Give a request up; its row is free after the chunk under way."""
        ticket.cancelled = True

    def _run(self) -> None:
        try:
            if self._config.warm_up != "none":
                log.info("warmed up in %.1f s", self.engine.warm_up(alone=self._config.warm_up == "first"))
            self.ready.set()
            while self._turn():
                pass
            self._lockstep.end()
        except BaseException:
            log.exception("the engine's thread ends")
            raise
        finally:
            self.ready.clear()
            while not self._inbox.empty():
                left = self._inbox.get()
                if isinstance(left, Change):
                    left.tell("the server ends")
                elif left is not None:
                    self._live.append(left)
            for ticket in self._live:
                ticket.tell(None)

    def _turn(self) -> bool:
        """Take what came in, do a chunk, tell what happened; false when told to stop."""
        new: list[Ticket] = []
        change: Change | None = None
        while change is None and (not (self._live or new) or not self._inbox.empty()):
            try:
                one = self._next()
            except queue.Empty:
                break
            if one is None:
                self._live += new
                return False
            if isinstance(one, Change):
                change = one
            else:
                new.append(one)
        self._step(new, change)
        self._tell()
        return True

    def _next(self) -> Ticket | Change | None:
        """Wait for a request, a change, or to be told to stop.

        Raises:
            queue.Empty: other processes wait for a turn.
        """
        return self._inbox.get(timeout=HEARTBEAT if self._several else None)

    def _step(self, new: list[Ticket], change: Change | None) -> None:
        for ticket in new:
            ticket.number = next(self._numbers)
        self._live += new
        asked = tuple(
            Asked(ticket.number, ticket.job, ticket.stream, ticket.alternatives, ticket.echo) for ticket in new
        )
        cancelled = tuple(ticket.number for ticket in self._live if ticket.cancelled)
        adapter = (change.name, change.folder) if change else ("", "")
        try:
            try:
                self._lockstep.lead(StepCommand(asked, adapter, cancelled, self._steps))
            finally:
                if change is not None:
                    change.tell(self._lockstep.refused)
        except Exception:
            if self._several:  # the other processes are in the middle of it, and cannot be brought back
                raise
            log.exception("the engine failed; requests under way are tried one by one")
            self._one_by_one()
            return
        passes, seconds = self.engine.scheduler.chunk
        if passes > 0:
            if passes >= self._steps or seconds > self._config.chunk:  # what ends early tells little
                most = round(self._config.chunk * passes / seconds)
                self._steps = max(1, min(MAX_STEPS, most, 2 * self._steps))
            if self._seen is not None:
                self._seen(seconds, passes)

    def _handle(self, ticket: Ticket) -> Handle:
        return self._lockstep.handles[ticket.number]

    def _one_by_one(self) -> None:
        """Try again what was under way, alone; what fails alone is what broke the engine."""
        scheduler = self.engine.scheduler
        for ticket in [ticket for ticket in self._live if self._handle(ticket).failed]:
            handle = self._handle(ticket)
            scheduler.retry(handle)
            scheduler.alone = handle
            try:
                while handle.result is None:
                    cancelled = (ticket.number,) if ticket.cancelled else ()
                    self._lockstep.do(StepCommand(cancelled=cancelled, steps=self._steps))
                    self._tell()
            except Exception:
                log.exception("a request breaks the engine")
                self._forget(ticket)
                ticket.tell(None)
            finally:
                scheduler.alone = None

    def _tell(self) -> None:
        for ticket in list(self._live):
            handle = self._handle(ticket)
            news = handle.poll()
            if handle.result is not None and ticket.alternatives is not None:
                ticket.logprobs = self._lockstep.logprobs.get(ticket.number)
            if news and not ticket.cancelled:
                ticket.tell(news)
            if handle.result is not None:
                self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._lockstep.forget(ticket.number)
        if ticket in self._live:
            self._live.remove(ticket)
            with self._count:
                self._admitted -= 1
