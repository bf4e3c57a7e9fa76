"""Broadcast helpers for several processes that hold one model."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from aspd_jax.sizes import next_power

FIRST_BYTES = 1024  # size of the first message; longer data needs a second message


def agreed(values: np.ndarray) -> np.ndarray:
    """Return the array of process 0 in all processes.

    All processes must call it, with arrays of equal shape and dtype.
    """
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def broadcast(data: bytes = b"") -> bytes:
    """Return the bytes of process 0 in all processes.

    All processes must call it; the data of other processes is ignored.
    """
    if jax.process_count() == 1:
        return data
    head = np.zeros(FIRST_BYTES, np.uint8)
    head[:4] = np.frombuffer(np.uint32(len(data)).tobytes(), np.uint8)
    first = FIRST_BYTES - 4
    head[4 : 4 + len(data[:first])] = np.frombuffer(data[:first], np.uint8)
    head = agreed(head).astype(np.uint8)
    size = int(np.frombuffer(head[:4].tobytes(), np.uint32)[0])
    begun = head[4 : 4 + size].tobytes()
    if size <= first:
        return begun
    # Sizes are rounded to powers of two, so that few programs are compiled.
    rest = np.zeros(next_power(size - first), np.uint8)
    rest[: len(data[first:])] = np.frombuffer(data[first:], np.uint8)
    return begun + agreed(rest).astype(np.uint8)[: size - first].tobytes()
