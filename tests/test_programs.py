"""Which program a pass runs in: it holds what is needed, is one that warm-up compiles, and is not left at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.programs import Programs, used_slots
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
def test_a_lone_sequence_has_the_same_widths_in_every_engine(drawn: tuple[Programs, Extent]) -> None:
    programs, needs = drawn
    lone = Extent(min(needs.narrow, 1 - min(needs.wide, 1)), min(needs.wide, 1), needs.size, needs.slots)
    within, least = programs.choose(lone)
    expected, expected_least = Programs(1, programs.capacity, programs.widest).choose(lone)
    assert within.size == expected.size < 2 * lone.size
    assert least == expected_least


@pytest.mark.parametrize(
    ("needed", "used"), [(1, 512), (512, 512), (513, 1024), (1025, 2048), (2049, 4096), (4097, 8192)]
)
def test_a_pass_looks_at_a_part_of_the_rows(needed: int, used: int) -> None:
    assert used_slots(8192, needed) == used
