"""Values of JSON answers with their log probabilities, compared with `json` and with sums over characters."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infer.answers.answer import TokenLogprob
from infer.answers.values import answer_values

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
        ("/a", '"xy"', -14.0),
        ("/b", "12", -192.0),
    ]
