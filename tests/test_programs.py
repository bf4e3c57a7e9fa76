"""Which program a pass runs in: it holds what is needed, is one that warm-up compiles, and is not left at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.programs import CLOSE_FIT, Programs, used_slots
from infer.step import Extent


@st.composite
def programs_and_needs(draw: st.DrawFn) -> tuple[Programs, Extent]:
    """An engine's programs, and a pass that some of its sequences need; at least one feeds something."""
    rows, capacity = draw(st.integers(1, 40)), draw(st.integers(128, 5000))
    widest = draw(st.integers(2, min(200, capacity)))
    wide = draw(st.integers(0, rows))
    narrow = draw(st.integers(0 if wide else 1, rows - wide))
    size = draw(st.integers(2, widest)) if wide else 1
    return Programs(rows, capacity, widest), Extent(narrow, wide, size, draw(st.integers(size, capacity)))


@given(programs_and_needs())
def test_what_is_chosen_holds_the_pass_and_is_kept_for_it(drawn: tuple[Programs, Extent]) -> None:
    programs, needs = drawn
    within, least = programs.choose(needs)
    assert within in programs.every()
    assert needs.size <= within.size and needs.slots <= within.slots
    assert needs.wide <= within.wide and needs.narrow <= (within.narrow or within.wide - needs.wide)
    if needs.wide:  # else the loop would end before its first pass, and choose the same again
        assert needs.wide > least.wide and needs.size > least.size


@given(programs_and_needs())
def test_branches_get_a_close_fit(drawn: tuple[Programs, Extent]) -> None:
    """Less than twice what is needed; kept until a quarter is enough, for a change costs as much as some passes."""
    programs, needs = drawn
    within, least = programs.choose(needs)
    if needs.size <= CLOSE_FIT:
        assert within.size < 2 * needs.size
        if within.wide:
            assert least.size == within.size // 4


@pytest.mark.parametrize(
    ("capacity", "needed", "used"),
    [
        (128, 1, 128), (512, 1, 256), (512, 257, 512), (2048, 256, 256), (2048, 257, 512), (2048, 513, 1024),
        (2048, 1025, 2048), (8192, 1025, 2048), (8192, 4097, 8192), (5000, 1025, 2048),
        (5000, 2501, 4096), (5000, 4097, 5000),
    ],
)  # fmt: skip
def test_a_pass_looks_at_a_part_of_the_rows(capacity: int, needed: int, used: int) -> None:
    assert used_slots(capacity, needed) == used
