from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax.errors import ConfigError
from aspd_jax.layout import Layout, build_layout, visible
from aspd_jax.tokens import SpecialTokens
from tests.conftest import GOLDEN, shared
from tests.helpers import brute_force

CASES = json.loads((GOLDEN / "layout_cases.json").read_text())
SCHEMES = {"sequential": "normal", "max": "max_para", "predict": "fixrange"}
SPECIAL = SpecialTokens(1, 2, 3, 4, 5, 6)
START, END, TEXT = 5, 6, 9


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_authors_positions_and_mask(case: dict[str, Any], scheme: str) -> None:
    special = SpecialTokens(22, 23, 24, 25, case["start_id"], case["end_id"])
    real = np.array(case["attention_mask"]) == 1
    layout = build_layout(np.array([case["ids"]]), special, scheme, real[None])
    expected = case["positions"][SCHEMES[scheme]]
    if expected is not None:
        assert layout.position[0][real].tolist() == np.array(expected)[real].tolist()
    authors_mask = np.array([[letter == "1" for letter in row] for row in case["visible"]])
    np.testing.assert_array_equal(visible(layout, layout)[0], authors_mask)
    # The authors number branches through the whole sequence, -1 outside; we number them within their block.
    branch = np.array(case["branch_indices"])
    np.testing.assert_array_equal((layout.branch[0] > 0), branch > 0)
    for block in range(1, layout.block.max() + 1):
        inside = layout.block[0] == block
        np.testing.assert_array_equal(layout.branch[0][inside], branch[inside] - branch[inside].min() + 1)


@pytest.mark.parametrize("file", sorted((GOLDEN / "engine").glob("*.npz")), ids=lambda file: file.stem)
def test_authors_engine_layout(file: Any) -> None:
    vector = np.load(file)
    layout = build_layout(vector["tokens"][None], SpecialTokens(594, 595, 596, 597, 592, 593))
    for name in ("position", "block", "branch"):
        np.testing.assert_array_equal(getattr(layout, name)[0], vector[name])


def test_unseen_cases_of_the_same_kind_are_the_ones_in_shared() -> None:
    assert json.loads(shared("golden", "layout_cases.json").read_text()) == CASES


block = st.lists(st.integers(0, 3), min_size=1, max_size=4)  # text tokens of each branch
sequence = st.lists(st.one_of(st.integers(0, 3), block), max_size=4)


def ids_of(parts: list) -> list[int]:
    ids = [TEXT]
    for part in parts:
        if isinstance(part, int):
            ids += [TEXT] * part
        else:
            ids += [3, *(token for size in part for token in (START, *[TEXT] * size, END)), 4]
    return ids


@settings(max_examples=200)
@given(
    rows=st.lists(st.lists(sequence, min_size=1, max_size=3), min_size=1, max_size=3),
    padding=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    scheme=st.sampled_from(list(SCHEMES)),
    cut=st.integers(0, 3),
)
def test_packed_rows_against_brute_force(rows: list, padding: list[int], scheme: str, cut: int) -> None:
    """Check rows of several truncated sequences with padding between them."""
    tokens, owners = [], []
    for row in rows:
        ids: list[int] = []
        owner: list[int] = []
        for number, parts in enumerate(row, 1):
            pad = padding[number]
            own = ids_of(parts)
            own = own[: max(1, len(own) - cut)]
            ids += [0] * pad + own
            owner += [0] * pad + [number] * len(own)
        tokens.append(ids)
        owners.append(owner)
    length = max(map(len, tokens))
    tokens = [ids + [0] * (length - len(ids)) for ids in tokens]
    owners = [owner + [0] * (length - len(owner)) for owner in owners]
    layout = build_layout(np.array(tokens), SPECIAL, scheme, sequence=np.array(owners))
    assert all(field.dtype == np.int32 for field in layout)
    for row, (ids, owner) in enumerate(zip(tokens, owners, strict=True)):
        expected = brute_force.lay_out(ids, owner, START, END, scheme)
        got = [
            None if s == 0 else brute_force.Token(s, b or None, r or None, p)
            for p, s, b, r in zip(*(field[row].tolist() for field in layout), strict=True)
        ]
        assert got == expected
        own = Layout(*(field[row : row + 1] for field in layout))
        for siblings in ("invisible", "shared"):
            np.testing.assert_array_equal(visible(own, own, siblings)[0], brute_force.mask(expected, siblings))


def test_padding_anywhere_changes_nothing_for_real_tokens() -> None:
    ids = np.array([ids_of([2, [1, 2], 1])])
    plain = build_layout(ids, SPECIAL)
    real = np.random.default_rng(0).random(40) < 0.5
    real[: ids.size - real.sum()] |= True
    real = np.concatenate([real, np.zeros(3, bool)])
    spread = np.zeros((1, real.size), np.int64)
    spread[0, np.flatnonzero(real)[: ids.size]] = ids[0]
    mask = np.zeros_like(spread, bool)
    mask[0, np.flatnonzero(real)[: ids.size]] = True
    layout = build_layout(spread, SPECIAL, padding_mask=mask)
    for old, new in zip(plain, layout, strict=True):
        np.testing.assert_array_equal(new[mask], old[0])
        assert not new[~mask].any()


def test_window_hides_what_is_far_back() -> None:
    layout = build_layout(np.full((1, 8), TEXT), SPECIAL)
    mask = visible(layout, layout, window=3)[0]
    i, j = np.indices(mask.shape)
    np.testing.assert_array_equal(mask, (j <= i) & (i - j < 3))


def test_works_on_device_arrays() -> None:
    layout = build_layout(np.array([ids_of([1, [2, 0]])]), SPECIAL)
    on_device = Layout(*map(jnp.asarray, layout))
    np.testing.assert_array_equal(visible(on_device, on_device), visible(layout, layout))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tokens": np.zeros((1, 3), int), "positions": "same"},
            "positions: expected one of sequential, max, predict, got",
        ),
        ({"tokens": np.zeros(3, int)}, r"tokens: expected integers \[B, S\], got int64 \[3\]"),
        ({"tokens": np.zeros((1, 3))}, "got float64"),
        ({"tokens": np.zeros((1, 3), int), "sequence": np.zeros((1, 2), int)}, r"of tokens, \[1, 3\], got \[1, 2\]"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_layout(special=SPECIAL, **arguments)
