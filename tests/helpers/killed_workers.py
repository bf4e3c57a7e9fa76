"""Workers of `aspd data build --workers` that are killed. Spawned processes import this module."""

from __future__ import annotations

import os
import signal
import struct
from multiprocessing.connection import Connection
from typing import Any


def dies_within_a_result(pipe: Connection, *_: Any) -> None:
    """Take the place of a worker, and end between the length of a result and its last byte."""
    pipe.recv()
    os.write(pipe.fileno(), struct.pack("!i", 1_000_000) + b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before_any_part(*_: Any) -> None:
    """Take the place of a worker, and end at once."""
    os.kill(os.getpid(), signal.SIGKILL)
