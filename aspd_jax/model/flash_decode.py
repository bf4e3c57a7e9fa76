"""Attention over the cache on an NVIDIA GPU as one Pallas kernel: scores stay on the chip.

B rows, Q queries of a row, C slots, K kv heads, G query heads per kv head, H head size; the kernel uses T tiles of R
rows of a product, tiles of W slots, heads of D, the next power of two, and P parts of the slots.

The queries of a row with all G heads that share keys are rows of one product: Q x G, cut into tiles of R. Few rows
leave most of the chip idle, so the slots that a tile of rows may see are divided among P programs (split-K), each of
which loops over its part. A program returns weighted sums of values, sums of exponentials and the maximum score, which
are combined afterwards. All branches of a row share a tile up to its maximum size, so that a tile of the cache is read
once. Slots of different branches interleave in the order of decoding, so the mask of every tile is computed from the
layout. Softmax is computed online over the slots (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from functools import partial
from math import e, log2
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from aspd_jax.layout import HIDDEN, NO_WINDOW, Layout, sees
from aspd_jax.sharding import partition_spec
from aspd_jax.sizes import next_power

LEAST, MAX_ROWS, ROW_BYTES = 16, 128, 2**15  # limits of a tile: smallest product side; sums that fit in registers
SLOT_BYTES, MAX_SLOTS = 2**14, 64  # maximum size of a key tile
PROGRAMS = 132  # one program per multiprocessor of an H100; more would add partial results to combine
MIN_WARPS, WARP_ROWS, STAGES = 4, 16, 3

Refs: TypeAlias = Any  # Pallas refs, for which there is no precise type


def flash_decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_layout: Layout,
    key_layout: Layout,
    window: int | jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of queries over a cache; on the mesh of the context, each device uses its own heads and rows.

    Args:
        query: [B, Q, K, G, H].
        key: [B, C, K, H], or longer on the first two axes: the kernel skips the rest, because a slice would be a copy.
        value: same shape as `key`.
        query_layout: layout of the queries; `sequence` is 0 at padding, whose results are finite but meaningless.
        key_layout: layout of the C slots in use.
        window: see `layout.visible`.
        interpret: run the kernel as plain JAX, on any platform.

    Returns:
        [B, Q, K, G, H] in the dtype of the query.
    """
    run = partial(_attend, interpret=interpret)
    limit = jnp.reshape(jnp.asarray(NO_WINDOW if window is None else window, jnp.int32), 1)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(query, key, value, query_layout, key_layout, limit)
    # XLA cannot partition a kernel. Rows are split only if all rows of the cache have queries.
    rows = "batch" if len(query) == len(key) else None

    def place(shape: tuple[int, ...], *axes: str | None) -> Any:
        return partition_spec(axes, shape, mesh)

    queries = place(query.shape, rows, None, "kv_heads", None, None)
    slots = place(key.shape, rows, None, "kv_heads", None)
    layouts = [jax.tree.map(lambda field: place(field.shape, rows, None), of) for of in (query_layout, key_layout)]
    split = jax.shard_map(
        run, in_specs=(queries, slots, slots, *layouts, place((1,), None)), out_specs=queries, check_vma=False
    )
    return split(query, key, value, query_layout, key_layout, limit)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_layout: Layout,
    key_layout: Layout,
    window: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Compute attention on one device; see `flash_decode`; window: int32 [1]."""
    (B, Q, K, G, H), C, slots = query.shape, key_layout.sequence.shape[1], key.shape[1]
    D = max(LEAST, next_power(H))
    width = D * key.dtype.itemsize
    R = min(MAX_ROWS, max(LEAST, min(ROW_BYTES // width, next_power(Q * G))))
    W = min(MAX_SLOTS, max(LEAST, SLOT_BYTES // width))
    T, S = pl.cdiv(Q * G, R), pl.cdiv(C, W)
    P = parts_for(B * K * T, S)

    rows = _filled(query.swapaxes(2, 3).reshape(B, Q * G, K, H), T * R).swapaxes(1, 2)
    rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, D - H)])
    row_layout = Layout(*(_filled(jnp.repeat(field, G, axis=1), T * R) for field in query_layout))
    visits = in_sight(row_layout, Layout(*(_filled(field, S * W) for field in key_layout)), window, R, W)

    def tile(t: Any, n: Any, b: Any) -> tuple[Any, ...]:
        return b, n // P, n % P, t

    at_rows = pl.BlockSpec((None, None, R, D), lambda t, n, b: (b, n // P, t, 0))
    cache = pl.BlockSpec((None, slots, None, H), lambda t, n, b: (b, 0, n // P, 0))
    sums, numbers = (B, K, P, T * R, D), (B, K, P, T * R)
    run = pl.pallas_call(
        partial(_kernel, slots=C, tile=W, parts=P, scale=float(H**-0.5 * log2(e))),
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (sums, numbers, numbers)],
        grid=(T, K * P, B),  # adjacent programs read the same part of the cache
        in_specs=[
            pl.BlockSpec((None, None, 2), lambda t, n, b: (b, t, 0)),
            pl.BlockSpec((1,), lambda t, n, b: (0,)),
            pl.BlockSpec((None, len(row_layout), R), lambda t, n, b: (b, 0, t)),
            pl.BlockSpec((None, len(key_layout), C), lambda t, n, b: (b, 0, 0)),
            at_rows,
            cache,
            cache,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, R, D), lambda *at: (*tile(*at), 0)),
            *[pl.BlockSpec((None, None, None, R), tile)] * 2,
        ],
        compiler_params=triton.CompilerParams(num_warps=max(MIN_WARPS, R // WARP_ROWS), num_stages=STAGES),
        name="flash_decode",
        interpret=interpret,
    )
    layouts = jnp.stack(row_layout, axis=1), jnp.stack(key_layout, axis=1)
    weighted, mass, top = run(visits, window, *layouts, rows, key, value)
    part = jnp.exp2(top - top.max(axis=2, keepdims=True))
    out = (part[..., None] * weighted).sum(axis=2) / (part * mass).sum(axis=2)[..., None]
    out = out[:, :, : Q * G, :H].astype(query.dtype)
    return out.reshape(B, K, Q, G, H).swapaxes(1, 2)


def parts_for(programs: int, slots: int) -> int:
    """Return the number of split-K partitions of the slot axis.

    Args:
        programs: number of programs without a split.
        slots: number of slot tiles.
    """
    return max(1, min(PROGRAMS // programs, slots))


def tiles_of(first: jax.Array, last: jax.Array, part: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Return the first tile of a part and the tile after its last, for `first` to `last` divided into `parts`."""
    count = last - first + 1
    return first + jax.lax.div(part * count, parts), first + jax.lax.div((part + 1) * count, parts)


