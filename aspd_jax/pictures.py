"""Pictures of structure: who sees whom, and answers with their branches side by side.

Matplotlib figures are returned, to be shown in a notebook, saved, or turned into SVG text; what is mostly text is HTML
that needs nothing beside it.

T tokens of one sequence.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure

from aspd_jax.files import partial_file
from aspd_jax.layout import Layout, Siblings, visible
from aspd_jax.structure import Parallel, Structure

COLOURS = ("#2f6db5", "#b5562f", "#2f9a5b", "#8a4bb0", "#a8891a", "#b53a68", "#2a93a0", "#6b7280")
SERIAL_COLOUR = "#9a948f"
TITLE_COLOUR = "#e0a458"
MOST_LABELLED = 64  # tokens whose names are readable beside a matrix
STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid var(--line); padding: 1rem 0; }
article h2 { font-size: 1rem; margin: 0; } .note { opacity: .7; font-size: .85rem; }
.question { border-left: 3px solid var(--line); margin: .3rem 0 .6rem; padding-left: .7rem; }
pre { white-space: pre-wrap; font: inherit; margin: 0; }
.block { display: flex; flex-wrap: wrap; gap: .6rem; margin: .4rem 0; }
.branch { flex: 1 1 12rem; border-left: 4px solid; padding-left: .7rem; }
.branch b { display: block; font-size: .8rem; }
.rejected { border-bottom: 1px dotted; cursor: help; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
td, th { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; white-space: nowrap; }
th, code { background: #8882; }
"""


def branch_colour(number: int) -> str:
    """Of a branch, by its number from 0; siblings next to each other differ."""
    return COLOURS[number % len(COLOURS)]


def draw_visibility(
    layout: Layout, names: Sequence[str] = (), siblings: Siblings = "invisible", title: str = ""
) -> Figure:
    """The visibility matrix of one sequence (protocol, section 3): a row for each token, filled where it may look.

    Serial tokens are grey, branches coloured. Below stand the positions that tokens are rotated with.

    Args:
        layout: of the sequence, int32 [T] each.
        names: of the tokens, [T]; written beside short sequences.
        siblings: `shared`: the variant of the ablation, in which they see each other.
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
    below.set(ylabel="position", xlabel="" if names else "token it may look at")
    if names and length <= MOST_LABELLED:
        short = [name if len(name) <= 12 else name[:11] + "…" for name in names]
        matrix.set_yticks(range(length), short, fontsize=6)
        below.set_xticks(range(length), short, fontsize=6, rotation=90)
    return figure


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure in the format that the file's name ends with."""
    with partial_file(file) as partial:
        figure.savefig(partial, format=file.suffix[1:] or None)


def svg(figure: Figure) -> str:
    """A figure as SVG text; the same figure gives the same text."""
    file = io.StringIO()
    with rc_context({"svg.hashsalt": "aspd"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def answer_html(structure: Structure) -> str:
    """A structured answer, the branches of a block side by side; to stand in a `page`, or anywhere with its `STYLE`."""
    parts = []
    for item in structure:
        if not isinstance(item, Parallel):
            parts.append(f"<pre>{escape(item.text)}</pre>")
            continue
        branches = []
        for number, branch in enumerate(item.branches):
            colour = branch_colour(number)
            name = f'<b style="color:{colour}">{escape(branch.title)}</b>'
            text = escape(branch.text.strip("\n"))
            branches.append(f'<div class="branch" style="border-color:{colour}">{name}<pre>{text}</pre></div>')
        parts.append(f'<div class="block">{"".join(branches)}</div>')
    return "".join(parts)


def page(title: str, body: str) -> str:
    """An HTML page that needs nothing beside it."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n{body}\n</html>\n"
    )
