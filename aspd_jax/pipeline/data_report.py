"""Report of a run of the pipeline: counts per stage, and statistics of the result (protocol, section 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aspd_jax.blocks.measures import Measures

QUANTILES = (0.1, 0.5, 0.9, 1.0)
# Stages at which records are left out, in their order.
STAGES = {
    "read": "not readable",
    "record": "repetitive, not as asked, or a list with a defect",
    "question": "other answers to the question are preferred (`select.per_question`)",
    "serial": "without a block, and of another kind or more than wanted (`select.serial_kinds`, `select.serial_ratio`)",
}


@dataclass
class Report:
    """Counts over records and answers.

    Attributes:
        unreadable: source, line and reason of each record that cannot be read.
        records: number of records read.
        left_out: number of records in neither set, by stage (`STAGES`).
        answers: measures of the answers in the sets, including plain ones.
        examined: number of answers for which blocks were proposed and checked, also of records that are left out.
        proposed: number of answers with a proposed block.
        blocks: number of proposed blocks over all candidates.
        failed: number of failed blocks and candidates by stage.
        reasons: number of failed checks by kind of reason.
    """

    unreadable: list[str] = field(default_factory=list)
    records: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    answers: list[Measures] = field(default_factory=list)
    examined: int = 0
    proposed: int = 0
    blocks: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def written(self) -> int:
        """Return the number of records in the sets."""
        return self.records - self.left_out.total()

    def count(self, stage: str) -> None:
        """Add a record that is left out at a stage of `STAGES`; empty: one in the sets."""
        self.records += 1
        self.left_out.update([stage] if stage else [])

    def add(self, rejected: Iterable[dict[str, Any]], blocks: int) -> None:
        """Add the yields of an answer.

        Args:
            rejected: rejected blocks and candidates, with `stage` and `reason`.
            blocks: number of proposed blocks.
        """
        self.examined += 1
        self.proposed += bool(blocks)
        self.blocks += blocks
        for rejection in rejected:
            self.failed[rejection["stage"]] += 1
            if rejection["stage"] in ("check", "defect"):
                self.reasons[rejection["reason"].split(":")[0]] += 1

    def statistics(self) -> dict[str, Any]:
        """Return PPD, DP, ABN, PE and ideal speed-up (protocol, section 7); those of blocks: of answers with one."""
        forked = [m for m in self.answers if m.blocks]
        speedups = [m.ideal_speedup for m in forked]
        whole, blocks = _total(self.answers), _total(forked)
        return {
            "answers": len(self.answers),
            "with_block": len(forked),
            "PPD": len(forked) / max(1, len(self.answers)),
            "DP": whole.parallelism,
            "DP_with_block": blocks.parallelism,
            "ABN": blocks.mean_branches,
            "PE": blocks.efficiency,
            "ideal_speedup": float(np.mean(speedups)) if speedups else 1.0,
            "ideal_speedup_quantiles": [float(v) for v in np.quantile(speedups, QUANTILES)] if speedups else [],
            "ideal_speedup_all": whole.ideal_speedup,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "records": self.records,
            "written": self.written,
            "left_out": {stage: self.left_out[stage] for stage in STAGES},
            "examined": self.examined,
            "proposed": self.proposed,
            "blocks": self.blocks,
            "failed": dict(self.failed),
            "reasons": dict(self.reasons),
            "statistics": self.statistics(),
        }

    def markdown(self) -> str:
        """Return the report as Markdown."""
        lines = ["# Report of `aspd data build`", "", "| stage | |", "|---|---|"]
        lines += [f"| records read | {self.records} |", f"| records in both sets | {self.written} |"]
        lines += [f"| records left out: {what} | {self.left_out[stage]} |" for stage, what in STAGES.items()]
        lines += [f"| answers examined, also of records left out later | {self.examined} |"]
        lines += [f"| … with a block proposed by their form | {self.proposed} |"]
        lines += [f"| blocks proposed, over all candidates | {self.blocks} |"]
        descriptions = {
            "short": "answers too short to fork",
            "integrity": "candidates that are not well formed",
            "check": "blocks whose branches depend on each other by their words",
            "defect": "blocks with unequal gaps, similar titles or repeated sentences",
            "select": "blocks that save nothing, or have too many branches",
        }
        lines += [
            f"| left out: {what} | {self.failed[stage]} |" for stage, what in descriptions.items() if self.failed[stage]
        ]
        lines += [f"| … {reason} | {count} |" for reason, count in self.reasons.most_common()]
        lines += ["", *_statistics_table(self.statistics())]
        return "\n".join(lines) + "\n"


def _total(answers: Sequence[Measures]) -> Measures:
    return Measures(*map(sum, zip(*answers, strict=True))) if answers else Measures(0)


def _statistics_table(found: dict[str, Any]) -> list[str]:
    """Return the lines of a Markdown table of `Report.statistics`."""
    quantiles = ", ".join(f"{v:.2f}x" for v in found["ideal_speedup_quantiles"]) or "none"
    return [
        "| statistics of the answers in the sets | |",
        "|---|---|",
        f"| answers | {found['answers']} |",
        f"| PPD, answers with a block | {found['with_block']}, {found['PPD']:.1%} |",
        f"| DP, tokens in branches | {found['DP']:.1%} of all, {found['DP_with_block']:.1%} of answers with a block |",
        f"| ABN, branches per block | {found['ABN']:.2f} |",
        f"| PE, parallel efficiency | {found['PE']:.1%} |",
        f"| ideal speed-up of answers with a block, mean | {found['ideal_speedup']:.2f}x |",
        f"| … 10 %, median, 90 %, most | {quantiles} |",
        f"| ideal speed-up of all answers together | {found['ideal_speedup_all']:.2f}x |",
    ]
