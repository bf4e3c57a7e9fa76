"""What streams send: joined text, or every event with its place."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from infer.answers.events import Event
from infer.server.deltas import branch_deltas, text_deltas
from infer.server.forms import data

TOKENS = st.builds(
    lambda block, branch, text: Event("token", block, branch, text),
    st.integers(0, 3),
    st.integers(0, 3),
    st.text("abc", max_size=3),
)
OTHERS = st.sampled_from(
    [Event("fork", 1, titles=("t", "u")), Event("branch", 1, 2, "abc"), Event("merge", 1), Event("done")]
)


@given(st.lists(TOKENS | OTHERS, max_size=12))
def test_every_text_is_sent_once(events: list[Event]) -> None:
    expected = "".join(event.text for event in events if event.kind == "token")
    joined, placed = text_deltas(events), branch_deltas(events)
    assert len(joined) == bool(expected), "what several events bring is sent at once, and nothing where there is none"
    assert "".join(delta.text for delta in joined) == "".join(delta.text for delta in placed) == expected
    assert all(delta.place is None for delta in joined)


@given(st.lists(TOKENS | OTHERS, max_size=12))
def test_branches_are_sent_with_their_places(events: list[Event]) -> None:
    sent = [delta.place for delta in branch_deltas(events)]
    shown = [event for event in events if event.kind != "done" and (event.kind != "token" or event.text)]
    places = [(place["event"], place["block"], place["branch"]) for place in sent if place is not None]
    assert places == [(event.kind, event.block, event.branch) for event in shown]
    titles = [place["titles"] for place in sent if place is not None and "titles" in place]
    assert titles == [list(event.titles) for event in shown if event.kind == "fork"]


@given(st.text())
@example("a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\n")
def test_an_event_is_one_line_for_every_reader(text: str) -> None:
    """Clients that read lines with `str.splitlines` (httpx) also split at U+0085, U+2028 and U+2029."""
    event = data({"content": text, text: 1})
    (line,) = event.removesuffix("\n\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"content": text, text: 1}
