"""Compiling programs beside the passes, or between requests: what is not there yet is done in a larger one meanwhile.

B sequences.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from infer.programs import WARM_SHARE, crowded
from infer.state import DecodeState, Protocol
from infer.step import Extent, Least, Limits, run
from infer.workspace import Workspace, compile_copies, workspace_shape

log = logging.getLogger(__name__)

ENOUGH_MISSES = 16  # runs in larger programs, beside requests; compiling takes as long as some thousand passes on CPU
NO_PASS = Limits(np.int32(0), Least(np.int32(0), np.int32(0)), np.bool_(False))


class Program(NamedTuple):
    """A program of passes: what of `run` is fixed when it is compiled, beside the model and the shape of its state."""

    within: Extent
    greedy: bool
    drafting: bool


class Compiler:
    """Which programs are there, and a thread that compiles those which were missed, the most missed first.

    Args:
        beside: whether there is such a thread; without it, what is not there is compiled when it is run, as JAX does.
    """

    def __init__(self, lm: LanguageModel, protocol: Protocol, beside: bool) -> None:
        self._lm, self._protocol, self._beside = lm, protocol, beside
        self._there: set[Program] = set()
        self._missed: Counter[Program] = Counter()
        self._failed: set[Program] = set()
        self._shapes: tuple[Any, dict[Extent, Workspace | None]] = (None, {})
        self._resting = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def note(self, program: Program) -> None:
        """It has been compiled."""
        with self._lock:
            self._there.add(program)

    def forget(self) -> None:
        """All programs are gone."""
        with self._lock:
            self._there.clear()
            self._missed.clear()
            self._failed.clear()

    def pick(self, best: Program, widths: np.ndarray, slots: int, state: DecodeState) -> Extent:
        """Where a pass runs: in the best program, if it is there, or nothing that is there holds the pass; else in the
        smallest that does, while the best is compiled.

        Args:
            widths: [B], tokens that each sequence feeds.
            slots: in use after the pass.
            state: of which only shapes count.
        """
        if not self._beside:
            return best.within
        with self._lock:
            others = [of.within for of in self._there if of[1:] == best[1:] and of.within.holds(widths, slots)]
            if best in self._there or not others:
                self._there.add(best)
                return best.within
            if best not in self._failed:
                self._miss(best, state)
        return min(others, key=lambda within: (within.places, within.slots))

    def rest(self, resting: bool) -> None:
        """Take note whether there is anything to do beside: if not, whatever was missed is compiled, however rarely."""
        with self._lock:
            self._resting = resting
            self._start_thread()

    def wait(self) -> None:
        """Until nothing is being compiled."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _miss(self, program: Program, state: DecodeState) -> None:
        """Count it as missed, and have it compiled if that was often enough; the lock is held."""
        like, workspaces = self._shapes
        if like is None:
            like = jax.tree.map(self._shape, state)
            self._shapes = like, workspaces
        within = program.within
        if within not in workspaces:
            workspaces[within] = workspace_shape(like, self._protocol, within.rows, within.slots)
        self._missed[program] += 1
        self._start_thread()

    def _next(self) -> Program | None:
        """What has been missed most, and often enough; the lock is held."""
        program, misses = max(self._missed.items(), key=itemgetter(1), default=(None, 0))
        return program if misses >= (1 if self._resting else ENOUGH_MISSES) else None

    def _start_thread(self) -> None:
        """If there is something for it to do; the lock is held."""
        if self._next() is not None and (self._thread is None or not self._thread.is_alive()):
            # No daemon, whoever asks: a process that ends while XLA compiles would crash.
            self._thread = threading.Thread(target=self._compile, name="compiler", daemon=False)
            self._thread.start()

    def _shape(self, array: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = None if self._protocol.mesh is None else array.sharding
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def _compile(self) -> None:
        """One after another, until none is missed often enough, or the process ends."""
        while threading.main_thread().is_alive():
            with self._lock:
                program = self._next()
                if program is None:
                    self._thread = None
                    return
                state, workspaces = self._shapes
            compiled = not crowded(WARM_SHARE) and self._try(program, state, workspaces[program.within])
            with self._lock:
                self._missed.pop(program, None)
                (self._there if compiled else self._failed).add(program)

    def _try(self, program: Program, state: Any, workspace: Workspace | None) -> bool:
        within, greedy, drafting = program
        args = (self._lm.params, state, workspace, NO_PASS, self._protocol, within, greedy, None, drafting)
        try:
            run.lower(*args).compile()
            if workspace is not None:
                compile_copies(state, workspace)
        except Exception:
            log.exception("a program does not compile; passes go on in larger ones: %s", program)
            return False
        return True
