"""Figures of the notebooks and pages, with matplotlib: visibility, and the steps in which an answer is decoded.

T: tokens of one sequence.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure

from aspd_jax.layout import Layout, Siblings, visible
from aspd_jax.pictures import COLOURS, SERIAL_COLOUR, TITLE_COLOUR, branch_colour
from aspd_jax.tokens import SerialIds, split
from infer.answers.answer import Result
from infer.decode.state import EngineConfig

MAX_LABELLED = 64  # tokens whose names are readable beside a matrix


def draw_visibility(
    layout: Layout, names: Sequence[str] = (), siblings: Siblings = "invisible", title: str = ""
) -> Figure:
    """Draw the visibility matrix of one sequence (protocol, section 3) above the positions of its tokens.

    Each row marks the tokens that one token attends to. Serial tokens are grey, branches coloured.

    Args:
        layout: layout of the sequence, int32 [T] each.
        names: labels of the tokens, [T]; shown for at most `MAX_LABELLED` tokens.
        siblings: `invisible`, or `shared` for the ablation in which sibling branches see each other.
        title: title of the figure.
    """
    fields = [np.asarray(field) for field in layout]
    length = fields[0].size
    row = Layout(*(field[None] for field in fields))
    sees = np.asarray(visible(row, row, siblings))[0]
    branches = np.asarray(layout.branch)
    colours = ListedColormap([(1.0, 1.0, 1.0), to_rgb(SERIAL_COLOUR), *map(to_rgb, COLOURS)])
    kind = np.where(branches > 0, 2 + (branches - 1) % len(COLOURS), 1)
    size = min(9.0, max(3.2, 0.19 * length + 1.4))
    figure = Figure(figsize=(size, 1.18 * size), layout="constrained")
    matrix, below = figure.subplots(2, 1, height_ratios=(6, 1), sharex=True)
    matrix.imshow(np.where(sees, kind[:, None], 0), cmap=colours, vmin=0, vmax=1 + len(COLOURS), aspect="auto")
    matrix.set(title=title, ylabel="token")
    below.scatter(range(length), np.asarray(layout.position), c=kind, cmap=colours, vmin=0, vmax=1 + len(COLOURS), s=9)
    below.set(ylabel="position", xlabel="" if names else "visible token")
    if names and length <= MAX_LABELLED:
        short = [name if len(name) <= 12 else name[:11] + "…" for name in names]
        matrix.set_yticks(range(length), short, fontsize=6)
        below.set_xticks(range(length), short, fontsize=6, rotation=90)
    return figure


def svg(figure: Figure) -> str:
    """Return a figure as SVG text, which is deterministic."""
    file = io.StringIO()
    with rc_context({"svg.hashsalt": "aspd"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


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


def draw_timeline(spans: Sequence[Span], title: str = "") -> Figure:
    """Draw one answer as lanes over steps: serial text on the first lane, each branch on a lane of its own.

    A separate lane below shows the same content decoded in serial mode.
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
        axes.barh(below, span.content, left=serially, height=0.8, color=colour)
        serially += span.content
    axes.set(title=title, xlabel="steps", xlim=(0, 1.02 * max(serially, spans[-1].end)))
    axes.invert_yaxis()
    names = ["serial", *(f"branch {lane}" for lane in range(1, lanes + 1)), "serial mode"]
    axes.set_yticks([*range(lanes + 1), below], names, fontsize=7)
    return figure
