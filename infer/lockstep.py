"""One engine in one process or in several: what changes it is done in all of them, in the same order.

A computation over the devices of several processes has to be started by every one of them. So the first process, which
has the requests, writes down as a `StepCommand` what it is about to do; the others read it, and do the same. Whatever
an engine decides besides follows from what it was asked and from what is on the devices, so all decide alike.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

import jax

from aspd_jax.errors import AspdError
from aspd_jax.processes import broadcast
from infer.answers.logprobs import TokenLogprob, token_logprobs
from infer.engine import Engine
from infer.request import Job, SamplingParams
from infer.scheduling.handle import Handle, Stream

log = logging.getLogger("aspd.server")


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        number: that no other request has.
        job: what is asked.
        stream: how its answer is read while it grows (`infer.scheduling.handle.Handle`).
        alternatives: how many likeliest tokens its log probabilities come with; None: it has none.
        echo: they begin with those of the prompt.
    """

    number: int
    job: Job
    stream: Stream
    alternatives: int | None
    echo: bool = False


@dataclass(frozen=True)
class StepCommand:
    """What is done to an engine between two looks at it, in this order.

    Attributes:
        asked: new requests.
        adapter: name and folder of an adapter that later requests may ask for; without a folder: may no longer; without
            a name: nothing changes. All processes have to see the folder.
        cancelled: numbers of requests that are given up.
        steps: most passes of the chunk.
        last: there will be no further command.
    """

    asked: tuple[Asked, ...] = ()
    adapter: tuple[str, str] = ("", "")
    cancelled: tuple[int, ...] = ()
    steps: int = 1
    last: bool = False

    def to_bytes(self) -> bytes:
        """For another process."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepCommand:
        """What another process wrote."""
        fields = json.loads(data)
        fields["asked"] = map(_asked, fields["asked"])
        return cls(**fields | {name: tuple(fields[name]) for name in ("asked", "adapter", "cancelled")})


def _asked(fields: dict[str, Any]) -> Asked:
    job = fields["job"]
    job |= {"prompt": tuple(job["prompt"]), "params": SamplingParams(**job["params"])}
    return Asked(**fields | {"job": Job(**job)})


class Lockstep:
    """Does turns.

    Attributes:
        handles: requests under way, by number.
        logprobs: of requests that have ended and want them, until somebody takes them; None: they failed.
        refused: why the last command changed no adapter; empty: it did, or was not asked to.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.handles: dict[int, Handle] = {}
        self.logprobs: dict[int, list[TokenLogprob] | None] = {}
        self.refused = ""
        self._wanted: dict[int, Asked] = {}  # requests whose log probabilities are due

    def lead(self, command: StepCommand) -> None:
        """Obey a command, here and in the other processes."""
        if jax.process_count() > 1:
            broadcast(command.to_bytes())
        self.do(command)

    def end(self) -> None:
        """Let the other processes end."""
        if jax.process_count() > 1:
            broadcast(StepCommand(last=True).to_bytes())

    def follow(self) -> None:
        """Do the turns of the first process, until its last."""
        while not (command := StepCommand.from_bytes(broadcast())).last:
            self.do(command)
            self.logprobs.clear()
            self.handles = {number: handle for number, handle in self.handles.items() if handle.result is None}

    def do(self, command: StepCommand) -> None:
        """Obey a command here."""
        scheduler = self.engine.scheduler
        for asked in command.asked:
            handle = self.handles[asked.number] = scheduler.submit(asked.job, stream=asked.stream)
            if not self.engine.adapters.there(asked.job.adapter):  # it went between the check and now
                scheduler.cancel(handle)
            if asked.alternatives is not None:
                self._wanted[asked.number] = asked
        self._change(*command.adapter)  # after the requests that have asked for what goes
        for number in command.cancelled:
            scheduler.cancel(self.handles[number])
            self._wanted.pop(number, None)
        self.engine.step(command.steps)
        for number in [number for number in self._wanted if self.handles[number].result is not None]:
            self.logprobs[number] = self._of(self.handles[number], self._wanted.pop(number))

    def _change(self, name: str, folder: str) -> None:
        self.refused = ""
        try:
            if folder:
                self.engine.adapters.put(name, folder)
            elif name:
                self.engine.adapters.remove(name)
        except AspdError as error:
            self.refused = str(error)

    def forget(self, number: int) -> None:
        """Nobody will ask for this request again."""
        self.handles.pop(number, None)
        self.logprobs.pop(number, None)
        self._wanted.pop(number, None)

    def _of(self, handle: Handle, asked: Asked) -> list[TokenLogprob] | None:
        assert handle.result is not None and asked.alternatives is not None
        try:
            adapter = self.engine.adapters.place(handle.job.adapter)
            return token_logprobs(
                self.engine.lm, self.engine.config, handle.result, asked.alternatives, adapter, asked.echo
            )
        except Exception:
            log.exception("log probabilities of an answer")
            return None
