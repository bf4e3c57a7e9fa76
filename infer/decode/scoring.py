"""Log probabilities of known branches: a program feeds their tokens and reads given next tokens (protocol, section 5).

B rows, T tokens of a program, L tokens that get logits, R log probabilities that are read.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from aspd_jax.layout import Layout
from aspd_jax.model.cache import OTHER, Bucket, TokenBatch
from infer.decode.decode_step import forward, logits_of
from infer.decode.packed import Packed
from infer.decode.state import DecodeState, EngineConfig, replicate, shard_state

MAX_READS = 512  # R


class ScoreInputs(NamedTuple):
    """Inputs of a program: parts of the branches of rows, that of the lowest row first.

    Attributes:
        row: row of each token; B: unused.
        place: index of its slot behind the prompt of the row; what the row holds from there on is dropped.
        tokens, offset, branch: token ids, their indices in their branches, and the numbers of the branches, from 1.
        lanes: indices of the tokens that get logits.
        read_lane, read_id: lane and token id of each log probability.
    """

    row: Int32[Array, " T"]
    place: Int32[Array, " T"]
    tokens: Int32[Array, " T"]
    offset: Int32[Array, " T"]
    branch: Int32[Array, " T"]
    lanes: Int32[Array, " L"]
    read_lane: Int32[Array, " R"]
    read_id: Int32[Array, " R"]


def max_lanes(bucket: Bucket) -> int:
    """Return L."""
    return max(16, bucket.tokens // 8)


@partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames="state")
def score(
    params: Any, state: DecodeState, packed: Packed[ScoreInputs], config: EngineConfig, bucket: Bucket
) -> tuple[DecodeState, jax.Array]:
    """Feed tokens of branches behind the prompts of rows, and read log probabilities.

    The branches of a pack are a block that follows what the row holds; they do not see each other.

    Returns:
        The state, of which only the cache changes, and the log probabilities, float32 [R].
    """
    inputs = packed.unpack()
    cursor, cache = state.sequence.cursor, state.cache
    (batch, capacity), real = cache.tokens.shape, inputs.row < state.cache.tokens.shape[0]
    own = jnp.minimum(inputs.row, batch - 1)
    slot = jnp.where(real, cursor.prompt_length[own] + inputs.place, capacity)
    first = jnp.full(batch, capacity).at[inputs.row].min(slot, mode="drop")
    kept = jnp.where(jnp.arange(capacity) < first[:, None], cache.layout.sequence, 0)
    length = jnp.where(first < capacity, first, cache.length)
    cache = cache._replace(layout=cache.layout._replace(sequence=kept), length=length)
    layout = Layout(cursor.position[own] + inputs.offset, jnp.int32(1), cursor.block[own] + 1, inputs.branch)
    tokens = TokenBatch(
        tokens=inputs.tokens,
        layout=Layout(*(jnp.where(real, field, 0) for field in layout)),
        row=inputs.row,
        slot=slot,
        kind=jnp.full_like(slot, OTHER),
        adapter=state.request.adapter[own],
        logits_at=inputs.lanes,
    )
    hidden, cache = forward(params, state._replace(cache=cache), config, tokens, bucket)
    logits = logits_of(params, config, tokens.adapter[tokens.logits_at], hidden)
    read = logits[inputs.read_lane, inputs.read_id] - jax.nn.logsumexp(logits, axis=-1)[inputs.read_lane]
    return shard_state(state._replace(cache=cache), config.mesh), replicate(read, config.mesh)
