"""Values of JSON answers with their log probabilities, compared with `json` and with sums over characters."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.answers.answer import TokenLogprob
from infer.answers.values import answer_values
from infer.request import MAX_ALTERNATIVES

ATOMS: Any = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just({}) | st.just([])
JSON: Any = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def leaves(value: Any, pointer: str = "") -> list[tuple[str, Any]]:
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not pairs:
        return [(pointer, value)]
    spelled = [(str(key).replace("~", "~0").replace("/", "~1"), inner) for key, inner in pairs]
    return [leaf for key, inner in spelled for leaf in leaves(inner, f"{pointer}/{key}")]


@given(value=JSON, seed=st.integers(0, 1 << 20))
def test_values_are_the_leaves(value: Any, seed: int) -> None:
    """Check pointers and values, and with tokens of one byte that each byte of a value counts once."""
    text = json.dumps(value, ensure_ascii=False)
    draw = random.Random(seed)
    tokens = [TokenLogprob(byte, -draw.random(), [], bytes([byte])) for byte in text.encode(errors="surrogatepass")]
    found = answer_values(text, tokens)
    assert [(one.pointer, json.loads(one.text)) for one in found] == leaves(value)
    total = sum(token.logprob or 0 for token in tokens)
    assert all(total <= one.logprob + 1e-9 and one.logprob < 0 for one in found)
    for end in range(len(text)):  # a text that is cut has its first leaves
        short = answer_values(text[:end], tokens[: len(text[:end].encode())])
        assert len(short) <= len(found) and all(a.pointer == b.pointer for a, b in zip(short, found, strict=False))


def test_tokens_across_the_ends_of_values_count() -> None:
    pieces = [b'{"a', b'": "x', b"y", b'", ', b'"b', b'": ', b"1", b"2}"]
    tokens = [TokenLogprob(0, -float(1 << n), [], piece) for n, piece in enumerate(pieces)]
    assert [tuple(one) for one in answer_values('{"a": "xy", "b": 12}', tokens)] == [
        ("/a", '"xy"', -14.0, ()),
        ("/b", "12", -192.0, ()),
    ]


LISTED: Any = [
    (["true", "false"], ["tr", "fal", "true", "se", "e}", "ru", " t", " f", " "]),
    (['"red"', '"rose"', '"blue"'], ["re", "ro", '"r', 'd"', '"}', ' "', " "]),
    (["1", "12", "3"], ["12", "2}", "3}", " ", " 1"]),
]


@given(kind=st.sampled_from(LISTED), seed=st.integers(0, 1 << 20))
def test_probabilities_of_listed_values(kind: Any, seed: int) -> None:
    """Compare with sums over all sequences of tokens that spell a listed value, with any distribution off the answer.

    What is given is never more than the sum, and equals it where the given probabilities add up to 1.
    """
    listed, more = kind
    draw = random.Random(seed)
    pieces = sorted({*"".join(listed), *more, "}"})
    assert len(pieces) <= 20, "all are among the likeliest tokens"
    value, spelled = draw.choice(listed), list[str]()
    while len(said := "".join(spelled)) < len(rest := f" {value}}}"):
        spelled.append(draw.choice([piece for piece in pieces if rest.startswith(piece, len(said))]))
    places = [random_distribution(draw, pieces) for _ in spelled]
    tokens = [TokenLogprob(-1, 0.0, [], b'{"a":')]
    for piece, place in zip(spelled, places, strict=True):
        likely = sorted(((n, math.log(p)) for n, p in enumerate(place)), key=lambda pair: -pair[1])
        texts = tuple(pieces[n].encode() for n, _ in likely)
        number = pieces.index(piece)
        tokens.append(TokenLogprob(number, math.log(place[number]), likely, piece.encode(), texts))
    schema = {"properties": {"a": {"enum": [json.loads(text) for text in listed]}}}
    (found,) = answer_values(f'{{"a": {value}}}', tokens, schema)
    first = 1 if spelled[0] == " " else 0  # this token is not one of the value
    before = "" if first else " "

    def spell(said: str, path: int | None) -> dict[str, float]:
        """Return the probability of each listed value behind a text; `path`: number of tokens of the answer in it."""
        ended = [text for text in listed if said == f"{before}{text}}}"]
        if ended:
            return {ended[0]: 1.0}
        place = random_distribution(draw, pieces) if path is None else places[path]
        able = [n for n, p in enumerate(pieces) if any(f"{before}{o}}}".startswith(said + p) for o in listed)]
        totals = dict.fromkeys(listed, 0.0)
        for n in able:
            on = path is not None and pieces[n] == spelled[path]
            for text, probability in spell(said + pieces[n], path + 1 if on and path is not None else None).items():
                totals[text] += probability * place[n] / sum(place[m] for m in able)
        return totals

    sums, total = spell("", first), sum(option.probability for option in found.options)
    assert found.text == value and value in {option.text for option in found.options} and total <= 1 + 1e-9
    for option in found.options:
        assert option.probability <= sums[option.text] + 1e-9
        assert total < 1 - 1e-9 or option.probability == pytest.approx(sums[option.text])
    assert [o.probability for o in found.options] == sorted((o.probability for o in found.options), reverse=True)


def test_options_are_left_out_where_the_likeliest_tokens_tell_too_little() -> None:
    """Check with 20 likeliest tokens, whose last one bounds the probability of `false`, which is not among them."""
    schema = {"properties": {"a": {"type": "boolean"}}}
    for last, known in ((1e-6, True), (0.1, False)):
        likely = [(0, math.log(0.5)), *((n, math.log(last)) for n in range(1, MAX_ALTERNATIVES))]
        texts = (b" true", *(b"x" for _ in likely[1:]))
        tokens = [TokenLogprob(-1, 0.0, [], b'{"a":'), TokenLogprob(0, likely[0][1], likely, b" true", texts)]
        (value,) = answer_values('{"a": true}', [*tokens, TokenLogprob(-2, 0.0, [], b"}")], schema)
        assert bool(value.options) == known


def random_distribution(draw: random.Random, pieces: list[str]) -> list[float]:
    weights = [draw.random() + 0.01 for _ in pieces]
    return [weight / sum(weights) for weight in weights]
