"""Progress on standard error: waits without steps to count, and bars that logs can show, too."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain, repeat
from typing import Any

from tqdm import tqdm

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event, also where it reads a program from disk
SILENT = 2.0  # seconds that a wait shows nothing
LINES = (2.0, 8.0, 20.0)  # seconds before each of the first lines where there is no terminal
EVERY = 30.0  # seconds between later lines


def programs_compiled() -> int:
    """Return the number of programs that JAX has compiled or read from disk since the first call in this process."""
    return len(_compilations())


@cache
def _compilations() -> list[float]:
    """Return the list of compile times in seconds, which a listener extends from any thread."""
    import jax  # slow to import

    durations: list[float] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    return durations


@contextmanager
def waiting(title: str, show: bool = True) -> Iterator[None]:
    """Show on standard error what a command does while it takes longer than two seconds.

    On a terminal one line changes every second and is erased at the end. Elsewhere lines follow at growing intervals.

    Args:
        title: what is done.
        show: False: show nothing.
    """
    if not show:
        yield
        return
    ended, begun, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()
    counts = "jax" in sys.modules  # nothing compiles while it is imported
    before = programs_compiled() if counts else 0

    def write(text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text}" if terminal else f"{text}\n" * bool(text))
        sys.stderr.flush()

    def report() -> None:
        times = chain((SILENT,), repeat(1.0)) if terminal else chain(LINES, repeat(EVERY))
        for seconds in times:
            if ended.wait(seconds):
                return
            compiled = programs_compiled() - before if counts else 0
            programs = f", {compiled} program{'s' * (compiled != 1)} compiled" if compiled else ""
            write(f"{title}: {time.monotonic() - begun:.0f} s{programs}")

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if terminal and time.monotonic() - begun > SILENT:
            write("")


class Bar(tqdm):
    """Progress bar. Where standard error is no terminal, it is a line at most every 30 seconds."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        if not sys.stderr.isatty():
            form = "{desc}{n_fmt} of {total_fmt}, {elapsed} (about {remaining} left){postfix}"
            if settings.get("desc"):
                settings["desc"] += ": "
            settings = {"mininterval": EVERY, "maxinterval": EVERY, "bar_format": form, "leave": True, **settings}
        super().__init__(*arguments, **settings)

    @staticmethod
    def status_printer(file: Any) -> Any:
        """Return the function that shows a status."""
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: text.strip() and print(text, file=file, flush=True)
