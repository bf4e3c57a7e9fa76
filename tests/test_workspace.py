"""The part of the state that passes work on, and what the host reads of it: nothing is lost, nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infer.workspace
from aspd_jax import LanguageModel
from infer import Engine, SamplingParams
from infer.benchmark import random_prompt
from infer.packed import Packed
from infer.prefill import new_state
from infer.state import RUNNING, STOP, DecodeState
from infer.workspace import BLOCK, Desk, Workspace, put_back, work_on

ROWS, SLOTS = 6, 256


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


@jax.jit
def work(whole: DecodeState, space: Workspace, first: jax.Array) -> tuple[DecodeState, DecodeState, Workspace]:
    """The state as it comes back when nothing was done, and when all that belongs to running rows was changed."""
    state = work_on(whole, space)
    mine = state.finish == RUNNING

    def changed(array: jax.Array) -> jax.Array:
        return jnp.where(mine.reshape(-1, *[1] * (array.ndim - 1)), array + 1, array)

    cache = state.cache
    cache = cache._replace(layers=jax.tree.map(changed, cache.layers), tokens=changed(cache.tokens))
    worked, kept = put_back(whole, space, state._replace(cache=cache, passes=changed(state.passes)), first)
    assert kept is not None
    return put_back(whole, space, state, first)[0], worked, kept


@settings(max_examples=40)
@given(
    running=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    slots=st.sampled_from([64, 128, SLOTS]),
    close=st.booleans(),
    ranges=st.lists(st.tuples(st.integers(0, 128), st.integers(0, 128)), min_size=ROWS, max_size=ROWS),
)
def test_a_workspace_comes_from_the_running_rows_and_what_was_written_goes_back(
    engine: Engine,
    empty: DecodeState,
    running: list[bool],
    slots: int,
    close: bool,
    ranges: list[tuple[int, int]],
) -> None:
    count = next(count for count in (2, 4, ROWS) if count >= sum(running) and (close or count == ROWS))
    if (count, slots) == (ROWS, SLOTS):
        return
    first, end = np.asarray(ranges).T.clip(0, slots)
    whole = filled(empty, running)
    whole = whole._replace(cache=whole.cache._replace(length=jnp.asarray(end)))
    space = Desk(engine.protocol).take(whole, count, slots, np.asarray(whole.finish))
    assert space is not None and space.layers[0].value.shape[::2] == (count, slots)
    own = np.arange(ROWS) if space.rows is None else np.asarray(space.rows)
    same, after, kept = work(whole, space, jnp.asarray(first)[own.clip(max=ROWS - 1)])
    assert not differs(told(same), told(whole)).any()
    assert (differs(told(after)._replace(cache=()), told(whole)._replace(cache=())) == running).all()  # type: ignore[arg-type]
    added = np.asarray(running)[:, None]
    assert (np.asarray(after.passes - whole.passes) == added[:, 0]).all()
    assert (np.asarray(after.cache.tokens - whole.cache.tokens)[:, :slots] == added).all()
    assert (np.asarray(after.cache.tokens - whole.cache.tokens)[:, slots:] == 0).all()
    place = np.arange(SLOTS)
    written = added & (place >= first[:, None]) & (place < end[:, None])
    block = place // BLOCK
    touched = (
        added & (end > first)[:, None] & (block >= first[:, None] // BLOCK) & (block <= (end[:, None] - 1) // BLOCK)
    )
    for new, old in zip(after.cache.layers, whole.cache.layers, strict=True):
        key, value = np.asarray(new.key - old.key).swapaxes(2, 3), np.asarray(new.value - old.value)
        for change in (key, value):
            assert (change[:, :, written.any(axis=0)] >= written[:, None, written.any(axis=0), None]).all()
            assert (change == touched[:, None, :, None]).all()
    for new, old in zip(kept.layers, space.layers, strict=True):
        at = own.clip(max=ROWS - 1)
        mine = (np.asarray(running)[at] & (own < ROWS))[:, None, None, None]
        assert (np.asarray(new.key - old.key) == mine).all() and (np.asarray(new.value - old.value) == mine).all()


def test_the_workspace_stays_as_long_as_it_fits(engine: Engine, empty: DecodeState) -> None:
    desk = Desk(engine.protocol)

    def take(running: list[int], count: int = 2, slots: int = 64) -> Workspace:
        finish = np.full(ROWS, STOP)
        finish[running] = RUNNING
        space = desk.take(empty._replace(finish=jnp.asarray(finish)), count, slots, finish)
        assert space is not None
        return space

    def kept(before: Workspace, *arguments: Any, **options: Any) -> bool:
        desk.put(before)
        return take(*arguments, **options) is before

    space = take([1, 4])
    assert space.rows is not None and np.asarray(space.rows).tolist() == [1, 4]
    assert kept(space, [1, 4]) and kept(space, [4]), "a row that has ended does no harm"
    assert not kept(take([1, 4]), [1, 3])
    assert not kept(take([1, 4]), [1, 4], slots=128)
    assert not kept(take([1, 4]), [1, 4], count=4)
    every = take([1], count=ROWS)
    assert every.rows is None and kept(every, [0, 2, 5], count=ROWS), "it holds all rows"
    desk.put(space := take([1, 4]))
    desk.clear()
    assert take([1, 4]) is not space
    desk.put(space)
    first, second = take([1, 4]), take([1, 4])
    assert first is space and second is not space, "it is given away once"


def test_rows_that_others_have_written_are_copied_again(engine: Engine, empty: DecodeState) -> None:
    """Up to half of the rows one by one; more, and the workspace is a new one."""

    def take(desk: Desk, state: DecodeState, count: int) -> Workspace:
        space = desk.take(state, count, 64, np.asarray(state.finish))
        assert space is not None
        return space

    def in_rows(state: DecodeState, space: Workspace, rows: list[int]) -> list[bool]:
        """Whether the workspace's rows have keys and values of these rows of the state."""
        found = []
        for place, row in enumerate(rows):
            pairs = zip(space.layers, state.cache.layers, strict=True)
            same = [(a.key[place] == b.key[row, ..., :64], a.value[place] == b.value[row, :, :64]) for a, b in pairs]
            found.append(all(bool(part.all()) for pair in same for part in pair))
        return found

    for running, count in (([1, 4], 2), ([0, 1, 2, 4], ROWS)):
        before = filled(empty, [row in running for row in range(ROWS)])
        after = before._replace(cache=before.cache._replace(layers=jax.tree.map(lambda x: x + 1, before.cache.layers)))
        rows = running if count < ROWS else list(range(ROWS))
        desk = Desk(engine.protocol)
        desk.put(take(desk, before, count))
        desk.written([4, 5])
        space = take(desk, after, count)
        assert in_rows(after, space, rows) == [row == 4 for row in rows], "no other row, and none that does not run"
        desk.put(space)
        assert take(desk, after, count) is space, "once is enough"
        desk.put(space)
        desk.written(range(ROWS))
        assert all(in_rows(after, take(desk, after, count), rows))


