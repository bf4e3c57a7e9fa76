"""When each part of an answer was decoded, in passes, and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from matplotlib.figure import Figure

from aspd_jax.pictures import SERIAL_COLOUR, TITLE_COLOUR, branch_colour
from aspd_jax.tokens import SerialIds, split
from infer.answers.answer import Result
from infer.decode.state import EngineConfig


class Span(NamedTuple):
    """Tokens of one stretch, one in each pass.

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


def draw_timeline(spans: Sequence[Span], title: str = "") -> Figure:
    """One answer as lanes over passes: what is serial on the first, every branch on a lane of its own.

    Below them the same content as serial mode decodes it, on one lane.
    """
    lanes = max(span.lane for span in spans)
    below = lanes + 1.5
    figure = Figure(figsize=(9, 1.2 + 0.26 * (lanes + 2)), layout="constrained")
    axes = figure.subplots()
    serially = 0
    for span in spans:
        length = span.end - span.start
        colour = branch_colour(span.lane - 1) if span.lane else TITLE_COLOUR if span.kind == "titles" else SERIAL_COLOUR
        axes.barh(span.lane, length, left=span.start, height=0.8, color=colour)
        if span.label:
            text = f" {span.label[:40]}"
            axes.text(span.start, span.lane, text, va="center", fontsize=7, color="white", clip_on=True)
        content = 0 if span.kind == "titles" else length - (span.kind == "branch")  # without its closing tag
        axes.barh(below, content, left=serially, height=0.8, color=colour)
        serially += content
    axes.set(title=title, xlabel="passes", xlim=(0, 1.02 * max(serially, spans[-1].end)))
    axes.invert_yaxis()
    names = ["serial", *(f"branch {lane}" for lane in range(1, lanes + 1)), "serial mode"]
    axes.set_yticks([*range(lanes + 1), below], names, fontsize=7)
    return figure
