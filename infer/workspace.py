"""Keys and values that passes work on, where the passes would copy them each time they look at them.

B rows of the state, M of them in the workspace, S slots of each, C cache slots, K kv heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.model.cache import LayerCache
from aspd_jax.model.lowering import copies_slices
from infer.state import RUNNING, STOP, DecodeState, Protocol, take

MOST_BYTES = 32 << 20  # of keys and values: copying much costs a short chunk more than its passes save
BLOCK = 32  # slots that are put back together; caches have a multiple of it (`infer.programs`)

Layers: TypeAlias = tuple[LayerCache, ...]


class Workspace(NamedTuple):
    """The first slots of some rows of the cache.

    Attributes:
        rows: int32 [M], numbers past the end for none; None: all rows, in order.
        layers: keys [M, K, H, S] and values [M, K, S, H] of each layer.
    """

    rows: jax.Array | None
    layers: Layers

    def pick(self, array: jax.Array) -> jax.Array:
        """Its rows of an array [B, …]."""
        return array if self.rows is None else jnp.take(array, self.rows, axis=0, mode="clip")


class Desk:
    """Where the host keeps a workspace from one chunk of passes to the next.

    It stays true as long as nothing but `run` writes keys and values; who else does has to say so (`written`).
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._workspace: Workspace | None = None
        self._rows: list[int] = []
        self._stale: set[int] = set()

    def clear(self) -> None:
        """Forget the workspace."""
        self._workspace = None

    def written(self, rows: Iterable[int]) -> None:
        """Copy these rows again before passes work on them: their keys and values have been written by others."""
        self._stale.update(rows)

    def take(self, state: DecodeState, count: int, slots: int, finish: np.ndarray) -> Workspace | None:
        """The workspace for passes over at most `count` running sequences, which are in the first `slots` slots of
        their caches: the one that lies there, if it fits and at most half of it has to be copied again. It is given
        away, and comes back with `put`.

        Args:
            finish: [B], as in the state.

        Returns:
            None where passes look at the state as it lies.
        """
        kept, self._workspace = self._workspace, None
        if not _pays(state, self._protocol, count, slots):
            return None
        batch, running = finish.size, np.flatnonzero(finish == RUNNING).tolist()
        stale = self._stale.intersection(running)
        fits = set(self._rows).issuperset(running) and 2 * len(stale) <= count
        if kept is not None and fits and kept.layers[0].value.shape[::2] == (count, slots):
            for row in stale:
                kept = copy_again(state.cache.layers, kept, np.int32(row), np.int32(self._rows.index(row)))
            self._stale -= stale
            return kept
        self._stale.clear()
        if count == batch:
            self._rows = list(range(batch))
            return copy_out(state.cache.layers, None, slots)
        self._rows = running
        rows = np.pad(running, (0, count - len(running)), constant_values=batch)
        return copy_out(state.cache.layers, rows.astype(np.int32), slots)

    def put(self, workspace: Workspace | None) -> None:
        """Keep what `run` gave back."""
        self._workspace = workspace


def workspace_shape(state: DecodeState, protocol: Protocol, count: int, slots: int) -> Workspace | None:
    """What `Desk.take` gives for a state, as shapes; of the state, too, only shapes count."""
    if not _pays(state, protocol, count, slots):
        return None
    batch = state.finish.shape[0]
    rows = None if count == batch else jax.ShapeDtypeStruct((count,), np.int32)
    shape: Workspace = jax.eval_shape(partial(copy_out, slots=slots), state.cache.layers, rows)
    return shape


def compile_copies(state: DecodeState, workspace: Workspace) -> None:
    """Compile what `Desk.take` runs for such a workspace; shapes are enough."""
    slots = workspace.layers[0].value.shape[2]
    copy_out.lower(state.cache.layers, workspace.rows, slots).compile()
    copy_again.lower(state.cache.layers, workspace, np.int32(0), np.int32(0)).compile()


def _pays(state: DecodeState, protocol: Protocol, count: int, slots: int) -> bool:
    batch, capacity = state.cache.tokens.shape
    if not copies_slices() or protocol.mesh is not None or (count, slots) == (batch, capacity):
        return False
    whole = sum(of.size * of.dtype.itemsize for of in jax.tree.leaves(state.cache.layers))
    return count * slots * whole <= MOST_BYTES * batch * capacity


