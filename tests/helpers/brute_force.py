"""The definitions of the protocol, written as loops over tokens: slow, and independent of the project's code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Token(NamedTuple):
    """Where a token stands; block and branch are None for serial tokens."""

    sequence: int
    block: int | None
    branch: int | None
    position: int


def lay_out(tokens: list[int], sequence: list[int], start: int, end: int, scheme: str) -> list[Token | None]:
    """One row; None for padding (sequence 0)."""
    result: list[Token | None] = [None] * len(tokens)
    for name in sorted(set(sequence) - {0}):
        places = [i for i, owner in enumerate(sequence) if owner == name]
        blocks: list[list[list[int]]] = []
        kind: list[tuple[int, int] | None] = []
        inside = False
        for order, place in enumerate(places):
            if tokens[place] == start:
                if not (order and kind[-1] is not None):
                    blocks.append([])
                blocks[-1].append([])
                inside = True
            if inside:
                blocks[-1][-1].append(place)
                kind.append((len(blocks), len(blocks[-1])))
            else:
                kind.append(None)
            if tokens[place] == end:
                inside = False
        serial_position = 0
        done: set[int] = set()
        for place, where in zip(places, kind, strict=True):
            if where is None:
                result[place] = Token(name, None, None, serial_position)
                serial_position += 1
                continue
            block = blocks[where[0] - 1]
            if where[0] in done:
                continue
            done.add(where[0])
            longest = max(len(branch) for branch in block)
            for number, branch in enumerate(block):
                for offset, member in enumerate(branch):
                    shift = number * longest if scheme == "predict" else 0
                    result[member] = Token(name, where[0], number + 1, serial_position + shift + offset)
            serial_position += {
                "sequential": sum(len(branch) for branch in block),
                "max": longest,
                "predict": len(block) * longest,
            }[scheme]
    return result


def sees(tokens: list[Token | None], i: int, j: int, siblings: str) -> bool:
    """Section 3, rule by rule; i and j are places in the linearisation."""
    a, b = tokens[i], tokens[j]
    if a is None or b is None or a.sequence != b.sequence:
        return False
    if j > i:
        return False
    return siblings == "shared" or not (a.block is not None and a.block == b.block and a.branch != b.branch)


def mask(tokens: list[Token | None], siblings: str = "invisible") -> np.ndarray:
    """Bool [S, S]."""
    size = range(len(tokens))
    return np.array([[sees(tokens, i, j, siblings) for j in size] for i in size], bool).reshape(
        len(tokens), len(tokens)
    )
