"""The pure decoding step, and the loop of steps that is a compiled program.

B rows, one sequence each, T tokens of a step, L lanes, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from aspd_jax.layout import Array
from aspd_jax.model.cache import Bucket, TokenBatch
from infer.decode.derived import derive
from infer.decode.grammar import sample_lanes
from infer.decode.inputs import Lanes, StepPlan, max_lanes, next_inputs, plan_step, widths
from infer.decode.packed import Packed
from infer.decode.speculation import speculate
from infer.decode.state import (
    FORK,
    MERGE,
    PARALLEL,
    PROMPT,
    RUNNING,
    Budget,
    Counters,
    Cursor,
    DecodeState,
    EngineConfig,
    SequenceState,
    replicate,
    shard_state,
    waiting,
)
from infer.decode.transition import advance, hold

LOG_STEPS = 16  # minimum steps of a run whose tokens fit its log
MIN_LOG = 1024  # minimum tokens of a log


def forward(
    params: Any, state: DecodeState, config: EngineConfig, batch: TokenBatch, bucket: Bucket
) -> tuple[Any, Any]:
    """Run the model over the cache; return the input of the head for all lanes, [L, hidden size], and the cache."""
    model = cast(Any, config.model).clone(mesh=config.mesh)
    hidden, cache = model.apply({"params": params}, batch, state.cache, bucket, head=False, method="decode")
    return hidden, cache


def logits_of(params: Any, config: EngineConfig, adapter: jax.Array, hidden: jax.Array) -> jax.Array:
    """Return the logits of lanes, float32 [L, V].

    Args:
        params: parameters of the model.
        config: configuration of the engine.
        adapter: adapter of each lane, int32 [L].
        hidden: input of the head, [L, hidden size].
    """
    own = adapter if config.model.config.adapters else None
    logits: jax.Array = cast(Any, config.model).apply({"params": params}, hidden, own, method="logits")
    return logits


def step(
    params: Any, state: DecodeState, plan: StepPlan, config: EngineConfig, bucket: Bucket, drafting: bool = False
) -> tuple[DecodeState, StepPlan, jax.Array]:
    """Feed the due tokens that fit, and take the tokens sampled after them.

    Args:
        params: parameters of the model.
        state: state before the step.
        plan: plan of the step, made from `state` and `bucket`.
        config: configuration of the engine.
        bucket: sizes of the program.
        drafting: whether to feed the draft tokens of the state and make new ones; if false, the state has none.

    Returns:
        The state after the step, the plan of the next one, and the tokens that segments took (`taken_tokens`), int32
        [K, 3]; those of a segment in their order.
    """
    derived, inputs = plan.derived, next_inputs(state, plan, config, bucket, drafting)
    hidden, cache = forward(params, state, config, inputs.batch, bucket)
    logits = logits_of(params, config, inputs.batch.adapter[inputs.batch.logits_at], hidden)
    state = state._replace(cache=cache, sequence=count_step(state.sequence, inputs.fed))
    if drafting:
        state, taken = speculate(params, state, derived, config, inputs, hidden, logits, bucket.slots)
    else:
        tokens = sample_lanes(logits, state, derived, config, inputs.lanes)
        state = advance(state, derived, config, inputs.lanes, tokens, jnp.ones_like(tokens.token, bool))
        taken = tokens.token[None]
    state = hold(state, derived, inputs)
    return state, plan_step(state, config, bucket), taken_tokens(state, inputs.lanes, taken)


def taken_tokens(state: DecodeState, lanes: Lanes, tokens: jax.Array) -> jax.Array:
    """Return row (B: none), segment and token of each of the tokens of lanes, [R, L]; -1: none; int32 [R L, 3]."""
    row = jnp.where(tokens >= 0, lanes.row, state.sequence.cursor.phase.size)
    return jnp.stack(jnp.broadcast_arrays(row, lanes.branch, tokens), axis=-1).reshape(-1, 3)


def count_step(s: SequenceState, fed: jax.Array) -> SequenceState:
    """Count a step for every sequence that feeds tokens of its answer, int32 [B]."""
    phase, appended = s.cursor.phase, s.cursor.known_length > s.cursor.prompt_length
    answers = (fed > 0) & ((phase != PROMPT) | appended)
    in_block = (phase == FORK) | (phase == PARALLEL) | (phase == MERGE)
    return s._replace(
        counters=s.counters._replace(
            steps=s.counters.steps + answers, parallel_steps=s.counters.parallel_steps + (answers & in_block)
        )
    )


class StopConditions(NamedTuple):
    """Conditions under which `run` returns.

    Attributes:
        steps: maximum number of steps.
        smaller: tokens up to which a smaller program fits; -1: none.
        larger: maximum due tokens of answers in a step of this program.
        join: whether to return when a sequence finishes, because another request waits for its row.
    """

    steps: Int32[Array, ""]
    smaller: Int32[Array, ""]
    larger: Int32[Array, ""]
    join: Bool[Array, ""]

    @classmethod
    def pack(cls, steps: int, smaller: int = -1, larger: int = 0, join: bool = False) -> Packed[StopConditions]:
        """Return conditions for `run`."""
        made: Any = cls(np.int32(steps), np.int32(smaller), np.int32(larger), np.bool_(join))
        return Packed.pack(made)


class TokenLog(NamedTuple):
    """Tokens that segments took in a run.

    Attributes:
        entries: row, segment (0 serial, k branch k) and token, those of a segment in their order.
        size: number of entries.
    """

    entries: Int32[Array, "E 3"]
    size: Int32[Array, ""]

    def append(self, taken: jax.Array, batch: int) -> TokenLog:
        """Return the log with the tokens of a step, int32 [K, 3]; `batch`: B, the row of those that are none."""
        used = taken[:, 0] < batch
        place = jnp.where(used, self.size + jnp.cumsum(used) - 1, self.entries.shape[0])
        return TokenLog(self.entries.at[place].set(taken, mode="drop"), self.size + jnp.sum(used, dtype=jnp.int32))


class StepSummary(NamedTuple):
    """Summary of a state, and the tokens taken in the run before it, for the host between runs.

    Attributes:
        tokens, lanes: `Widths` of the next step.
        steps_left: steps of `StopConditions.steps` that are left.
        phase, finish, position: see `Cursor`.
        waits: whether a segment waits for the host.
        counters, budget, draft: see `SequenceState`.
        length: slots in use in the cache.
        log: tokens that were taken.
    """

    tokens: Int32[Array, " B"]
    lanes: Int32[Array, " B"]
    steps_left: Int32[Array, ""]
    phase: Int32[Array, " B"]
    finish: Int32[Array, " B"]
    position: Int32[Array, " B"]
    waits: Bool[Array, " B"]
    counters: Counters
    budget: Budget
    draft: Int32[Array, "B N D"]
    length: Int32[Array, " B"]
    log: TokenLog


@partial(jax.jit, static_argnames="config")
def summarise(
    state: DecodeState, config: EngineConfig, log: TokenLog | None = None, steps_left: jax.Array | int = 0
) -> Packed[StepSummary]:
    """Return the summary of a state.

    Args:
        state: the state.
        config: configuration of the engine.
        log: tokens that were taken; None: none were.
        steps_left: see `StepSummary`.
    """
    need = widths(state, derive(state.sequence, config))
    s = state.sequence
    return Packed.pack(
        StepSummary(
            tokens=need.tokens,
            lanes=need.lanes,
            steps_left=jnp.int32(steps_left),
            phase=s.cursor.phase,
            finish=s.cursor.finish,
            position=s.cursor.position,
            waits=waiting(s),
            counters=s.counters,
            budget=s.budget,
            draft=s.draft,
            length=state.cache.length,
            log=log or empty_log(0),
        )
    )


@partial(jax.jit, static_argnames=("config", "bucket", "drafting"), donate_argnames="state")
def run(
    params: Any,
    state: DecodeState,
    stops: Packed[StopConditions],
    config: EngineConfig,
    bucket: Bucket,
    drafting: bool,
) -> tuple[DecodeState, Packed[StepSummary]]:
    """Run steps until a stop condition holds, a sequence begins to wait, or the next step does not fit bucket or log.

    The plan of a step is made once: by the step before it, or before the loop.
    """
    conditions = stops.unpack()
    if not drafting:
        state = state._replace(sequence=state.sequence._replace(draft=jnp.full_like(state.sequence.draft, -1)))
    running = jnp.sum(state.sequence.cursor.finish == RUNNING)

    def unfed(cursor: Cursor) -> jax.Array:
        """Return the number of prompts that are not fed; known text behind a prompt does not count."""
        return jnp.sum((cursor.phase == PROMPT) & (cursor.known_length == cursor.prompt_length))

    prompts = unfed(state.sequence.cursor)
    waited, batch = jnp.sum(waiting(state.sequence)), state.cache.length.size
    step_tokens = max_lanes(config, batch, bucket) * (1 + drafting * config.draft_tokens)
    log = empty_log(max(MIN_LOG, LOG_STEPS * step_tokens))

    def more(carry: tuple[DecodeState, StepPlan, TokenLog, jax.Array]) -> jax.Array:
        state, plan, log, left = carry
        cursor, need = state.sequence.cursor, plan.need
        is_prompt = cursor.phase == PROMPT
        tokens = jnp.where(plan.rows, need.tokens, 0)
        answers = jnp.where(is_prompt, 0, tokens)
        length = jnp.max(jnp.where(tokens > 0, state.cache.length + jnp.maximum(answers, 1), 0))
        fits = (
            (jnp.sum(answers) <= conditions.larger)
            & (jnp.max(answers) <= bucket.max_per_row)
            & (length <= bucket.slots)
        )
        finished = jnp.sum(cursor.finish == RUNNING) < running
        changed = (unfed(cursor) < prompts) | (jnp.sum(waiting(state.sequence)) > waited) | (conditions.join & finished)
        is_narrow = jnp.sum(tokens) <= conditions.smaller
        fits &= log.size + step_tokens <= log.entries.shape[0]
        return (left > 0) & jnp.any(tokens > 0) & fits & ~changed & ~is_narrow

    def body(
        carry: tuple[DecodeState, StepPlan, TokenLog, jax.Array],
    ) -> tuple[DecodeState, StepPlan, TokenLog, jax.Array]:
        state, plan, log, left = carry
        state, plan, taken = step(params, state, plan, config, bucket, drafting)
        return shard_state(state, config.mesh), plan, replicate(log.append(taken, batch), config.mesh), left - 1

    start = state, plan_step(state, config, bucket), log, jnp.int32(conditions.steps)
    state, _, log, left = jax.lax.while_loop(more, body, start)
    return state, summarise(state, config, log, left)


def empty_log(size: int) -> TokenLog:
    """Return a log without entries; `size`: E."""
    return TokenLog(jnp.zeros((size, 3), jnp.int32), jnp.int32(0))
