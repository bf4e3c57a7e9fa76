"""Attention over the cache on an NVIDIA GPU: the kernel of `model.flash_decode`, in the form that Triton compiles.

B rows, Q queries of a row, C slots, K kv heads, G query heads per kv head, H head size; the kernel uses T tiles of R
rows of a product, tiles of W slots, heads of D, the next power of two, and P parts of the slots.

The queries of a row with all G heads that share keys are rows of one product: Q x G, cut into tiles of R. Few rows
leave most of the chip idle, so the slots that a tile of rows may see are divided among P programs (split-K), each of
which loops over its part. A program returns weighted sums of values, sums of exponentials and the maximum score, which
are combined afterwards. All branches of a row share a tile up to its maximum size, so that a tile of the cache is read
once.
"""

from __future__ import annotations

from functools import partial
from math import e, log2
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from aspd_jax.layout import HIDDEN
from aspd_jax.model.flash_decode import Fields, Refs, filled, in_sight, sees
from aspd_jax.sizes import next_power

LEAST, MAX_ROWS, ROW_BYTES = 16, 128, 2**15  # limits of a tile: smallest product side; sums that fit in registers
SLOT_BYTES, MAX_SLOTS = 2**14, 64  # maximum size of a key tile
PROGRAMS = 132  # one program per multiprocessor of an H100; more would add partial results to combine
MIN_WARPS, WARP_ROWS, STAGES = 4, 16, 3


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


def attend_on_gpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seeing: Fields,
    seen: Fields,
    window: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Compute attention with the GPU kernel; see `Attend`."""
    (B, Q, K, G, H), C, slots = query.shape, seen.sequence.shape[1], key.shape[1]
    D = max(LEAST, next_power(H))
    width = D * key.dtype.itemsize
    R = min(MAX_ROWS, max(LEAST, min(ROW_BYTES // width, next_power(Q * G))))
    W = min(MAX_SLOTS, max(LEAST, SLOT_BYTES // width))
    T, S = pl.cdiv(Q * G, R), pl.cdiv(C, W)
    P = parts_for(B * K * T, S)

    rows = filled(query.swapaxes(2, 3).reshape(B, Q * G, K, H), T * R).swapaxes(1, 2)
    rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, D - H)])
    of_rows = Fields(*(filled(jnp.repeat(field, G, axis=1), T * R) for field in seeing))
    visits = in_sight(of_rows, Fields(*(filled(field, S * W) for field in seen)), window, R, W)

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
            pl.BlockSpec((None, len(of_rows), R), lambda t, n, b: (b, 0, t)),
            pl.BlockSpec((None, len(seen), C), lambda t, n, b: (b, 0, 0)),
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
    weighted, mass, top = run(visits, window, jnp.stack(of_rows, axis=1), jnp.stack(seen, axis=1), rows, key, value)
    part = jnp.exp2(top - top.max(axis=2, keepdims=True))
    out = (part[..., None] * weighted).sum(axis=2) / (part * mass).sum(axis=2)[..., None]
    out = out[:, :, : Q * G, :H].astype(query.dtype)
    return out.reshape(B, K, Q, G, H).swapaxes(1, 2)


def _kernel(*refs: Refs, slots: int, tile: int, parts: int, scale: float) -> None:
    """Compute the partial result of a tile of rows over a part of the slots.

    Args:
        refs: visits int32 [2]; window int32 [1]; `Fields` of the rows int32 [4, R] and of the slots [4, C]; query [R,
            D]; key and value [slots of the cache, H]; and the results, float32: weighted sums of values [R, D], sums of
            exponentials [R], and maximum scores [R]. Exponentials have base 2.
        slots: C.
        tile: W.
        parts: P.
        scale: multiplier of the scores.
    """
    visits, window, seeing, seen, query, key, value, weighted, mass, top = refs
    (R, D), H = query.shape, key.shape[1]
    queries, size = query[...], jnp.arange(D)[None]
    of_rows = Fields(*(seeing[n, :][:, None] for n in range(len(Fields._fields))))
    part = jax.lax.rem(pl.program_id(1), parts)

    def add(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weighted, mass, top = sums
        at = number * tile + jnp.arange(tile)
        inside = at < slots  # memory behind the cache is undefined
        held = inside[:, None] & (size < H)
        keys, values = (triton.load(x.at[at[:, None], size], mask=held, other=0) for x in (key, value))
        of_slots = (triton.load(seen.at[n, at], mask=inside, other=0)[None] for n in range(len(Fields._fields)))
        mask = sees(of_rows, Fields(*of_slots), window[0])
        scores = jnp.where(mask, product(queries, keys, 1, 1) * scale, HIDDEN)
        highest = jnp.maximum(top, scores.max(axis=1))
        probs, kept = jnp.exp2(scores - highest[:, None]), jnp.exp2(top - highest)
        weighted = kept[:, None] * weighted + product(probs.astype(values.dtype), values, 1, 0)
        return weighted, kept * mass + probs.sum(axis=1), highest

    initial = jnp.zeros((R, D), jnp.float32), jnp.zeros(R, jnp.float32), jnp.full(R, HIDDEN, jnp.float32)
    weighted[...], mass[...], top[...] = jax.lax.fori_loop(*tiles_of(visits[0], visits[1], part, parts), add, initial)


def product(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
    """Return the float32 matrix product over one axis of each operand."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
