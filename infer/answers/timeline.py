"""Timeline of an answer: the steps in which each segment is decoded."""

from __future__ import annotations

from typing import Literal, NamedTuple

from aspd_jax.tokens import SerialIds, split
from infer.answers.answer import Result
from infer.decode.state import EngineConfig


class Span(NamedTuple):
    """Tokens of one segment, one for each step.

    Attributes:
        kind: `serial`, `titles` (with their tags, `<|para|>` included), or `branch` (its closing tag included).
        lane: 0 for serial segments and titles; 1, 2, … for the branches of a block.
        start, end: steps, from 0 for the one that samples the first token; `end` is not included.
        label: title of the branch.
        content: number of tokens of plain text.
    """

    kind: Literal["serial", "titles", "branch"]
    lane: int
    start: int
    end: int
    label: str
    content: int = 0


def timeline(config: EngineConfig, result: Result) -> list[Span]:
    """Return the spans of an answer that is decoded without draft tokens and with all branches in every step.

    The last span ends at the critical path.
    """
    ids = result.token_ids
    if not ids:
        return []
    ended = ids[-1] in config.end
    spans: list[Span] = []
    titles = [branch.title for item in result.structure for branch in getattr(item, "branches", ())]
    at = branches = 0
    items = split(ids[:-1] if ended else ids, config.special, config.form)
    for item in items:
        if isinstance(item, SerialIds):
            spans.append(Span("serial", 0, at, at + len(item.ids), "", len(item.ids)))
            at += len(item.ids)
            continue
        if item.number:  # tags between leads are known, and take no step
            size = 2 + len(item.number) + sum(1 + len(title) for title in item.titles)
        else:
            size = 1 + sum(2 + len(title) for title in item.titles)
        spans.append(Span("titles", 0, at, at + size, "", sum(len(text.lead) for text in item.texts)))
        at += size
        lengths = [1 + len(text.ids) for text in item.texts]
        for lane, length in enumerate(lengths, 1):
            label = " ".join(titles[branches].split()) if branches < len(titles) else ""
            spans.append(Span("branch", lane, at, at + length, label, length - 1))
            branches += 1
        at += max(lengths)
    return [*spans, Span("serial", 0, at, at + 1, "", 1)] if ended else spans
