"""Compiling ahead of time, and measuring what a pass costs.

Programs are compiled by running them on nothing: no steps, no rows, or tokens that are all padding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout
from aspd_jax.processes import agreed
from infer.answer import read
from infer.compiler import NO_PASS, Compiler, Program
from infer.policy import Sample, StepCost, fit
from infer.prefill import NO_CAP, PREFILL_CHUNK, PREFILL_TOKENS, begin, chunk_size
from infer.programs import WARM_SHARE, crowded, doubled_slots, part_sizes, width_bucket
from infer.rows import copy_row, set_branch_cap, stop_stretches
from infer.state import DecodeState, Protocol
from infer.step import Extent, first_tokens, prefill, report, run
from infer.workspace import Desk, copy_again

log = logging.getLogger(__name__)

REPEATS = 5
GREEDY = (True, False)
TIMED_SIZES = (1, 4, 16)  # tokens of a sequence in the passes that are timed


def compile_all(
    lm: LanguageModel, protocol: Protocol, state: DecodeState, programs: Sequence[Extent], compiler: Compiler
) -> DecodeState:
    """Compile these programs of passes, and prefill for as many prompts, as long chunks and as full rows as there may
    be; and what is done to rows between passes. Where a process has no room for all, it warns, and leaves the rest.
    """
    batch, capacity = state.cache.tokens.shape
    sizes = sorted({chunk_size(left) for left in range(1, min(PREFILL_CHUNK, capacity) + 1)})
    counts = sorted({min(batch, 1 << n) for n in range(width_bucket(batch).bit_length())})
    drafts = sorted({False, protocol.draft_tokens > 0})
    every: list[Callable[[DecodeState], DecodeState]] = []
    for rows, size, used in product(counts, sizes, part_sizes(capacity, doubled_slots)):
        if size <= used and (rows == 1 or rows * size <= PREFILL_TOKENS):
            every.append(partial(_padding, lm, protocol, rows=rows, size=size, used=used, ways=GREEDY))
    for greedy in GREEDY:
        for within, drafting in product(programs, drafts):
            every.append(partial(_no_pass, lm, protocol, program=Program(within, greedy, drafting), compiler=compiler))
    for number, compiled in enumerate(every):
        if crowded(WARM_SHARE):
            log.warning("room for %d of %d programs: raise vm.max_map_count, or take fewer rows", number, len(every))
            break
        state = compiled(state)
    for rows in counts:
        state = begin(lm, protocol, state, [], rows)
        read(state, protocol, range(rows))
    jax.block_until_ready(report(state, protocol))
    state = copy_row(state, 0, 0)
    state = stop_stretches(state, np.zeros(batch, bool), np.zeros(state.branch_live.shape, bool))
    return set_branch_cap(state, np.full(batch, NO_CAP, np.int32))


def measure_cost(lm: LanguageModel, protocol: Protocol, state: DecodeState) -> tuple[DecodeState, StepCost]:
    """Time passes of several widths over parts of the cache, and fit what a pass costs."""
    batch, capacity = state.cache.tokens.shape
    samples = []
    for used in sorted({doubled_slots(capacity, 1), capacity}):
        for size in TIMED_SIZES:
            times = []
            for _ in range(REPEATS + 1):  # the first may compile
                before = time.perf_counter()
                state = jax.block_until_ready(_padding(lm, protocol, state, batch, size, used, [True]))
                times.append(1000 * (time.perf_counter() - before))
            samples.append(Sample(batch * size, batch * used, median(times[1:])))
    # Other clocks tell otherwise, and what hangs on it has to be decided alike in all processes.
    milliseconds = agreed(np.asarray([sample.milliseconds for sample in samples], np.float32))
    return state, fit([of._replace(milliseconds=float(ms)) for of, ms in zip(samples, milliseconds, strict=True)])


def _no_pass(
    lm: LanguageModel, protocol: Protocol, state: DecodeState, program: Program, compiler: Compiler
) -> DecodeState:
    """Run no pass, in this program."""
    within, greedy, drafting = program
    workspace = Desk(protocol).take(state, within.rows, within.slots, np.asarray(state.finish))
    if workspace is not None:
        workspace = copy_again(state.cache.layers, workspace, np.int32(0), np.int32(0))
    state = run(lm.params, state, workspace, NO_PASS, protocol, within, greedy, None, drafting)[0]
    compiler.note(program)
    return state


def _padding(
    lm: LanguageModel, protocol: Protocol, state: DecodeState, rows: int, size: int, used: int, ways: Sequence[bool]
) -> DecodeState:
    """Feed nothing, as if it were `size` tokens to so many rows, and sample nothing after it, greedily or not."""
    batch = state.finish.shape[0]
    tokens = np.zeros((rows, size), np.int32)
    layout = Layout(tokens, tokens, tokens, tokens)
    place = np.full(rows, batch, np.int32)
    every = None if rows == batch else place
    logits, state = prefill(lm.params, state, every, tokens, layout, np.full(rows, -1, np.int32), protocol, used)
    ends = Layout(*(field[:, 0] for field in layout))
    for greedy in ways:
        state = first_tokens(state, logits, place, np.zeros(rows, bool), ends, protocol, greedy, None)
    return state
