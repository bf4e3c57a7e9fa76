"""The part of the state that a chunk of passes works on, where the passes would copy it each time they look at it.

B rows of the state, M of them in the workspace.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout
from aspd_jax.model.cache import LayerCache
from aspd_jax.model.lowering import copies_slices
from infer.state import RUNNING, STOP, DecodeState, Protocol, take

MOST_BYTES = 8 << 20  # of keys and values: more do not stay in the processor's caches, and chunks can be short


class Workspace(NamedTuple):
    """Rows and slots of a state.

    Attributes:
        rows: int32 [M], the running sequences, then numbers past the end; None: all rows.
        state: of these rows, [M], with the first slots of their caches.
    """

    rows: jax.Array | None
    state: DecodeState

    def pick(self, array: jax.Array) -> jax.Array:
        """Its rows of an array [B, …]."""
        return array if self.rows is None else jnp.take(array, self.rows, axis=0, mode="clip")


def workspace_of(state: DecodeState, protocol: Protocol, count: int, slots: int) -> Workspace:
    """What passes over at most `count` running sequences need of a state, which is in the first `slots` slots of their
    caches; the whole state where passes look at it as it lies.
    """
    batch, capacity = state.cache.tokens.shape
    of_slot = sum(layer.key.nbytes + layer.value.nbytes for layer in state.cache.layers) // (batch * capacity)
    large = count * slots * of_slot > MOST_BYTES
    if not copies_slices() or protocol.mesh is not None or large or (count, slots) == (batch, capacity):
        return Workspace(None, state)
    rows, some = None, state
    if count < batch:
        rows = jnp.nonzero(state.finish == RUNNING, size=count, fill_value=batch)[0].astype(jnp.int32)
        some = take(state, rows)
        some = some._replace(finish=jnp.where(rows < batch, some.finish, STOP))
    layers = tuple(
        LayerCache(_rows(of.key[..., :slots], rows), _rows(of.value[:, :, :slots], rows)) for of in state.cache.layers
    )
    layout = Layout(*(field[:, :slots] for field in some.cache.layout))
    cache = some.cache._replace(layers=layers, tokens=some.cache.tokens[:, :slots], layout=layout)
    return Workspace(rows, some._replace(cache=cache))


def put_back(whole: DecodeState, workspace: Workspace) -> DecodeState:
    """The state that a workspace was taken from, with the workspace as it is now."""
    rows, state = workspace
    if state.cache.tokens.shape == whole.cache.tokens.shape:
        return state

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if rows is None:
            return jax.lax.dynamic_update_slice(old, new, (0,) * old.ndim)
        return old.at[(rows, *(slice(size) for size in new.shape[1:]))].set(new, mode="drop")

    nothing = cast(Any, ())
    small = [
        of._replace(cache=of.cache._replace(layers=()), request=nothing, recogniser=nothing) for of in (whole, state)
    ]
    after: DecodeState = jax.tree.map(put, *small)
    put_layer = put if rows is None else partial(_put_rows, rows=rows)
    layers = jax.tree.map(put_layer, whole.cache.layers, state.cache.layers)
    cache = after.cache._replace(layers=layers)
    return after._replace(cache=cache, request=whole.request, recogniser=whole.recogniser)


def _rows(array: jax.Array, rows: jax.Array | None) -> jax.Array:
    """Rows of a layer; those past the end are the last one."""
    if rows is None:
        return array
    return jnp.concatenate([jax.lax.dynamic_slice_in_dim(array, row, 1) for row in rows])


def _put_rows(array: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    """Put rows of a layer where they were, each as a block: a scatter goes number by number. Those past the end fall on
    the last row, as which they were taken. So they go first, before it comes itself, if it is running.
    """
    zero = (0,) * (array.ndim - 1)

    def one(nth: jax.Array, array: jax.Array) -> jax.Array:
        nth = rows.size - 1 - nth
        return jax.lax.dynamic_update_slice(array, jax.lax.dynamic_slice_in_dim(new, nth, 1), (rows[nth], *zero))

    return jax.lax.fori_loop(0, rows.size, one, array)
