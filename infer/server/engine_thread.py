"""Run the engine in a thread, and isolate requests that make it fail."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import jax

from aspd_jax.progress import programs_compiled
from infer.answers.answer import Result, TokenLogprob
from infer.answers.events import Event
from infer.engine import Engine
from infer.lockstep import Lockstep, StepCommand
from infer.request import Request
from infer.server.config import ServerConfig
from infer.server.refusals import Refused

log = logging.getLogger("aspd.server")
FIRST_STEPS = 4  # steps of the first chunk, before the duration of a step is known
MAX_STEPS = 256
REPLACED = "model: the adapter was removed or replaced before the request began"
HEARTBEAT = 5.0  # seconds between commands of an idle engine in several processes, which wait for the next


def engine_error() -> Refused:
    """Return the error of a request on which the engine failed even alone, or that a stop of the server ended."""
    return Refused(500, "the server failed on this request", "server_error")


class Ticket:
    """A request and a queue of its events, which are read on the event loop that made the ticket.

    Args:
        request: the request.
        number: unique number.
        timeout: maximum seconds to the last event.

    Attributes:
        request, number: see above.
        programs: number of compiled programs when the ticket was made.
        logprobs: log probabilities (`Engine.logprobs`), set before `done`; None: not asked for, or they failed.
        events: new events of each chunk; None: the engine failed.
        cancelled: whether the client cancelled the request, whose row is free after the current chunk.
    """

    def __init__(self, request: Request, number: int, timeout: float) -> None:
        self.request, self.number, self.programs = request, number, programs_compiled()
        self.logprobs: list[TokenLogprob] | None = None
        self.events: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._timeout, self._deadline = timeout, self._loop.time() + timeout

    def send(self, events: list[Event] | None) -> None:
        """Queue events; None: the engine failed, and no further events follow. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, events)
        except RuntimeError:  # the loop is closed
            self.cancelled = True

    async def stream(self) -> AsyncIterator[list[Event]]:
        """Yield the new events of each chunk, up to `done`.

        Raises:
            Refused: the time has passed, the engine failed, or the request cannot be answered.
        """
        while True:
            try:
                async with asyncio.timeout_at(self._deadline):
                    events = await self.events.get()
            except TimeoutError:
                raise Refused(504, f"no answer within {self._timeout:g} s", "timeout", "timeout") from None
            if events is None:
                raise engine_error()
            if (result := events[-1].result) is not None:
                if result.error:
                    raise Refused(400, result.error)
                if self.logprobs is None and self.request.alternatives is not None:
                    raise engine_error()
            yield events
            if result is not None:
                return

    async def result(self) -> Result:
        """Return the result.

        Raises:
            Refused: see `stream`.
        """
        results = [events[-1].result async for events in self.stream()]
        assert results[-1] is not None
        return results[-1]


