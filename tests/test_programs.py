"""Which program a pass runs in: it holds what is needed, is one that warm-up compiles, and is not left at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infer.programs import CLOSE_FIT, FEW, Programs, doubled_slots, part_sizes, used_slots
from infer.step import Extent, Least


class Pass(NamedTuple):
    """An engine's programs, and how many tokens each of its sequences feeds in a pass; 0: it is not running."""

    programs: Programs
    widths: list[int]
    slots: int

    def choose(self, keep: bool = False) -> tuple[Extent, Least]:
        return self.programs.choose(np.asarray(self.widths), self.slots, keep)


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """Some sequences feed one token, some those of their branches, some a fork; at least one feeds something."""
    rows, capacity = draw(st.integers(1, 40)), draw(st.integers(128, 5000))
    widest = draw(st.integers(2, min(200, capacity)))
    one = st.one_of(st.integers(0, 1), st.integers(2, min(CLOSE_FIT[-1], widest)), st.integers(2, widest))
    widths = draw(st.lists(one, min_size=rows, max_size=rows).filter(any))
    return Pass(Programs(rows, capacity, widest), widths, draw(st.integers(max(widths), capacity)))


@given(passes())
def test_what_is_chosen_holds_the_pass_and_is_kept_for_it(drawn: Pass) -> None:
    within, least = drawn.choose()
    assert within in drawn.programs.every()
    assert max(drawn.widths) <= within.size and drawn.slots <= within.slots
    wide = sum(width > within.few for width in drawn.widths)
    narrow = sum(0 < width <= within.few for width in drawn.widths)
    assert wide <= within.wide and narrow <= within.narrow
    branching = sum(width > 1 for width in drawn.widths)
    if branching:  # else the loop would end before its first pass, and choose the same again
        assert branching > least.wide and max(drawn.widths) > least.size


@given(passes())
def test_branches_get_a_close_fit(drawn: Pass) -> None:
    """Less than twice what is needed, up to 16 half as much again at most; kept until half is enough, for a change
    costs as much as some passes.
    """
    within, least = drawn.choose()
    size = max(drawn.widths)
    if size <= CLOSE_FIT[-1]:
        assert within.size < 2 * size
        if size <= FEW[-1]:
            assert within.size <= 1.5 * size
        if within.wide:
            assert least.size == within.size // 2


@given(passes())
@example(Pass(Programs(8, 128, 2), [0, 0, 0, 1, 1, 1, 1, 2], 2))  # 4 + 1 places would do, but not the 4 rows they imply
def test_the_smallest_of_all_programs_is_chosen(drawn: Pass) -> None:
    """Of those that hold the pass and a row for each of its sequences, none has fewer places."""
    within, _ = drawn.choose()
    sequences = sum(width > 0 for width in drawn.widths)
    assert sequences <= within.rows
    for other in drawn.programs.every():
        wide = sum(width > other.few for width in drawn.widths)
        narrow = sum(0 < width <= other.few for width in drawn.widths)
        enough = wide <= other.wide and narrow <= other.narrow and max(drawn.widths) <= other.size
        holds = enough and sequences <= other.rows
        assert not holds or within.places <= other.places, other
        assert other.holds(np.asarray(drawn.widths), drawn.slots) == (holds and drawn.slots <= other.slots)


@given(passes())
def test_some_of_the_cover_holds_every_pass(drawn: Pass) -> None:
    programs = drawn.programs
    assert set(programs.cover()) <= set(programs.every())
    held = [within for within in programs.cover() if within.holds(np.asarray(drawn.widths), drawn.slots)]
    smallest = min(held, key=lambda within: (within.places, within.slots))
    assert smallest.size < 4 * max(drawn.widths) and smallest.slots == doubled_slots(programs.capacity, drawn.slots)


def test_the_cover_is_small() -> None:
    programs = Programs(32, 2048, 433)
    assert len(programs.cover()) == 24 and len(programs.every()) > 500


def test_a_fork_costs_other_sequences_little() -> None:
    """One of 32 sequences announces a block with 60 tokens of titles, while the others have branches or none."""
    programs = Programs(32, 2048, 64)
    drawn = Pass(programs, [60] + [5] * 15 + [1] * 16, 500)
    assert drawn.choose()[0] == Extent(32, 16, 1, 64, 512)
    assert drawn.choose(keep=True)[0] == Extent(32, 1, 16, 64, 512)  # if narrow ones were those with one token


@pytest.mark.parametrize(
    ("capacity", "needed", "used", "doubled"),
    [
        (128, 1, 128, 128), (512, 1, 256, 256), (512, 256, 256, 256), (512, 257, 384, 512), (512, 385, 512, 512),
        (2048, 257, 384, 512), (2048, 384, 384, 512), (2048, 513, 768, 1024), (2048, 769, 1024, 1024),
        (2048, 1025, 1536, 2048), (2048, 1537, 2048, 2048), (8192, 4097, 6144, 8192), (5000, 1025, 1536, 2048),
        (5000, 3073, 4096, 4096), (5000, 4097, 5000, 5000), (320, 257, 320, 320),
    ],
)  # fmt: skip
def test_a_pass_looks_at_a_part_of_the_rows(capacity: int, needed: int, used: int, doubled: int) -> None:
    assert used_slots(capacity, needed) == used
    assert doubled_slots(capacity, needed) == doubled


@given(st.integers(128, 9000).flatmap(lambda capacity: st.tuples(st.just(capacity), st.integers(1, capacity))))
def test_a_part_holds_what_is_needed_and_at_most_half_as_much_again(sizes: tuple[int, int]) -> None:
    capacity, needed = sizes
    used, doubled = used_slots(capacity, needed), doubled_slots(capacity, needed)
    assert needed <= used <= doubled <= capacity
    assert used <= max(1.5 * needed, 256) and doubled < max(2 * needed, 257)
    for rule, size in ((used_slots, used), (doubled_slots, doubled)):
        assert size in part_sizes(capacity, rule)
