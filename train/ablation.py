"""The paper's ablation of masks and positions (spec, section 4) as a grid of configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aspd_jax.layout import PositionScheme, Siblings
from train.config import TrainConfig

GRID: tuple[tuple[PositionScheme, Siblings], ...] = (
    ("sequential", "invisible"),
    ("sequential", "shared"),
    ("max", "invisible"),
    ("max", "shared"),
    ("predict", "invisible"),
)
# Judge score and tokens per second of Vicuna-7B (paper, table 4). The serial base has 6.21 and 53.19.
PUBLISHED = {
    "sequential-invisible": (7.64, 104.21),
    "sequential-shared": (4.64, 110.30),
    "max-invisible": (6.78, 89.45),
    "max-shared": (3.70, 86.96),
    "predict-invisible": (6.75, 72.15),
}


def variants(config: TrainConfig) -> dict[str, TrainConfig]:
    """One configuration for each cell of the grid; everything else is the same."""
    return {
        f"{positions}-{siblings}": replace(config, model=replace(config.model, positions=positions, siblings=siblings))
        for positions, siblings in GRID
    }


def table(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: what the models of the grid answer, beside what the paper reports for its own.

    Args:
        records: of `infer.evaluate.evaluate`, by name of the variant.
    """
    lines = [
        "| positions | siblings | exact match | of answers with a block | fork decision right | ideal speed-up "
        "| paper: score | paper: tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, answers in records.items():
        blocks = [answer for answer in answers if answer["should_fork"]]
        score, speed = PUBLISHED[name]
        ideal = sum(a["content_tokens"] for a in answers) / max(1, sum(a["critical_path"] for a in answers))
        right = [a["forked"] == a["should_fork"] for a in answers]
        lines.append(
            f"| {name.replace('-', ' | ')} | {_share([a['exact'] for a in answers])} "
            f"| {_share([a['exact'] for a in blocks])} | {_share(right)} | {ideal:.2f}x | {score:.2f} | {speed:.2f} |"
        )
    return "\n".join(lines)


def _share(values: Sequence[bool]) -> str:
    return f"{100 * sum(values) / max(1, len(values)):.1f} %"
