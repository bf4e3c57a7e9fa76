"""Values of a JSON answer, with their log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from infer.answers.answer import TokenLogprob, Value


class _Leaf(NamedTuple):
    """A leaf of a JSON text: its JSON pointer, and the characters `start` to `end` that spell it."""

    pointer: str
    start: int
    end: int


def answer_values(text: str, tokens: Sequence[TokenLogprob]) -> list[Value]:
    """Return the leaves of a JSON answer in the order of its text, as far as it is complete.

    Args:
        text: the answer.
        tokens: its tokens with their log probabilities, whose bytes join to the text.
    """
    places, at = [], 0
    for token in tokens:
        places.append((at, at := at + len(token.text)))
    values = []
    for leaf in _leaves(text):
        start, end = (len(text[:place].encode()) for place in (leaf.start, leaf.end))
        own = [token for token, (first, last) in zip(tokens, places, strict=True) if first < end and last > start]
        total = sum(token.logprob or 0.0 for token in own)
        values.append(Value(leaf.pointer, text[leaf.start : leaf.end], total))
    return values


def _leaves(text: str) -> Iterator[_Leaf]:
    """Yield the leaves of a JSON text that has the form of `json.dumps`, up to the first that is not complete."""
    decoder = json.JSONDecoder(strict=False)

    def walk(at: int, pointer: str) -> Iterator[_Leaf | int]:
        """Yield the leaves of the value at a place, and then the place behind it."""
        if text[at : at + 2] in ("{}", "[]") or text[at] not in "{[":
            end = decoder.raw_decode(text, at)[1]
            if pointer and end == len(text):
                raise ValueError("a number may have been cut")
            yield _Leaf(pointer, at, end)
            yield end
            return
        opened, number = text[at], 0
        while text[at] not in "}]":
            at += 1 if not number else 2
            key = str(number)
            if opened == "{":
                key, at = decoder.raw_decode(text, at)
                at += 2
            number += 1
            for found in walk(at, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"):
                if isinstance(found, int):
                    at = found
                else:
                    yield found
        yield at + 1

    try:
        yield from (leaf for leaf in walk(0, "") if isinstance(leaf, _Leaf))
    except (ValueError, IndexError):  # the text is cut
        return
