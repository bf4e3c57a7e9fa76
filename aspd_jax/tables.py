"""Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(rows: Sequence[Mapping[str, Any]], head: bool = True) -> str:
    """Return rows as a Markdown table without the columns that are empty in all of them.

    Args:
        rows: cells by the head of their column; each row has the same columns, and there is at least one row.
        head: whether the heads are above the rows.
    """
    full = [column for column in rows[0] if any(row[column] != "" for row in rows)]
    lines = [f"| {' | '.join(full)} |", "|---" * len(full) + "|"] if head else []
    cells = [[str(row[column]).replace("|", "\\|") for column in full] for row in rows]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])
