"""Sizes rounded up to powers of two: few programs are compiled for many lengths."""

from __future__ import annotations


def next_power(count: int) -> int:
    """The smallest power of two that is as large."""
    return 1 << max(0, count - 1).bit_length()


def powers(first: int, last: int) -> list[int]:
    """Powers of two from the one that holds `first` to the one that holds `last`."""
    found, size = [], next_power(first)
    while size < 2 * last:
        found.append(size)
        size *= 2
    return found
