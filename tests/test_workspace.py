"""The part of the state that passes work on, and what the host reads of it: nothing is lost, nothing else changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infer.workspace
from aspd_jax import LanguageModel
from infer import Engine
from infer.packed import Packed
from infer.prefill import new_state
from infer.state import RUNNING, STOP, DecodeState, Protocol
from infer.workspace import Workspace, put_back, workspace_of

ROWS, SLOTS = 6, 64


@pytest.fixture(scope="module")
def empty(engine: Engine, bare_lm: LanguageModel) -> DecodeState:
    return new_state(bare_lm, engine.protocol, ROWS, SLOTS)


def filled(state: DecodeState, running: list[bool]) -> DecodeState:
    """Other numbers in every element, but for those that say who runs."""
    random = np.random.default_rng(0)

    def fill(array: jax.Array) -> jax.Array:
        return jnp.asarray(random.integers(0, 2 if array.dtype == bool else 1000, array.shape), array.dtype)

    other: DecodeState = jax.tree.map(fill, state)
    return other._replace(finish=jnp.where(jnp.asarray(running), RUNNING, STOP), recogniser=state.recogniser)


def differs(a: Any, b: Any) -> np.ndarray:
    """Which rows have an element that is not the same."""
    different = np.zeros(ROWS, bool)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        different |= (np.asarray(x) != np.asarray(y)).reshape(ROWS, -1).any(axis=1)
    return different


def told(state: DecodeState) -> DecodeState:
    """Without what is not by row."""
    return state._replace(recogniser=())  # type: ignore[arg-type]


@partial(jax.jit, static_argnames=("protocol", "count", "slots"))
def work(whole: DecodeState, protocol: Protocol, count: int, slots: int) -> tuple[Workspace, DecodeState, DecodeState]:
    """A workspace; the state with it as it was, and with all that belongs to running rows changed."""
    space = workspace_of(whole, protocol, count, slots)
    mine = space.state.finish == RUNNING

    def changed(array: jax.Array) -> jax.Array:
        return jnp.where(mine.reshape(-1, *[1] * (array.ndim - 1)), array + 1, array)

    cache = space.state.cache
    cache = cache._replace(layers=jax.tree.map(changed, cache.layers), tokens=changed(cache.tokens))
    worked = space.state._replace(cache=cache, passes=changed(space.state.passes))
    return space, put_back(whole, space), put_back(whole, Workspace(space.rows, worked))


@settings(max_examples=40)
@given(
    running=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    slots=st.sampled_from([16, SLOTS]),
    close=st.booleans(),
)
def test_a_workspace_comes_from_the_running_rows_and_goes_back_to_them(
    engine: Engine, empty: DecodeState, running: list[bool], slots: int, close: bool
) -> None:
    whole = filled(empty, running)
    count = next(count for count in (2, 4, ROWS) if count >= sum(running) and (close or count == ROWS))
    space, same, after = work(whole, engine.protocol, count, slots)
    assert space.state.cache.tokens.shape == (count, slots) and space.state.cache.layers[0].key.shape[-1] == slots
    assert not differs(told(same), told(whole)).any()
    assert (differs(told(after), told(whole)) == running).all()
    added = np.asarray(running)[:, None]
    assert (np.asarray(after.passes - whole.passes) == added[:, 0]).all()
    assert (np.asarray(after.cache.tokens - whole.cache.tokens)[:, :slots] == added).all()
    assert (np.asarray(after.cache.tokens - whole.cache.tokens)[:, slots:] == 0).all()
    for new, old in zip(after.cache.layers, whole.cache.layers, strict=True):
        key, value = np.asarray(new.key - old.key), np.asarray(new.value - old.value)
        assert (key[..., :slots] == added[..., None, None]).all() and (key[..., slots:] == 0).all()
        assert (value[:, :, :slots] == added[..., None, None]).all() and (value[:, :, slots:] == 0).all()


def test_rows_past_the_end_go_back_first(engine: Engine, empty: DecodeState) -> None:
    """Negative control: put back last, they would undo what the last row became."""
    whole = filled(empty, [False] * (ROWS - 1) + [True])
    space = workspace_of(whole, engine.protocol, 2, 16)
    layers = jax.tree.map(lambda array: array.at[0].add(1), space.state.cache.layers)
    worked = Workspace(space.rows, space.state._replace(cache=space.state.cache._replace(layers=layers)))
    assert differs(put_back(whole, worked).cache.layers, whole.cache.layers)[-1]
    flipped = jax.tree.map(lambda array: array[::-1], layers)
    rows = Workspace(space.rows[::-1], worked.state._replace(cache=worked.state.cache._replace(layers=flipped)))  # type: ignore[index]
    assert not differs(put_back(whole, rows).cache.layers, whole.cache.layers).any()


def test_large_workspaces_and_other_platforms_stay_whole(
    engine: Engine, empty: DecodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = filled(empty, [True] + [False] * (ROWS - 1))
    assert workspace_of(whole, engine.protocol, 1, 16).state is not whole
    assert workspace_of(whole, engine.protocol, ROWS, SLOTS).state is whole, "all of it is used"
    monkeypatch.setattr(infer.workspace, "MOST_BYTES", 1000)
    assert workspace_of(whole, engine.protocol, 1, 16).state is whole
    monkeypatch.undo()
    monkeypatch.setattr(infer.workspace, "copies_slices", lambda: False)
    assert workspace_of(whole, engine.protocol, 1, 16).state is whole


def test_what_is_packed_is_read_as_it_was() -> None:
    tree = {
        "a": jnp.asarray([[1, -2], [3, 4]]),
        "b": (jnp.asarray(True), jnp.zeros((0, 3), jnp.int32)),
        "c": jnp.int32(7),
    }
    read = jax.jit(Packed.of)(tree).read()
    assert jax.tree.structure(read) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(read), jax.tree.leaves(tree), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and (x == np.asarray(y)).all()
    with pytest.raises(TypeError, match="int32 and bool"):
        Packed.of(jnp.zeros(3))
