"""Figures of the report, computed from the records of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from aspd_jax.journal import read_journal
from infer.evaluation.config import EvalConfig
from infer.evaluation.evaluate import results_file
from infer.evaluation.intervals import difference, interval
from infer.evaluation.lists import ListPair
from infer.evaluation.questions import Question
from infer.evaluation.speed import total

QUANTILES = (0.1, 0.5, 0.9, 1.0)
Record = dict[str, Any]


def figures(config: EvalConfig, questions: dict[str, Sequence[Question]], folder: Path) -> dict[str, Any]:
    """Compute the figures of every benchmark: each system overall and by category, and paired comparisons."""
    results = {}
    for bench, asked in questions.items():
        answers, timed = (read_records(config, asked, folder, kind, bench) for kind in ("answers", "speed"))
        categories = list(dict.fromkeys(question.category for question in asked))
        systems = {}
        for system in config.systems:
            records = (answers[system.name], timed[system.name])
            systems[system.name] = {
                "model": system.model,
                "mode": system.mode,
                "role": config.models[system.model].role,
                "all": _summary(*records),
                "categories": {name: _summary(*(_only(part, name) for part in records)) for name in categories},
            }
        results[bench] = {
            "questions": len(asked),
            "turns": sum(len(question.turns) for question in asked),
            "systems": systems,
            "comparisons": _comparisons(config, timed),
        }
    return results


def list_pairs(config: EvalConfig, asked: Sequence[Question], folder: Path, bench: str) -> dict[str, list[ListPair]]:
    """Return the answers of each model that has both modes; turns that both modes answered."""
    answers = {
        name: {record["question_id"]: record["turns"] for record in records}
        for name, records in read_records(config, asked, folder, "answers", bench).items()
    }
    both = {s.model: [answers[f"{s.model}-serial"], answers[s.name]] for s in config.systems if s.mode == "adaptive"}
    return {
        name: [
            ListPair(question.category, question.turns[: number + 1], *turns)
            for question in asked
            for number, turns in enumerate(zip(*(mode.get(question.id, ()) for mode in modes), strict=False))
        ]
        for name, modes in both.items()
    }


def read_records(
    config: EvalConfig, asked: Sequence[Question], folder: Path, kind: str, bench: str
) -> dict[str, list[Record]]:
    """Return the records of each system in the order of the questions; `kind`: see `results_file`."""
    records = {}
    for system in config.systems:
        found = read_journal(results_file(folder, kind, bench, system.name))
        by_id = {record["question_id"]: record for record in found}
        records[system.name] = [by_id[question.id] for question in asked if question.id in by_id]
    return records


def _only(records: Sequence[Record], category: str) -> list[Record]:
    return [record for record in records if record["category"] == category]


def _summary(answers: Sequence[Record], timed: Sequence[Record]) -> dict[str, Any]:
    turns = [turn for record in answers for turn in record["turns"]]
    graded = [float(record["correct"]) for record in answers if "correct" in record]
    return {
        "answers": len(turns) + sum("probabilities" in record for record in answers),
        "right": interval(graded)._asdict() if graded else None,
        "errors": sum("error" in record for record in answers),
        "structure": _structure(answers, turns),
        "speed": _speed(timed),
    }


def _structure(answers: Sequence[Record], turns: Sequence[Record]) -> dict[str, Any]:
    health = [turn["health"] for turn in turns]
    forked = [measures for measures in health if measures["forked"]]
    blocks = [size for measures in health for size in measures["branches"]]
    known = [record for record in answers if record["forks"] is not None and record["turns"]]
    chains = [record["turns"][0]["health"]["forked"] for record in known if not record["forks"]]
    parallel = [record["turns"][0]["health"]["forked"] for record in known if record["forks"]]
    tokens = sum(measures["tokens"] for measures in forked)
    in_branches = sum(measures["branch_tokens"] for measures in forked)
    in_titles = sum(measures["title_tokens"] for measures in forked)
    stats = [turn["stats"] for turn in turns]
    ideal = [turn["stats"]["ideal_speedup"] for turn in turns if turn["health"]["forked"]]
    return {
        "trigger_rate": _share(measures["forked"] for measures in health),
        "well_formed_rate": _share(measures["well_formed"] for measures in health),
        "finish": dict(Counter(turn["finish_reason"] for turn in turns)),
        "blocks": len(blocks),
        "branches_per_block": float(np.mean(blocks)) if blocks else None,
        "dependent_blocks": sum(measures["dependent"] for measures in health),
        "wrongly_forked": _share(chains),
        "rightly_forked": _share(parallel),
        "degree_of_parallelism": in_branches / tokens if tokens else None,
        "parallel_efficiency": (in_branches - in_titles) / in_branches if in_branches else None,
        "content_tokens": float(np.mean([s["content_tokens"] for s in stats])) if stats else None,
        "ideal_forked": interval(ideal)._asdict() if ideal else None,
        "ideal_best": max(ideal, default=None),
        "ideal": sum(s["content_tokens"] for s in stats) / max(1, sum(s["critical_path"] for s in stats)),
    }


def _share(holds: Iterable[bool]) -> float | None:
    values = list(holds)
    return sum(values) / len(values) if values else None


def _speed(timed: Sequence[Record]) -> dict[str, Any] | None:
    """Return rates, phases and speed-ups over serial mode of the timed answers; None: none was timed."""
    turns = [turn for record in timed for turn in record["turns"]]
    if not turns:
        return None
    seconds = [total(turn["runs"]) for turn in turns]
    steps = sum(turn["steps"] if "steps" in turn else turn["passes"] for turn in turns)  # `passes` in older records
    phases = {phase: sum(total(turn["runs"], phase) for turn in turns) for phase in ("prefill", "serial", "parallel")}
    decoding = phases["serial"] + phases["parallel"]
    summary: dict[str, Any] = {
        "answers": len(turns),
        "runs": len(turns[0]["runs"]),
        "content_per_second": interval(
            [t["content_tokens"] / s for t, s in zip(turns, seconds, strict=True)]
        )._asdict(),
        "seconds": interval(seconds)._asdict(),
        "spread": median(_relative_spread(turn["runs"]) for turn in turns),
        "first_token_ms": 1000 * median(total(turn["runs"], "first_token") for turn in turns),
        "ms_per_step": 1000 * decoding / max(1, steps),
        "steps": steps / len(turns),
        "parallel_share": phases["parallel"] / decoding if decoding else None,
        "realised": None,
    }
    if all("serial_runs" in turn for turn in turns):
        realised = [total(turn["serial_runs"]) / s for turn, s in zip(turns, seconds, strict=True)]
        ideal = [turn["ideal"] for turn in turns]
        blocks = [r for r, turn in zip(realised, turns, strict=True) if turn["blocks"]]
        summary |= {
            "realised": interval(realised)._asdict(),
            "realised_with_block": interval(blocks)._asdict() if blocks else None,
            "realised_quantiles": {str(q): float(np.quantile(realised, q)) for q in QUANTILES},
            "realised_all": realised,
            "realised_time": sum(total(turn["serial_runs"]) for turn in turns) / sum(seconds),
            "ideal": interval(ideal)._asdict(),
            "efficiency": float(np.mean([r / i for r, i in zip(realised, ideal, strict=True)])),
        }
    return summary


def _relative_spread(runs: Sequence[dict[str, float]]) -> float:
    times = [run["total"] for run in runs]
    return (max(times) - min(times)) / median(times)


def _comparisons(config: EvalConfig, timed: dict[str, list[Record]]) -> list[dict[str, Any]]:
    """Return the ratio of content tokens per second of every system in adaptive mode to every other system.

    Questions are paired. Ratios are averaged as logarithms, which treat 2 and 1/2 alike.
    """
    rates = {
        name: {record["question_id"]: float(np.log(_rate(record))) for record in records if _rate(record) > 0}
        for name, records in timed.items()
    }
    comparisons = []
    for ours in [system.name for system in config.systems if system.mode == "adaptive"]:
        for theirs in [system.name for system in config.systems if system.name != ours]:
            both = [id for id in rates[ours] if id in rates[theirs]]
            if both:
                gap = difference([rates[ours][id] for id in both], [rates[theirs][id] for id in both])._asdict()
                gap |= {key: float(np.exp(gap[key])) for key in ("mean", "low", "high")}
                comparisons.append({"ours": ours, "theirs": theirs} | gap)
    return comparisons


def _rate(record: Record) -> float:
    """Return the content tokens per second of a conversation."""
    seconds = sum(total(turn["runs"]) for turn in record["turns"])
    return sum(turn["content_tokens"] for turn in record["turns"]) / seconds if seconds else 0.0
