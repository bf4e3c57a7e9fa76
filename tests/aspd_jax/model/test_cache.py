"""The cache: the writes of a step, and the views of attention by row, against definitions as loops."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aspd_jax.layout import Layout
from aspd_jax.model.cache import Bucket, Cache, LayerCache, RowView, TokenBatch, by_row, record, write

KV_HEADS, HEAD = 2, 3


class Fed(NamedTuple):
    """A pass: for every row of the cache, the slots that its tokens get; -1: a guess that there is none of.

    Attributes:
        length: slots of every row that are written before.
        slots: of the tokens of every row.
        padding: places behind them.
        bucket: that they go in.
        capacity: slots of a row.
    """

    length: list[int]
    slots: list[list[int]]
    padding: int
    bucket: Bucket
    capacity: int

    @property
    def places(self) -> list[tuple[int, int]]:
        """Row and slot of every token, in their order."""
        return [(row, slot) for row, slots in enumerate(self.slots) for slot in slots]

    @property
    def batch(self) -> TokenBatch:
        """No two tokens alike."""
        batch, size = len(self.length), self.bucket.tokens
        row, slot = np.full(size, batch), np.full(size, self.capacity)
        fields = np.zeros((6, size), np.int32)
        for flat, (own, place) in enumerate(self.places):
            row[flat] = own
            if place >= 0:
                slot[flat] = place
                fields[:, flat] = 100 * (flat + 1) + np.arange(6)
        tokens, kind, *layout = map(jnp.asarray, fields)
        return TokenBatch(tokens, Layout(*layout), jnp.asarray(row), jnp.asarray(slot), kind, kind, jnp.arange(size))


@st.composite
def passes(draw: st.DrawFn) -> Fed:
    """Tokens that follow what a row holds, or fill gaps in it; some rows feed none."""
    rows, capacity = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    few = draw(st.integers(1, rows))
    feeding = range(few) if few > 1 else [draw(st.integers(0, rows - 1))]
    length = draw(st.lists(st.integers(0, capacity), min_size=rows, max_size=rows))
    each = st.lists(st.integers(-1, capacity - 1), max_size=4, unique_by=lambda slot: slot if slot >= 0 else object())
    slots = [draw(each) if row in feeding else [] for row in range(rows)]
    padding, wider = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    count = max(1, sum(map(len, slots)))
    longest = max(map(len, slots))
    per_row = max(1, longest) + wider
    per_row = per_row if rows == 1 else min(count + padding, per_row)
    bucket = Bucket(few, count + padding, per_row, capacity)
    if few > 1 and draw(st.booleans()):
        *_, others, most = sorted(map(len, slots))
        bucket = bucket._replace(per_row=max(1, others), longest=most + wider)
    return Fed(length, slots, padding, bucket, capacity)


FULL = Fed([0, 0], [[0, 1], [0]], 0, Bucket(2, 3, 2, 2), 2)
WITH_A_GAP = Fed([3, 1], [[3, -1], [1]], 1, Bucket(2, 4, 2, 8), 8)


@pytest.mark.further
@given(passes())
@example(WITH_A_GAP).via("a guess that there is none of is not written")
def test_what_is_fed_is_recorded_where_it_stands(fed: Fed) -> None:
    shape = len(fed.length), fed.capacity
    before = np.arange(6)[:, None, None] + np.zeros((6, *shape), np.int32)
    tokens, kind, *layout = map(jnp.asarray, before)
    after = record(Cache((), tokens, kind, Layout(*layout), jnp.asarray(fed.length)), fed.batch)
    expected, length = before.copy(), list(fed.length)
    for flat, (row, slot) in enumerate(fed.places):
        if slot >= 0:
            expected[:, row, slot] = 100 * (flat + 1) + np.arange(6)
            length[row] = max(length[row], slot + 1)
    for now, wanted in zip((after.tokens, after.kind, *after.layout), expected, strict=True):
        np.testing.assert_array_equal(now, wanted)
    np.testing.assert_array_equal(after.length, length)


@given(passes(), st.sampled_from([jnp.float32, jnp.bfloat16]))
@example(WITH_A_GAP, jnp.float32).via("a guess that there is none of is not written")
def test_keys_and_values_are_written_where_tokens_stand(fed: Fed, dtype: type) -> None:
    shape = (len(fed.length), fed.capacity, KV_HEADS, HEAD)
    before = 1 + np.arange(2 * np.prod(shape)).reshape(2, *shape) % 200
    new = -1 - np.arange(2 * fed.bucket.tokens * KV_HEADS * HEAD).reshape(2, -1, KV_HEADS, HEAD) % 200
    key, value = (jnp.asarray(array, dtype) for array in before)
    after = write(LayerCache(key, value), fed.batch, *(jnp.asarray(array, jnp.float32) for array in new))
    expected = before.copy()
    for flat, (row, slot) in enumerate(fed.places):
        if slot >= 0:
            expected[:, row, slot] = new[:, flat]
    for now, wanted in zip(after, expected, strict=True):
        assert now.dtype == dtype
        np.testing.assert_array_equal(np.asarray(now, np.float32), wanted)


@pytest.mark.further
@given(passes())
@example(WITH_A_GAP).via("a guess that there is none of is seen by nothing")
@example(FULL).via("the last row has fewer tokens than others, and there is no padding behind it")
def test_tokens_by_row_are_those_of_the_row_and_come_back_to_their_places(fed: Fed) -> None:
    batch, bucket = fed.batch, fed.bucket
    (every, *others), place = by_row(batch, bucket)
    first = np.cumsum([0, *map(len, fed.slots)])

    def check(part: RowView, index: int, row: int, size: int) -> None:
        assert part.token.shape[1] == part.layout.position.shape[1] == size
        own = fed.slots[row]
        for nth in range(size):
            assert 0 <= part.token[index, nth] < bucket.tokens
            if nth >= len(own):
                assert part.layout.sequence[index, nth] == 0, "there is no such token"
                continue
            assert part.token[index, nth] == first[row] + nth
            for field, of_row in zip(batch.layout, part.layout, strict=True):
                assert of_row[index, nth] == field[first[row] + nth]

    assert len(every.token) == bucket.rows
    if bucket.rows == 1:
        fed_row = int(every.row)
        assert not any(slots for row, slots in enumerate(fed.slots) if row != fed_row)
        if any(fed.slots):
            check(every, 0, fed_row, bucket.per_row)
            np.testing.assert_array_equal(every.select(jnp.arange(len(fed.length))), [fed_row])
    else:
        assert every.row is None
        for row in range(bucket.rows):
            check(every, row, row, bucket.per_row)
    assert len(others) == (bucket.longest > bucket.per_row)
    for longest in others:
        assert longest.row is not None and len(longest.token) == 1
        row = int(longest.row)
        assert len(fed.slots[row]) == max(map(len, fed.slots))
        check(longest, 0, row, bucket.longest)
        np.testing.assert_array_equal(longest.select(jnp.arange(len(fed.length))), [row])
    # What is computed by row comes back as it lies: here, which token it is.
    parts = np.concatenate([np.asarray(part.token).reshape(-1) for part in (every, *others)])
    assert ((place >= 0) & (place < parts.size)).all()
    np.testing.assert_array_equal(parts[np.asarray(place)][: first[-1]], np.arange(first[-1]))
