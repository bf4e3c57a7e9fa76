"""Tasks by workers: one in this process, or actors of a Ray cluster. Ray is an optional package.

Workers hold no state that a task needs twice: a task of an actor that has died is given to another actor.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

from aspd_jax.errors import AspdError, RequestError

Task: TypeAlias = tuple[Any, Any]  # hashable key, which messages name, and input or result
MAX_DEATHS = 3  # deaths of actors with the same only task, or while they start, that end the run
CONNECT_SECONDS = 10.0
OBJECT_STORE = 1 << 28  # bytes of shared memory of a local cluster; tasks and results are small


class Worker(Protocol):
    """Processor of several tasks at a time.

    Attributes:
        capacity: maximum number of tasks that it holds.
    """

    capacity: int

    def advance(self, new: Sequence[Task]) -> list[Task]:
        """Take new tasks, work for a while, and return the keys and results of the tasks that have ended."""
        ...


def run_here(worker: Worker, tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield keys and results in the order in which tasks end, in this process."""
    left, held, more = iter(tasks), 0, True
    while more or held:
        new: list[Task] = []
        while more and held + len(new) < worker.capacity:
            task = next(left, None)
            if task is None:
                more = False
            else:
                new.append(task)
        if not new and not held:
            return
        ended = worker.advance(new)
        held += len(new) - len(ended)
        yield from ended


@dataclass(frozen=True)
class RayOptions:
    """Options of a run on Ray.

    Attributes:
        address: address of a cluster (`auto`, `HOST:PORT`, `ray://HOST:PORT`), or `local`: a cluster on this machine
            that ends with the run.
        workers: number of actors; 0: as many as the resources of the cluster suffice for.
        resources: resources of an actor by name, such as CPU, GPU or TPU.
    """

    address: str
    workers: int = 0
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})

    @staticmethod
    def parse_resources(text: str) -> dict[str, float]:
        """Return resources by name from `NAME=N,…`.

        Raises:
            RequestError: the text has another form.
        """
        resources: dict[str, float] = {}
        for part in text.split(","):
            name, _, amount = part.partition("=")
            try:
                resources[name] = float(amount)
            except ValueError:
                resources[name] = -1.0
            if not name or not 0 <= resources[name] < float("inf"):
                raise RequestError(f"--ray-resources: expected names and numbers, such as CPU=1,GPU=1, got {text!r}")
        return resources

    def actor_options(self) -> dict[str, Any]:
        """Return the resources in the form of `ray.remote`."""
        named = {"CPU": "num_cpus", "GPU": "num_gpus"}
        options: dict[str, Any] = {named[name]: n for name, n in self.resources.items() if name in named}
        others = {name: n for name, n in self.resources.items() if name not in named}
        return {"num_cpus": 0} | options | ({"resources": others} if others else {})


def require_ray(option: str = "--ray") -> None:
    """Check that Ray is installed.

    Raises:
        RequestError: it is not.
    """
    if find_spec("ray") is None:
        raise RequestError(f"{option}: expected the package ray, got none. Run: pip install 'aspd-jax[ray]'")


@contextmanager
def cluster(options: RayOptions) -> Iterator[int]:
    """Connect to a cluster, or start a local one, and disconnect; yield the number of workers.

    Raises:
        RequestError: Ray is not installed, or the cluster cannot be reached or has too few resources for one worker.
    """
    require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    local = options.address == "local"
    _check_reachable(options.address)
    settings: dict[str, Any] = {"address": options.address, "log_to_driver": False, "logging_level": logging.WARNING}
    if local:
        cpus = max(os.cpu_count() or 1, int(options.workers * options.resources.get("CPU", 0) + 0.999))
        settings |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"--ray: expected a cluster at {options.address}, got: {reason}") from None
    try:
        total = ray.cluster_resources()
        shares = [int(total.get(name, 0) / n) for name, n in options.resources.items() if n > 0]
        most = min(shares, default=int(total.get("CPU", 1)))
        if most < 1:
            wanted = ",".join(f"{name}={n:g}" for name, n in options.resources.items())
            raise RequestError(f"--ray-resources: expected at most the resources of the cluster, got {wanted}")
        yield options.workers or most
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Check that a server listens at `HOST:PORT`; Ray itself tries for many minutes.

    Raises:
        RequestError: none does.
    """
    host, found, port = address.removeprefix("ray://").rpartition(":")
    if not found:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"--ray: expected the address of a cluster, got {address}: {reason}") from None


class _Actor:
    """Body of an actor. `start` makes the worker, so that the driver receives errors of it unchanged."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make

    def start(self) -> int:
        """Make the worker, and return the number of tasks that it holds at most."""
        self._worker = self._make()
        return self._worker.capacity

    def advance(self, new: Sequence[Task]) -> list[Task]:
        """See `Worker.advance`."""
        return self._worker.advance(new)


