"""Figures with matplotlib: visibility, timelines, benchmarks and evaluations.

Callers import this module when they draw, so that nothing else needs matplotlib.

T: tokens of one sequence.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure

from aspd_jax.files import partial_file
from aspd_jax.layout import Layout, Siblings, visible
from aspd_jax.pictures import COLOURS, SERIAL_COLOUR, TITLE_COLOUR, branch_colour

if TYPE_CHECKING:
    from infer.answers.timeline import Span
    from infer.bench.decoding import AnswerTime
    from infer.bench.step_times import StepTime

BLUE = "#4c78a8"
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


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure in the format of the file's suffix."""
    with partial_file(file) as partial:
        figure.savefig(partial, format=file.suffix[1:] or None)


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


def plot_decoding(
    steps: Sequence[StepTime], answers: Sequence[Sequence[AnswerTime]], copied: float, title: str, file: Path
) -> None:
    """Plot step time and bandwidth by width, and ideal and realised speed-up by number of branches.

    Args:
        steps: step times by width.
        answers: pairs of answer times.
        copied: copy bandwidth in bytes per second.
        title: title of the figure.
        file: output file; its suffix selects the format.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    times, bandwidth, speed = figure.subplots(1, 3)
    widths = [p.width for p in steps]
    below = [p.median - p.fastest for p in steps]
    above = [p.slowest - p.median for p in steps]
    times.errorbar(widths, [p.median for p in steps], yerr=[below, above], marker="o", capsize=3)
    times.set(xscale="log", xlabel="tokens per step", ylabel="ms per step", ylim=(0, None))
    bandwidth.plot(widths, [100 * p.bandwidth / copied for p in steps], marker="o")
    bandwidth.set(xscale="log", xlabel="tokens per step", ylabel="% of copy bandwidth", ylim=(0, None))
    for batch in sorted({pair[0].batch for pair in answers}):
        pairs = [pair for pair in answers if pair[0].batch == batch]
        adaptive = [next(a for a in pair if a.name == "adaptive") for pair in pairs]
        serial = [next(a for a in pair if a.name == "serial") for pair in pairs]
        branches = [a.branches for a in adaptive]
        realised = [s.seconds / a.seconds for a, s in zip(adaptive, serial, strict=True)]
        speed.plot(branches, realised, marker="o", label=f"realised, batch {batch}")
    if answers:
        speed.plot(branches, [a.ideal for a in adaptive], linestyle="--", color="gray", label="ideal")
        speed.legend(fontsize=8)
    speed.set(xlabel="branches", ylabel="speed-up over serial mode", ylim=(0, None))
    for axes in (times, bandwidth):
        axes.set_xticks(widths, [str(width) for width in widths])
    save_figure(figure, file)


def plot_speedups(by_category: dict[str, dict[str, float]], title: str, file: Path) -> None:
    """Plot the mean realised speed-up of each category with its interval as bars."""
    figure = Figure(figsize=(7, 0.8 + 0.32 * len(by_category)), layout="constrained")
    axes = figure.subplots()
    names = list(by_category)[::-1]
    means = [by_category[name]["mean"] for name in names]
    around = [[abs(by_category[name][end] - by_category[name]["mean"]) for name in names] for end in ("low", "high")]
    axes.barh(names, means, xerr=around, capsize=2, color=BLUE, height=0.6)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set(title=title, xlabel="realised speed-up (95 % interval)", xlim=(0, None))
    save_figure(figure, file)


def plot_distribution(values: Sequence[float], title: str, file: Path) -> None:
    """Plot a histogram of realised speed-ups, one value per answer."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.hist(values, bins=min(24, max(4, len(values) // 2)), color=BLUE)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set(title=title, xlabel="realised speed-up of an answer", ylabel="answers", xlim=(0, None))
    save_figure(figure, file)


def plot_quality(
    points: dict[str, tuple[dict[str, float], dict[str, float]]], quality: str, title: str, file: Path
) -> None:
    """Plot quality against speed, one point with intervals per system.

    Args:
        points: content tokens per second and quality by system.
        quality: label of the quality axis.
        title: title of the figure.
        file: output file.
    """
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, (speed, good) in points.items():
        errors = [[[abs(i["mean"] - i["low"])], [abs(i["high"] - i["mean"])]] for i in (speed, good)]
        axes.errorbar(speed["mean"], good["mean"], xerr=errors[0], yerr=errors[1], marker="o", capsize=3, label=name)
    axes.set(title=title, xlabel="content tokens per second, batch 1", ylabel=quality, xlim=(0, None))
    axes.legend(fontsize=8)
    save_figure(figure, file)
