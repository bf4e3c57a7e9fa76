"""Prompts into the cache: rows for new requests, and their prompts in chunks.

M requests, S tokens of a chunk, T tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout, build_layout
from aspd_jax.model.cache import empty_cache
from infer.programs import capacity_for, doubled_slots, stepped, width_bucket
from infer.recogniser import Recogniser, of_tokens
from infer.request import Job
from infer.rows import Admission, admit
from infer.state import DecodeState, Protocol, Request, empty_state, settle
from infer.step import Script, first_tokens, prefill

PREFILL_CHUNK = 512  # tokens of a prompt in a pass
LEAST_CHUNK = 16  # tokens of the smallest pass of prefill: padding is cheaper than programs for fewer
CLOSE_CHUNK = 64  # from here on, half as many tokens again are worth a program of their own
PREFILL_TOKENS = 4096  # tokens of all prompts in a pass, padding included: their attention scores have to fit
NO_CAP = np.iinfo(np.int32).max


@dataclass
class Prompt:
    """A prompt on its way into a row of the cache.

    Attributes:
        row: of the cache.
        kept: of the prompt's tokens, so many are in the row already.
        slots: slots of the row in use, at first those of the kept tokens (`kept_slots`).
        in_order: so many of the kept slots are in the order of the linearisation.
        layout: of the whole prompt, [T] each.
        fed: tokens in the cache so far.
    """

    job: Job
    row: int
    kept: int = 0
    slots: int = 0
    in_order: int = 0
    kept_slots: int = field(init=False)
    layout: Layout = field(init=False)
    fed: int = field(init=False)

    def place(self, lm: LanguageModel, protocol: Protocol) -> None:
        """Compute the layout."""
        self.layout = prompt_layout(lm, protocol, self.job.prompt)
        self.fed, self.kept_slots = self.kept, self.slots

    @property
    def done(self) -> bool:
        """Whether all of it is in the cache."""
        return self.fed == len(self.job.prompt)


def prompt_layout(lm: LanguageModel, protocol: Protocol, prompt: Sequence[int]) -> Layout:
    """Layout [T] of a prompt.

    Raises:
        RequestError: it ends inside a branch.
    """
    tokens = np.asarray([prompt], np.int32)
    layout = Layout(*(part[0] for part in build_layout(tokens, protocol.special, lm.config.positions)))
    if layout.branch[-1]:
        raise RequestError("a prompt ends inside a branch; an answer can only follow serial text")
    return layout


def new_state(
    lm: LanguageModel, protocol: Protocol, batch: int, capacity: int, recogniser: Recogniser | None = None
) -> DecodeState:
    """A state of empty rows with so many slots each; tags are the special tokens where no recogniser is given."""
    if recogniser is None:
        codec = None if lm.tokenizer is None else lm.codec.text
        recogniser = of_tokens(lm.config.vocabulary, protocol.special.ids, protocol.end, protocol.forbidden, codec)
    cache = empty_cache(lm.config, batch, capacity, lm.mesh)
    request, tables = jax.tree.map(jnp.asarray, (_request([], batch), recogniser))
    return settle(empty_state(protocol, cache, request, tables), lm.mesh)


def _request(jobs: Sequence[Job], size: int) -> Request:
    """A `Request` of NumPy arrays, by job; filled up to `size` entries."""

    def column(values: Callable[[Job], Any], dtype: Any) -> np.ndarray:
        return np.asarray([values(job) for job in jobs] + [0] * (size - len(jobs)), dtype)

    def param(name: str, dtype: Any) -> np.ndarray:
        return column(lambda job: getattr(job.params, name), dtype)

    columns: dict[str, Any] = {
        "adaptive": column(lambda job: job.mode == "adaptive", bool),
        "seed": column(lambda job: job.seed, np.uint32),
        "temperature": param("temperature", np.float32),
        "top_k": param("top_k", np.int32),
        "top_p": param("top_p", np.float32),
        "min_p": param("min_p", np.float32),
        "repetition_penalty": param("repetition_penalty", np.float32),
        "max_branch_tokens": param("max_branch_tokens", np.int32),
        "branch_cap": np.full(size, NO_CAP, np.int32),
    }
    return Request(**columns)


def begin(
    lm: LanguageModel, protocol: Protocol, state: DecodeState, prompts: Sequence[Prompt], at_least: int = 1
) -> DecodeState:
    """Give prompts their rows, by a program for `at_least` so many; nothing is fed yet."""
    batch = state.finish.shape[0]
    size = min(batch, width_bucket(max(at_least, len(prompts))))
    for prompt in prompts:
        prompt.place(lm, protocol)
    longest_head = len(protocol.tags.branch_start) + protocol.max_title_tokens + len(protocol.separator)

    def column(values: Callable[[Prompt], int], rest: int = 0) -> np.ndarray:
        return np.asarray([values(p) for p in prompts] + [rest] * (size - len(prompts)), np.int32)

    admission = Admission(
        kept=column(lambda p: p.slots),
        prompt_length=column(lambda p: p.slots + len(p.job.prompt) - p.kept),
        position=column(lambda p: p.layout.position[-1]),
        block=column(lambda p: p.layout.block.max()),
        budget=column(lambda p: p.job.budget),
        content=column(lambda p: p.job.params.max_content_tokens or p.job.budget),
        stride=longest_head + column(lambda p: p.job.params.max_branch_tokens),
    )
    return admit(state, column(lambda p: p.row, batch), _request([p.job for p in prompts], size), admission)


def next_chunk(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of these prompts, as many as go into one pass."""
    chosen: list[Prompt] = []
    for prompt in prompts:
        size = _common_chunk([*chosen, prompt])
        if chosen and width_bucket(len(chosen) + 1) * size > PREFILL_TOKENS:
            break
        chosen.append(prompt)
    return chosen


