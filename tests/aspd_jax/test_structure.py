from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspd_jax.errors import StructureError
from aspd_jax.structure import Branch, Parallel, Serial, canonical, from_json, plain_text, to_json

branches = st.builds(Branch, st.text(min_size=1), st.text())
items = st.one_of(st.builds(Serial, st.text()), st.lists(branches, min_size=2, max_size=4).map(Parallel))
structures = st.lists(items, max_size=5).map(tuple)


def test_plain_text_leaves_titles_out() -> None:
    answer = (Serial("a"), Parallel([Branch("T", "b"), Branch("U", "c")]), Serial("d"))
    assert plain_text(answer) == "abcd"


@given(structures)
def test_json_round_trip(structure: tuple) -> None:
    assert from_json(json.loads(json.dumps(to_json(structure)))) == structure


@given(structures)
def test_canonical_keeps_the_text_and_joins_serial_segments(structure: tuple) -> None:
    joined = canonical(structure)
    assert plain_text(joined) == plain_text(structure)
    assert canonical(joined) == joined
    kinds = [type(item) for item in joined]
    assert (Serial, Serial) not in list(itertools.pairwise(kinds))
    assert Serial("") not in joined


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "a list of items, got str"),
        ([{"type": "list"}], 'item 0: "type": expected'),
        ([{"type": "serial"}], 'item 0: "text": expected a string, got None'),
        (
            [{"type": "serial", "text": "a"}, {"type": "parallel", "branches": []}],
            "item 1: branches: expected two or more",
        ),
        ([{"type": "parallel", "branches": [{"title": "a", "text": "b"}, {"title": 3}]}], 'branch 1: "title"'),
        ([{"type": "parallel", "branches": [{"title": "", "text": "b"}]}], "item 0: title: expected text, got none"),
    ],
)
def test_errors_say_where(value: object, message: str) -> None:
    with pytest.raises(StructureError, match=message.replace("(", r"\(")):
        from_json(value)
