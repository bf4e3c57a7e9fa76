"""Continuous batching: requests join and leave a running batch between chunks of passes.

B rows of the cache, one for each request that is under way.

First come, first served: a request starts when a row is free, and none overtakes another. The host prepares prompts
and picks the program that fits what the next passes need; tokens are chosen on the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout
from aspd_jax.tokens import BlockIds, SerialIds
from infer.answer import Answer, Reading, Result, cut, look_at, read, readings, result
from infer.handle import NO_LIMIT, Handle
from infer.passes import Passes, Run
from infer.policy import Policy, StepCost
from infer.prefill import NO_CAP, Prompt, begin, feed_chunk, new_state, next_chunk
from infer.programs import SMALLEST_CAPACITY, used_slots
from infer.recogniser import TextReader
from infer.request import Job
from infer.reuse import LEAST_COPIED, RowMemory, best_match, common_prefix
from infer.rows import copy_row, set_branch_cap, stop_stretches
from infer.state import FORK, PARALLEL, RUNNING, SERIAL, DecodeState, Protocol
from infer.step import Report, Script, report
from infer.warm_up import compile_all, measure_cost

STEPS_BESIDE_PREFILL = 4  # passes of the running requests between two chunks of a prompt
STEPS_BETWEEN_CAPS = 16  # passes between two looks at how loaded the batch is


class Chunk(NamedTuple):
    """Passes that were done between two looks of the host, and the seconds they took."""

    passes: int
    seconds: float


@dataclass
class _Row:
    """A row of the cache, and the request that holds it."""

    handle: Handle | None = None
    prompt: Prompt | None = None  # while it is being fed
    memory: RowMemory = field(default_factory=RowMemory)

    @property
    def decoding(self) -> bool:
        return self.handle is not None and self.prompt is None


class Scheduler:
    """Requests in a batch that others join and leave.

    Args:
        rows: B.
        capacity: slots of a row: for prompt and answer.
        policy: which branches of a loaded batch have to wait.
        reuse: let a prompt begin with what a row still holds of it.
        ended: called with every result.
        reader: of tags that are text.
        compile_beside: see `Engine`.

    Attributes:
        cost: of a pass, once it has been measured; `slo` needs it.
        script: tokens to take in place of sampled ones, for benchmarks and tests.
        alone: the only request that is admitted; None: all are.
        chunk: what the last `pump` decoded.
        passes: what they are done in.
        compiles_beside: see `Engine`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        protocol: Protocol,
        rows: int,
        capacity: int,
        policy: Policy,
        reuse: bool,
        ended: Callable[[Result], None],
        reader: TextReader | None = None,
        compile_beside: bool = False,
    ) -> None:
        # Room for all drafts of a pass, and for as many slots of rejected ones that are not filled again yet.
        drafts = 2 * protocol.max_branches * protocol.draft_tokens
        reserve = -(-drafts // SMALLEST_CAPACITY) * SMALLEST_CAPACITY
        self._lm, self._protocol, self._capacity, self._room = lm, protocol, capacity + reserve, capacity
        self._policy, self._reuse, self._ended, self._reader = policy, reuse, ended, reader
        self.cost: StepCost | None = None
        self.script: Script | None = None
        self.alone: Handle | None = None
        self.chunk = Chunk(0, 0.0)
        self.codec = None if lm.tokenizer is None else lm.codec
        self.head = len(protocol.separator)
        self._rows = [_Row() for _ in range(rows)]
        self._waiting: deque[Handle] = deque()
        self._state: DecodeState | None = None
        self._told: tuple[DecodeState, Report] | None = None
        self._ahead: Run | None = None
        self._cap: int | None = None
        self._stamp = 0
        self._lock = threading.RLock()
        # Other processes would pick other programs, and wait for each other in them.
        self.compiles_beside = compile_beside and jax.process_count() == 1
        self.passes = Passes(lm, protocol, rows, self._capacity, self.compiles_beside)

    def submit(self, job: Job, steps: int = NO_LIMIT) -> Handle:
        """Queue a request; something has to `pump` until it is done."""
        handle = Handle(self, job, steps)
        self._waiting.append(handle)
        return handle

    def retry(self, handle: Handle) -> None:
        """Queue a request that was under way when the engine failed, before all others. Its answer will be the same, so
        its events go on where they were.
        """
        handle.failed, handle.row, handle.passes = False, None, np.zeros(2, np.int64)
        self._waiting.appendleft(handle)

    def cancel(self, handle: Handle) -> None:
        """Give a request up, and its row free."""
        with self._lock:
            if handle.result is not None:
                return
            handle.cancelled = True
            if handle.row is None:
                self._waiting.remove(handle)
                self._end(handle, None)
                return
            row = self._rows[handle.row]
            started = row.prompt is None
            row.prompt = None
            reading = read(self._state_now(), self._protocol, [handle.row], self._reader)[0]
            mask = np.arange(len(self._rows)) == handle.row
            self._state = stop_stretches(self._state_now(), mask, np.zeros(self._state_now().branch_live.shape, bool))
            self._end(handle, reading if started else None)
            if not any(row.decoding for row in self._rows):
                self._ahead = None

    def pump(self, steps: int = NO_LIMIT) -> bool:
        """Admit who waits, feed a chunk of their prompts, run a chunk of passes; false if there was nothing to do.

        Args:
            steps: most passes of the chunk. It ends earlier where a request finishes and another waits for its row, or
                there is a limit at all: somebody waits for the answer then. Where a prompt has ended whose request is
                listened to, its first token is there: the chunk has one pass for other requests, none without any.
                While the host looks at answers that go on, the first passes of the next chunk are under way.
        """
        with self._lock:
            self.chunk = Chunk(0, 0.0)
            self.passes.forget_programs_if_crowded()
            try:
                self._end_ahead()
                self._admit()
                if not any(row.handle for row in self._rows):
                    return False
                others = any(row.decoding for row in self._rows)
                told = self._feed()
                if others or not told:
                    self._decode(1 if told else steps, early=steps != NO_LIMIT)
            except BaseException:
                # The state may be lost half-way. Who waits goes on with a new one; who ran does not.
                self._state, self._told, self._ahead, self._cap = None, None, None, None
                self.passes.desk.clear()
                for row in self._rows:
                    if row.handle is not None:
                        row.handle.failed = True
                    row.handle, row.prompt, row.memory = None, None, RowMemory()
                raise
            return True

    def forget(self) -> None:
        """Let no later prompt begin with what rows hold of requests that have ended."""
        with self._lock:
            for row in self._rows:
                if row.handle is None:
                    row.memory = RowMemory()

    def warm_up(self, closely: bool = True) -> float:
        """See `Engine.warm_up`."""
        with self._lock:
            if any(row.handle for row in self._rows):
                raise RequestError("warm_up is for an engine at rest; requests are under way")
            before = time.perf_counter()
            self.passes.desk.clear()
            programs = self.passes.programs.every() if closely else self.passes.programs.cover()
            self._state = compile_all(self._lm, self._protocol, self._state_now(), programs, self.passes.compiler)
            self._state, self.cost = measure_cost(self._lm, self._protocol, self._state)
            return time.perf_counter() - before

    def partial(self, handle: Handle) -> Result:
        """A request's answer as far as it is."""
        with self._lock:
            if handle.row is None or not self._rows[handle.row].decoding:
                return self._result(handle, None)
            return self._result(handle, read(self._state_now(), self._protocol, [handle.row], self._reader)[0])

    def _state_now(self) -> DecodeState:
        if self._state is None:
            recogniser = None if self._reader is None else self._reader.recogniser
            self._state = new_state(self._lm, self._protocol, len(self._rows), self._capacity, recogniser)
            costly = self._policy.milliseconds is not None or self.passes.drafts.on
            if costly and self.cost is None:
                self._state, self.cost = measure_cost(self._lm, self._protocol, self._state)
        return self._state

    def _admit(self) -> None:
        free = [number for number, row in enumerate(self._rows) if row.handle is None]
        admitted = []
        state = self._state_now()
        while free and self._waiting:
            handle = self._waiting[0]
            if self.alone not in (None, handle):
                break
            job = handle.job
            # A prompt is laid out without blocks where tags are text.
            whole = self._lm.config.positions != "predict" and self._reader is None
            memories = [row.memory for row in self._rows] if self._reuse else [RowMemory()] * len(self._rows)
            match = best_match(memories, free, job.prompt, self._room - len(job.prompt) - job.budget, whole)
            if self._reuse and self._soon_shared(job.prompt) > match.tokens:
                break  # what it begins with is being fed for another
            self._waiting.popleft()
            if match.source != match.row:
                state = copy_row(state, match.source, match.row)
                self.passes.desk.written([match.row])
            row = self._rows[match.row]
            prompt = Prompt(job, match.row, match.tokens, match.slots, match.in_order)
            row.handle, row.prompt = handle, prompt
            row.memory = RowMemory(row.memory.ids[:0], 0, 0, self._stamp)
            handle.row, handle.reused = match.row, match.tokens
            handle.seconds = {"queued": time.perf_counter() - handle.submitted}
            free.remove(match.row)
            admitted.append(prompt)
        if admitted:
            state = begin(self._lm, self._protocol, state, admitted)
            self._cap = None  # those that are new have none yet
        self._state = state

    def _soon_shared(self, prompt: Sequence[int]) -> int:
        """Tokens that a prompt will be able to copy when those that are being fed are there."""
        ids = np.asarray(prompt[:-1], np.int32)
        fed = [np.asarray(row.prompt.job.prompt, np.int32) for row in self._rows if row.prompt is not None]
        shared = max((common_prefix(other, ids) for other in fed), default=0)
        return shared if shared >= LEAST_COPIED else 0

    def _feed(self) -> bool:
        """Feed a chunk of prompts; whether one ended that is listened to."""
        fed = [(row.handle.submitted, row.prompt) for row in self._rows if row.handle and row.prompt]
        prompts = next_chunk([prompt for _, prompt in sorted(fed, key=lambda pair: pair[0])])
        if not prompts:
            return False
        state = feed_chunk(self._lm, self._protocol, self._state_now(), prompts, self.script)
        self._state = state
        self.passes.desk.written(prompt.row for prompt in prompts)
        done = [prompt for prompt in prompts if prompt.done]
        if not done:
            return False
        after = self._reported()
        now = time.perf_counter()
        for prompt in done:
            row = self._rows[prompt.row]
            assert row.handle is not None
            row.prompt = None
            tokens = np.asarray(prompt.job.prompt, np.int32)
            in_order = tokens.size if prompt.in_order == prompt.kept_slots else prompt.in_order
            row.memory = RowMemory(tokens, in_order, prompt.slots, self._stamp)
            seconds = row.handle.seconds
            total = now - row.handle.submitted
            seconds |= {"prefill": total - seconds["queued"], "serial": 0.0, "parallel": 0.0, "first_token": total}
            seconds["total"] = total
        told = any(self._handle(prompt.row).wanted for prompt in done)
        self._look(after)
        return told

    def _decode(self, steps: int, early: bool) -> None:
        """At most so many passes; `early`: fewer if a request finishes."""
        rows = [number for number, row in enumerate(self._rows) if row.decoding]
        if not rows:
            return
        feeding = any(row.prompt is not None for row in self._rows)
        if feeding:
            steps = min(steps, STEPS_BESIDE_PREFILL)
        stops = any(self._handle(number).job.params.stop for number in rows)
        if stops:
            steps = min(steps, 1)  # stop strings are found by the host
        if self._policy.milliseconds is not None:
            steps = min(steps, STEPS_BETWEEN_CAPS)
        before = time.perf_counter()
        self._hold_back()
        done, told, join = 0, self._reported(), early or bool(self._waiting)
        left = steps - self.chunk.passes  # those that were started ahead
        while done < left and told.widths.any() and not (join and (told.finish[rows] != RUNNING).any()):
            run = self._start(told, left - done, join)
            passes, told = self.passes.end(run, self.cost)
            self._told = run.state, told
            done += passes
        self._count(told, done, time.perf_counter() - before)
        # The next passes follow from what is known, unless what is read now may change them, or branches are held back.
        known = not (stops or feeding) and self._policy == Policy() and bool((told.finish[rows] == RUNNING).all())
        self._look(told, steps if early and known and told.widths.any() else 0)

    def _start(self, told: Report, steps: int, join: bool) -> Run:
        """Start passes of what `told` tells of."""
        params = [self._handle(number).job.params for number, row in enumerate(self._rows) if row.decoding]
        greedy, stops = all(of.greedy for of in params), any(of.stop for of in params)
        run = self.passes.start(self._state_now(), told, steps, join, greedy, stops, self.script)
        self._state = run.state
        return run

    def _end_ahead(self) -> None:
        """Wait for the passes that were started ahead."""
        if self._ahead is None:
            return
        run, self._ahead = self._ahead, None
        done, told = self.passes.end(run, self.cost)
        self._told = run.state, told
        self._count(told, done, time.perf_counter() - run.since)

    def _count(self, told: Report, passes: int, seconds: float) -> None:
        """Count passes for the chunk, and their time for every request."""
        self.chunk = Chunk(self.chunk.passes + passes, self.chunk.seconds + seconds)
        now = time.perf_counter()
        for number, row in enumerate(self._rows):
            if not row.decoding:
                continue
            handle = self._handle(number)
            in_blocks = told.parallel_passes[number]
            both = np.asarray([told.passes[number] - in_blocks, in_blocks])
            serial, in_block = (both - handle.passes) / max(1, (both - handle.passes).sum()) * seconds
            handle.passes = both
            handle.seconds["serial"] += float(serial)
            handle.seconds["parallel"] += float(in_block)
            handle.seconds["total"] = now - handle.submitted

    def _reported(self) -> Report:
        """What the last passes reported, as long as nothing else has changed the state since."""
        state = self._state_now()
        if self._told is None or self._told[0] is not state:
            self._told = state, report(state, self._protocol).read()
        return self._told[1]

    def _hold_back(self) -> None:
        """Set how many branches a sequence may feed in a pass."""
        cap = None
        if self._policy != Policy():
            state = self._state_now()
            phase, finish, length = jax.device_get((state.phase, state.finish, state.cache.length))
            running = finish == RUNNING
            in_block = running & np.isin(phase, (FORK, PARALLEL))
            slots = used_slots(self._capacity, int(length[running].max(initial=0)) + 1) * len(self._rows)
            cap = self._policy.branches(self.cost, int((running & ~in_block).sum()), int(in_block.sum()), slots)
        if cap != self._cap:
            self._cap = cap
            caps = np.full(len(self._rows), NO_CAP if cap is None else cap, np.int32)
            self._state = set_branch_cap(self._state_now(), caps)

    def _look(self, told: Report, ahead: int = 0) -> None:
        """Read the requests that have ended, have stop strings, or are listened to.

        Args:
            told: of the state.
            ahead: so many passes are started before anything is read.
        """
        self._stamp += 1
        finish = told.finish
        decoding = [number for number, row in enumerate(self._rows) if row.decoding]
        looked_at = [handle.wanted or bool(handle.job.params.stop) for handle in map(self._handle, decoding)]
        asked = [row for row, wanted in zip(decoding, looked_at, strict=True) if wanted or finish[row] != RUNNING]
        if not asked:
            return
        shot = look_at(self._state_now(), self._protocol, asked)
        if ahead:
            self._ahead = self._start(told, ahead, join=True)
        found = dict(zip(asked, readings(shot, len(asked), self._protocol, self._reader), strict=True))
        if stopped := self._close_at_stop_strings(found):
            finish = np.asarray(self._state_now().finish)
            found |= zip(stopped, read(self._state_now(), self._protocol, stopped, self._reader), strict=True)
        for number, reading in found.items():
            handle = self._handle(number)
            if finish[number] != RUNNING:
                self._end(handle, reading)
            elif handle.wanted:
                handle.note(reading.answer, None)

    def _close_at_stop_strings(self, readings: dict[int, Reading]) -> list[int]:
        """End every stretch that holds a stop string of its request; returns the rows in which one did."""
        answers = np.zeros(len(self._rows), bool)
        branches = np.zeros((len(self._rows), self._protocol.max_branches), bool)
        for number, reading in readings.items():
            stop, answer = self._handle(number).job.params.stop, reading.answer
            if not stop or not answer.items or self.codec is None:
                continue
            last, text_of = answer.items[-1], self.codec.text.text_of
            if answer.phase == SERIAL and isinstance(last, SerialIds):
                text = text_of(last)
                answers[number] = cut(text, stop) != text
            elif answer.phase in (FORK, PARALLEL) and isinstance(last, BlockIds):
                for branch, stretch in enumerate(last.texts(self.head)):
                    text = text_of(stretch)
                    branches[number, branch] = cut(text, stop) != text
        found = np.flatnonzero(answers | branches.any(axis=1)).tolist()
        if found:
            self._state = stop_stretches(self._state_now(), answers, branches)
        return found

    def _end(self, handle: Handle, reading: Reading | None) -> None:
        if handle.row is not None:
            row = self._rows[handle.row]
            row.handle = None
            if reading is not None:
                row.memory = RowMemory(*reading.cached(), reading.slots, self._stamp)
        final = self._result(handle, reading)
        self._ended(final)
        handle.note(reading.answer if reading else Answer(np.zeros(0, np.int32), (), SERIAL, RUNNING), final)

    def _result(self, handle: Handle, reading: Reading | None) -> Result:
        if reading is None:
            nothing = np.zeros(0, np.int32)
            none = Layout(*[nothing] * len(Layout._fields))
            reading = Reading(Answer(nothing, (), SERIAL, RUNNING), 0, 0, nothing, none, 0, 0, 0)
        made = result(reading, handle.job, self.codec, self._protocol, handle.reused, handle.seconds)
        return replace(made, finish_reason="cancelled") if handle.cancelled else made

    def _handle(self, row: int) -> Handle:
        handle = self._rows[row].handle
        assert handle is not None
        return handle
