"""Log probabilities of known branches: a program feeds their tokens and reads given next tokens (protocol, section 5).

T tokens of a program, L tokens that get logits, R log probabilities that are read.
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
    """Inputs of a program.

    Attributes:
        row: index of the row.
        kept: slots behind the prompt that the row keeps; what it holds behind them is dropped.
        size: number of tokens; the rest of T is padding.
        tokens, offset, branch: token ids, their indices in their branches, and the numbers of the branches, from 1.
        lanes: indices of the tokens that get logits.
        reads: number of log probabilities; the rest of R is padding.
        read_lane, read_id: lane and token id of each.
    """

    row: Int32[Array, ""]
    kept: Int32[Array, ""]
    size: Int32[Array, ""]
    tokens: Int32[Array, " T"]
    offset: Int32[Array, " T"]
    branch: Int32[Array, " T"]
    lanes: Int32[Array, " L"]
    reads: Int32[Array, ""]
    read_lane: Int32[Array, " R"]
    read_id: Int32[Array, " R"]


def max_lanes(bucket: Bucket) -> int:
    """Return L."""
    return max(16, bucket.tokens // 8)


@partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames="state")
def score(
    params: Any, state: DecodeState, packed: Packed[ScoreInputs], config: EngineConfig, bucket: Bucket
) -> tuple[DecodeState, jax.Array]:
    """Feed tokens of branches behind the prompt of a row, and read log probabilities.

    The branches of a pack are a block that follows what the row holds; they do not see each other.

    Returns:
        The state, of which only the cache changes, and the log probabilities, float32 [R].
    """
    inputs = packed.unpack()
    cursor, cache, row = state.sequence.cursor, state.cache, inputs.row
    (batch, capacity), number = cache.tokens.shape, jnp.arange(bucket.tokens)
    real, first = number < inputs.size, cursor.prompt_length[row] + inputs.kept
    kept = jnp.where(jnp.arange(capacity) < first, cache.layout.sequence[row], 0)
    layout = cache.layout._replace(sequence=cache.layout.sequence.at[row].set(kept))
    cache = cache._replace(layout=layout, length=cache.length.at[row].set(first))
    own = Layout(cursor.position[row] + inputs.offset, jnp.int32(1), cursor.block[row] + 1, inputs.branch)
    tokens = TokenBatch(
        tokens=inputs.tokens,
        layout=Layout(*(jnp.where(real, field, 0) for field in own)),
        row=jnp.where(real, row, batch),
        slot=jnp.where(real, first + number, capacity),
        kind=jnp.full_like(number, OTHER),
        adapter=jnp.broadcast_to(state.request.adapter[row], number.shape),
        logits_at=inputs.lanes,
    )
    hidden, cache = forward(params, state._replace(cache=cache), config, tokens, bucket)
    logits = logits_of(params, config, tokens.adapter[tokens.logits_at], hidden)
    read = logits[inputs.read_lane, inputs.read_id] - jax.nn.logsumexp(logits, axis=-1)[inputs.read_lane]
    return shard_state(state._replace(cache=cache), config.mesh), replicate(read, config.mesh)
