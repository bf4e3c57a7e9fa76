"""Attention under the mask of `layout.visible`: one interface and several back ends, selected by name.

`FULL_PASS_BACK_ENDS` lists the values of `ModelConfig.attention`; `DECODE_BACK_ENDS`, those of
`ModelConfig.decode_attention`.

B batch, Q queries, C keys (tokens of a full pass, or slots of the cache), K kv heads, G query heads per kv head, H head
size.

Every back end takes query [B, Q, K, G, H], key and value [B, C, K, H] and a `View`, and returns [B, Q, K, G, H] in the
dtype of the query. Scores and softmax are float32. Key and value may have more rows and slots than the view; the extra
ones are ignored, so that callers pass the whole cache and a back end slices it only if it has to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from aspd_jax.layout import HIDDEN, Layout, Siblings, visible
from aspd_jax.model import flash_decode as kernel

QUERY_CHUNK = 128
GROUPS = 8
DECODE_CHUNK = 16  # queries of a row whose scores are in memory at a time


# Sliding window in positions; an array if layers with different windows share one program.
Window: TypeAlias = int | jax.Array | None


class View(NamedTuple):
    """The array arguments of `layout.visible`.

    Attributes:
        query: layout of the queries, int32 [B, Q] per field.
        key: layout of the keys, int32 [B, C] per field.
    """

    query: Layout
    key: Layout

    def mask(self, siblings: Siblings, window: Window) -> jax.Array:
        """Return the mask, bool [B, Q, C]."""
        return visible(self.query, self.key, siblings, window)


Attention = Callable[[jax.Array, jax.Array, jax.Array, View, Siblings, Window], jax.Array]
DecodeAttention = Callable[[jax.Array, jax.Array, jax.Array, View, Window], jax.Array]  # siblings are invisible


def reference(
    query: jax.Array, key: jax.Array, value: jax.Array, view: View, siblings: Siblings, window: Window
) -> jax.Array:
    """Compute attention as it is defined, with all scores at once; memory grows with Q x C."""
    return attend(query, *looked_at(key, value, view), view.mask(siblings, window))


def looked_at(key: jax.Array, value: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    """Slice key and value to the rows and slots of the view."""
    rows, slots = view.key.position.shape
    return key[:rows, :slots], value[:rows, :slots]


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Compute softmax attention under a mask, bool [B, Q, C]."""
    B, Q, K, G, H = query.shape
    # The queries of a kv head form one matrix (R = G x Q rows), because all compilers handle batched products well.
    rows = (query * H**-0.5).transpose(0, 2, 3, 1, 4).reshape(B, K, G * Q, H)
    scores = jnp.einsum("BKRH,BCKH->BKRC", rows, key, preferred_element_type=jnp.float32)
    masked = jnp.where(mask[:, None, None], scores.reshape(B, K, G, Q, -1), HIDDEN)
    probs = jax.nn.softmax(masked).astype(value.dtype).reshape(B, K, G * Q, -1)
    out = jnp.einsum("BKRC,BCKH->BKRH", probs, value)
    return out.reshape(B, K, G, Q, H).transpose(0, 3, 1, 2, 4)


def reference_decode(query: jax.Array, key: jax.Array, value: jax.Array, view: View, window: Window) -> jax.Array:
    """Compute attention over the cache as it is defined; see `reference`."""
    return reference(query, key, value, view, "invisible", window)


def decode(query: jax.Array, key: jax.Array, value: jax.Array, view: View, window: Window) -> jax.Array:
    """Compute attention of few queries over many keys, for decoding: `DECODE_CHUNK` queries of every row at a time."""

    def attend_chunk(query: jax.Array, key: jax.Array, value: jax.Array, view: View) -> jax.Array:
        # The barrier stops the compiler from recomputing the mask in every layer and for every head.
        mask = jax.lax.optimization_barrier(view.mask("invisible", window))
        return attend(query, key, value, mask)

    key, value = looked_at(key, value, view)
    if query.shape[1] <= DECODE_CHUNK:
        return attend_chunk(query, key, value, view)
    return _in_chunks(attend_chunk, query, key, value, view, DECODE_CHUNK)


def chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, view: View, siblings: Siblings, window: Window
) -> jax.Array:
    """Compute attention of a full pass in chunks of queries, each recomputed in the backward pass; for training.

    Keys and queries are the same tokens in the order of the linearisation. A group of chunks, of at most `GROUPS`,
    reads only the keys up to its own end, which skips most of the masked scores. The chunks of a group run in a loop,
    so that the scores of only one chunk per group are in memory, which grows with C instead of Q x C.
    """
    length = query.shape[1]
    group = QUERY_CHUNK * ceil(ceil(length / QUERY_CHUNK) / GROUPS)
    recomputed = jax.checkpoint(partial(reference, siblings=siblings, window=window))
    out = []
    for start in range(0, length, group):
        end = min(start + group, length)
        group_view = View(_part(view.query, slice(start, end)), _part(view.key, slice(end)))
        part = query[:, start:end], key[:, :end], value[:, :end], group_view
        out.append(recomputed(*part) if end - start <= QUERY_CHUNK else _in_chunks(recomputed, *part, QUERY_CHUNK))
    return jnp.concatenate(out, axis=1)


def flash_decode(query: jax.Array, key: jax.Array, value: jax.Array, view: View, window: Window) -> jax.Array:
    """Compute attention over the cache with the kernel for NVIDIA GPUs (`model.flash_decode`).

    On CPU the kernel is interpreted, which is slow and meant for tests. Other platforms use `decode`.
    """
    fused = partial(kernel.flash_decode, window=window)

    def plain(query: jax.Array, key: jax.Array, value: jax.Array, *layouts: Layout) -> jax.Array:
        return decode(query, key, value, View(*layouts), window)

    interpreted = partial(fused, interpret=True)
    return jax.lax.platform_dependent(query, key, value, *view, cuda=fused, cpu=interpreted, default=plain)


# Attention among the tokens of a full pass, in the order of the linearisation.
FULL_PASS_BACK_ENDS: dict[str, Attention] = {"reference": reference, "chunked": chunked}
# Attention of a few tokens over the slots of a cache, in any order.
DECODE_BACK_ENDS: dict[str, DecodeAttention] = {
    "reference": reference_decode,
    "decode": decode,
    "flash_decode": flash_decode,
}


def _in_chunks(
    attention: Callable[[jax.Array, jax.Array, jax.Array, View], jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    view: View,
    size: int,
) -> jax.Array:
    """Apply `attention` to chunks of `size` queries in a loop."""
    length = query.shape[1]
    chunks = ceil(length / size)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)

    def step(chunk: tuple[jax.Array, Layout]) -> jax.Array:
        return attention(chunk[0], key, value, View(chunk[1], view.key))

    parts = jax.lax.map(step, (split(query), Layout(*(split(jnp.asarray(field)) for field in view.query))))
    joined = jnp.moveaxis(parts, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def _part(layout: Layout, tokens: slice) -> Layout:
    return Layout(*(field[:, tokens] for field in layout))
