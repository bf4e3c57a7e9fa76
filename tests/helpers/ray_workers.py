"""Workers for tests on a Ray cluster, and the processes of such a cluster. Actors import this module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aspd_jax.errors import RequestError
from aspd_jax.ray_pool import Task, Worker


class Logged:
    """A worker that notes its process and its new tasks before it works on them.

    Args:
        worker: the worker.
        log: file of the notes.
        fatal: key of a task; when it comes for the first time, the process kills itself before it returns results.
    """

    def __init__(self, worker: Worker, log: Path, fatal: Any = None) -> None:
        self.worker, self.log, self.fatal, self.capacity = worker, log, fatal, worker.capacity

    def advance(self, new: Sequence[Task]) -> list[Task]:
        with self.log.open("a") as file:
            file.writelines(f"{os.getpid()} {key!r}\n" for key, _ in new)
        ended = self.worker.advance(new)
        if any(key == self.fatal for key, _ in new) and made(self.log).count(repr(self.fatal)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ended


class Squares:
    """Squares numbers, one with each call; it kills its process at a number, once or always.

    Args:
        seconds: duration of a call; all actors have started before the tasks are done.
        fatal: number at which it dies; -1: none.
        mark: file that exists after the first death; None: it dies each time.
        refused: number that it refuses.
    """

    capacity = 3

    def __init__(self, seconds: float = 0.2, fatal: int = -1, mark: Path | None = None, refused: int = -1) -> None:
        self.seconds, self.fatal, self.mark, self.refused = seconds, fatal, mark, refused
        self.held: list[Task] = []

    def advance(self, new: Sequence[Task]) -> list[Task]:
        self.held += new
        if not self.held:
            return []
        key, number = self.held.pop(0)
        time.sleep(self.seconds)
        if number == self.fatal and not (self.mark and self.mark.exists()):
            if self.mark:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.refused:
            raise RequestError(f"{number}: expected another number, got {number}.")
        return [(key, number * number)]


def make_squares(log: Path, **options: Any) -> Logged:
    """Return a logged worker."""
    return Logged(Squares(**options), log)


def made(log: Path) -> list[str]:
    """Return the keys that workers began, in order."""
    return [line.partition(" ")[2] for line in log.read_text().splitlines()]


def descendants(process: int) -> dict[int, str]:
    """Return the command lines of all processes below one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    left = [process]
    while left:
        for child in parents.get(left.pop(), []):
            left.append(child)
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def ended(lines: Mapping[int, str], seconds: float = 60) -> bool:
    """Wait for the processes of `descendants` to end, but for Ray's idle agents; zombies have ended."""
    processes = [process for process, line in lines.items() if "agent" not in line.lower()]
    end = time.monotonic() + seconds

    def alive(process: int) -> bool:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    while any(map(alive, processes)):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def make_logged(make: Callable[[], Worker], log: Path, fatal: Any = None) -> Logged:
    """Return a worker that another function makes, logged."""
    return Logged(make(), log, fatal)
