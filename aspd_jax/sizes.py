"""Sizes rounded up to powers of two, which limits the number of compiled programs."""

from __future__ import annotations


def next_power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def powers(first: int, last: int) -> list[int]:
    """Return the powers of two from `next_power(first)` to `next_power(last)`."""
    sizes, size = [], next_power(first)
    while size < 2 * last:
        sizes.append(size)
        size *= 2
    return sizes
