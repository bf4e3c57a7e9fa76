"""Show structured records on a terminal, or as an HTML page with coloured branches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from aspd_jax.jsonl import read_lines
from aspd_jax.pictures import answer_html, page, rendered
from aspd_jax.sources import Unreadable, record_of


def read_structured(file: Path, left_out: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of `aspd data build`, or of any JSONL that `aspd train` reads.

    Args:
        file: JSONL file.
        left_out: list to which file, line and reason of each unreadable line are appended.

    Yields:
        The fields of each record. Its `messages` have `role` and `content`; those that are answers have their
        `structure`, and a `detail` with the `measures` and the `rejected` of the pipeline, if the file has them.

    Raises:
        DataError: the file cannot be read.
    """
    for line in read_lines(file):
        found = record_of(line)
        if isinstance(found, Unreadable):
            left_out.append(f"{file}, line {found.number}: {found.reason}")
            continue
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in found.messages]
        listed = line.value.get("pipeline")
        known = isinstance(listed, list) and all(isinstance(of, dict) and "message" in of for of in listed)
        details = {detail["message"]: detail for detail in listed} if known else {}
        for place in found.answers:
            messages[place] |= {"structure": found.structure(place), "detail": details.get(place, {})}
        yield line.value | {"messages": messages}


def show(record: dict[str, Any], console: Console) -> None:
    """Print a record: questions, answers with coloured branches, and rejected blocks with their reasons."""
    for message in record["messages"]:
        if "structure" not in message:
            console.print(Panel(Text(message["content"]), title=message["role"], title_align="left"))
            continue
        console.print(rendered(message["structure"]))
        for line in _notes(message["detail"]):
            console.print(Text(line, style="dim"))


def _notes(detail: dict[str, Any]) -> Iterator[str]:
    if measures := detail.get("measures"):
        yield (
            f"{measures['tokens']} tokens, {measures['blocks']} blocks, {measures['branches']} branches, "
            f"ideal speed-up {measures['ideal_speedup']:.2f}x"
        )
    for rejection in detail.get("rejected", []):
        titles = " | ".join(rejection.get("titles", []))
        yield f"left out at {rejection['stage']}: {rejection['reason']}" + (f" ({titles})" if titles else "")


def records_page(records: Sequence[dict[str, Any]], title: str) -> str:
    """Return a self-contained HTML page; the reasons of rejected blocks appear on hover."""
    return page(title, "\n".join([f"<h1>{escape(title)}</h1>", *map(_article, records)]))


def _article(record: dict[str, Any]) -> str:
    parts = [f"<h2>{escape(str(record.get('id', '')))}</h2>"]
    for message in record["messages"]:
        if "structure" not in message:
            parts.append(f'<div class="question"><pre>{escape(message["content"])}</pre></div>')
            continue
        parts.append(answer_html(message["structure"]))
        notes = list(_notes(message["detail"]))
        if message["detail"].get("measures"):
            parts.append(f'<p class="note">{escape(notes.pop(0))}</p>')
        if notes:
            reasons = escape("\n".join(notes), quote=True)
            parts.append(f'<p class="note"><span class="rejected" title="{reasons}">{len(notes)} left out</span></p>')
    return f"<article>{''.join(parts)}</article>"
