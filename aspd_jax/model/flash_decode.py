"""Attention over the cache as one Pallas kernel: keys and values are read once, scores never leave the chip.

Here is what all platforms share, and the kernel for a TPU; that for a GPU is `model.flash_decode_gpu`.

B rows, Q queries of a row, C slots, K kv heads, G query heads per kv head, H head size; the kernel sees T tiles of P
queries, S tiles of W slots, and N = K or K x G groups of R = P x G or P rows of a product.

The grid goes through rows, tiles of queries and, innermost, tiles of slots. All queries of a row, those of all
branches, are one tile as long as they fit into the chip's memory; so a tile of the cache, with all its heads, is
fetched once per row. Slots of branches lie between each other in the order of time, so who sees whom is computed for
every tile from the layout. Softmax is that of Milakov and Gimelshein (2018), in one go over the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from aspd_jax.layout import HIDDEN, NO_WINDOW, Layout, Siblings
from aspd_jax.sharding import partition_spec

QUERY_ROWS = 1 << 21  # P x K x G x H of a tile at most: 8 MiB of float32 sums
SLOT_BYTES = 1 << 20  # of a tile of keys at most; long enough for a fetch to reach full bandwidth
SLOTS = 128  # of a tile at least: one vector's lanes
ALIGNED = 16  # queries: two bfloat16 share a sublane, of which a vector has 8
TOGETHER = 128  # rows of a product that fill the matrix unit
MEMORY = 60 << 20  # bytes of the chip's memory that the kernel may take


class Fields(NamedTuple):
    """What `layout.visible` looks at, of queries or keys; int32 [B, Q] or [B, C] each.

    Attributes:
        order: in which siblings see each other in the ablation `shared`.
    """

    sequence: jax.Array
    position: jax.Array
    block: jax.Array
    branch: jax.Array
    order: jax.Array


class Tiles(NamedTuple):
    """How a call is cut up.

    Attributes:
        queries: P.
        slots: W.
        together: whether the G heads that share keys are rows of one product.
    """

    queries: int
    slots: int
    together: bool


Refs: TypeAlias = Any  # of Pallas, which has no type that says what they hold
# From query, key, value, fields of both, window int32 [1], `siblings` and `interpret` to the result; on one device.
Attend: TypeAlias = Callable[..., jax.Array]


def tiles_for(queries: int, slots: int, key: jax.Array, heads: int) -> Tiles:
    """Tiles for so many queries and slots of a row, over a cache [B, C, K, H] that meets so many query heads."""
    K, H = key.shape[2:]
    most = max(QUERY_ROWS // (heads * H), ALIGNED)
    whole = pl.cdiv(queries, ALIGNED) * ALIGNED
    count = pl.cdiv(whole, most)
    P = pl.cdiv(pl.cdiv(whole, count), ALIGNED) * ALIGNED
    W = SLOTS
    while slots > W and 2 * W * K * H * key.dtype.itemsize <= SLOT_BYTES:
        W *= 2
    return Tiles(P, W, P < TOGETHER)


def flash_decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seeing: Fields,
    seen: Fields,
    siblings: Siblings,
    window: int | jax.Array | None,
    attend: Attend,
    interpret: bool = False,
) -> jax.Array:
    """Attention of queries [B, Q, K, G, H] over a cache; on the mesh of the context, where its heads and rows lie.

    Args:
        key: [B, C, K, H] or longer on the first two axes: a part of the cache would be copied, so the kernel visits it.
        value: as `key`.
        seeing: of the queries; `sequence` is 0 at padding, whose results are finite and mean nothing.
        seen: of the slots that are in use, C of them.
        siblings, window: see `layout.visible`.
        attend: the kernel of a platform.
        interpret: run it as plain JAX, on any platform.

    Returns:
        [B, Q, K, G, H] in the dtype of the query.
    """
    attend = partial(attend, siblings=siblings, interpret=interpret)
    limit = jnp.reshape(jnp.asarray(NO_WINDOW if window is None else window, jnp.int32), 1)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(query, key, value, seeing, seen, limit)
    # No compiler splits a kernel. Rows of the cache that do not feed are left out only where rows are not split.
    rows = "batch" if len(query) == len(key) else None

    def place(shape: tuple[int, ...], *axes: str | None) -> Any:
        return partition_spec(axes, shape, mesh)

    queries = place(query.shape, rows, None, "kv_heads", None, None)
    slots = place(key.shape, rows, None, "kv_heads", None)
    of_rows = [jax.tree.map(lambda field: place(field.shape, rows, None), fields) for fields in (seeing, seen)]
    split = jax.shard_map(
        attend, in_specs=(queries, slots, slots, *of_rows, place((1,), None)), out_specs=queries, check_vma=False
    )
    return split(query, key, value, seeing, seen, limit)


def attend_on_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seeing: Fields,
    seen: Fields,
    window: jax.Array,
    siblings: Siblings,
    interpret: bool,
) -> jax.Array:
    """An `Attend`."""
    (B, Q, K, G, H), C = query.shape, seen.sequence.shape[1]
    tiles = tiles_for(Q, C, key, K * G)
    P, W = tiles.queries, tiles.slots
    T, S = pl.cdiv(Q, P), pl.cdiv(C, W)
    N, R = (K, G * P) if tiles.together else (K * G, P)

    seeing = Fields(*(filled(field, T * P) for field in seeing))
    seen = Fields(*(filled(field, S * W) for field in seen))
    visits = in_sight(seeing, seen, window, siblings, P, W)
    rows = filled(query * H**-0.5, T * P).reshape(B, T, P, K, G, H).transpose(0, 1, 3, 4, 2, 5).reshape(B, T, N, R, H)

    def slots(b: Any, t: Any, s: Any, visits: Refs, _: Refs) -> tuple[Any, Any]:
        return b, jnp.clip(s, visits[b, t, 0], visits[b, t, 1])  # one that was just there is not fetched again

    def cache_tile(*at: Any) -> tuple[Any, ...]:
        return *slots(*at), *[0] * (key.ndim - 2)

    def query_tile(b: Any, t: Any, *_: Any) -> tuple[Any, ...]:
        return b, t, 0, 0, 0

    if K == 1:  # a head alone lies as one matrix; with an axis of 1, XLA would lay out the cache anew
        key, value = key[:, :, 0], value[:, :, 0]
    if not interpret:  # else XLA moves small caches whole to the chip's memory and back
        key, value = (pltpu.with_memory_space_constraint(of_cache, pltpu.HBM) for of_cache in (key, value))
    out = pl.pallas_call(
        partial(_kernel, siblings=siblings, slots=C, shared=N // K),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, T, S),
            in_specs=[
                pl.BlockSpec((1, P, len(seeing)), lambda b, t, *_: (b, t, 0)),
                pl.BlockSpec((1, len(seen), W), lambda *at: (slots(*at)[0], 0, slots(*at)[1])),
                pl.BlockSpec((1, 1, N, R, H), query_tile),
                pl.BlockSpec((1, W, *key.shape[2:]), cache_tile),
                pl.BlockSpec((1, W, *value.shape[2:]), cache_tile),
            ],
            out_specs=pl.BlockSpec((1, 1, N, R, H), query_tile),
            scratch_shapes=[
                pltpu.VMEM((K, W, H), key.dtype),
                pltpu.VMEM((K, W, H), value.dtype),
                pltpu.VMEM((R, W), jnp.float32),
                pltpu.VMEM((N, R, 1), jnp.float32),
                pltpu.VMEM((N, R, 1), jnp.float32),
                pltpu.VMEM((N, R, H), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, query.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=MEMORY),
        name="flash_decode",
        interpret=interpret,
    )(visits, window, jnp.stack(seeing, axis=2), jnp.stack(seen, axis=1), rows, key, value)
    return out.reshape(B, T, K, G, P, H).transpose(0, 1, 4, 2, 3, 5).reshape(B, T * P, K, G, H)[:, :Q]


def filled(x: jax.Array, size: int) -> jax.Array:
    """With zeros behind what there is along the second axis, up to a size."""
    return jnp.pad(x, [(0, 0), (0, size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def in_sight(
    seeing: Fields, seen: Fields, window: jax.Array, siblings: Siblings, queries: int, slots: int
) -> jax.Array:
    """The first and the last tile of slots that a tile of queries may see something of.

    Args:
        seeing, seen: of whole tiles.
        window: int32 [1].
        siblings: see `layout.visible`.
        queries, slots: of a tile.

    Returns:
        Int32 [B, T, 2]; both are 0 where nothing is seen.
    """
    rows = len(seeing.position)

    def cut(field: jax.Array, size: int) -> jax.Array:
        return field.reshape(rows, -1, size)

    real, position = cut(seeing.sequence, queries) > 0, cut(seeing.position, queries)
    least = jnp.min(jnp.where(real, position, NO_WINDOW), axis=2)[:, :, None]
    most = jnp.max(jnp.where(real, position, -1), axis=2)[:, :, None]
    held = seen.sequence[:, None] > 0
    # Positions of siblings do not say which of them came first.
    near = (
        held & (least - seen.position[:, None] < window) & ((siblings == "shared") | (seen.position[:, None] <= most))
    )
    some = near.reshape(rows, real.shape[1], -1, slots).any(axis=3)
    last = some.shape[2] - 1 - jnp.argmax(some[:, :, ::-1], axis=2)
    none = ~some.any(axis=2)
    return jnp.stack([jnp.argmax(some, axis=2), jnp.where(none, 0, last)], axis=2).astype(jnp.int32)


def _kernel(
    visits: Refs,
    window: Refs,
    seeing: Refs,
    seen: Refs,
    query: Refs,
    key: Refs,
    value: Refs,
    out: Refs,
    keys: Refs,
    values: Refs,
    bias: Refs,
    highest: Refs,
    total: Refs,
    sums: Refs,
    *,
    siblings: Siblings,
    slots: int,
    shared: int,
) -> None:
    """What a tile of slots adds to the sums of a tile of queries.

    Args:
        visits: int32 [B, T, 2], `window` int32 [1]: scalars.
        seeing: [1, P, 5], `seen` [1, 5, W]: `Fields`.
        query, out: [1, 1, N, R, H].
        key, value: [1, W, K, H]; of one head, [1, W, H].
        keys, values: [K, W, H], the same by head.
        bias: float32 [R, W], 0 where a row sees a slot.
        highest, total: float32 [N, R, 1]: highest score so far, and the sum of shares beside it.
        sums: float32 [N, R, H], of values.
        slots: C.
        shared: groups that look at the same kv head.
    """
    b, t, s = (pl.program_id(axis) for axis in range(3))
    (N, R, _), W = sums.shape, bias.shape[1]

    @pl.when(s == 0)
    def start() -> None:
        highest[...] = jnp.full_like(highest, HIDDEN)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    @pl.when((s >= visits[b, t, 0]) & (s <= visits[b, t, 1]))
    def add_tile() -> None:
        def by_head(tile: jax.Array) -> jax.Array:
            if slots % W:  # behind the cache may be anything, and nothing times infinity is no number
                at = s * W + jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
                tile = jnp.where(at < slots, tile, 0)
            return tile[None] if tile.ndim == 2 else jnp.swapaxes(tile, 0, 1)

        keys[...], values[...] = by_head(key[0]), by_head(value[0])
        q = Fields(*(seeing[0, :, n : n + 1] for n in range(len(Fields._fields))))
        k = Fields(*(seen[0, n : n + 1] for n in range(len(Fields._fields))))
        hidden = jnp.where(sees(q, k, window[0], siblings), 0.0, HIDDEN)
        bias[...] = jnp.tile(hidden, (R // hidden.shape[0], 1))

        def add(n: jax.Array, carry: None) -> None:
            head = jax.lax.div(n, shared)
            scores = _product(query[0, 0, n], keys[head], 1) + bias[...]
            before = highest[n]
            now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            shares, kept = jnp.exp(scores - now), jnp.exp(before - now)
            highest[n] = now
            total[n] = kept * total[n] + jnp.sum(shares, axis=1, keepdims=True)
            sums[n] = kept * sums[n] + _product(shares.astype(values.dtype), values[head], 0)

        jax.lax.fori_loop(0, N, add, None)

    @pl.when(s == pl.num_programs(2) - 1)
    def finish() -> None:
        out[0, 0] = (sums[...] / total[...]).astype(out.dtype)


def _product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Rows [R, X] times a matrix, summed over its `axis`; float32."""
    return jax.lax.dot_general(rows, matrix, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def sees(q: Fields, k: Fields, window: jax.Array, siblings: Siblings) -> jax.Array:
    """`layout.visible` for a tile, bool [P, W], of fields [P, 1] and [1, W]."""
    same = (q.sequence == k.sequence) & (k.sequence > 0)
    sibling = (q.block == k.block) & (q.block > 0) & (q.branch != k.branch)
    before = (k.position <= q.position) & ~sibling
    if siblings == "shared":
        before = before | (sibling & (k.order <= q.order))
    return same & before & (q.position - k.position < window)


def fields(layout: Layout, slot: jax.Array | None) -> Fields:
    """Fields of a layout [B, …] and its places in the cache; without these, siblings follow in order of branches."""
    every = (jnp.asarray(field, jnp.int32) for field in layout)
    position, sequence, block, branch = every
    order = branch if slot is None else jnp.broadcast_to(slot, position.shape)
    return Fields(sequence, position, block, branch, order)
