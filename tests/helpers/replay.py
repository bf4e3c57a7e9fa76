"""Replay of a linearisation through the stepwise engine; its logits equal those of a training pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.errors import RequestError, StructureError
from aspd_jax.layout import Layout, build_layout
from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import next_power
from aspd_jax.tokens import BlockIds, ItemIds, SerialIds, TitleForm, split
from infer.decode.decode_step import count_step, forward, logits_of
from infer.decode.derived import Derived, derive
from infer.decode.grammar import LaneTokens
from infer.decode.guidance import RowGuidance, SerialRule, guidance_arrays, guide
from infer.decode.inputs import Inputs, next_inputs, plan_step, widths
from infer.decode.slots import admit
from infer.decode.state import PROMPT, RUNNING, DecodeState, EngineConfig, waiting
from infer.decode.token_classes import ANY_TEXT, PARALLEL_START, TITLE_END, TITLE_START
from infer.decode.transition import advance
from infer.engine import Engine
from infer.request import Request, SamplingParams
from infer.scheduling.admission import admission, new_state
from infer.scheduling.buckets import MAX_TOKENS, capacity_for


@dataclass(frozen=True)
class Trace:
    """A replay.

    Attributes:
        logits: logits after each answer token, in the order of the linearisation, float32 [T, V].
        steps: steps after prefill until the last answer token was sampled. The step that feeds this token is not
            counted, because generation does not run it.
        widths: number of tokens fed in each of these steps.
    """

    logits: np.ndarray
    steps: int
    widths: tuple[int, ...]


MIN_SIZE = 8  # tokens of the narrowest step: programs for fewer take longer to compile than they save


class _Script:
    """Tokens that replace sampled ones, by segment, and the decisions after tags of the serial segment."""

    def __init__(self, items: Sequence[ItemIds], config: EngineConfig, end: Sequence[int]) -> None:
        special, leads = config.special, config.form.leads
        serial: list[int] = []
        self._branches: list[list[list[int]]] = []
        self._decisions: list[RowGuidance] = []
        for item in items:
            if isinstance(item, SerialIds):
                serial.extend(item.ids)
                continue
            own = _own_titles(item)
            if leads:  # tags between leads are known
                serial.append(special.title_start)
                self._decisions.append(_goes_on())
                for title in (item.number, *item.titles):
                    serial += (*title, special.title_end)
                    self._decisions.append(_goes_on(special.title_start))
                self._decisions.pop()
            else:
                for title in item.titles:
                    serial += (special.title_start, *title, special.title_end)
                    self._decisions += (_goes_on(), _goes_on())
                serial.append(special.parallel_start)
            known = [special.parallel_start] if leads else []
            heads = {n: [special.branch_start, *title, *config.form.separator] for n, title in enumerate(own, 1)}
            self._decisions.append(replace(_goes_on(), known_tokens={0: known, **heads}, branches=len(own)))
            block = zip(heads.values(), item.branches, strict=True)
            self._branches.append([[*branch[len(head) - 1 :], special.branch_end][::-1] for head, branch in block])
        self._serial = [*serial, *end][::-1]
        self._decisions.reverse()

    def next(self, block: int, lane: int) -> int:
        """Return the next token of a lane; 0 for unused lanes."""
        if lane < 0:
            return 0
        return int((self._branches[block][lane - 1] if lane else self._serial).pop())

    def decide(self) -> RowGuidance:
        """Return the decision after the next tag of the serial segment."""
        return self._decisions.pop()

    @property
    def done(self) -> bool:
        return not self._serial and not any(branch for block in self._branches for branch in block)


def _goes_on(*known: int) -> RowGuidance:
    """Return the decision that serial text goes on to the next tag, behind known tokens."""
    stops = 1 << TITLE_START | 1 << TITLE_END | 1 << PARALLEL_START
    return RowGuidance(stops={0: stops}, known_tokens={0: known}, counted=False, serial=SerialRule(ANY_TEXT))


@partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames="state")
def replay_step(
    params: Any, state: DecodeState, derived: Derived, config: EngineConfig, bucket: Bucket
) -> tuple[jax.Array, Inputs, DecodeState]:
    """Run a step without sampling; return the logits of all fed tokens, [T, V], the inputs and the state."""
    inputs = next_inputs(state, plan_step(state, config, bucket), config, bucket, drafting=False)
    every = inputs._replace(batch=inputs.batch._replace(logits_at=jnp.arange(bucket.tokens)))
    hidden, cache = forward(params, state, config, every.batch, bucket)
    logits = logits_of(params, config, every.batch.adapter[every.batch.logits_at], hidden)
    return logits, inputs, state._replace(cache=cache, sequence=count_step(state.sequence, inputs.fed))


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def replay_advance(
    state: DecodeState, derived: Derived, config: EngineConfig, inputs: Inputs, sampled: jax.Array
) -> DecodeState:
    """Take scripted tokens, one per lane, in place of sampled ones."""
    lanes = inputs.lanes
    tokens = LaneTokens(sampled, state.classes[sampled].astype(jnp.int32))
    return advance(state, derived, config, lanes, tokens, lanes.row < state.sequence.cursor.phase.size)


def replay(engine: Engine, prompt_token_ids: Sequence[int], answer_token_ids: Sequence[int]) -> Trace:
    """Feed a linearisation through the stepwise engine, branches side by side.

    Limits of branches and titles are raised to the sizes of the answer.

    Args:
        engine: engine, whose requests are not affected.
        prompt_token_ids: token ids of the prompt.
        answer_token_ids: token ids of a well-formed linearisation, with or without end of text.

    Returns:
        The logits after every answer token, and the number of steps after prefill.

    Raises:
        RequestError: prompt and answer exceed `max_length`.
        StructureError: the answer is not well formed.
    """
    length = len(prompt_token_ids) + len(answer_token_ids)
    if length > engine.max_length:
        raise RequestError(
            f"prompt and answer: expected at most {engine.max_length} tokens (max_length), got {length}."
        )
    lm, config = engine.lm, engine.config
    prompt, answer = engine.encode(prompt_token_ids), engine.encode(answer_token_ids)
    if not prompt:
        raise RequestError("prompt: expected at least one token, got none.")
    if not answer:
        raise StructureError("answer: expected at least one token, got none.")
    ended = answer[-1] in config.end
    items = split(answer[:-1] if ended else answer, config.special, config.form, paired=False)
    blocks = [item for item in items if isinstance(item, BlockIds)]
    config = replace(
        config,
        form=replace(config.form, separator=_separator(blocks, config.form)),
        max_branches=_larger_limit(config.max_branches, *(len(block.branches) for block in blocks)),
        max_title_tokens=_larger_limit(config.max_title_tokens, *(len(t) for block in blocks for t in block.titles)),
    )
    script = _Script(items, config, answer[-1:] if ended else ())
    layout = build_layout(np.asarray([[*prompt, *answer]]), config.special, lm.config.positions)
    place = {key: index - len(prompt) for index, key in enumerate(_keys(layout))}

    # A budget of one token more than the answer has, so that its last token does not end the sequence.
    request = Request(tuple(prompt), SamplingParams(), "adaptive", len(answer) + 1, seed=0)
    capacity = capacity_for(len(prompt) + len(answer) + 1)
    empty = new_state(lm, config, 1, capacity)
    state = admit(empty, admission(lm, config, empty, request, 0), config)
    logits = np.full((len(answer), lm.config.vocab_size), np.nan, np.float32)
    block, widths_fed = -1, []
    while True:
        prefilling = int(state.sequence.cursor.phase[0]) == PROMPT
        derived = derive(state.sequence, config)
        due = min(int(widths(state, derived).tokens[0]), MAX_TOKENS if prefilling else capacity)
        size = max(MIN_SIZE, next_power(due))
        bucket = Bucket(1, size, size, capacity)
        all_logits, inputs, state = replay_step(lm.params, state, derived, config, bucket)
        if not prefilling:
            fed = np.flatnonzero(np.asarray(inputs.batch.layout.sequence) > 0)
            keys = _keys(Layout(*(field[None] for field in inputs.batch.layout)))
            logits[[place[keys[index]] for index in fed]] = np.asarray(all_logits)[fed, : lm.config.vocab_size]
            widths_fed.append(fed.size)
            if script.done:
                return Trace(logits, len(widths_fed) - 1, tuple(widths_fed[:-1]))
        used = np.asarray(inputs.lanes.row) < 1
        if not used.any():
            continue
        lanes = np.where(used, np.asarray(inputs.lanes.branch), -1).tolist()
        sampled = np.asarray([script.next(block, lane) for lane in lanes], np.int32)
        state = replay_advance(state, derived, config, inputs, jnp.asarray(sampled))
        if bool(waiting(state.sequence)[0]):
            decision = script.decide()
            block += decision.branches > 0
            state, _ = guide(state, guidance_arrays({0: decision}, 1, state.token_mask.shape[3], config), config)
        cursor = state.sequence.cursor
        cursor = cursor._replace(finish=jnp.full_like(cursor.finish, RUNNING))
        state = state._replace(sequence=state.sequence._replace(cursor=cursor))


def _larger_limit(limit: int, *needed: int) -> int:
    """Return `limit`, or a power of two that is large enough: answers of similar size share a program."""
    needed_size = max(needed, default=0)
    return limit if needed_size <= limit else next_power(needed_size)


def _keys(layout: Layout) -> list[tuple[int, ...]]:
    """Return the keys of the tokens of one sequence, which do not depend on their order: (block, branch, position)."""
    fields = (layout.block, layout.branch, layout.position)
    return list(zip(*(np.asarray(field)[0].tolist() for field in fields), strict=True))


def _separator(blocks: Sequence[BlockIds], form: TitleForm) -> tuple[int, ...]:
    """Return the separator of an answer: that of `form` if all heads have it, else what follows all titles."""
    known = form.separator
    if form.leads:
        return known
    rests = [
        branch[len(title) :]
        for block in blocks
        for title, branch in zip(_own_titles(block), block.branches, strict=True)
    ]
    if all(tuple(rest[: len(known)]) == known for rest in rests) and (known or not rests):
        return known
    common = 0
    while all(len(rest) > common for rest in rests) and len({rest[common] for rest in rests}) == 1:
        common += 1
    return tuple(rests[0][:common])


def _own_titles(block: BlockIds) -> list[list[int]]:
    """Return the title that each branch starts with; some titles may have no branch.

    Raises:
        StructureError: a branch starts with none of the titles.
    """
    own = []
    for number, branch in enumerate(block.branches, 1):
        fitting = [title for title in block.titles if branch[: len(title)] == title]
        if not fitting:
            raise StructureError(f"branch {number}: expected to start with a title of its block, got other tokens.")
        own.append(max(fitting, key=len))
    return own
