"""Table that compares models on the same questions: exact match, fork decisions and ideal speed-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.evaluation.intervals import difference

Record = Mapping[str, Any]
HEAD = (
    "model", "exact match", "of answers with a block", "fork decision right", "ideal speed-up",
    "exact match less reference", "p",
)  # fmt: skip


def forked(record: Record) -> bool:
    """Return whether an answer has a block."""
    return any(turn["stats"]["blocks"] for turn in record["turns"])


def table(models: Mapping[str, Sequence[Record]], reference: str) -> str:
    """Return a Markdown table that compares models.

    Args:
        models: records of `infer.evaluation.conversations` by model, for the same questions in any order.
        reference: name of the model whose exact match the others are compared with, paired by question.
    """
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [f"| {' | '.join([name, *_cells(name, models, reference)])} |" for name in models]
    return "\n".join(lines)


def _cells(name: str, models: Mapping[str, Sequence[Record]], reference: str) -> list[str]:
    records = models[name]
    stats = [turn["stats"] for record in records for turn in record["turns"]]
    ideal = sum(s["content_tokens"] for s in stats) / max(1, sum(s["critical_path"] for s in stats))
    cells = [
        _share(records, lambda record: bool(record["correct"])),
        _share([record for record in records if record["forks"]], lambda record: bool(record["correct"])),
        _share(records, lambda record: forked(record) == record["forks"])
        if any(map(forked, records))
        else "(never forks)",
        f"{ideal:.2f}x",
    ]
    if name == reference or reference not in models:
        return [*cells, "", ""]
    d = difference(_correct(records), _correct(models[reference]))
    return [*cells, f"{100 * d.mean:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]", f"{d.p:.4f}"]


def _share(records: Sequence[Record], holds: Callable[[Record], bool]) -> str:
    return f"{100 * sum(map(holds, records)) / max(1, len(records)):.1f} %"


def _correct(records: Sequence[Record]) -> list[float]:
    """Return 1 for a right and 0 for a wrong answer, in the order of question ids."""
    return [float(record["correct"]) for record in sorted(records, key=lambda record: record["question_id"])]
