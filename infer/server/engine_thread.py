"""Run the engine in a thread, and isolate requests that make it fail."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import jax

from infer.answers.answer import Result, TokenLogprob
from infer.answers.events import Event
from infer.engine import Engine
from infer.lockstep import Lockstep, StepCommand
from infer.request import Request
from infer.scheduling.handle import Handle
from infer.server.config import ServerConfig

log = logging.getLogger("aspd.server")
FIRST_STEPS = 4  # steps of the first chunk, before the duration of a step is known
MAX_STEPS = 256
REPLACED = "model: the adapter was removed or replaced before the request began"
HEARTBEAT = 5.0  # seconds between commands of an idle engine in several processes, which wait for the next


class Busy(Exception):
    """Too many requests wait; `seconds`: time after which a client may try again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests wait; try again in {seconds} s")
        self.seconds = seconds


class Broken(Exception):
    """The engine failed on this request even alone, or the server stopped."""


class Ticket:
    """Handle of a request and a queue of its events, which are read on the event loop that made the ticket.

    Attributes:
        request: the request.
        number: unique number, once the engine's thread has the request.
        handle: handle of the request, once it is submitted.
        logprobs: log probabilities (`Engine.logprobs`), set before `done`; None: not asked for, or they failed.
        events: new events of each chunk; None: the engine failed.
        cancelled: whether the client cancelled the request.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.number = request, 0
        self.handle: Handle | None = None
        self.logprobs: list[TokenLogprob] | None = None
        self.events: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self.cancelled = False
        self._loop = asyncio.get_running_loop()

    def send(self, events: list[Event] | None) -> None:
        """Queue events; None: the engine failed, and no further events follow. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, events)
        except RuntimeError:  # the loop is closed
            self.cancelled = True

    async def stream(self) -> AsyncIterator[list[Event]]:
        """Yield the new events of each chunk, up to `done`.

        Raises:
            Broken: the engine failed.
        """
        while True:
            events = await self.events.get()
            if events is None:
                raise Broken
            yield events
            if events[-1].kind == "done":
                return


class AdapterChange:
    """Load or removal of an adapter, to be done by the engine's thread.

    Args:
        name: name of the adapter.
        folder: folder of the adapter; empty: remove it.

    Attributes:
        done: future of the reason of a refusal; empty: the change was made.
    """

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, folder
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[str] = self._loop.create_future()

    def resolve(self, refused: str) -> None:
        """Set the result of `done`. May be called from any thread."""

        def resolve() -> None:
            if not self.done.done():
                self.done.set_result(refused)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(resolve)


class Occupancy(NamedTuple):
    """Number of running and of waiting requests."""

    running: int
    waiting: int


class EngineThread:
    """Thread that runs an engine, with a queue of requests.

    Args:
        engine: the engine.
        config: limits of the server.
        on_chunk: function that is called with the seconds and the steps of every chunk; None: none.
        on_answer: function that is called with the mode and the result of every answer, cancelled ones included; None:
            none.

    Attributes:
        engine: the engine.
        ready: event that is set after warm-up.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        on_chunk: Callable[[float, int], None] | None = None,
        on_answer: Callable[[str, Result], None] | None = None,
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
    def occupancy(self) -> Occupancy:
        """Return the number of running and of waiting requests."""
        running = min(self._admitted, self.engine.max_batch)
        return Occupancy(running, self._admitted - running)

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue requests, all or none.

        Raises:
            Busy: too many requests wait.
        """
        with self._count:
            if self._admitted + len(requests) > self.engine.max_batch + self._config.max_waiting:
                raise Busy(1 + (self._admitted - self.engine.max_batch) // self.engine.max_batch)
            self._admitted += len(requests)
        tickets = [Ticket(request) for request in requests]
        for ticket in tickets:
            self._inbox.put(ticket)
        return tickets

    async def change_adapter(self, name: str, folder: str) -> str:
        """Load or remove an adapter (`AdapterChange`); return why that was refused, empty if it was not."""
        change = AdapterChange(name, folder)
        self._inbox.put(change)
        return await change.done

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request; its row is free after the current chunk."""
        ticket.cancelled = True

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
                one = self._next()
            except queue.Empty:
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

    def _next(self) -> Ticket | AdapterChange | None:
        """Wait for the next request or adapter change; None: stop.

        Raises:
            queue.Empty: other processes need a command.
        """
        return self._inbox.get(timeout=HEARTBEAT if self._several else None)

    def _step(self, new: list[Ticket], change: AdapterChange | None) -> None:
        for ticket in new:
            ticket.number = next(self._numbers)
        self._live += new
        submitted = tuple((ticket.number, ticket.request) for ticket in new)
        cancelled = tuple(ticket.number for ticket in self._live if ticket.cancelled)
        adapter = (change.name, change.folder) if change else ("", "")
        try:
            try:
                self._lockstep.lead(StepCommand(submitted, adapter, cancelled, self._steps))
            finally:
                for ticket in new:
                    ticket.handle = self._lockstep.handles.get(ticket.number)
                if change is not None:
                    change.resolve(self._lockstep.refused)
        except Exception:
            if self._several:  # the other processes are within the failed chunk and cannot be recovered
                raise
            log.exception("the engine failed; requests under way are tried one by one")
            for ticket in new:
                if ticket.handle is None:  # the engine failed before it had the request
                    self._forget(ticket)
                    ticket.send(None)
            self._retry_failed()
            return
        steps, seconds = self.engine.last_chunk
        if steps > 0:
            if steps >= self._steps or seconds > self._config.chunk:  # chunks that end early say little about the time
                in_time = round(self._config.chunk * steps / seconds)
                self._steps = max(1, min(MAX_STEPS, in_time, 2 * self._steps))
            if self._on_chunk is not None:
                self._on_chunk(seconds, steps)

    def _retry_failed(self) -> None:
        """Retry the requests that were under way one at a time; those that fail alone end with an error."""
        for ticket in list(self._live):
            handle = ticket.handle
            if handle is None or not handle.failed:
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
            handle = ticket.handle
            assert handle is not None
            events, result = handle.poll(), handle.result
            if result is not None and ticket.request.alternatives is not None:
                ticket.logprobs = self._lockstep.logprobs.get(ticket.number)
            if result is not None and handle.cancelled and not ticket.cancelled:
                result = replace(result, finish_reason="error", error=REPLACED)
                events = [Event("done", result=result)]
            if result is not None and self._on_answer is not None:
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