def _filled(x: jax.Array, size: int) -> jax.Array:
    """Pad the second axis with zeros to `size`."""
    return jnp.pad(x, [(0, 0), (0, size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def in_sight(row_layout: Layout, key_layout: Layout, window: jax.Array, rows: int, slots: int) -> jax.Array:
    """Return the first and last slot tile that a tile of rows may see, for every tile of rows.

    Args:
        row_layout, key_layout: layouts of whole tiles.
        window: int32 [1].
        rows, slots: sizes of a tile.

    Returns:
        Int32 [B, T, 2]; both are 0 if the tile sees nothing.
    """
    B = len(row_layout.position)

    def cut(field: jax.Array) -> jax.Array:
        return field.reshape(B, -1, rows)

    real, position = cut(row_layout.sequence) > 0, cut(row_layout.position)
    lowest = jnp.min(jnp.where(real, position, NO_WINDOW), axis=2)[:, :, None]
    highest = jnp.max(jnp.where(real, position, -1), axis=2)[:, :, None]
    held = key_layout.sequence[:, None] > 0
    near = held & (key_layout.position[:, None] <= highest) & (lowest - key_layout.position[:, None] < window)
    some = near.reshape(B, real.shape[1], -1, slots).any(axis=3)
    last = some.shape[2] - 1 - jnp.argmax(some[:, :, ::-1], axis=2)
    none = ~some.any(axis=2)
    return jnp.stack([jnp.argmax(some, axis=2), jnp.where(none, 0, last)], axis=2).astype(jnp.int32)


def _kernel(*refs: Refs, slots: int, tile: int, parts: int, scale: float) -> None:
    """Compute the partial result of a tile of rows over a part of the slots.

    Args:
        refs: visits int32 [2]; window int32 [1]; `Layout` of the rows int32 [4, R] and of the slots [4, C]; query [R,
            D]; key and value [slots of the cache, H]; and the results, float32: weighted sums of values [R, D], sums of
            exponentials [R], and maximum scores [R]. Exponentials have base 2.
        slots: C.
        tile: W.
        parts: P.
        scale: multiplier of the scores.
    """
    visits, window, row_fields, key_fields, query, key, value, weighted, mass, top = refs
    (R, D), H = query.shape, key.shape[1]
    queries, size = query[...], jnp.arange(D)[None]
    row_layout = Layout(*(row_fields[n, :][:, None] for n in range(len(Layout._fields))))
    part = jax.lax.rem(pl.program_id(1), parts)

    def add(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weighted, mass, top = sums
        at = number * tile + jnp.arange(tile)
        inside = at < slots  # memory behind the cache is undefined
        held = inside[:, None] & (size < H)
        keys, values = (triton.load(x.at[at[:, None], size], mask=held, other=0) for x in (key, value))
        fields = (triton.load(key_fields.at[n, at], mask=inside, other=0)[None] for n in range(len(Layout._fields)))
        mask = sees(row_layout, Layout(*fields), window=window[0])
        scores = jnp.where(mask, _product(queries, keys, 1, 1) * scale, HIDDEN)
        highest = jnp.maximum(top, scores.max(axis=1))
        probs, kept = jnp.exp2(scores - highest[:, None]), jnp.exp2(top - highest)
        weighted = kept[:, None] * weighted + _product(probs.astype(values.dtype), values, 1, 0)
        return weighted, kept * mass + probs.sum(axis=1), highest

    initial = jnp.zeros((R, D), jnp.float32), jnp.zeros(R, jnp.float32), jnp.full(R, HIDDEN, jnp.float32)
    weighted[...], mass[...], top[...] = jax.lax.fori_loop(*tiles_of(visits[0], visits[1], part, parts), add, initial)


def _product(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
    """Return the float32 matrix product over one axis of each operand."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
