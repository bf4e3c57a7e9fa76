"""XLA's threads on CPU, each on a core of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax

TASKS = Path("/proc/self/task")  # a folder for each thread of this process
COMPUTES = "tf_XLAEigen"  # the name of those that do the work of a program


def pin_threads() -> int:
    """Bind XLA's threads to a core each, where there are as many of them as cores that this process may use.

    Linux wakes them on one core after a pause, and leaves them there for some time: each waits for the other, in every
    pass (docs/benchmarks.md). All other threads stay free.

    Returns:
        How many were bound: none where programs run elsewhere, or this is not Linux.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return 0
    threads = [int(task.name) for task in TASKS.iterdir() if (task / "comm").read_text().strip() == COMPUTES]
    cores = os.sched_getaffinity(0)
    if len(threads) != len(cores):
        return 0
    for thread, core in zip(sorted(threads), sorted(cores), strict=True):
        os.sched_setaffinity(thread, {core})
    return len(threads)
