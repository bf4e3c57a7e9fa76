"""Lockstep execution of an engine in one process or in several.

A computation over the devices of several processes has to be started by every one of them. Process 0 receives the
requests and broadcasts each change as a `StepCommand`; all processes execute the commands in the same order. Scheduling
decisions follow from the commands and from the state on the devices, so all processes decide alike.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from aspd_jax.errors import AspdError
from aspd_jax.processes import broadcast
from infer.answers.answer import Result, TokenLogprob
from infer.engine import Engine
from infer.request import Request, SamplingParams, ScoredBranch
from infer.scheduling.handle import Handle

log = logging.getLogger("aspd.server")


@dataclass(frozen=True)
class StepCommand:
    """Changes of an engine and the chunk that follows them, in this order.

    Attributes:
        submitted: new requests, each with a unique number.
        adapter: name and folder of an adapter to load, which all processes have to see. Empty folder: the adapter is
            removed; empty name: nothing changes.
        cancelled: numbers of requests to cancel.
        steps: maximum steps of the chunk.
        last: no further command follows.
    """

    submitted: tuple[tuple[int, Request], ...] = ()
    adapter: tuple[str, str] = ("", "")
    cancelled: tuple[int, ...] = ()
    steps: int = 1
    last: bool = False

    def to_bytes(self) -> bytes:
        """Encode the command for another process."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepCommand:
        """Decode the command of another process."""
        fields = json.loads(data)
        fields["submitted"] = [(number, _request(request)) for number, request in fields["submitted"]]
        return cls(**fields | {name: tuple(fields[name]) for name in ("submitted", "adapter", "cancelled")})


def _request(fields: dict[str, Any]) -> Request:
    sequences: dict[str, Any] = {name: tuple(fields[name]) for name in ("prompt", "messages")}
    sequences["scored"] = tuple(ScoredBranch(*map(tuple, branch)) for branch in fields["scored"])
    return Request(**fields | sequences | {"params": SamplingParams(**fields["params"])})


class Lockstep:
    """Executor of commands on an engine.

    Attributes:
        handles: handles of requests, by number, until `forget`.
        logprobs: log probabilities of ended requests that asked for them, by number, until `forget`; None: they failed.
        refused: reason why the last command changed no adapter; empty: no error.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.handles: dict[int, Handle] = {}
        self.logprobs: dict[int, list[TokenLogprob] | None] = {}
        self.refused = ""

    def lead(self, command: StepCommand) -> None:
        """Execute a command in all processes."""
        if jax.process_count() > 1:
            broadcast(command.to_bytes())
        self.do(command)

    def end(self) -> None:
        """End the other processes."""
        if jax.process_count() > 1:
            broadcast(StepCommand(last=True).to_bytes())

    def follow(self) -> None:
        """Execute the commands of process 0 until the last."""
        while not (command := StepCommand.from_bytes(broadcast())).last:
            self.do(command)
            self.logprobs.clear()
            self.handles = {number: handle for number, handle in self.handles.items() if handle.result is None}

    def do(self, command: StepCommand) -> None:
        """Execute a command in this process."""
        self.refused = "the engine failed before the change was made"
        for number, request in command.submitted:
            loaded = self.engine.adapters.loaded(request.adapter)  # false: replaced since the request was checked
            handle = self.engine.submit_checked(request if loaded else replace(request, adapter=0))
            self.handles[number] = handle
            if not loaded:
                handle.cancel()
        self._change_adapter(*command.adapter)  # after the requests that use an adapter that is removed
        for number in command.cancelled:
            self.handles[number].cancel()
        self.engine.step(command.steps)
        for number, handle in self.handles.items():
            asked = handle.request.alternatives is not None and not handle.cancelled
            if asked and number not in self.logprobs and handle.result is not None:
                self.logprobs[number] = self._logprobs(handle.request, handle.result)

    def _change_adapter(self, name: str, folder: str) -> None:
        refused = ""
        try:
            if folder:
                self.engine.adapters.put(name, folder)
            elif name:
                self.engine.adapters.remove(name)
        except (AspdError, OSError) as error:  # the other processes may not find what this one does
            refused = str(error)
        self.refused = refused

    def forget(self, number: int) -> None:
        """Drop a request."""
        self.handles.pop(number, None)
        self.logprobs.pop(number, None)

    def _logprobs(self, request: Request, result: Result) -> list[TokenLogprob] | None:
        try:
            return self.engine.logprobs(request, result)
        except Exception:
            log.exception("log probabilities of an answer")
            return None
