"""The paper's ablation of masks and positions (spec, section 4) as a grid of configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from aspd_jax.layout import PositionScheme, Siblings
from train.config import TrainConfig

GRID: tuple[tuple[PositionScheme, Siblings], ...] = (
    ("sequential", "invisible"),
    ("sequential", "shared"),
    ("max", "invisible"),
    ("max", "shared"),
    ("predict", "invisible"),
)
# No branch of the synthetic tasks is longer. `predict` spaces branches by the longest that the limits allow, and was
# trained on spacings of this order.
MAX_BRANCH_TOKENS = 64
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


class Outcome(Protocol):
    """What is told of a group of answers."""

    @property
    def exact(self) -> float: ...
    @property
    def fork_right(self) -> float: ...
    @property
    def ideal_speedup(self) -> float: ...


def table(outcomes: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """Markdown: what the models of the grid answer, beside what the paper reports for its own.

    Args:
        outcomes: by name of the variant: of all answers, and of those that should have a block.
    """
    lines = [
        "| positions | siblings | exact match | of answers with a block | fork decision right | ideal speed-up "
        "| paper: score | paper: tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (every, blocks) in outcomes.items():
        score, speed = PUBLISHED[name]
        shares = [f"{100 * share:.1f} %" for share in (every.exact, blocks.exact, every.fork_right)]
        cells = [*name.split("-"), *shares, f"{every.ideal_speedup:.2f}x", f"{score:.2f}", f"{speed:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
