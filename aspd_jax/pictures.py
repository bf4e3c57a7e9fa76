"""Structured answers with branches side by side, on a terminal and as HTML; the colours of branches."""

from __future__ import annotations

from html import escape

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from aspd_jax.structure import Parallel, Structure

COLOURS = ("#2f6db5", "#b5562f", "#2f9a5b", "#8a4bb0", "#a8891a", "#b53a68", "#2a93a0", "#6b7280")
SERIAL_COLOUR = "#9a948f"
TITLE_COLOUR = "#e0a458"
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
    """Return the colour of a branch by its number from 0; adjacent siblings have different colours."""
    return COLOURS[number % len(COLOURS)]


def rendered(structure: Structure) -> RenderableType:
    """Return a structured answer for a terminal, the branches of a block side by side."""
    parts: list[RenderableType] = []
    for item in structure:
        if not isinstance(item, Parallel):
            parts.append(Text(item.text.strip("\n")))
            continue
        panels = []
        for number, branch in enumerate(item.branches):
            text, colour = branch.text.strip().removeprefix(",").strip(), branch_colour(number)
            title = Text(branch.caption, style=colour)
            panels.append(Panel(Text(text), title=title, title_align="left", width=36, border_style=colour))
        parts.append(Columns(panels))
    return Group(*parts)


def answer_html(structure: Structure) -> str:
    """Return a structured answer as HTML, the branches of a block side by side; it needs the style `STYLE`."""
    parts = []
    for item in structure:
        if not isinstance(item, Parallel):
            parts.append(f"<pre>{escape(item.text)}</pre>")
            continue
        branches = []
        for number, branch in enumerate(item.branches):
            colour = branch_colour(number)
            name = f'<b style="color:{colour}">{escape(branch.caption)}</b>' if branch.caption else ""
            text = escape(branch.text.strip("\n"))
            branches.append(f'<div class="branch" style="border-color:{colour}">{name}<pre>{text}</pre></div>')
        parts.append(f'<div class="block">{"".join(branches)}</div>')
    return "".join(parts)


def page(title: str, body: str) -> str:
    """Return a self-contained HTML page with the style `STYLE`."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n{body}\n</html>\n"
    )
