"""Runs of passes: in which program, on which copy of keys and values, with or without drafts.

B rows of the state.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import NamedTuple

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from infer.compiler import Compiler, Program
from infer.feed import widest_feed
from infer.packed import Packed
from infer.policy import DraftControl, StepCost
from infer.programs import FULL_SHARE, Programs, crowded, programs_compiled
from infer.state import DecodeState, Protocol
from infer.step import Extent, Limits, Report, Script, run
from infer.workspace import Desk

log = logging.getLogger(__name__)

STEPS_IN_LARGER = 16  # passes in a larger program between two looks whether the best is there


class Run(NamedTuple):
    """Passes on their way.

    Attributes:
        steps: at most so many.
        within: their program.
        drafting: whether they feed drafts.
        before: what was known of the state that they began with.
        after: what they report.
        state: what they leave.
        since: when they were started, by `time.perf_counter`.
    """

    steps: int
    within: Extent
    drafting: bool
    before: Report
    after: Packed[Report]
    state: DecodeState
    since: float


class Passes:
    """Starts runs of passes, and learns from what they report.

    Args:
        rows: B.
        capacity: slots of a row.
        compile_beside: see `Engine`.

    Attributes:
        programs: of the engine.
        compiler: which of them are there.
        desk: where keys and values lie that passes work on.
        drafts: whether passes feed drafts.
    """

    def __init__(
        self, lm: LanguageModel, protocol: Protocol, rows: int, capacity: int, compile_beside: bool = False
    ) -> None:
        self._lm, self._protocol = lm, protocol
        self.programs = Programs(rows, capacity, widest_feed(protocol))
        self.compiler = Compiler(lm, protocol, compile_beside)
        self.desk = Desk(protocol)
        self.drafts = DraftControl(protocol.draft_tokens)
        self._compiled = -1  # programs, when it was last looked whether there is room for more
        self._forgetting_helps = True

    def start(
        self, state: DecodeState, told: Report, steps: int, join: bool, greedy: bool, stops: bool, script: Script | None
    ) -> Run:
        """Start passes, and do not wait for them; `state` is given away.

        Args:
            told: of the state; some sequence feeds something.
            steps: at most so many passes. There are fewer where the next needs another program.
            join: end when a sequence finishes.
            greedy: whether no sequence samples.
            stops: a pass takes one token of a stretch, because stop strings are looked for: none may follow such a
                string.
            script: see `choose`.
        """
        since = time.perf_counter()
        drafting = self.drafts.on and not stops
        steps, slots = min(steps, self.drafts.passes), int(told.slots)
        best, least = self.programs.choose(told.widths, slots, keep=drafting)
        within = best
        if script is None:
            within = self.compiler.pick(Program(best, greedy, drafting), told.widths, slots, state)
        if within != best:
            steps = min(steps, STEPS_IN_LARGER)
        limits = Limits(np.int32(steps), least, np.bool_(join))
        workspace = self.desk.take(state, within.rows, within.slots, told.finish)
        state, workspace, after = run(
            self._lm.params, state, workspace, limits, self._protocol, within, greedy, script, drafting
        )
        self.desk.put(workspace)
        return Run(steps, within, drafting, told, after, state, since)

    def end(self, started: Run, cost: StepCost | None) -> tuple[int, Report]:
        """Wait for passes: how many there were, and what they report; `cost`: of a pass, which drafts are judged by."""
        before, after = started.before, started.after.read()
        done = started.steps - int(after.left)
        if not started.drafting:
            self.drafts.note_plain(done)
        elif cost is not None:
            stretches = int(np.sum(after.stretches - before.stretches))
            accepted = int(np.sum(after.accepted - before.accepted))
            slots = before.finish.size * started.within.slots
            self.drafts.note(cost, done, started.within.places, slots, stretches, accepted)
        return done, after

    def forget_programs_if_crowded(self) -> None:
        """Forget all programs before there are so many that the next one ends the process; each is compiled again, or
        read from JAX's cache on disk, when it is needed.
        """
        compiled = programs_compiled()
        if compiled == self._compiled or not self._forgetting_helps:
            return  # counting maps takes milliseconds, for which a request would wait
        self._compiled = compiled
        if crowded(FULL_SHARE):
            log.warning("no room for more programs (vm.max_map_count); all are forgotten")
            jax.clear_caches()
            self.compiler.forget()
            gc.collect()
            self._forgetting_helps = not crowded(FULL_SHARE)  # else the maps are not programs'
