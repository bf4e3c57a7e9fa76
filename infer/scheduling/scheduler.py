"""Continuous batching: requests join and leave a running batch between chunks of passes.

B rows of the cache, one for each request that is under way.

First come, first served: a request starts when a row is free, and none overtakes another. The host lays out prompts
and picks the program that fits what the next passes need; tokens are chosen on the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout
from aspd_jax.sizes import next_power
from infer.answers.answer import Answer, Reading, Result, look_at, read, readings, result
from infer.decode.decode_step import StepSummary, summarise
from infer.decode.slots import NO_CAP, copy_slots, set_branch_cap, set_token_mask, stop_segments
from infer.decode.state import FORK, LENGTH, PARALLEL, PROMPT, RUNNING, SERIAL, DecodeState, EngineConfig
from infer.decode.tag_automaton import TextReader
from infer.request import Job, SamplingParams
from infer.scheduling.admission import Beginning, begin, new_state
from infer.scheduling.buckets import MIN_CAPACITY
from infer.scheduling.handle import NO_LIMIT, Handle, Stream
from infer.scheduling.policy import Policy, StepCost
from infer.scheduling.prefix_cache import MIN_COPIED, RowMemory, best_match, common_prefix, row_to_keep_in
from infer.scheduling.runner import InFlightSteps, Runner
from infer.scheduling.structured import Constraint, rows_of
from infer.scheduling.warm_up import compile_all, measure_cost

STEPS_BETWEEN_CAPS = 16  # passes between two looks at how loaded the batch is
MIN_SLOTS_COPIED = 64


class Chunk(NamedTuple):
    """Passes that were done between two looks of the host, and the seconds they took."""

    passes: int
    seconds: float


@dataclass
class _Row:
    """A row of the cache, and the request that holds it."""

    handle: Handle | None = None
    memory: RowMemory = field(default_factory=RowMemory)
    prompt: RowMemory | None = None  # what the row holds when the prompt has been fed, until it has

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
        constrain: what follows the schemas of a request.
        place: of an adapter among the parameters, by its number.
        reader: of tags that are text.

    Attributes:
        cost: of a pass, once it has been measured; `slo` needs it.
        alone: the only request that is admitted; None: all are.
        chunk: what the last `step` decoded.
        runner: of passes.
    """

    def __init__(
        self,
        lm: LanguageModel,
        config: EngineConfig,
        rows: int,
        capacity: int,
        policy: Policy,
        reuse: bool,
        constrain: Callable[[SamplingParams], Constraint],
        place: Callable[[int], int],
        reader: TextReader | None = None,
    ) -> None:
        # Room for all drafts of a pass, and for as many slots of rejected ones that are not filled again yet.
        drafts = 2 * config.max_branches * config.draft_tokens
        reserve = -(-drafts // MIN_CAPACITY) * MIN_CAPACITY
        self._lm, self._config, self._capacity, self._room = lm, config, capacity + reserve, capacity
        self._policy, self._reuse, self._reader = policy, reuse, reader
        self._constrain, self._place = constrain, place
        self.cost: StepCost | None = None
        self.alone: Handle | None = None
        self.chunk = Chunk(0, 0.0)
        self.codec = None if lm.tokenizer is None else lm.codec
        self.head = len(config.separator)
        self._rows = [_Row() for _ in range(rows)]
        self._waiting: deque[Handle] = deque()
        self._state: DecodeState | None = None
        self._report: StepSummary | None = None  # of the state; None: something has changed it since
        self._ahead: InFlightSteps | None = None
        self._cap: int | None = None
        self._stamp = 0
        self._lock = threading.RLock()
        self.runner = Runner(lm, config, rows, self._capacity)

    def now(self) -> float:
        """Seconds, by the clock that all times of requests are told by."""
        return self.runner.clock()

    def submit(self, job: Job, steps: int = NO_LIMIT, stream: Stream = None) -> Handle:
        """Queue a request; something has to `step` until it is done."""
        handle = Handle(self, job, steps, stream)
        if job.budget:
            self._waiting.append(handle)
        else:
            self._end(handle, None)
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
            reading = self._read(handle.row)
            mask = np.arange(len(self._rows)) == handle.row
            branches = np.zeros((mask.size, self._config.max_branches), bool)
            self._change(stop_segments(self._state_now(), mask, branches))
            self._end(handle, reading if started else None)
            if not any(row.decoding for row in self._rows):
                self._ahead = None

    def step(self, steps: int = NO_LIMIT) -> bool:
        """Admit who waits, and run a chunk of passes; false if there was nothing to do.

        Args:
            steps: most passes of the chunk. It ends earlier where a request finishes and another waits for its row, or
                there is a limit at all: somebody waits for the answer then; and where a prompt has ended whose request
                is listened to: its first token is there. While the host looks at answers that go on, the first passes
                of the next chunk are under way.
        """
        with self._lock:
            self.chunk = Chunk(0, 0.0)
            try:
                self._end_ahead()
                self._admit()
                if not any(row.handle for row in self._rows):
                    return False
                self._decode(steps, join=steps != NO_LIMIT)
            except BaseException:
                # The state may be lost half-way. Who waits goes on with a new one; who ran does not.
                self._state, self._report, self._ahead, self._cap = None, None, None, None
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

    def warm_up(self, alone: bool = False) -> float:
        """See `Engine.warm_up`."""
        with self._lock:
            if any(row.handle for row in self._rows):
                raise RequestError("warm_up is for an engine at rest; requests are under way")
            before = self.now()
            self.forget()  # passes that are timed write over what rows hold
            buckets = self.runner.buckets
            least = min(bucket.rows for bucket in buckets.buckets)
            programs = [bucket for bucket in buckets.buckets if bucket.rows == least or not alone]
            state = compile_all(self._lm, self._config, self._state_now(), programs)
            if not alone:
                state, self.cost = measure_cost(self._lm, self._config, state, buckets)
            self._change(state)
            return self.now() - before

    def adapters_in_use(self) -> set[int]:
        """Numbers of the adapters of all requests that have not ended."""
        with self._lock:
            running = [row.handle for row in self._rows if row.handle is not None]
            return {handle.job.adapter for handle in (*self._waiting, *running)}

    def partial(self, handle: Handle) -> Result:
        """A request's answer as far as it is."""
        with self._lock:
            if handle.row is None or not self._rows[handle.row].decoding:
                return self._result(handle, None)
            return self._result(handle, self._read(handle.row))

    def _state_now(self) -> DecodeState:
        if self._state is None:
            automaton = None if self._reader is None else self._reader.automaton
            self._state = new_state(self._lm, self._config, len(self._rows), self._capacity, automaton)
            costly = self._policy.milliseconds is not None or self.runner.drafts.on
            if costly and self.cost is None:
                self._state, self.cost = measure_cost(self._lm, self._config, self._state, self.runner.buckets)
        return self._state

    def _change(self, state: DecodeState) -> None:
        """Go on with another state: what was reported of the last one no longer holds."""
        self._state, self._report = state, None

    def _admit(self) -> None:
        while self._waiting and (free := [number for number, row in enumerate(self._rows) if row.handle is None]):
            handle = self._waiting[0]
            if self.alone not in (None, handle):
                break
            job, target = handle.job, free[0]  # the first ones first: passes of several rows look at no others
            # A prompt is laid out without blocks where tags are text.
            whole = self._lm.config.positions != "predict" and self._reader is None
            memories = [row.memory for row in self._rows] if self._reuse else [RowMemory()] * len(self._rows)
            spare = self._room - len(job.prompt) - job.budget
            match = best_match(memories, target, job.prompt, spare, whole, job.adapter)
            if self._reuse and self._soon_shared(job) > match.beginning.tokens:
                break  # what it begins with is being fed for another
            self._waiting.popleft()
            self._give_row(handle, target, match.source, match.beginning, match.in_order, free)

    def _give_row(
        self, handle: Handle, target: int, source: int, beginning: Beginning, in_order: int, free: Sequence[int]
    ) -> None:
        row, job, state = self._rows[target], handle.job, self._state_now()
        loses = self._reuse and (source != target or beginning.tokens < row.memory.ids.size)
        keep = row_to_keep_in([other.memory for other in self._rows], free, target) if loses else None
        if keep is not None or source != target:
            nowhere = len(self._rows)  # a row may take the place of the one that it is copied from
            to = np.asarray([target if source != target else nowhere, nowhere if keep is None else keep], np.int32)
            most = max(beginning.slots if source != target else 0, 0 if keep is None else row.memory.slots)
            size = min(self._capacity, max(MIN_SLOTS_COPIED, next_power(most)))
            state = copy_slots(state, np.asarray([source, target], np.int32), to, self._config, size)
        if keep is not None:
            self._rows[keep].memory = row.memory
        tokens = np.asarray(job.prompt, np.int32)
        slots = beginning.slots + tokens.size - beginning.tokens
        kept_in_order = in_order == beginning.slots
        row.handle = handle
        kept, in_order_kept = tokens[: beginning.tokens], min(in_order, beginning.slots)
        row.memory = RowMemory(kept, in_order_kept, beginning.slots, self._stamp, job.adapter)
        row.prompt = RowMemory(tokens, tokens.size if kept_in_order else in_order, slots, 0, job.adapter)
        handle.row, handle.reused = target, beginning.tokens
        handle.seconds = {"queued": self.now() - handle.submitted}
        self._change(begin(self._lm, self._config, state, job, target, beginning, self._place(job.adapter)))
        if job.constrained:
            handle.constraint = self._constrain(job.params)
            self._permit({target: handle.constraint.start()})
        self._cap = None  # it has none yet

    def _soon_shared(self, job: Job) -> int:
        """Tokens that a prompt will be able to copy when those that are being fed are there."""
        ids = np.asarray(job.prompt[:-1], np.int32)
        fed = [row.prompt.ids for row in self._rows if row.prompt is not None and row.prompt.adapter == job.adapter]
        shared = max((common_prefix(other, ids) for other in fed), default=0)
        return shared if shared >= MIN_COPIED else 0

    def _note_prompts(self, report: StepSummary) -> bool:
        """Take note of prompts that have been fed; whether somebody waits for one: its listener, or a request that may
        begin alike and has a row to go to.
        """
        now, awaited = self.now(), False
        for number, row in enumerate(self._rows):
            if row.handle is None or row.prompt is None or report.phase[number] == PROMPT:
                continue
            row.memory, row.prompt = replace(row.prompt, stamp=self._stamp), None
            seconds, total = row.handle.seconds, now - row.handle.submitted
            seconds |= {"prefill": total - seconds["queued"], "serial": 0.0, "parallel": 0.0, "first_token": total}
            seconds["total"], row.handle.counted = total, now
            row.handle.passes = np.asarray([report.steps[number] - report.parallel_steps[number], 0])
            awaited |= bool(row.handle.stream) or (bool(self._waiting) and any(of.handle is None for of in self._rows))
        return awaited

    def _decode(self, steps: int, join: bool) -> None:
        """At most so many passes; `join`: fewer if a request finishes."""
        rows = [number for number, row in enumerate(self._rows) if row.handle is not None]
        stepwise = self._is_stepwise()
        if stepwise:
            steps = min(steps, 1)
        if self._policy.milliseconds is not None:
            steps = min(steps, STEPS_BETWEEN_CAPS)
        before = self.now()
        self._hold_back()
        done, report, join = 0, self._reported(), join or bool(self._waiting)
        left = steps - self.chunk.passes  # those that were started ahead
        awaited = self._note_prompts(report)
        while done < left and report.tokens.any() and not awaited:
            if join and (report.finish[rows] != RUNNING).any():
                break
            started = self._start(report, left - done, join)
            passes, report = self.runner.end(started, self.cost)
            self._report = report
            done += passes
            awaited = self._note_prompts(report)
        self._count(report, done, self.now() - before)
        # The next passes follow from what is known, unless what is read now may change them, or branches are held back.
        feeding = any(row.prompt is not None for row in self._rows)
        known = not (stepwise or feeding) and self._policy == Policy() and bool((report.finish[rows] == RUNNING).all())
        self._process_outputs(report, steps if join and known and report.tokens.any() else 0)

    def _start(self, report: StepSummary, steps: int, join: bool) -> InFlightSteps:
        """Start the passes that a report asks for."""
        state, stepwise = self._state_now(), self._is_stepwise()
        listened = any(row.handle is not None and row.decoding and row.handle.stream for row in self._rows)
        started = self.runner.start(state, report, steps, join, listened, stepwise)
        self._change(started.state)
        return started

    def _is_stepwise(self) -> bool:
        """Whether the host has to see every token: it finds stop strings, and follows schemas."""
        jobs = [row.handle.job for row in self._rows if row.handle is not None]
        return any(job.params.stop or job.constrained for job in jobs)

    def _permit(self, news: dict[int, dict[int, np.ndarray]]) -> None:
        """Say what schemas set_token_mask next, by row and segment; nothing that is reported changes."""
        size = next_power(sum(map(len, news.values())))
        self._state = set_token_mask(self._state_now(), *rows_of(news, len(self._rows), size), self._config)

    def _end_ahead(self) -> None:
        """Wait for the passes that were started ahead."""
        if self._ahead is None:
            return
        started, self._ahead = self._ahead, None
        done, report = self.runner.end(started, self.cost)
        if self._state is started.state:
            self._report = report
        self._count(report, done, self.now() - started.since)

    def _count(self, report: StepSummary, passes: int, seconds: float) -> None:
        """Count passes for the chunk, and their time for every request."""
        self.chunk = Chunk(self.chunk.passes + passes, self.chunk.seconds + seconds)
        now = self.now()
        for number, row in enumerate(self._rows):
            if not row.decoding:
                continue
            handle = self._handle(number)
            in_blocks = report.parallel_steps[number]
            both = np.asarray([report.steps[number] - in_blocks, in_blocks])
            spent = min(seconds, now - handle.counted)  # its prompt may have ended under way
            serial, in_block = (both - handle.passes) / max(1, (both - handle.passes).sum()) * spent
            handle.passes, handle.counted = both, now
            handle.seconds["serial"] += float(serial)
            handle.seconds["parallel"] += float(in_block)
            handle.seconds["total"] = now - handle.submitted

    def _reported(self) -> StepSummary:
        if self._report is None:
            self._report = summarise(self._state_now(), self._config).read()
        return self._report

    def _hold_back(self) -> None:
        """Set how many branches a sequence may feed in a pass."""
        cap = None
        if self._policy != Policy():
            report = self._reported()
            running = report.finish == RUNNING
            in_block = running & np.isin(report.phase, (FORK, PARALLEL))
            slots = int(report.length[running].max(initial=0)) * len(self._rows)
            cap = self._policy.branches(self.cost, int((running & ~in_block).sum()), int(in_block.sum()), slots)
        if cap != self._cap:
            self._cap = cap
            caps = np.full(len(self._rows), NO_CAP if cap is None else cap, np.int32)
            self._change(set_branch_cap(self._state_now(), caps))

    def _process_outputs(self, report: StepSummary, ahead: int = 0) -> None:
        """Read the requests that have ended, have stop strings or a schema, or are listened to.

        Args:
            report: of the state.
            ahead: so many passes are started before anything is read.
        """
        self._stamp += 1
        finish = report.finish
        decoding = [number for number, row in enumerate(self._rows) if row.decoding]
        looked_at = [
            bool(handle.stream or handle.job.params.stop) or handle.job.constrained
            for handle in map(self._handle, decoding)
        ]
        asked = [row for row, wanted in zip(decoding, looked_at, strict=True) if wanted or finish[row] != RUNNING]
        if not asked:
            return
        shot = look_at(self._state_now(), self._config, asked)
        if ahead:
            self._ahead = self._start(report, ahead, join=True)
        found = dict(zip(asked, readings(shot, self._limits(asked), self._config, self._reader), strict=True))
        for number, reading in found.items():
            if finish[number] == RUNNING:
                self._handle(number).note(reading.answer, None)
        if stopped := self._close_at_stop_strings(found):
            finish = self._reported().finish
            found |= {number: self._read(number) for number in stopped}
        news: dict[int, dict[int, np.ndarray]] = {}
        for number, reading in found.items():
            handle = self._handle(number)
            if finish[number] != RUNNING:
                self._end(handle, reading)
                continue
            if handle.constraint is not None and (of_row := handle.constraint.follow(reading.answer)):
                news[number] = of_row
        if news:
            self._permit(news)

    def _close_at_stop_strings(self, readings: dict[int, Reading]) -> list[int]:
        """End answers that hold a stop string, and branches behind one; return the rows of these answers."""
        answers = np.zeros(len(self._rows), bool)
        branches = np.zeros((len(self._rows), self._config.max_branches), bool)
        for number, reading in readings.items():
            if self._handle(number).job.params.stop and reading.answer.finish == RUNNING:
                answers[number], late = self._handle(number).stopped(reading.answer)
                branches[number, np.asarray(late, int) - 1] = True
        if (answers | branches.any(axis=1)).any():
            self._change(stop_segments(self._state_now(), answers, branches))
        return [int(number) for number in np.flatnonzero(answers)]

    def _read(self, number: int) -> Reading:
        """Return the answer in a row as far as it is."""
        return read(self._state_now(), self._config, [number], self._limits([number]), self._reader)[0]

    def _limits(self, rows: Sequence[int]) -> list[int | None]:
        """Return the most tokens of plain text that the answers in rows may have."""
        return [self._handle(number).job.params.max_content_tokens for number in rows]

    def _end(self, handle: Handle, reading: Reading | None) -> None:
        if handle.row is not None:
            row = self._rows[handle.row]
            row.handle = None
            if reading is not None:
                row.memory = RowMemory(*reading.cached(), reading.slots, self._stamp, handle.job.adapter)
        final = self._result(handle, reading)
        handle.note(reading.answer if reading else Answer(np.zeros(0, np.int32), (), SERIAL, RUNNING), final)

    def _result(self, handle: Handle, reading: Reading | None) -> Result:
        if reading is None:
            nothing = np.zeros(0, np.int32)
            none = Layout(*[nothing] * len(Layout._fields))
            finish = RUNNING if handle.job.budget else LENGTH
            reading = Reading(Answer(nothing, (), SERIAL, finish), 0, 0, nothing, none, 0, 0, 0)
        made = result(reading, handle.job, self.codec, self._config, handle.reused, handle.seconds)
        return replace(made, finish_reason="cancelled") if handle.cancelled else made

    def _handle(self, row: int) -> Handle:
        handle = self._rows[row].handle
        assert handle is not None
        return handle
