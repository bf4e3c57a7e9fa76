"""XLA's threads on CPU, each on a core of its own."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

import jax

log = logging.getLogger("aspd.server")
TASKS = Path("/proc/self/task")  # a folder for each thread of this process
COMPUTES = "tf_XLAEigen"  # the name of those that do the work of a program


def pin_threads() -> int:
    """Bind XLA's threads to a core each, where there are as many of them as cores that this process may use.

    Linux wakes them on one core after a pause, and leaves them there for some time: each waits for the other, in every
    pass (docs/benchmarks.md). All other threads stay free.

    Returns:
        How many were bound: none where programs run elsewhere, or the system does not let a process choose.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return 0
    threads: list[int] = []
    for task in TASKS.iterdir():
        with suppress(FileNotFoundError):  # it has just ended
            if (task / "comm").read_text().strip() == COMPUTES:
                threads.append(int(task.name))
    cores = os.sched_getaffinity(0)
    if len(threads) != len(cores):
        return 0
    try:
        for thread, core in zip(sorted(threads), sorted(cores), strict=True):
            os.sched_setaffinity(thread, {core})
    except OSError as error:
        log.warning("XLA's threads share cores: %s", error)
        for thread in threads:  # one that may not leave its core, while another may come to it, is worse than none
            with suppress(OSError):
                os.sched_setaffinity(thread, cores)
        return 0
    log.info("%d threads of XLA's are bound to a core each (--no-pin-threads: none)", len(threads))
    return len(threads)
