"""A batch of requests on its way: the host's side of decoding.

B sequences, N branches at most, S prompt tokens, V vocabulary.

The host prepares the state, feeds the prompts, and then only picks the program for the width that is
needed next; tokens are chosen on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout, build_layout
from aspd_jax.model.cache import empty_cache
from infer.answer import Result, cut, read_answers, result
from infer.request import Job
from infer.state import FORK, PARALLEL, RUNNING, SERIAL, DecodeState, Protocol, Request, empty_state, width_bucket
from infer.step import next_widths, prefill, run, stop_stretches

PREFILL_CHUNK = 512
SMALLEST_CAPACITY = 128
NO_LIMIT = np.iinfo(np.int32).max


def start_state(lm: LanguageModel, protocol: Protocol, jobs: Sequence[Job]) -> DecodeState:
    """A state with a cache that holds these jobs to their last token; nothing is fed yet."""
    batch = width_bucket(len(jobs))
    capacity = max(SMALLEST_CAPACITY, width_bucket(max(len(job.prompt) + job.budget for job in jobs)))
    rows = [*jobs, *[jobs[0]] * (batch - len(jobs))]  # rows beyond the jobs are never started

    def column(values: Callable[[Job], Any], dtype: Any) -> jax.Array:
        return jnp.asarray([values(job) for job in rows], dtype)

    def param(name: str, dtype: Any) -> jax.Array:
        return column(lambda job: getattr(job.params, name), dtype)

    request = Request(
        adaptive=column(lambda job: job.mode == "adaptive", bool),
        key=jax.vmap(jax.random.key)(column(lambda job: job.seed, jnp.uint32)),
        temperature=param("temperature", jnp.float32),
        top_k=param("top_k", jnp.int32),
        top_p=param("top_p", jnp.float32),
        min_p=param("min_p", jnp.float32),
        repetition_penalty=param("repetition_penalty", jnp.float32),
        max_branch_tokens=param("max_branch_tokens", jnp.int32),
    )
    longest_head = 1 + protocol.max_title_tokens + len(protocol.separator)
    return empty_state(protocol, empty_cache(lm.config, batch, capacity, lm.mesh), request)._replace(
        prompt_length=column(lambda job: len(job.prompt), jnp.int32),
        remaining=column(lambda job: job.budget, jnp.int32),
        stride=longest_head + request.max_branch_tokens,
    )


def feed_prompts(
    lm: LanguageModel, protocol: Protocol, state: DecodeState, prompts: Sequence[Sequence[int]], scripted: bool = False
) -> DecodeState:
    """Prefill, in chunks of bucketed size, and sample the first tokens (unless `scripted`).

    A prompt may hold blocks, from earlier answers of a conversation.

    Raises:
        RequestError: a prompt ends inside a branch.
    """
    batch, longest = state.phase.shape[0], max(len(prompt) for prompt in prompts)
    tokens = np.zeros((batch, longest), np.int32)
    real = np.zeros((batch, longest), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        real[row, : len(prompt)] = True
    layout = build_layout(tokens, protocol.special, lm.config.positions, real)
    last = real.sum(axis=1) - 1
    every_row = np.arange(batch)
    if layout.branch[every_row, last].any():
        raise RequestError("a prompt ends inside a branch; an answer can only follow serial text")
    state = state._replace(
        position=jnp.asarray(layout.position[every_row, last]), block=jnp.asarray(layout.block.max(axis=1))
    )
    for first in range(0, longest, PREFILL_CHUNK):
        size = width_bucket(min(PREFILL_CHUNK, longest - first))

        def chunk(array: np.ndarray, piece: slice = slice(first, first + size), size: int = size) -> np.ndarray:
            part = array[:, piece]
            return np.pad(part, ((0, 0), (0, size - part.shape[1])))

        ends = (last >= first) & (last < first + size)
        place = np.where(ends, last - first, -1).astype(np.int32)
        pieces = Layout(*(chunk(field) for field in layout))
        state = prefill(lm.params, state, chunk(tokens), pieces, place, protocol, scripted)
    return state


class Decoding:
    """A batch from its prompts to its results.

    Attributes:
        seconds: per job, wall time by phase since the start.
    """

    def __init__(self, lm: LanguageModel, protocol: Protocol, jobs: Sequence[Job]) -> None:
        self._lm, self._protocol, self._jobs = lm, protocol, jobs
        self._started = time.perf_counter()
        self._state = feed_prompts(lm, protocol, start_state(lm, protocol, jobs), [job.prompt for job in jobs])
        self._finish = np.asarray(self._state.finish)
        self._close_at_stop_strings()
        elapsed = time.perf_counter() - self._started
        self.seconds = [{"prefill": elapsed, "serial": 0.0, "parallel": 0.0, "total": elapsed} for _ in jobs]

    def advance(self, steps: int = NO_LIMIT) -> Iterator[None]:
        """Decode to the end; yields whenever the host looks in, after at most `steps` passes."""
        if any(job.params.stop for job in self._jobs):
            steps = 1  # stop strings are found by the host
        count = len(self._jobs)
        widths = np.asarray(next_widths(self._state, self._protocol))
        passes = np.zeros((2, count), np.int64)
        while widths.any():
            before = time.perf_counter()
            size = width_bucket(int(widths.max()))
            self._state, on_device = run(self._lm.params, self._state, steps, self._protocol, size)
            widths, finish, total, parallel = jax.device_get(
                (on_device, self._state.finish, self._state.passes, self._state.parallel_passes)
            )
            running, self._finish = self._finish[:count] == RUNNING, finish
            if self._close_at_stop_strings():
                widths = np.asarray(next_widths(self._state, self._protocol))
            now = time.perf_counter()
            done = np.stack([total - parallel, parallel])[:, :count]
            shares = (done - passes) / np.maximum(1, (done - passes).sum(axis=0))
            passes = done
            for row in np.flatnonzero(running):
                self.seconds[row]["serial"] += float((now - before) * shares[0, row])
                self.seconds[row]["parallel"] += float((now - before) * shares[1, row])
                self.seconds[row]["total"] = now - self._started
            yield

    def _close_at_stop_strings(self) -> bool:
        """End every stretch that holds a stop string of its request; returns whether one did."""
        if not any(job.params.stop for job in self._jobs):
            return False
        decode, separator = self._lm.codec.text.decode, len(self._protocol.separator)
        answers = np.zeros(self._finish.shape, bool)
        branches = np.zeros(self._state.branch_live.shape, bool)
        for row, answer in enumerate(read_answers(self._state, self._protocol, len(self._jobs))):
            stop = self._jobs[row].params.stop
            if not answer.items:
                continue
            last = answer.items[-1]
            if answer.phase == SERIAL and len(last) == 1:
                text = decode(last[0])
                answers[row] = cut(text, stop) != text
            elif answer.phase in (FORK, PARALLEL):
                for number, (title, branch) in enumerate(zip(*last, strict=True)):
                    text = decode(branch[len(title) + separator :])
                    branches[row, number] = cut(text, stop) != text
        if not (answers.any() or branches.any()):
            return False
        self._state = stop_stretches(self._state, answers, branches)
        self._finish = np.asarray(self._state.finish)
        return True

    def results(self) -> list[Result]:
        """The answers as far as they are."""
        answers = read_answers(self._state, self._protocol, len(self._jobs))
        codec = None if self._lm.tokenizer is None else self._lm.codec
        passes, path, sampled, phase = jax.device_get(
            (self._state.passes, self._state.critical_path, self._state.branch_sampled, self._state.phase)
        )
        path = path + np.where(np.isin(phase, (FORK, PARALLEL)), sampled.max(axis=1), 0)
        return [
            result(answer, job, codec, self._protocol, int(passes[row]), int(path[row]), self.seconds[row])
            for row, (answer, job) in enumerate(zip(answers, self._jobs, strict=True))
        ]