@partial(jax.jit, static_argnames="slots")
def copy_out(layers: Layers, rows: jax.Array | None, slots: int) -> Workspace:
    """A workspace of these rows; see `Workspace`."""

    def some(array: jax.Array) -> jax.Array:
        if rows is None:
            return array
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(array, row, 1) for row in rows])

    return Workspace(rows, tuple(LayerCache(some(of.key[..., :slots]), some(of.value[:, :, :slots])) for of in layers))


@partial(jax.jit, donate_argnames="workspace")
def copy_again(layers: Layers, workspace: Workspace, row: jax.Array, place: jax.Array) -> Workspace:
    """The workspace with a row of the cache as it is now; `place`: which of the workspace's rows it is."""

    def put(own: jax.Array, whole: jax.Array) -> jax.Array:
        slots = jax.lax.dynamic_slice_in_dim(whole, row, 1)[:, :, : own.shape[2], : own.shape[3]]
        return jax.lax.dynamic_update_slice_in_dim(own, slots, place, 0)

    return workspace._replace(layers=jax.tree.map(put, workspace.layers, layers))


def work_on(whole: DecodeState, workspace: Workspace | None) -> DecodeState:
    """The state as passes see it, [M]: the rows and slots of the workspace; the whole one without a workspace."""
    if workspace is None:
        return whole
    rows, some = workspace.rows, whole
    if rows is not None:
        some = take(whole, rows)
        some = some._replace(finish=jnp.where(rows < whole.finish.size, some.finish, STOP))
    slots = workspace.layers[0].value.shape[2]
    tokens, kind, layout = jax.tree.map(
        lambda field: field[:, :slots], (some.cache.tokens, some.cache.kind, some.cache.layout)
    )
    cache = some.cache._replace(layers=workspace.layers, tokens=tokens, kind=kind, layout=layout)
    return some._replace(cache=cache)


def put_back(
    whole: DecodeState, workspace: Workspace | None, state: DecodeState, first: jax.Array
) -> tuple[DecodeState, Workspace | None]:
    """The whole state, and its workspace, after passes.

    Args:
        state: what has become of `work_on(whole, workspace)`, [M].
        first: int32 [M], a slot before which no key and no value of the row has been written.
    """
    if workspace is None:
        return state, None
    rows = workspace.rows

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if rows is None:
            return jax.lax.dynamic_update_slice(old, new, (0,) * old.ndim)
        return old.at[(rows, *(slice(size) for size in new.shape[1:]))].set(new, mode="drop")

    nothing = cast(Any, ())
    small = [
        of._replace(cache=of.cache._replace(layers=()), request=nothing, recogniser=nothing) for of in (whole, state)
    ]
    after: DecodeState = jax.tree.map(put, *small)
    layers = _put_slots(whole.cache.layers, state.cache.layers, rows, first, state.cache.length)
    cache = after.cache._replace(layers=layers)
    after = after._replace(cache=cache, request=whole.request, recogniser=whole.recogniser)
    return after, Workspace(rows, state.cache.layers)


def _put_slots(layers: Layers, new: Layers, rows: jax.Array | None, first: jax.Array, end: jax.Array) -> Layers:
    """Put slots from `first` to `end` of each row where they belong, in blocks: a scatter goes number by number."""
    start = first // BLOCK
    blocks = jnp.where(end > first, -(-end // BLOCK) - start, 0)
    if rows is not None:
        blocks = jnp.where(rows < layers[0].value.shape[0], blocks, 0)
    ends = jnp.cumsum(blocks)

    def one(nth: jax.Array, layers: Layers) -> Layers:
        row = jnp.sum(nth >= ends)
        slot = (start[row] + nth - (ends[row] - blocks[row])) * BLOCK
        to = row if rows is None else rows[row]

        def put(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            at = [jnp.zeros_like(slot)] * 4
            at[axis] = slot
            sizes = [1, *new.shape[1:]]
            sizes[axis] = BLOCK
            return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice(new, [row, *at[1:]], sizes), [to, *at[1:]])

        return tuple(
            LayerCache(put(a.key, b.key, 3), put(a.value, b.value, 2)) for a, b in zip(layers, new, strict=True)
        )

    return jax.lax.fori_loop(0, ends[-1], one, layers)
