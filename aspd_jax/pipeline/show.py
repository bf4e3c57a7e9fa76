"""Structured records for the eye: on a terminal, and as a page of their own with branches coloured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from aspd_jax.errors import AspdError, DataError
from aspd_jax.structure import Parallel, Serial, Structure, from_json

COLOURS = ("#2f6db5", "#b5562f", "#2f9a5b", "#8a4bb0", "#a8891a", "#b53a68", "#2a93a0", "#6b7280")
_STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid var(--line); padding: 1rem 0; }
h2 { font-size: 1rem; margin: 0; } .note { opacity: .7; font-size: .85rem; }
.question { border-left: 3px solid var(--line); padding-left: .7rem; }
pre { white-space: pre-wrap; font: inherit; margin: 0; }
.branch { display: block; border-left: 4px solid; padding-left: .7rem; margin: .15rem 0; }
.branch b { display: block; font-size: .8rem; }
.rejected { border-bottom: 1px dotted; cursor: help; }
"""


def read_structured(file: Path) -> Iterator[dict[str, Any]]:
    """Records of a file of `aspd data build`, or of any JSONL that `aspd train` reads.

    Raises:
        DataError: line and problem.
    """
    if not file.is_file():
        raise DataError(f"{file} does not exist")
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                record["answers"] = [
                    (place, from_json(m["structure"])) if "structure" in m else (place, (Serial(m["content"]),))
                    for place, m in enumerate(record["messages"])
                    if m["role"] == "assistant"
                ]
            except (AspdError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}, line {number}: no structured record: {error!r}") from None
            yield record


def find(file: Path, name: str) -> dict[str, Any]:
    """The record with an id.

    Raises:
        DataError: there is none.
    """
    for record in read_structured(file):
        if str(record.get("id")) == name:
            return record
    raise DataError(f"{file} holds no record with id {name!r}")


def show(record: dict[str, Any], console: Console) -> None:
    """Print a record: questions, answers with their branches side by side in colours, and what was left out and why."""
    answers = dict(record["answers"])
    details = {detail["message"]: detail for detail in record.get("pipeline", [])}
    for place, message in enumerate(record["messages"]):
        if place not in answers:
            console.print(Panel(Text(message["content"]), title=message["role"], title_align="left"))
            continue
        console.print(_answer(answers[place]))
        for line in _notes(details.get(place, {})):
            console.print(Text(line, style="dim"))


def _answer(structure: Structure) -> RenderableType:
    parts: list[RenderableType] = []
    for item in structure:
        if isinstance(item, Serial):
            parts.append(Text(item.text.strip("\n")))
            continue
        for number, branch in enumerate(item.branches):
            colour = COLOURS[number % len(COLOURS)]
            text = Text(branch.text.strip("\n"))
            parts.append(Panel(text, title=Text(branch.title, style=colour), title_align="left", border_style=colour))
    return Group(*parts)


def _notes(detail: dict[str, Any]) -> Iterator[str]:
    if measures := detail.get("measures"):
        yield (
            f"{measures['tokens']} tokens, {measures['blocks']} blocks, {measures['branches']} branches, "
            f"ideal speed-up {measures['ideal_speedup']:.2f}x; from {detail['source'] or 'no candidate'}"
        )
    for rejection in detail.get("rejected", []):
        titles = " | ".join(rejection.get("titles", []))
        yield f"left out at {rejection['stage']}: {rejection['reason']}" + (f" ({titles})" if titles else "")


def page(records: Sequence[dict[str, Any]], title: str) -> str:
    """A self-contained HTML page; reasons for what was left out appear on hover."""
    shown = "\n".join(_article(record) for record in records)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n{shown}\n</html>\n"
    )


def _article(record: dict[str, Any]) -> str:
    answers = dict(record["answers"])
    details = {detail["message"]: detail for detail in record.get("pipeline", [])}
    parts = [f"<h2>{escape(str(record.get('id', '')))}</h2>"]
    for place, message in enumerate(record["messages"]):
        if place not in answers:
            parts.append(f'<div class="question"><pre>{escape(message["content"])}</pre></div>')
            continue
        for item in answers[place]:
            if isinstance(item, Parallel):
                for number, branch in enumerate(item.branches):
                    colour = COLOURS[number % len(COLOURS)]
                    name = f'<b style="color:{colour}">{escape(branch.title)}</b>'
                    text = escape(branch.text.strip("\n"))
                    parts.append(f'<div class="branch" style="border-color:{colour}">{name}<pre>{text}</pre></div>')
            else:
                parts.append(f"<pre>{escape(item.text)}</pre>")
        detail = details.get(place, {})
        told = list(_notes(detail))
        if detail.get("measures"):
            parts.append(f'<p class="note">{escape(told.pop(0))}</p>')
        if told:
            reasons = escape("\n".join(told), quote=True)
            parts.append(f'<p class="note"><span class="rejected" title="{reasons}">{len(told)} left out</span></p>')
    return f"<article>{''.join(parts)}</article>"
