"""Continuous batching: requests join and leave a running batch between chunks of steps.

B: number of rows of the cache; a request has one row while it runs.

Requests start in the order of submission, each when a row is free. The host lays out prompts and selects the program
for the next steps; tokens are sampled on the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.sizes import next_power
from infer.answers.answer import RequestOutput, Result, logged_tokens, make_result
from infer.answers.events import EventReader, FilledReader
from infer.control.constraint import Constraint
from infer.control.controller import Controller
from infer.control.exact import Exact
from infer.control.filling import Filling
from infer.control.lists import Lists
from infer.control.schemas import Schemas
from infer.control.scoring import Scoring
from infer.control.tags import Tags
from infer.control.text_end import TextEnd
from infer.decode.decode_step import StepSummary, summarise
from infer.decode.guidance import RowGuidance, guidance_arrays, guide
from infer.decode.packed import Packed
from infer.decode.slots import KnownText, admit, append_text, copy_slots, row_contents
from infer.decode.state import LENGTH, PROMPT, RUNNING, STOP, DecodeState, EngineConfig
from infer.decode.token_classes import TokenClasses
from infer.request import Request
from infer.scheduling.adapter_slots import AdapterSlots
from infer.scheduling.admission import MIN_PROMPT, admission, classes_of, new_state
from infer.scheduling.buckets import MIN_CAPACITY
from infer.scheduling.handle import Handle
from infer.scheduling.prefix_cache import Match, PrefixCache, RowMemory, read_row
from infer.scheduling.runner import ALL_STEPS, DraftControl, InFlightSteps, Runner
from infer.scheduling.step_cost import draft_pays, measure_cost
from infer.scheduling.warm_up import compile_all, programs_of

MIN_SLOTS_COPIED = 64


class StepStats(NamedTuple):
    """Number of steps of a chunk, and the seconds they took."""

    steps: int = 0
    seconds: float = 0.0


class Scheduler:
    """Scheduler of requests in a batch with a fixed number of rows.

    One thread at a time runs a method. Others may call `submit` meanwhile: requests are queued and taken out of the
    queue one by one, each in one operation.

    Args:
        lm: the model.
        config: configuration of the engine.
        rows: B.
        capacity: maximum tokens of prompt and answer.
        drafts: control of draft tokens.
        reuse: whether prompts reuse what rows hold.
        adapters: adapters that requests select.
        schemas: compiled schemas of requests.

    Attributes:
        last_chunk: statistics of the last call of `step`.
        runner: runner of steps.
    """

    def __init__(
        self,
        lm: LanguageModel,
        config: EngineConfig,
        rows: int,
        capacity: int,
        drafts: DraftControl,
        reuse: bool,
        adapters: AdapterSlots,
        schemas: Schemas,
    ) -> None:
        # Slots for the draft tokens of one step, and for as many rejected ones that are not overwritten yet.
        drafted = 2 * config.max_branches * config.draft_tokens
        reserve = -(-drafted // MIN_CAPACITY) * MIN_CAPACITY
        self._lm, self._config, self._capacity, self._max_length = lm, config, capacity + reserve, capacity
        self._adapters, self._schemas = adapters, schemas
        self._codec = None if lm.tokenizer is None else lm.codec
        self._rows: list[Handle | None] = [None] * rows
        self._classes: TokenClasses | None = None
        self._prefixes = PrefixCache(rows, reuse)
        self._waiting: deque[Handle] = deque()
        self._arrivals = 0  # requests that got a row
        self._alone: Handle | None = None  # the only request that may start; None: all may
        self._state: DecodeState | None = None
        self._summary: StepSummary | None = None  # summary of `_state`; None: outdated
        self._in_flight: InFlightSteps | None = None
        self._unread: Packed[StepSummary] | None = None  # summary of steps whose tokens are not taken
        self._changed = False  # whether something has changed the state since the last steps were started
        self._lock = threading.RLock()
        self.last_chunk = StepStats()
        self.runner = Runner(lm, config, rows, self._capacity, drafts)

    def submit(self, request: Request) -> Handle:
        """Queue a request; calls of `step` run it."""
        request = self._with_paying_draft(request)
        stop, repeat = request.params.stop, request.params.end_at_repeat
        reader = FilledReader(stop) if request.template else EventReader(self._codec, stop, repeat)
        handle = Handle(self, request, reader, self.runner.clock(), request.stream)
        self._adapters.acquire(request.adapter)
        if request.budget:
            self._waiting.append(handle)
        else:
            self._end(handle, RequestOutput(LENGTH))
        return handle

    def _with_paying_draft(self, request: Request) -> Request:
        """Return a request without a draft of exact fields where it costs more than it saves, if costs are measured."""
        if request.draft is None or self.runner.cost is None or self.runner.drafts.always:
            return request
        blocks = list(map(len, request.draft.blocks(self._config.max_branches)))
        return replace(request, drafts=draft_pays(self.runner.cost, blocks, self.runner.buckets, len(request.prompt)))

    def retry_alone(self, handle: Handle) -> None:
        """Queue a failed request first. Other requests wait until it ends or fails."""
        handle.retry()
        self._adapters.acquire(handle.request.adapter)
        self._waiting.appendleft(handle)
        self._alone = handle

    def cancel(self, handle: Handle) -> None:
        """Cancel a request, and free its row."""
        with self._lock:
            if handle.decoded is not None:
                return
            handle.cancelled = True
            if handle.row is None:
                if handle in self._waiting:
                    self._waiting.remove(handle)
                self._end(handle, RequestOutput(RUNNING))
                return
            output = self._output(handle)
            self._guide({handle.row: RowGuidance(finish=STOP)})
            self._end(handle, output)
            if not self._decoding:
                self._in_flight = None

    def step(self, max_steps: int | None = None) -> bool:
        """Admit waiting requests, and run a chunk of steps.

        The chunk ends when a request ends while another waits, or when the prompt of a streamed answer has been fed.
        While the host reads answers that go on, the first steps of the next chunk run.

        Args:
            max_steps: maximum steps of the chunk, which then also ends when any request ends; None: no limit.

        Returns:
            False if there was nothing to do.
        """
        limit, return_on_end = (ALL_STEPS, False) if max_steps is None else (max_steps, True)
        with self._lock:
            self.last_chunk = StepStats()
            try:
                self._end_in_flight()
                self._admit()
                if not self._running:
                    return False
                self._decode(limit, return_on_end)
            except BaseException:
                self._fail()
                raise
            return True

    def reset_cache(self) -> None:
        """Clear the prefix cache."""
        with self._lock:
            self._prefixes.reset(self._free)

    def warm_up(self, alone: bool = False, checks: bool = False) -> float:
        """Run `Engine.warm_up`."""
        with self._lock:
            if self._running:
                raise RequestError(
                    f"warm_up: expected no running request, got {len(self._running)}. Call it before `submit`."
                )
            before = self.runner.clock()
            self.reset_cache()  # timed steps overwrite the rows
            buckets = self.runner.buckets
            least = min(bucket.rows for bucket in buckets.buckets)
            used = [bucket for bucket in buckets.buckets if bucket.rows == least or not alone]
            most = buckets.max_checked if checks else 0
            compile_all(programs_of(self._lm, self._config, self._state_now(), used, not alone, most))
            if not alone or checks:
                state, self.runner.cost = measure_cost(self._lm, self._config, self._state_now(), used)
                self._change(state)
            return self.runner.clock() - before

    def partial(self, handle: Handle) -> Result:
        """Return an answer as far as it is decoded."""
        with self._lock:
            return self._result(handle, self._output(handle))

    @property
    def _free(self) -> list[int]:
        """Return the rows that no request has."""
        return [row for row, handle in enumerate(self._rows) if handle is None]

    @property
    def _running(self) -> dict[int, Handle]:
        """Return the requests that have a row, by row."""
        return {row: handle for row, handle in enumerate(self._rows) if handle is not None}

    @property
    def _decoding(self) -> dict[int, Handle]:
        """Return the requests whose prompts have been fed, by row."""
        return {row: handle for row, handle in self._running.items() if handle.decoding}

    @property
    def _token_classes(self) -> TokenClasses:
        if self._classes is None:
            self._classes = classes_of(self._lm, self._config)
        return self._classes

    def _state_now(self) -> DecodeState:
        if self._state is None:
            self._state = new_state(self._lm, self._config, len(self._rows), self._capacity, self._token_classes)
            judged = self.runner.drafts.active and not self.runner.drafts.always
            if judged and self.runner.cost is None:
                buckets = self.runner.buckets.buckets
                self._state, self.runner.cost = measure_cost(self._lm, self._config, self._state, buckets)
        return self._state

    def _change(self, state: DecodeState) -> None:
        """Replace the state outside of steps; its summary is outdated."""
        self._state, self._summary, self._changed = state, None, True

    def _fail(self) -> None:
        """Drop the state, which may be incomplete; waiting requests continue with a new one, running ones fail."""
        self._state, self._summary, self._in_flight, self._unread, self._alone = None, None, None, None, None
        for handle in self._running.values():
            self._adapters.release(handle.request.adapter)
            handle.fail()
        self._rows = [None] * len(self._rows)
        self._prefixes.reset(self._free)

    def _admit(self) -> None:
        """Give free rows to waiting requests, the oldest first; one that waits for a prefix does not hold up others."""
        for handle in tuple(self._waiting):
            if not (free := self._free) or self._alone not in (None, handle):
                break
            spare = self._max_length - len(handle.request.prompt) - handle.request.budget
            feeding = [other.prompt for other in self._running.values() if other.prompt is not None]
            match = self._prefixes.match(handle.request, free, spare, feeding)
            if match is not None:
                self._waiting.remove(handle)
                self._start_request(handle, match)

    def _start_request(self, handle: Handle, match: Match) -> None:
        """Give a row to a request, with a cached prefix of its prompt."""
        request, (source, row, tokens, slots, _) = handle.request, match
        self._rows[row] = handle
        if source != row:
            size = min(self._capacity, max(MIN_SLOTS_COPIED, next_power(slots)))
            self._change(copy_slots(self._state_now(), np.int32(source), np.int32(row), self._config, size))
        fed = self._prefixes.begin(request, match)
        controller = self._controller(handle)
        handle.start(row, tokens, fed, controller, self.runner.clock())
        adapter, now = self._adapters.slot(request.adapter), self._state_now()
        self._arrivals += 1
        new = admission(self._lm, self._config, now, request, row, tokens, slots, adapter, self._arrivals)
        self._change(admit(now, new, self._config))
        if (guidance := controller.start()) is not None:
            self._guide({row: guidance})

    def _controller(self, handle: Handle) -> Controller:
        """Return the controller of a request's answer at its beginning."""
        request = handle.request
        if request.scored:
            return Scoring(request)
        controller = Controller()
        if request.lists:
            most = self.runner.buckets.max_checked
            controller = Lists(request, self._lm.codec.text, self._token_classes, self._config, most)
        elif request.mode == "adaptive":
            controller = Tags(self._config, self._token_classes, self._codec.text if self._codec else None)
        if request.template is not None:
            controller = Filling(request, self._schemas, self._lm.codec.text, self._config)
        elif request.params.answer_grammar or request.params.prediction:
            serial = controller = Constraint(request, self._schemas, self._config)
            if request.draft is not None:
                draft = Filling(request, self._schemas, self._lm.codec.text, self._config)
                controller = Exact(draft, serial, request, self._lm.codec.text)
        if request.ends_by_text:
            controller = TextEnd(controller, handle.reader, filled=request.template is not None)
        return controller

    def _end_prefills(self, summary: StepSummary) -> bool:
        """Record prompts that have been fed.

        Returns:
            Whether the chunk should end: the answer is streamed, or a waiting request can start from this prefix.
        """
        now, ends_chunk = self.runner.clock(), False
        for row, handle in self._running.items():
            if handle.prompt is None or summary.phase[row] == PROMPT:
                continue
            self._prefixes.store(row, handle.prompt)
            steps, in_blocks = int(summary.counters.steps[row]), int(summary.counters.parallel_steps[row])
            handle.end_prefill(steps - in_blocks, now)
            ends_chunk |= bool(handle.stream) or (bool(self._waiting) and None in self._rows)
        return ends_chunk

    def _decode(self, max_steps: int, return_on_end: bool) -> None:
        """Run a chunk; it also ends with a request if `return_on_end`, or if others wait."""
        rows, before = list(self._running), self.runner.clock()
        done, summary, join = 0, self._summary_now(), return_on_end or bool(self._waiting)
        passed = set[int]()  # rows that had a pass in this chunk
        left = max_steps - self.last_chunk.steps  # steps that are not in flight
        ends_chunk = self._end_prefills(summary)
        while True:
            ended = join and bool((summary.finish[rows] != RUNNING).any())
            allowed = 0 if ends_chunk or ended else left - done
            steps_left = allowed if summary.tokens.any() else 0
            waiting = {row: handle for row, handle in self._decoding.items() if summary.waits[row]}
            if allowed <= 0:  # known branches and checks take steps, at least one in each chunk
                waiting = {row: handle for row, handle in waiting.items() if row not in passed}
            if not waiting and steps_left <= 0:
                break
            # A step of the other sequences runs while the host decides.
            started = self._start(summary, 1 if waiting else steps_left, join) if steps_left > 0 else None
            decisions = self._decide(waiting, summary) if waiting else {}
            passed |= {row for row, guidance in decisions.items() if guidance.check or guidance.scores}
            if started is not None:
                steps, self._summary = self.runner.end(started)
                self._take_tokens()
                done += steps
            done += self._guide(decisions)
            summary = self._summary_now()
            ends_chunk = self._end_prefills(summary)
        self._count(summary, done, self.runner.clock() - before)
        # Start the next steps before reading.
        feeding = any(handle.prompt is not None for handle in self._running.values())
        known = not feeding and bool((summary.finish[rows] == RUNNING).all())
        self._process_outputs(summary, max_steps if join and known and summary.tokens.any() else 0)

    def _decide(self, handles: dict[int, Handle], summary: StepSummary) -> dict[int, RowGuidance]:
        """Return the decisions for sequences that wait, by row; `summary`: of the state in which they wait."""
        before, decisions = self.runner.clock(), {}
        for row, handle in handles.items():
            output = self._read(handle, summary)
            if handle.request.ends_by_text:
                handle.update(output)
            decisions[row] = handle.controller.follow(output)
        for handle in handles.values():
            handle.count_decision(self.runner.clock() - before)
        return decisions

    def _start(self, summary: StepSummary, max_steps: int, join: bool) -> InFlightSteps:
        """Start steps in the program that the summary selects."""
        streamed = any(handle.stream for handle in self._decoding.values())
        started = self.runner.start(self._state_now(), summary, max_steps, join, streamed)
        self._state, self._summary, self._changed, self._unread = started.state, None, False, started.last
        return started

    def _end_in_flight(self) -> None:
        """Wait for the steps in flight."""
        if self._in_flight is None:
            return
        started, self._in_flight = self._in_flight, None
        steps, summary = self.runner.end(started)
        self._take_tokens()
        if not self._changed:
            self._summary = summary
        self._count(summary, steps, self.runner.clock() - started.start)

    def _guide(self, rows: dict[int, RowGuidance]) -> int:
        """Apply decisions for sequences, by row; return the number of passes over known branches and checks."""
        scoring = [row for row, guidance in rows.items() if guidance.scores]
        passes = self._score(scoring) if scoring else 0
        if not (rows := {row: guidance for row, guidance in rows.items() if not guidance.scores}):
            return passes
        arrays = guidance_arrays(rows, len(self._rows), self._schemas.words, self._config)
        state, summary = guide(self._state_now(), arrays, self._config)
        self._change(state)
        texts = {row: guidance.text for row, guidance in rows.items() if guidance.text}
        for row, text in texts.items():
            size = max(MIN_PROMPT, next_power(len(text)))
            state, summary = append_text(self._state_now(), KnownText.pack(row, text, size), self._config)
            self._change(state)
        self._summary = summary.read()
        for row, guidance in rows.items():
            self._running[row].output.apply(guidance, self._config)
        if checks := {row: guidance.check for row, guidance in rows.items() if guidance.check}:
            for state, after in self.runner.check(self._state_now(), checks, self._summary_now().length):
                self._change(state)
                self._summary, passes = after, passes + 1
                for row, segment, taken in logged_tokens(after.log):
                    self._running[row].output.take(segment, taken, self._config)
                    self._running[row].output.path -= sum(checks[row].known[: len(taken)])
        return passes

    def _score(self, rows: Sequence[int]) -> int:
        """Feed the next parts of known branches of rows, and read log probabilities; return the number of passes."""
        streamed, parts, passes = any(handle.stream for handle in self._decoding.values()), {}, 0
        for row in rows:
            controller, output = self._running[row].controller, self._running[row].output
            assert isinstance(controller, Scoring)
            parts[row] = controller.tokens, output.scored_tokens
        slots = {row: self._prefixes.memory(row).slots for row in rows}
        for state, read in self.runner.score(self._state_now(), parts, slots, streamed):
            self._state, self._changed, passes = state, True, passes + 1
            for row, (tokens, scores) in read.items():
                output = self._running[row].output
                output.scored_tokens += tokens
                output.scores.append(scores)
        return passes

    def _take_tokens(self) -> None:
        """Wait for the steps started last, and take their tokens; those of cancelled requests are dropped."""
        if self._unread is None:
            return
        log, self._unread = self._unread.read().log, None
        for row, segment, tokens in logged_tokens(log):
            if (handle := self._rows[row]) is not None:
                handle.output.take(segment, tokens, self._config)

    def _count(self, summary: StepSummary, steps: int, seconds: float) -> None:
        """Add steps and their time to the statistics of the chunk and of every request."""
        self.last_chunk = StepStats(self.last_chunk.steps + steps, self.last_chunk.seconds + seconds)
        now = self.runner.clock()
        for row, handle in self._decoding.items():
            in_blocks = int(summary.counters.parallel_steps[row])
            handle.count(int(summary.counters.steps[row]) - in_blocks, in_blocks, seconds, now)

    def _summary_now(self) -> StepSummary:
        if self._summary is None:
            self._summary = summarise(self._state_now(), self._config).read()
        return self._summary

    def _process_outputs(self, summary: StepSummary, next_steps: int) -> None:
        """Read the answers that have ended or are streamed.

        Args:
            summary: summary of `_state`.
            next_steps: maximum steps to start before the answers are read; 0: none.
        """
        self._prefixes.tick()
        finish = summary.finish
        handles = {row: one for row, one in self._decoding.items() if one.stream or finish[row] != RUNNING}
        if not handles:
            return
        if next_steps:
            self._in_flight = self._start(summary, next_steps, join=True)
        for row, handle in handles.items():
            output = self._read(handle, summary)
            if finish[row] == RUNNING:
                handle.update(output)
            else:
                self._end(handle, output)

    def _output(self, handle: Handle) -> RequestOutput:
        """Return an answer as far as it is decoded."""
        if handle.row is None or not handle.decoding:
            return RequestOutput(RUNNING)
        self._take_tokens()
        return self._read(handle, self._summary_now() if self._in_flight is None else self._in_flight.last.read())

    @staticmethod
    def _read(handle: Handle, summary: StepSummary) -> RequestOutput:
        """Return an answer as its budgets and its controller read it; `summary`: of the state after its last token."""
        assert handle.row is not None
        handle.output.update(summary, handle.row)
        return handle.controller.read(handle.output.limited(handle.request.params.max_content_tokens))

    def _end(self, handle: Handle, output: RequestOutput) -> None:
        """End a request with what was decoded of its answer, and free its row."""
        if handle.row is not None and handle.decoding:
            self._prefixes.store(handle.row, self._memory(handle, handle.row))
        handle.update(output, self._result(handle, output))
        if handle.row is not None:  # not before: an exception above fails a request that has its row
            self._rows[handle.row] = None
        if not handle.failed:
            self._adapters.release(handle.request.adapter)
        if self._alone is handle:
            self._alone = None

    def _memory(self, handle: Handle, row: int) -> RowMemory:
        """Return the contents of a row for later prompts: prompt and answer, or the prompt alone.

        No token of a later prompt marks blocks without tags: those of templates, and of drafts and lists under way.
        """
        if handle.request.scored or handle.output.branch_ids:
            return self._prefixes.memory(row)
        return read_row(row_contents(self._state_now(), np.int32(row)).read(), handle.request.adapter)

    def _result(self, handle: Handle, output: RequestOutput) -> Result:
        result = make_result(
            output, handle.request, self._codec, self._config, handle.reused, handle.seconds, handle.decisions
        )
        if handle.cancelled:
            return replace(result, finish_reason="cancelled")
        error = handle.controller.error
        return replace(result, finish_reason="error", error=error) if error else result
