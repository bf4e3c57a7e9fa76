"""Values of a JSON answer, with their log probabilities and those of the values that a schema lists."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from aspd_jax.fields import listed_values
from aspd_jax.tokens import TextCodec
from infer.answers.answer import Option, Result, TokenLogprob, Value
from infer.answers.filled import filled_branches
from infer.request import MAX_ALTERNATIVES, Request

BEHIND = b",}]"  # bytes of which one follows a value
MAX_UNKNOWN = 0.01  # share of the listed values in a place that tokens beyond the likeliest may have


class _Leaf(NamedTuple):
    """A leaf of a JSON text: the keys that lead to it, and the characters `start` to `end` that spell it."""

    path: tuple[str, ...]
    start: int
    end: int


def request_values(
    request: Request, result: Result, tokens: Sequence[TokenLogprob], codec: TextCodec, place: tuple[str, ...] = ()
) -> list[Value] | None:
    """Return the values of an answer; None: it is no JSON value, and has none.

    Args:
        request: the request.
        result: its answer.
        tokens: `token_logprobs` of the answer, with as many alternatives as there are.
        codec: codec of the tokenizer.
        place: keys that lead to the value in the answer.
    """
    schema, template = request.params.json_schema, request.template
    if request.echo or (schema is None and template is None):
        return None
    if template is None:
        return answer_values(result.text, tokens, json.loads(str(schema)), 0, place)
    sizes, values, at = [size for block in result.branch_sizes for size in block], list[Value](), 0
    for branch in filled_branches(template, result.text, result.token_ids, sizes, codec):
        hole, begin = branch.text.hole, at + len(branch.lead)
        at = begin + len(branch.rest)
        if hole.schema is not None and branch.complete:
            text = codec.decode(result.token_ids[branch.rest.start : branch.rest.stop])
            keys = (*place, *(hole.path or (hole.name,)))
            start = text.index(branch.value)
            values += answer_values(text, tokens[begin:at], json.loads(hole.schema), start, keys)
    return values


def answer_values(
    text: str, tokens: Sequence[TokenLogprob], schema: Any = True, start: int = 0, place: tuple[str, ...] = ()
) -> list[Value]:
    """Return the leaves of a JSON value in the order of its text, as far as it is complete.

    Args:
        text: an answer, or a part of it.
        tokens: its tokens with their log probabilities, whose bytes join to the text.
        schema: JSON schema of the value.
        start: place in the text at which the value begins.
        place: keys that lead to the value in the answer.
    """
    places, at = [], 0
    for token in tokens:
        places.append((at, at := at + len(token.text)))
    values = []
    for leaf in _leaves(text, start):
        begin, end = (len(text[:character].encode()) for character in (leaf.start, leaf.end))
        own = [number for number, (first, last) in enumerate(places) if first < end and last > begin]
        total = sum(tokens[number].logprob or 0.0 for number in own)
        options: tuple[Option, ...] = ()
        listed = listed_values(schema, leaf.path)
        if own and (value := text[leaf.start : leaf.end]) in listed:
            before = text.encode()[places[own[0]][0] : begin]
            options = _options(listed, value, before, tokens[own[0] :])
        pointer = "".join(f"/{key.replace('~', '~0').replace('/', '~1')}" for key in (*place, *leaf.path))
        values.append(Value(pointer, text[leaf.start : leaf.end], total, options))
    return values


def _options(listed: Sequence[str], value: str, before: bytes, tokens: Sequence[TokenLogprob]) -> tuple[Option, ...]:
    """Return the probabilities of listed values, as far as the likeliest tokens in the places of a value tell them.

    They are those of sampling at temperature 1 where only tokens of listed values are permitted. In each place, the
    probability of a token with which one listed value alone can begin is that value's. None is returned if the tokens
    beyond the likeliest may change them by more than `MAX_UNKNOWN`.

    Args:
        listed: the listed values as JSON text.
        value: the value of the answer.
        before: bytes of the first token before the value.
        tokens: tokens of the value, and those behind it.
    """
    texts = {text: before + text.encode() for text in listed}
    found, path, done = dict.fromkeys(listed, 0.0), 1.0, b""

    def beginnings(new: bytes) -> list[str]:
        """Return the listed values that the text may become."""
        said = done + new
        return [
            text
            for text, own in texts.items()
            if own.startswith(said) or (said.startswith(own) and said[len(own)] in BEHIND)
        ]

    for token in tokens:
        likely = {id: (text, value) for (id, value), text in zip(token.top, token.top_texts, strict=True)}
        # Behind a value of parallel fields, white space may follow, with which the next value does not begin.
        own = token.text if beginnings(token.text) else token.text.rstrip()
        likely[token.token] = (own, token.logprob or 0.0)
        fitting = {
            id: (names, math.exp(logprob)) for id, (text, logprob) in likely.items() if (names := beginnings(text))
        }
        total = sum(probability for _, probability in fitting.values())
        beyond = math.exp(token.top[-1][1]) if len(token.top) == MAX_ALTERNATIVES else 0.0
        if token.token not in fitting or beyond * len(beginnings(b"")) > MAX_UNKNOWN * total:
            return ()
        for id, (names, probability) in fitting.items():
            if id != token.token and len(names) == 1:
                found[names[0]] += path * probability / total
        names, probability = fitting[token.token]
        path, done = path * probability / total, done + token.text
        if names == [value]:
            break
    found[value] += path
    known = [Option(text, probability) for text, probability in found.items() if probability]
    return tuple(sorted(known, key=lambda option: -option.probability))


def _leaves(text: str, start: int) -> Iterator[_Leaf]:
    """Yield the leaves of a JSON value in the form of `json.dumps`, up to the first that is not complete."""
    decoder = json.JSONDecoder(strict=False)

    def walk(at: int, path: tuple[str, ...]) -> Iterator[_Leaf | int]:
        """Yield the leaves of the value at a place, and then the place behind it."""
        if text[at : at + 2] in ("{}", "[]") or text[at] not in "{[":
            end = decoder.raw_decode(text, at)[1]
            if path and end == len(text):
                raise ValueError("a number may have been cut")
            yield _Leaf(path, at, end)
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
            for found in walk(at, (*path, key)):
                if isinstance(found, int):
                    at = found
                else:
                    yield found
        yield at + 1

    try:
        yield from (leaf for leaf in walk(start, ()) if isinstance(leaf, _Leaf))
    except (ValueError, IndexError, RecursionError):  # the text is cut, or too deep
        return
