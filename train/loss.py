"""Loss on the next token of the linearisation (protocol, section 9).

B rows, S tokens, D embed, V vocabulary, P parts (`train.batches.PARTS`), N chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from aspd_jax.layout import Array

CHUNK = 256  # tokens of each row whose logits exist at a time


class Sums(NamedTuple):
    """Sum of cross-entropies and sum of weights of the targets of each part; float32 [P]."""

    loss: jax.Array
    weight: jax.Array

    def mean(self) -> jax.Array:
        """Loss per unit of weight over all parts."""
        return self.loss.sum() / jnp.maximum(self.weight.sum(), 1.0)


def next_token_loss(
    hidden: jax.Array,
    head: Callable[[jax.Array], jax.Array],
    tokens: Array,
    weight: Array,
    part: Array,
    parts: int,
) -> Sums:
    """Cross-entropies of weighted targets, with the logits of one chunk at a time.

    Args:
        hidden: activations before the head, [B, S, D].
        head: activations [..., D] -> logits, float32 [..., V].
        tokens: int32 [B, S]; token s + 1 is the target of token s.
        weight: float32 [B, S], weight of each token as a target. The first token of a sequence and
            tokens that the engine feeds weigh 0, so no target crosses from one branch to the next.
        part: int32 [B, S], which part each token belongs to as a target.
        parts: how many parts there are.
    """
    S = tokens.shape[1]
    chunks = ceil(S / CHUNK)
    C = ceil(S / chunks)

    def shifted(x: Array) -> jax.Array:
        return jnp.pad(x[:, 1:], [(0, 0), (0, chunks * C - S + 1)])

    def in_chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, C, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(sums: Sums, chunk: tuple[jax.Array, ...]) -> tuple[Sums, None]:
        hidden, target, weight, part = chunk
        losses = optax.softmax_cross_entropy_with_integer_labels(head(hidden), target) * weight
        of_part = jax.nn.one_hot(part, parts, dtype=jnp.float32)
        loss, count = jnp.einsum("BC,BCP->P", losses, of_part), jnp.einsum("BC,BCP->P", weight, of_part)
        return Sums(sums.loss + loss, sums.weight + count), None

    padded = jnp.pad(hidden, [(0, 0), (0, chunks * C - S), (0, 0)])
    xs = tuple(in_chunks(x) for x in (padded, shifted(tokens), shifted(weight), shifted(part)))
    zero = jnp.zeros(parts, jnp.float32)
    sums, _ = jax.lax.scan(one, Sums(zero, zero), xs)
    return sums