class AdapterChange(NamedTuple):
    """Load or removal of an adapter, to be done by the engine's thread.

    Attributes:
        name: name of the adapter.
        folder: folder of the adapter; empty: remove it.
        done: future of the reason of a refusal; empty: the change was made.
    """

    name: str
    folder: str
    done: Future[str]

    def resolve(self, refused: str) -> None:
        """Set the result of `done`, unless the client has disconnected."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(refused)


class EngineThread:
    """Thread that runs an engine, with a queue of requests.

    Args:
        engine: the engine.
        config: limits of the server.
        on_chunk: function that is called with the seconds and the steps of every chunk.
        on_answer: function that is called with the mode and the result of every answer, cancelled ones included.

    Attributes:
        engine: the engine.
        ready: event that is set after warm-up.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        on_chunk: Callable[[float, int], None],
        on_answer: Callable[[str, Result], None],
    ) -> None:
        self.engine, self._config = engine, config
        self.ready = threading.Event()
        self._on_chunk, self._on_answer = on_chunk, on_answer
        self._lockstep = Lockstep(engine)
        self._several = jax.process_count() > 1
        self._numbers = count()
        self._inbox: queue.SimpleQueue[Ticket | AdapterChange | None] = queue.SimpleQueue()
        self._live: list[Ticket] = []
        self._admitted = 0  # number of tickets that have not ended, counted at submission
        self._count = threading.Lock()
        self._steps = FIRST_STEPS
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; requests under way fail."""
        self._inbox.put(None)
        self._thread.join(timeout=self._config.drain)

    @property
    def occupancy(self) -> tuple[int, int]:
        """Return the number of running and of waiting requests."""
        running = min(self._admitted, self.engine.max_batch)
        return running, self._admitted - running

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue requests, all or none.

        Raises:
            Refused: too many requests wait.
        """
        with self._count:
            if self._admitted + len(requests) > self.engine.max_batch + self._config.max_waiting:
                wait = 1 + (self._admitted - self.engine.max_batch) // self.engine.max_batch
                message, headers = f"too many requests wait; try again in {wait} s", {"Retry-After": str(wait)}
                raise Refused(429, message, "rate_limit_exceeded", "queue_full", headers=headers)
            self._admitted += len(requests)
        tickets = [Ticket(request, next(self._numbers), self._config.timeout) for request in requests]
        for ticket in tickets:
            self._inbox.put(ticket)
        return tickets

    async def change_adapter(self, name: str, folder: str) -> str:
        """Load or remove an adapter (`AdapterChange`); return why that was refused, empty if it was not."""
        change = AdapterChange(name, folder, Future())
        self._inbox.put(change)
        return await asyncio.wrap_future(change.done)

    def _run(self) -> None:
        try:
            if self._config.warm_up != "none":
                alone, checks = self._config.warm_up == "first", self._config.fields == "exact"
                log.info("warmed up in %.1f s", self.engine.warm_up(alone, checks))
            self.ready.set()
            while self._run_command():
                pass
            self._lockstep.end()
        except BaseException:
            log.exception("the engine's thread ends")
            raise
        finally:
            self.ready.clear()
            while not self._inbox.empty():
                left = self._inbox.get()
                if isinstance(left, AdapterChange):
                    left.resolve("the server ends")
                elif left is not None:
                    self._live.append(left)
            for ticket in self._live:
                ticket.send(None)

    def _run_command(self) -> bool:
        """Take new requests and adapter changes, run a chunk, and send events; return False to stop."""
        new: list[Ticket] = []
        change: AdapterChange | None = None
        while change is None and (not (self._live or new) or not self._inbox.empty()):
            try:
                one = self._inbox.get(timeout=HEARTBEAT if self._several else None)
            except queue.Empty:  # other processes need a command
                break
            if one is None:
                self._live += new
                return False
            if isinstance(one, AdapterChange):
                change = one
            else:
                new.append(one)
        self._step(new, change)
        self._send_events()
        return True

    def _step(self, new: list[Ticket], change: AdapterChange | None) -> None:
        self._live += new
        submitted = tuple((ticket.number, ticket.request) for ticket in new)
        cancelled = tuple(ticket.number for ticket in self._live if ticket.cancelled)
        adapter = (change.name, change.folder) if change else ("", "")
        try:
            try:
                self._lockstep.lead(StepCommand(submitted, adapter, cancelled, self._steps))
            finally:
                if change is not None:
                    change.resolve(self._lockstep.refused)
        except Exception:
            if self._several:  # the other processes are within the failed chunk and cannot be recovered
                raise
            log.exception("the engine failed; requests under way are tried one by one")
            for ticket in new:
                if ticket.number not in self._lockstep.handles:  # the engine failed before it had the request
                    self._forget(ticket)
                    ticket.send(None)
            self._retry_failed()
            return
        steps, seconds = self.engine.last_chunk
        if steps > 0:
            if steps >= self._steps or seconds > self._config.chunk:  # chunks that end early say little about the time
                in_time = round(self._config.chunk * steps / seconds)
                self._steps = max(1, min(MAX_STEPS, in_time, 2 * self._steps))
            self._on_chunk(seconds, steps)

    def _retry_failed(self) -> None:
        """Retry the requests that were under way one at a time; those that fail alone end with an error."""
        for ticket in list(self._live):
            handle = self._lockstep.handles.get(ticket.number)
            if handle is None or not handle.failed:  # it has ended, or was not under way
                continue
            self.engine.retry_alone(handle)
            try:
                while handle.result is None:
                    cancelled = (ticket.number,) if ticket.cancelled else ()
                    self._lockstep.do(StepCommand(cancelled=cancelled, steps=self._steps))
                    self._send_events()
            except Exception:
                log.exception("a request breaks the engine")
                self._forget(ticket)
                ticket.send(None)

    def _send_events(self) -> None:
        for ticket in list(self._live):
            handle = self._lockstep.handles[ticket.number]
            events, result = handle.poll(), handle.result
            ticket.logprobs = self._lockstep.logprobs.get(ticket.number)
            if result is not None and handle.cancelled and not ticket.cancelled:
                result = replace(result, finish_reason="error", error=REPLACED)
                events = [Event("done", result=result)]
            if result is not None:
                self._on_answer(ticket.request.mode, result)
            if events and not ticket.cancelled:
                ticket.send(events)
            if handle.result is not None:
                self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._lockstep.forget(ticket.number)
        if ticket in self._live:
            self._live.remove(ticket)
            with self._count:
                self._admitted -= 1