@dataclass
class _ActorState:
    """State of an actor in the driver.

    Attributes:
        actor: handle of the actor.
        capacity: maximum number of tasks that it holds; 0: it has not started.
        held: tasks that it holds, by key.
    """

    actor: Any
    capacity: int = 0
    held: dict[Any, Any] = field(default_factory=dict)


class _Pool:
    def __init__(
        self,
        make: Callable[[], Worker],
        tasks: Iterable[Task],
        options: RayOptions,
        workers: int,
        name: Callable[[Any], str],
        urgent: bool,
    ) -> None:
        import ray

        self._ray, self._make, self._workers, self._name, self._urgent = ray, make, workers, name, urgent
        self._class: Any = ray.remote(_Actor).options(max_restarts=0, max_task_retries=0, **options.actor_options())
        self._tasks = iter(tasks)
        self._next: Task | None = next(self._tasks, None)
        self._returned: deque[Task] = deque()  # tasks of actors that have died
        self._deaths: Counter[Any] = (
            Counter()
        )  # deaths by the only task of the actor; None: deaths of actors that were starting
        self._replies: dict[Any, _ActorState] = {}
        self._idle: list[_ActorState] = []

    def run(self) -> Iterator[Task]:
        try:
            for _ in range(self._workers if self._next is not None else 0):
                self._start()
            while self._replies:
                (reply,), _ = self._ray.wait(list(self._replies), num_returns=1)
                state = self._replies.pop(reply)
                yield from self._read(reply, state)
                if self._next is None and not self._returned and not any(state.held for state in self._actors()):
                    return  # all tasks have ended; other actors may still be starting
        finally:
            for state in self._actors():
                self._ray.kill(state.actor)

    def _actors(self) -> list[_ActorState]:
        return [*self._replies.values(), *self._idle]

    def _start(self) -> None:
        state = _ActorState(self._class.remote(self._make))
        self._replies[state.actor.start.remote()] = state

    def _read(self, reply: Any, state: _ActorState) -> Iterator[Task]:
        """Yield the results of a reply, and give its actor new tasks, or replace an actor that has died."""
        try:
            value = self._ray.get(reply)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AspdError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:  # the actor, its node or its reply is lost
            self._ray.kill(state.actor)
            self._replace(state, error)
            return
        if state.capacity:
            for key, result in value:
                del state.held[key]
                yield key, result
        else:
            state.capacity = value
            self._deaths.pop(None, None)
        self._idle.append(state)
        self._feed()

    def _replace(self, state: _ActorState, error: Exception) -> None:
        """Give back the tasks of an actor that has died, and start another.

        Raises:
            RequestError: actors have died too often with one task, or at their start.
        """
        alone = None if not state.capacity else next(iter(state.held)) if len(state.held) == 1 else state
        if alone is not state:
            self._deaths[alone] += 1
            if self._deaths[alone] >= MAX_DEATHS:
                what = "at the start" if alone is None else f"with {self._name(alone)}"
                reason = str(error).splitlines()[0]
                raise RequestError(
                    f"--ray: expected workers that stay alive, got {MAX_DEATHS} deaths {what} ({reason}). "
                    "Results so far are stored; run the same command to resume."
                )
        self._returned.extend(state.held.items())
        self._start()
        self._feed()

    def _feed(self) -> None:
        """Send tasks to idle actors. Returned tasks are sent one at a time, because one of them may be fatal."""
        for state in list(self._idle):
            new: list[Task] = []
            if self._urgent and self._returned and not state.held:
                new.append(self._returned.popleft())
            while not (self._urgent and (new or self._returned)) and self._has_capacity(state, new):
                assert self._next is not None
                new.append(self._next)
                self._next = next(self._tasks, None)
            if not new and not state.held and self._returned:
                new.append(self._returned.popleft())
            if new or state.held:
                self._idle.remove(state)
                state.held |= dict(new)
                self._replies[state.actor.advance.remote(new)] = state

    def _has_capacity(self, state: _ActorState, new: Sequence[Task]) -> bool:
        return self._next is not None and len(state.held) + len(new) < state.capacity


def run_on_ray(
    make: Callable[[], Worker],
    tasks: Iterable[Task],
    options: RayOptions,
    workers: int,
    name: Callable[[Any], str] = "record {}".format,
    urgent: bool = False,
) -> Iterator[Task]:
    """Yield keys and results in the order in which tasks end, on a connected cluster.

    A result that has been yielded is never computed again. When an actor dies, the tasks that it held are given to
    other actors, one at a time.

    Args:
        make: function that makes the worker of an actor, and that can be pickled.
        tasks: keys and inputs; keys are distinct.
        options: options of the run.
        workers: number of actors, see `cluster`.
        name: function from a key to its name in messages.
        urgent: whether tasks of dead actors are repeated before other tasks, not after them.

    Raises:
        RequestError: actors have died too often with one task, or at their start.
        AspdError: error of a worker.
    """
    return _Pool(make, tasks, options, workers, name, urgent).run()
