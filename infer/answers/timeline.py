"""When each part of an answer was decoded, in steps."""

from __future__ import annotations

from typing import Literal, NamedTuple

from aspd_jax.tokens import SerialIds, split
from infer.answers.answer import Result
from infer.decode.state import EngineConfig


class Span(NamedTuple):
    """Tokens of one segment, one in each pass.

    Attributes:
        kind: `serial`, `titles` (with their tags, `<|para|>` included), or `branch` (its closing tag included).
        lane: 0 for what is serial, 1, 2, … for the branches of a block.
        start, end: passes, from 0 for the one that samples the first token; `end` is not included.
        label: the branch's title.
    """

    kind: Literal["serial", "titles", "branch"]
    lane: int
    start: int
    end: int
    label: str


def timeline(config: EngineConfig, result: Result) -> list[Span]:
    """The spans of an answer, as it is decoded without guesses and with all branches admitted.

    The last one ends at the critical path. Of a model that writes tags as text there are none.
    """
    ids = result.token_ids
    if config.text_tags is not None or not ids:
        return []
    ended = ids[-1] in config.end
    spans: list[Span] = []
    titles = [branch.title for item in result.structure for branch in getattr(item, "branches", ())]
    at = branches = 0
    items = split(ids[:-1] if ended else ids, config.special)
    for item in items:
        if isinstance(item, SerialIds):
            spans.append(Span("serial", 0, at, at + len(item.ids), ""))
            at += len(item.ids)
            continue
        size = 1 + sum(2 + len(title) for title in item.titles)
        spans.append(Span("titles", 0, at, at + size, ""))
        at += size
        lengths = [1 + len(text.ids) for text in item.texts(len(config.separator))]
        for lane, length in enumerate(lengths, 1):
            label = titles[branches] if branches < len(titles) else ""
            spans.append(Span("branch", lane, at, at + length, label))
            branches += 1
        at += max(lengths)
    return [*spans, Span("serial", 0, at, at + 1, "")] if ended else spans
