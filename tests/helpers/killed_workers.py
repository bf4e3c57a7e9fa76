"""Work on a part by a worker of `aspd data build --workers` that is killed. Spawned processes import this module."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from aspd_jax.pipeline.worker_pool import Part


def dies_within_a_result(part: Part, file: Path) -> None:
    """Write a part of a result, and end."""
    file.write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before_a_result(part: Part, file: Path) -> None:
    """End without a result."""
    os.kill(os.getpid(), signal.SIGKILL)