def chunk_size(left: int) -> int:
    """Tokens of the pass that feeds the next of so many: 16, 32, 64, 96, 128, 192, 256, 384 or 512."""
    return stepped(min(PREFILL_CHUNK, max(LEAST_CHUNK, left)), CLOSE_CHUNK)


def _common_chunk(prompts: Sequence[Prompt]) -> int:
    return chunk_size(max(len(p.job.prompt) - p.fed for p in prompts))


def feed_chunk(
    lm: LanguageModel,
    protocol: Protocol,
    state: DecodeState,
    prompts: Sequence[Prompt],
    script: Script | None = None,
    scripted: bool = False,
) -> DecodeState:
    """Feed the next chunk of every prompt, and sample the first token of those that end with it (unless `scripted`).

    A prompt may hold blocks, from earlier answers of a conversation.
    """
    batch, capacity = state.cache.tokens.shape
    size = _common_chunk(prompts)
    rows = min(batch, width_bucket(len(prompts)))
    tokens = np.zeros((rows, size), np.int32)
    layout = Layout(*(np.zeros((rows, size), np.int32) for _ in Layout._fields))
    last = np.full(rows, -1, np.int32)
    place = np.full(rows, batch, np.int32)
    if rows == batch:  # every row, in order
        place = np.arange(batch, dtype=np.int32)
    for number, prompt in enumerate(prompts):
        at = prompt.row if rows == batch else number
        place[at] = prompt.row
        piece = slice(prompt.fed, prompt.fed + size)
        some = prompt.job.prompt[piece]
        tokens[at, : len(some)] = some
        for target, source in zip(layout, prompt.layout, strict=True):
            target[at, : len(some)] = source[piece]
        prompt.fed += len(some)
        prompt.slots += len(some)
        if prompt.done:
            last[at] = len(some) - 1
    used = doubled_slots(capacity, max(p.slots for p in prompts))
    logits, state = prefill(lm.params, state, None if rows == batch else place, tokens, layout, last, protocol, used)
    if scripted or (last < 0).all():
        return state
    ends = Layout(*(field[np.arange(rows), last] for field in layout))
    greedy = all(p.job.params.greedy for p in prompts if p.done)
    return first_tokens(state, logits, place, last >= 0, ends, protocol, greedy, script)


def start(lm: LanguageModel, protocol: Protocol, jobs: Sequence[Job], scripted: bool = False) -> DecodeState:
    """A state that holds just these jobs, to their last token, with their prompts fed."""
    capacity = capacity_for(max(len(job.prompt) + job.budget for job in jobs))
    prompts = [Prompt(job, row) for row, job in enumerate(jobs)]
    state = begin(lm, protocol, new_state(lm, protocol, width_bucket(len(jobs)), capacity), prompts)
    while pending := next_chunk([prompt for prompt in prompts if not prompt.done]):
        state = feed_chunk(lm, protocol, state, pending, scripted=scripted)
    return state
