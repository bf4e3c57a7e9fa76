"""Time of this machine's processors that its host gives to others: while much of it goes, figures say little."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
STOLEN = 7  # of user, nice, system, idle, iowait, irq, softirq, steal: see proc_stat(5)
USED = (0, 1, 2, 5, 6)


class ProcessorTime(NamedTuple):
    """Of all processors, since the machine was started; clock ticks.

    Attributes:
        used: for what runs here.
        stolen: in which something would have run here.
    """

    used: int
    stolen: int


def processor_time(stat: Path = STAT) -> ProcessorTime | None:
    """What Linux has counted so far; None: it does not tell, as in some sandboxes, or this is not Linux."""
    if not stat.exists():
        return None
    ticks = [int(count) for count in stat.read_text().partition("\n")[0].split()[1:]]
    if len(ticks) <= STOLEN or not any(ticks):
        return None
    return ProcessorTime(sum(ticks[kind] for kind in USED), ticks[STOLEN])


def stolen_share(before: ProcessorTime | None, after: ProcessorTime | None) -> float | None:
    """Share of the time for which something wanted to run, 0 to 1; None: not known."""
    if before is None or after is None:
        return None
    used, stolen = after.used - before.used, after.stolen - before.stolen
    return stolen / max(1, used + stolen)