def test_large_workspaces_and_other_platforms_stay_whole(
    engine: Engine, empty: DecodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = np.asarray([RUNNING] + [STOP] * (ROWS - 1))

    def take(count: int, slots: int) -> Workspace | None:
        return Desk(engine.protocol).take(empty, count, slots, finish)

    assert take(1, 64) is not None
    assert take(ROWS, SLOTS) is None, "all of it is used"
    monkeypatch.setattr(infer.workspace, "MOST_BYTES", 1000)
    assert take(1, 64) is None
    monkeypatch.undo()
    monkeypatch.setattr(infer.workspace, "copies_slices", lambda: False)
    assert take(1, 64) is None


@pytest.mark.parametrize("said", [True, False])
def test_prompts_that_come_in_between_are_seen(
    bare_lm: LanguageModel, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a workspace that is kept while a prompt is fed does not hold that prompt."""
    params = SamplingParams(max_new_tokens=40, temperature=1, seed=0)
    prompts = [random_prompt(bare_lm, tokens, seed=tokens) for tokens in (20, 30, 25)]

    def answers(together: bool) -> list[list[int]]:
        engine = Engine(bare_lm, max_length=512, max_batch=2, reuse=False)
        handles = []
        for prompt in prompts:
            handles.append(engine.submit(prompt, params, mode="serial"))
            engine.pump(8)
            if not together:
                handles[-1].wait()
        return [handle.wait().token_ids for handle in handles]

    alone = answers(together=False)
    if not said:
        monkeypatch.setattr(Desk, "written", lambda self, rows: None)
    assert (answers(together=True) == alone) == said


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
