"""Figures with matplotlib: visibility and timelines.

Callers import this module when they draw, so that nothing else needs matplotlib.

T: tokens of one sequence.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure

from aspd_jax.layout import Layout, Siblings, visible
from aspd_jax.pictures import COLOURS, SERIAL_COLOUR, TITLE_COLOUR, branch_colour

if TYPE_CHECKING:
    from infer.answers.timeline import Span

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
