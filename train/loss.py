"""Loss on the next token of the linearisation (protocol, section 9).

B rows, S tokens, D hidden size, V vocabulary, P parts (`train.batches.PARTS`), N chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from aspd_jax.layout import Array
from aspd_jax.model.vocabulary import HEAD_AXES, Head
from aspd_jax.sharding import partition_spec

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
    split: tuple[str, ...] = (),
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
        split: mesh axes over which the vocabulary is split, under `shard_map`: V is one device's share of it.
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
        losses = cross_entropy(head(hidden), target, split) * weight
        of_part = jax.nn.one_hot(part, parts, dtype=jnp.float32)
        loss, count = jnp.einsum("BC,BCP->P", losses, of_part), jnp.einsum("BC,BCP->P", weight, of_part)
        return Sums(sums.loss + loss, sums.weight + count), None

    padded = jnp.pad(hidden, [(0, 0), (0, chunks * C - S), (0, 0)])
    xs = tuple(in_chunks(x) for x in (padded, shifted(tokens), shifted(weight), shifted(part)))
    zero = jnp.zeros(parts, jnp.float32)
    sums, _ = jax.lax.scan(one, Sums(zero, zero), xs)
    return sums


def cross_entropy(logits: jax.Array, target: jax.Array, split: tuple[str, ...] = ()) -> jax.Array:
    """Of logits [..., V] and targets [...]: float32 [...].

    Args:
        split: as in `next_token_loss`. Devices tell each other three numbers per target.
    """
    V = logits.shape[-1]
    own = target - first_token(V, split)
    at_target = jnp.take_along_axis(logits, jnp.clip(own, 0, V - 1)[..., None], axis=-1).squeeze(-1)
    at_target = jax.lax.psum(jnp.where((own >= 0) & (own < V), at_target, 0), split)
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(axis=-1)), split)
    total = jax.lax.psum(jnp.exp(logits - highest[..., None]).sum(axis=-1), split)
    return jnp.log(total) + highest - at_target


def first_token(V: int, split: tuple[str, ...]) -> int | jax.Array:
    """The first token of this device's share, V tokens, of a vocabulary that is split over these mesh axes."""
    return jax.lax.axis_index(split) * V if split else 0


def loss_over_mesh(
    mesh: Mesh,
    hidden: jax.Array,
    head: Head,
    logits: Callable[..., jax.Array],
    tokens: Array,
    weight: Array,
    part: Array,
    parts: int,
) -> Sums:
    """`next_token_loss` over a mesh: every device takes its own rows, and its own share of the vocabulary.

    The head is gathered over `fsdp` once, before the loop over chunks, and its gradient is reduced once, after it. Left
    to itself, the compiler does both for every chunk.

    Args:
        logits: of (head, activations [..., D], the first token of the head's share): float32 [..., V].
    """
    rows = partition_spec(("batch", "sequence"), tokens.shape, mesh)
    each = zip(head, HEAD_AXES, strict=True)
    places = Head(*(None if leaf is None else partition_spec(axes, leaf.shape, mesh) for leaf, axes in each))
    over_rows, split = rows[0] or (), places.kernel[0] or ()

    def whole(leaf: jax.Array, place: PartitionSpec) -> jax.Array:
        if place[1] is None:
            return leaf
        # On its way it is as the products need it; back in its own dtype, the loop adds up its gradient in that.
        return jax.lax.all_gather(leaf.astype(hidden.dtype), place[1], axis=1, tiled=True).astype(leaf.dtype)

    def on_device(hidden: jax.Array, head: Head, tokens: Array, weight: Array, part: Array) -> Sums:
        head = jax.tree.map(whole, head, places)
        of_chunk = partial(logits, head, first=first_token(len(head.kernel), split))
        return jax.lax.psum(next_token_loss(hidden, of_chunk, tokens, weight, part, parts, split), over_rows)

    in_specs = (rows, places, rows, rows, rows)
    over = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=False)
    return over(hidden, head, tokens, weight, part)
