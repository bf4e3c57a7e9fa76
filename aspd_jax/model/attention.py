"""Attention under the mask of `layout.visible`: one contract, several implementations.

B batch, Q queries, C keys (cache slots or tokens), K kv heads, G query heads per kv head, H head size.

Every implementation takes query [B, Q, K, G, H], key and value [B, K, C, H] and a `View`, and returns
[B, Q, K, G, H] in the dtype of the query. Scores and softmax are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout, Siblings, visible
from aspd_jax.model.lowering import mixture, scores, softmax

HIDDEN = -1e30  # finite, so that a row that sees nothing (padding) gives no NaN
QUERY_CHUNK = 128
GROUPS = 8


# Sliding window in positions; an array where layers that differ share one program.
Window: TypeAlias = int | jax.Array | None


class View(NamedTuple):
    """Who looks at whom: the arguments of `layout.visible` that are arrays.

    `query_slot` [B, Q] and `key_slot` [B, C] are the places in the cache while decoding, else None.
    """

    query: Layout
    key: Layout
    query_slot: jax.Array | None = None
    key_slot: jax.Array | None = None

    def mask(self, siblings: Siblings, window: Window) -> jax.Array:
        """Bool [B, Q, C]."""
        return visible(self.query, self.key, siblings, window, self.query_slot, self.key_slot)


Attention = Callable[[jax.Array, jax.Array, jax.Array, View, Siblings, Window], jax.Array]


class Arithmetic(NamedTuple):
    """What attention computes of queries as rows, in order.

    Attributes:
        scores: rows [B, K, R, H] and keys -> float32 [B, K, R, C].
        shares: scores -> those of each token, which add up to 1 over C.
        mixture: shares [B, K, R, C] and values [B, K, C, H] -> [B, K, R, H].
    """

    scores: Callable[[jax.Array, jax.Array], jax.Array]
    shares: Callable[[jax.Array], jax.Array]
    mixture: Callable[[jax.Array, jax.Array], jax.Array]


PLAIN = Arithmetic(
    scores=partial(jnp.einsum, "BKRH,BKCH->BKRC", preferred_element_type=jnp.float32),
    shares=jax.nn.softmax,
    mixture=partial(jnp.einsum, "BKRC,BKCH->BKRH"),
)
OVER_CACHE = Arithmetic(scores, softmax, mixture)  # where keys lie as [B, K, H, C]; not for training


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, arithmetic: Arithmetic = PLAIN
) -> jax.Array:
    """Softmax attention under a mask, bool [B, Q, C]; keys [B, K, C, H], or as `arithmetic` has them."""
    B, Q, K, G, H = query.shape
    # All queries of a kv head as one matrix (R = G x Q rows): plain batched products, which every back end does well.
    rows = (query * H**-0.5).transpose(0, 2, 3, 1, 4).reshape(B, K, G * Q, H)
    seen = jnp.where(mask[:, None, None], arithmetic.scores(rows, key).reshape(B, K, G, Q, -1), HIDDEN)
    shares = arithmetic.shares(seen).astype(value.dtype)
    out = arithmetic.mixture(shares.reshape(B, K, G * Q, -1), value)
    return out.reshape(B, K, G, Q, H).transpose(0, 3, 1, 2, 4)


def dense(
    query: jax.Array, key: jax.Array, value: jax.Array, view: View, siblings: Siblings, window: Window
) -> jax.Array:
    """The reference: all scores at once, memory Q x C."""
    return attend(query, key, value, view.mask(siblings, window))


def cached(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """The one for decoding: over keys as they lie in the cache, [B, K, H, C], and a mask that is there already."""
    return attend(query, key, value, mask, OVER_CACHE)


def chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, view: View, siblings: Siblings, window: Window
) -> jax.Array:
    """The one for training: chunks of queries one after another, each recomputed in the backward pass.

    Exact for full passes, in which keys and queries are the same tokens in the order of the linearisation:
    a chunk looks at no key behind its group. Memory grows with C, not with Q x C.
    """
    return by_chunks(partial(dense, siblings=siblings, window=window), query, key, value, view)


def by_chunks(
    attention: Callable[[jax.Array, jax.Array, jax.Array, View], jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    view: View,
) -> jax.Array:
    """Attention of a full pass, `QUERY_CHUNK` queries at a time, in at most `GROUPS` groups.

    A group looks at the keys up to its own end, so that little is computed that lies ahead. Its chunks are a loop,
    which no compiler can run side by side: scores of one chunk exist per group.
    """
    length = query.shape[1]
    group = QUERY_CHUNK * ceil(ceil(length / QUERY_CHUNK) / GROUPS)
    out = []
    for start in range(0, length, group):
        end = min(start + group, length)
        ours = View(_part(view.query, slice(start, end)), _part(view.key, slice(end)))
        out.append(_one_by_one(attention, query[:, start:end], key[:, :, :end], value[:, :, :end], ours))
    return jnp.concatenate(out, axis=1)


def _one_by_one(
    attention: Callable[[jax.Array, jax.Array, jax.Array, View], jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    view: View,
) -> jax.Array:
    """Attention of one group: a loop over its chunks of queries."""
    one = jax.checkpoint(attention)
    length = query.shape[1]
    chunks = ceil(length / QUERY_CHUNK)
    if chunks == 1:
        return one(query, key, value, view)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * QUERY_CHUNK - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, QUERY_CHUNK, *x.shape[2:]), 1, 0)

    def step(chunk: tuple[jax.Array, Layout]) -> jax.Array:
        return one(chunk[0], key, value, View(chunk[1], view.key))

    parts = jax.lax.map(step, (split(query), Layout(*(split(jnp.asarray(field)) for field in view.query))))
    joined = jnp.moveaxis(parts, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def _part(layout: Layout, tokens: slice) -> Layout:
    return Layout(*(field[:, tokens] for field in layout))
