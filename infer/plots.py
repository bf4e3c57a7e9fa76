"""Figures of benchmarks as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from infer.benchmark import AnswerTime, PassTime


def plot_decoding(
    passes: Sequence[PassTime], answers: Sequence[Sequence[AnswerTime]], copied: float, title: str, file: Path
) -> None:
    """Three curves: time of a pass by width, bandwidth by width, and speed-up by branches, ideal and realised.

    Args:
        copied: bytes per second of a large copy.
        file: where to write; its ending says in which format.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    times, bandwidth, speed = figure.subplots(1, 3)
    widths = [p.width for p in passes]
    below = [p.median - p.fastest for p in passes]
    above = [p.slowest - p.median for p in passes]
    times.errorbar(widths, [p.median for p in passes], yerr=[below, above], marker="o", capsize=3)
    times.set(xscale="log", xlabel="tokens in a pass", ylabel="ms per pass", ylim=(0, None))
    bandwidth.plot(widths, [100 * p.bandwidth / copied for p in passes], marker="o")
    bandwidth.set(xscale="log", xlabel="tokens in a pass", ylabel="% of copy bandwidth", ylim=(0, None))
    for batch in sorted({pair[0].batch for pair in answers}):
        some = [pair for pair in answers if pair[0].batch == batch]
        adaptive = [next(a for a in pair if a.name == "adaptive") for pair in some]
        serial = [next(a for a in pair if a.name == "serial") for pair in some]
        branches = [a.branches for a in adaptive]
        realised = [s.seconds / a.seconds for a, s in zip(adaptive, serial, strict=True)]
        speed.plot(branches, realised, marker="o", label=f"realised, batch {batch}")
    if answers:
        speed.plot(branches, [a.ideal for a in adaptive], linestyle="--", color="gray", label="ideal")
        speed.legend(fontsize=8)
    speed.set(xlabel="branches", ylabel="speed-up over serial mode", ylim=(0, None))
    for axes in (times, bandwidth):
        axes.set_xticks(widths, [str(width) for width in widths])
    figure.savefig(file)
