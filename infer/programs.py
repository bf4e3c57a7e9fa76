"""Which compiled program a pass runs in: few, so that little is compiled, and each close to what is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import jax
import numpy as np

from infer.step import Extent, Least

SMALLEST_CAPACITY = 128
SMALLEST_PART = 256  # slots of a row, below which there is little to save
CLOSE_FIT = (1, 2, 4, 6, 8, 12, 16, 32)  # tokens that a sequence feeds: more are the titles of a large block, once
FEW = (1, 16)  # tokens of narrow sequences: a serial stretch has one, a block beside a fork hardly more than 16

MAPS = Path("/proc/self/maps")  # a line for each
MOST_MAPS = Path("/proc/sys/vm/max_map_count")
WARM_SHARE = 0.75  # of the maps, which warm-up may fill: what it compiled must not be forgotten by the next request
FULL_SHARE = 0.875

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event, also where it reads a program from disk


def crowded(share: float) -> bool:
    """Whether this process has more than a share of the memory maps that Linux lets it have.

    XLA on CPU maps every kernel by itself, some 450 maps a program, and ends the process where it gets no more.
    """
    if jax.default_backend() != "cpu" or not MOST_MAPS.exists():
        return False
    most = int(MOST_MAPS.read_text())
    return MAPS.read_bytes().count(b"\n") > most * share


def programs_compiled() -> int:
    """How many programs JAX has compiled in this process, or read from disk, since this was first asked."""
    return len(_compilations())


@cache
def _compilations() -> list[float]:
    """Seconds that each took; it grows, from any thread."""
    found: list[float] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    return found


def width_bucket(tokens: int) -> int:
    """The smallest power of two that holds so many tokens."""
    return 1 << max(0, int(np.ceil(np.log2(max(tokens, 1)))))


def capacity_for(tokens: int) -> int:
    """Slots of a row that holds so many tokens."""
    return max(SMALLEST_CAPACITY, width_bucket(tokens))


def stepped(needed: int, fine: int) -> int:
    """The smallest that holds `needed`, of the powers of two and, from `fine` on, of what lies halfway between them."""
    doubled = width_bucket(needed)
    between = 3 * doubled // 4
    return between if fine < between and needed <= between else doubled


def used_slots(capacity: int, needed: int) -> int:
    """How many of a row's slots a pass looks at: 256, 384, 512, 768, 1024, … or all."""
    return min(stepped(max(SMALLEST_PART, needed), SMALLEST_PART), capacity)


def doubled_slots(capacity: int, needed: int) -> int:
    """The same with fewer programs: 256, 512, 1024, … or all."""
    return min(max(SMALLEST_PART, width_bucket(needed)), capacity)


def part_sizes(capacity: int, of: Callable[[int, int], int]) -> list[int]:
    """How many slots a pass may look at, by one of these rules."""
    return sorted({of(capacity, needed) for needed in range(1, capacity + 1)})


@dataclass(frozen=True)
class Programs:
    """The programs of an engine.

    Attributes:
        rows: of the cache.
        capacity: slots of a row.
        widest: most tokens that a sequence feeds in a pass.
    """

    rows: int
    capacity: int
    widest: int

    def choose(self, widths: np.ndarray, slots: int, keep: bool = False) -> tuple[Extent, Least]:
        """The smallest program that does what is needed, and how little may be needed while it is left for a smaller.

        Args:
            widths: [B], tokens that each sequence feeds; some are more than 0.
            slots: in use after the pass.
            keep: however little that is; where drafts come and go, which narrow sequences have no places for.
        """
        splits = [self._split(widths, slots, few) for few in (FEW[:1] if keep else FEW)]
        within = min(splits, key=lambda extent: extent.places)
        if keep or not within.wide:
            return within, Least(np.int32(-1), np.int32(0))
        return within, Least(np.int32(within.wide // 8), np.int32(_left_at(within.size)))

    def _split(self, widths: np.ndarray, slots: int, few: int) -> Extent:
        """The smallest program in which sequences that feed at most `few` tokens are narrow."""
        wide, slots = int((widths > few).sum()), used_slots(self.capacity, slots)
        everyone = self._rows(int((widths > 0).sum()))
        if wide == 0:
            return Extent(everyone, few, 0, few, slots)
        wide, size = self._rows(wide), _size(int(widths.max()))
        return Extent(everyone, few, wide, size, slots) if wide < everyone else Extent(0, 0, wide, size, slots)

    def every(self) -> list[Extent]:
        """All that `choose` can choose."""
        counts = sorted({self._rows(count) for count in range(1, self.rows + 1)})
        sizes = sorted({_size(tokens) for tokens in range(2, self.widest + 1)})
        found = []
        for slots in part_sizes(self.capacity, used_slots):
            for everyone in counts:
                found.append(Extent(everyone, 1, 0, 1, slots))
                found += [Extent(0, 0, everyone, size, slots) for size in sizes]
                for wide, size, few in product((count for count in counts if count < everyone), sizes, FEW):
                    if few < size:
                        found.append(Extent(everyone, few, wide, size, slots))
        return found

    def cover(self) -> list[Extent]:
        """A few of them, one of which holds any pass, though not closely: over all sequences, and 4, 16, 64, … wide."""
        sizes = sorted({_size(min(_fourfold(tokens), self.widest)) for tokens in range(2, self.widest + 1)})
        found = []
        for slots in part_sizes(self.capacity, doubled_slots):
            found.append(Extent(self.rows, 1, 0, 1, slots))
            found += [Extent(0, 0, self.rows, size, slots) for size in sizes]
        return found

    def _rows(self, count: int) -> int:
        """1, 4, 16, … rows where that is at most half of them, else all, which need not be gathered."""
        size = _fourfold(count)
        return size if 2 * size <= self.rows else self.rows


def _size(tokens: int) -> int:
    """A close fit where branches are decoded, and for most titles."""
    return next((size for size in CLOSE_FIT if size >= tokens), _fourfold(tokens))


def _left_at(size: int) -> int:
    """So few tokens of a sequence that a smaller size is worth a change of programs, which costs some passes."""
    return size // (2 if size <= CLOSE_FIT[-1] else 4)


def _fourfold(count: int) -> int:
    """1, 4, 16, …: the first that is enough. Elsewhere, few programs are worth more than a close fit."""
    size = 1
    while size < count:
        size *= 4
    return size
