"""What streams send, and in which order."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from infer.answers.events import Event
from infer.server.deltas import AsTheyCome, ReadingOrder


def events_of(answer: list[Any], random: Random) -> tuple[list[Event], str]:
    """Events of an answer in which all branches of a block grow side by side, and its text."""
    events, text, block = [], "", 0
    for item in answer:
        if isinstance(item, str):
            events += [Event("token", text=item[i : i + 2]) for i in range(0, len(item), 2)]
            text += item
            continue
        block += 1
        events.append(Event("fork", block, titles=tuple("t" for _ in item)))
        left = dict(enumerate(item, 1))
        while left:
            branch = random.choice(sorted(left))
            if left[branch]:
                events.append(Event("token", block, branch, left[branch][:2]))
                left[branch] = left[branch][2:]
            else:
                events.append(Event("branch", block, branch, item[branch - 1]))
                del left[branch]
        events.append(Event("merge", block))
        text += "".join(item)
    return events, text


texts = st.text("abc", max_size=7)


@settings(max_examples=150)
@given(st.lists(texts | st.lists(texts, min_size=2, max_size=4), max_size=5), st.randoms(use_true_random=False))
def test_reading_order(answer: list[Any], random: Random) -> None:
    """Every text that was sent is a beginning of the answer, and as long as it can be."""
    events, text = events_of(answer, random)
    order, sent = ReadingOrder(), ""
    written: dict[tuple[int, int], str] = {}
    for event in events:
        sent += "".join(delta.text for delta in order.take([event]))
        assert text.startswith(sent)
        if event.kind == "token" and event.branch <= 1:  # serial text and first branches are never held back
            assert sent.endswith(event.text)
        if event.kind == "merge":
            assert len(sent) >= len("".join(written.values()))
        if event.kind == "token":
            written[event.block, event.branch] = written.get((event.block, event.branch), "") + event.text
    assert sent == text
    looks = [events[at : at + 3] for at in range(0, len(events), 3)]
    joined, one_by_one = ReadingOrder(), ReadingOrder()
    for look in looks:  # what several events bring is sent at once
        deltas = joined.take(look)
        assert len(deltas) <= 1
        assert "".join(delta.text for delta in deltas) == "".join(d.text for e in look for d in one_by_one.take([e]))
    if any(isinstance(item, list) and sum(map(bool, item)) > 1 for item in answer):
        mixed = "".join(delta.text for event in events for delta in AsTheyCome().take([event]))
        assert sorted(mixed) == sorted(text)
