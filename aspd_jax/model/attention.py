"""Attention under the mask of `layout.visible`: one contract, several implementations.

B batch, Q queries, C keys (cache slots or tokens), K kv heads, G query heads per kv head, H head size.

Every implementation takes query [B, Q, K, G, H], key and value [B, K, C, H] and a `View`, and returns
[B, Q, K, G, H] in the dtype of the query. Scores and softmax are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout, Siblings, visible

HIDDEN = -1e30  # finite, so that a row that sees nothing (padding) gives no NaN
QUERY_CHUNK = 128


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


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention under a mask, bool [B, Q, C]."""
    B, Q, K, G, H = query.shape
    # All queries of a kv head as one matrix (R = G x Q rows): plain batched products, which every back end does well.
    rows = (query * H**-0.5).transpose(0, 2, 3, 1, 4).reshape(B, K, G * Q, H)
    scores = jnp.einsum("BKRH,BKCH->BKRC", rows, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, K, G, Q, -1)
    scores = jnp.where(mask[:, None, None], scores, HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("BKRC,BKCH->BKRH", weights.reshape(B, K, G * Q, -1), value)
    return out.reshape(B, K, G, Q, H).transpose(0, 3, 1, 2, 4)


def dense(
    query: jax.Array, key: jax.Array, value: jax.Array, view: View, siblings: Siblings, window: Window
) -> jax.Array:
    """The reference, and the one for decoding: all scores at once, memory Q x C."""
    return attend(query, key, value, view.mask(siblings, window))


def chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, view: View, siblings: Siblings, window: Window
) -> jax.Array:
    """The one for training: chunks of queries one after another, each recomputed in the backward pass.

    Exact for full passes, in which keys and queries are the same tokens in the order of the linearisation:
    a chunk looks at no key behind its own last token. Memory grows with C, not with Q x C.
    """
    one = jax.checkpoint(partial(dense, siblings=siblings, window=window))
    out = []
    for start in range(0, query.shape[1], QUERY_CHUNK):
        here, behind = slice(start, start + QUERY_CHUNK), slice(start + QUERY_CHUNK)
        seen = View(_part(view.query, here), _part(view.key, behind))
        out.append(one(query[:, here], key[:, :, behind], value[:, :, behind], seen))
    return jnp.concatenate(out, axis=1)


def _part(layout: Layout, tokens: slice) -> Layout:
    return Layout(*(field[:, tokens] for field in layout))
