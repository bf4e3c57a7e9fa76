"""Next-token loss on the linearisation (protocol, section 9).

B: rows; S: tokens of a row; D: hidden size; V: vocabulary; P: parts (`train.batches.PARTS`); C: tokens of a chunk.
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

CHUNK = 256  # tokens of each row whose logits are in memory at a time


class Sums(NamedTuple):
    """Sum of cross-entropies and sum of weights of the targets of each part; float32 [P]."""

    loss: jax.Array
    weight: jax.Array

    def mean(self) -> jax.Array:
        """Return the mean loss over all parts."""
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
    """Sum the weighted cross-entropies by part, computing logits for one chunk at a time.

    Args:
        hidden: activations before the head, [B, S, D].
        head: maps activations [..., D] to logits, float32 [..., V].
        tokens: token ids, int32 [B, S]; token s + 1 is the target of token s.
        weight: weight of each token as a target, float32 [B, S]. The first token of a sequence and tokens that the
            engine feeds have weight 0, so that no target crosses from one branch to the next.
        part: part of each token as a target, int32 [B, S].
        parts: number of parts.
        split: mesh axes over which the vocabulary is split, inside `shard_map`; V is then the share of one device.
    """
    S = tokens.shape[1]
    chunks = ceil(S / CHUNK)
    C = ceil(S / chunks)

    def shifted(x: Array) -> jax.Array:
        return jnp.pad(x[:, 1:], [(0, 0), (0, chunks * C - S + 1)])

    def in_chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, C, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def add_chunk(sums: Sums, chunk: tuple[jax.Array, ...]) -> tuple[Sums, None]:
        hidden, target, weight, part = chunk
        losses = cross_entropy(head(hidden), target, split) * weight
        one_hot = jax.nn.one_hot(part, parts, dtype=jnp.float32)
        loss, count = jnp.einsum("BC,BCP->P", losses, one_hot), jnp.einsum("BC,BCP->P", weight, one_hot)
        return Sums(sums.loss + loss, sums.weight + count), None

    padded = jnp.pad(hidden, [(0, 0), (0, chunks * C - S), (0, 0)])
    xs = tuple(in_chunks(x) for x in (padded, shifted(tokens), shifted(weight), shifted(part)))
    zero = jnp.zeros(parts, jnp.float32)
    sums, _ = jax.lax.scan(add_chunk, Sums(zero, zero), xs)
    return sums


def cross_entropy(logits: jax.Array, target: jax.Array, split: tuple[str, ...] = ()) -> jax.Array:
    """Return the cross-entropy of each target, float32 [...].

    Args:
        logits: float32 [..., V].
        target: token ids, int32 [...].
        split: see `next_token_loss`. Devices exchange three numbers per target.
    """
    V = logits.shape[-1]
    local = target - first_token(V, split)
    at_target = jnp.take_along_axis(logits, jnp.clip(local, 0, V - 1)[..., None], axis=-1).squeeze(-1)
    at_target = jax.lax.psum(jnp.where((local >= 0) & (local < V), at_target, 0), split)
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(axis=-1)), split)
    total = jax.lax.psum(jnp.exp(logits - highest[..., None]).sum(axis=-1), split)
    return jnp.log(total) + highest - at_target


def first_token(V: int, split: tuple[str, ...]) -> int | jax.Array:
    """Return the first token id of this device's share of V tokens of a vocabulary split over mesh axes."""
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
    """Compute `next_token_loss` over a mesh, with rows and vocabulary split over devices.

    The head is gathered over `fsdp` once before the loop over chunks, and its gradient is reduced once after it;
    without `shard_map`, the compiler does both in every chunk.

    Args:
        mesh: mesh.
        hidden, tokens, weight, part, parts: see `next_token_loss`.
        head: parameters of the head.
        logits: maps (head, activations [..., D], `first`: first token id of the head's share) to float32 [..., V].
    """
    rows = partition_spec(("batch", "sequence"), tokens.shape, mesh)
    leaves = zip(head, HEAD_AXES, strict=True)
    places = Head(*(None if leaf is None else partition_spec(axes, leaf.shape, mesh) for leaf, axes in leaves))
    over_rows, split = rows[0] or (), places.kernel[0] or ()

    def whole(leaf: jax.Array, place: PartitionSpec) -> jax.Array:
        if place[1] is None:
            return leaf
        # Transfer in the dtype of the products; convert back so that the loop sums the gradient in the head's dtype.
        return jax.lax.all_gather(leaf.astype(hidden.dtype), place[1], axis=1, tiled=True).astype(leaf.dtype)

    def on_device(hidden: jax.Array, head: Head, tokens: Array, weight: Array, part: Array) -> Sums:
        head = jax.tree.map(whole, head, places)
        local_head = partial(logits, head, first=first_token(len(head.kernel), split))
        return jax.lax.psum(next_token_loss(hidden, local_head, tokens, weight, part, parts, split), over_rows)

    in_specs = (rows, places, rows, rows, rows)
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=False)
    return mapped(hidden, head, tokens, weight, part)
