"""Loss on the next token of the linearisation (spec, section 9).

B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from aspd_jax.layout import Array


def next_token_loss(logits: jax.Array, tokens: Array, weight: Array) -> tuple[jax.Array, jax.Array]:
    """Sum of cross-entropies over weighted targets, and the sum of their weights.

    Args:
        logits: float32 [B, S, V].
        tokens: int32 [B, S]; token s + 1 is the target of token s.
        weight: float32 [B, S], weight of each token as a target. The first token of a sequence and
            tokens that the engine feeds weigh 0, so no target crosses from one branch to the next.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.sum(losses * weight[:, 1:]), jnp.sum(weight[:, 1:])
