"""From the records of a run to its figures: what the report shows, and what report.json holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from infer.evaluation.eval_config import EvalConfig
from infer.evaluation.evaluate import answers_file, speed_file
from infer.evaluation.intervals import difference, interval
from infer.evaluation.questions import Question
from infer.evaluation.speed import total
from infer.offline.journal import read_journal

RATIO = "content tokens/s, ratio"
QUANTILES = (0.1, 0.5, 0.9, 1.0)
Record = dict[str, Any]


def figures(config: EvalConfig, questions: dict[str, Sequence[Question]], folder: Path) -> dict[str, Any]:
    """Of every benchmark: by system, overall and by category; comparisons of systems, paired by question."""
    found = {}
    for bench, asked in questions.items():
        answers, timed, scores = {}, {}, defaultdict(list)
        for system in config.systems:
            order = [question.id for question in asked]
            answers[system.name] = _in_order(read_journal(answers_file(folder, bench, system.name)), order)
            timed[system.name] = _in_order(read_journal(speed_file(folder, bench, system.name)), order)
        for judgment in read_journal(folder / "model_judgment" / bench / "single.jsonl"):
            scores[judgment["model"]].append(judgment)
        likely = {name: read_journal(folder / "likelihood" / bench / f"{name}.jsonl") for name in config.models}
        categories = list(dict.fromkeys(question.category for question in asked))
        systems = {}
        for system in config.systems:
            of = (answers[system.name], timed[system.name], scores[system.name], likely[system.model])
            systems[system.name] = {
                "model": system.model,
                "mode": system.mode,
                "role": config.models[system.model].role,
                "all": _summary(*of),
                "categories": {name: _summary(*(_only(records, name) for records in of)) for name in categories},
            }
        found[bench] = {
            "questions": len(asked),
            "turns": sum(len(question.turns) for question in asked),
            "systems": systems,
            "comparisons": _comparisons(config, answers, timed, scores),
            "pairs": _pairs(read_journal(folder / "model_judgment" / bench / "pair.jsonl")),
        }
    return found


def _in_order(records: Sequence[Record], order: Sequence[Any]) -> list[Record]:
    by_id = {record["question_id"]: record for record in records}
    return [by_id[id] for id in order if id in by_id]


def _only(records: Sequence[Record], category: str) -> list[Record]:
    return [record for record in records if record["category"] == category]


def _summary(
    answers: Sequence[Record], timed: Sequence[Record], scores: Sequence[Record], likely: Sequence[Record]
) -> dict[str, Any]:
    turns = [turn for record in answers for turn in record["turns"]]
    graded = [record["correct"] for record in answers if record["correct"] is not None]
    return {
        "answers": len(turns),
        "errors": sum("error" in record for record in answers),
        "correct": interval([float(right) for right in graded])._asdict() if graded else None,
        "score": interval(list(_by_question(scores).values()))._asdict() if scores else None,
        "score_by_turn": {
            str(turn): interval([s["score"] for s in scores if s["turn"] == turn])._asdict()
            for turn in sorted({s["turn"] for s in scores})
        },
        "nats_per_token": interval([r["nats_per_token"] for r in likely])._asdict() if likely else None,
        "bits_per_byte": interval([r["bits_per_byte"] for r in likely])._asdict() if likely else None,
        "structure": _structure(answers, turns),
        "speed": _speed(timed),
    }


def _by_question(scores: Iterable[Record]) -> dict[Any, float]:
    """The mean score over the turns of every question."""
    found: dict[Any, list[float]] = defaultdict(list)
    for score in scores:
        found[score["question_id"]].append(score["score"])
    return {id: float(np.mean(values)) for id, values in found.items()}


def _structure(answers: Sequence[Record], turns: Sequence[Record]) -> dict[str, Any]:
    health = [turn["health"] for turn in turns]
    forked = [one for one in health if one["forked"]]
    blocks = [size for one in health for size in one["branches"]]
    repeated = [one["repeated"] for one in forked if one["repeated"] is not None]
    known = [record for record in answers if record["forks"] is not None and record["turns"]]
    chains = [record["turns"][0]["health"]["forked"] for record in known if not record["forks"]]
    parallel = [record["turns"][0]["health"]["forked"] for record in known if record["forks"]]
    tokens = sum(one["tokens"] for one in forked)
    in_branches = sum(one["branch_tokens"] for one in forked)
    stats = [turn["stats"] for turn in turns]
    ideal = [turn["stats"]["ideal_speedup"] for turn in turns if turn["health"]["forked"]]
    return {
        "trigger_rate": _share(one["forked"] for one in health),
        "well_formed_rate": _share(one["well_formed"] for one in health),
        "finish": dict(Counter(turn["finish_reason"] for turn in turns)),
        "blocks": len(blocks),
        "branches_per_block": float(np.mean(blocks)) if blocks else None,
        "dependent_blocks": sum(one["dependent"] for one in health),
        "numbered": sum(one["numbered"] for one in health),
        "misnumbered": sum(one["misnumbered"] for one in health),
        "repeated": float(np.mean(repeated)) if repeated else None,
        "wrongly_forked": _share(chains),
        "rightly_forked": _share(parallel),
        "degree_of_parallelism": in_branches / tokens if tokens else None,
        "parallel_efficiency": (
            (in_branches - sum(one["title_tokens"] for one in forked)) / in_branches if in_branches else None
        ),
        "content_tokens": float(np.mean([s["content_tokens"] for s in stats])) if stats else None,
        "ideal_forked": interval(ideal)._asdict() if ideal else None,
        "ideal_best": max(ideal, default=None),
        "ideal": sum(s["content_tokens"] for s in stats) / max(1, sum(s["critical_path"] for s in stats)),
    }


def _share(holds: Iterable[bool]) -> float | None:
    values = list(holds)
    return sum(values) / len(values) if values else None


def _speed(timed: Sequence[Record]) -> dict[str, Any] | None:
    """Of answers that were timed: rates and phases, and speed-ups over serial mode on the same content."""
    turns = [turn for record in timed for turn in record["turns"]]
    if not turns:
        return None
    seconds = [total(turn["runs"]) for turn in turns]
    passes = sum(turn["passes"] for turn in turns)
    phases = {phase: sum(total(turn["runs"], phase) for turn in turns) for phase in ("prefill", "serial", "parallel")}
    decoding = phases["serial"] + phases["parallel"]
    found: dict[str, Any] = {
        "answers": len(turns),
        "runs": len(turns[0]["runs"]),
        "content_per_second": interval(
            [t["content_tokens"] / s for t, s in zip(turns, seconds, strict=True)]
        )._asdict(),
        "seconds": interval(seconds)._asdict(),
        "spread": median(_relative_spread(turn["runs"]) for turn in turns),
        "first_token_ms": 1000 * median(total(turn["runs"], "first_token") for turn in turns),
        "ms_per_pass": 1000 * decoding / max(1, passes),
        "passes": passes / len(turns),
        "parallel_share": phases["parallel"] / decoding if decoding else None,
        "realised": None,
    }
    if all("serial_runs" in turn for turn in turns):
        realised = [total(turn["serial_runs"]) / s for turn, s in zip(turns, seconds, strict=True)]
        ideal = [turn["ideal"] for turn in turns]
        blocks = [r for r, turn in zip(realised, turns, strict=True) if turn["blocks"]]
        found |= {
            "realised": interval(realised)._asdict(),
            "realised_with_block": interval(blocks)._asdict() if blocks else None,
            "realised_quantiles": {str(q): float(np.quantile(realised, q)) for q in QUANTILES},
            "realised_all": realised,
            "realised_time": sum(total(turn["serial_runs"]) for turn in turns) / sum(seconds),
            "ideal": interval(ideal)._asdict(),
            "efficiency": float(np.mean([r / i for r, i in zip(realised, ideal, strict=True)])),
        }
    return found


def _relative_spread(runs: Sequence[dict[str, float]]) -> float:
    times = [run["total"] for run in runs]
    return (max(times) - min(times)) / median(times)


def _comparisons(
    config: EvalConfig,
    answers: dict[str, list[Record]],
    timed: dict[str, list[Record]],
    scores: dict[str, list[Record]],
) -> list[dict[str, Any]]:
    """Every ASPD system in adaptive mode beside every other system, by question."""
    measures: dict[str, Callable[[str], dict[Any, float]]] = {
        "right answers": lambda name: {
            record["question_id"]: float(record["correct"]) for record in answers[name] if record["correct"] is not None
        },
        "judge's score": lambda name: _by_question(scores[name]),
        RATIO: lambda name: {
            record["question_id"]: float(np.log(_rate(record))) for record in timed[name] if _rate(record) > 0
        },
    }
    found = []
    for ours in [system.name for system in config.systems if system.mode == "adaptive"]:
        for theirs in [system.name for system in config.systems if system.name != ours]:
            for what, of in measures.items():
                mine, other = of(ours), of(theirs)
                both = [id for id in mine if id in other]
                if both:
                    gap = difference([mine[id] for id in both], [other[id] for id in both])._asdict()
                    if what == RATIO:  # of logarithms, so that twice and half are equally far from even
                        gap |= {key: float(np.exp(gap[key])) for key in ("mean", "low", "high")}
                    found.append({"ours": ours, "theirs": theirs, "what": what} | gap)
    return found


def _rate(record: Record) -> float:
    """Content tokens per second of a conversation."""
    seconds = sum(total(turn["runs"]) for turn in record["turns"])
    return sum(turn["content_tokens"] for turn in record["turns"]) / seconds if seconds else 0.0


def _pairs(judgments: Sequence[Record]) -> list[dict[str, Any]]:
    """Wins and ties of every pair of systems; `consistent`: verdicts that are the same in both orders."""
    found = []
    for names in dict.fromkeys((j["model_1"], j["model_2"]) for j in judgments):
        ours = [j for j in judgments if (j["model_1"], j["model_2"]) == names]
        worth = [{"model_1": 1.0, "tie": 0.5, "model_2": 0.0}[j["winner"]] for j in ours]
        found.append(
            {
                "model_1": names[0],
                "model_2": names[1],
                "judgments": len(ours),
                "wins": worth.count(1.0),
                "ties": worth.count(0.5),
                "losses": worth.count(0.0),
                "consistent": _share(j["g1_winner"] == j["g2_winner"] for j in ours),
                "win_rate": interval(worth)._asdict(),
            }
        )
    return found
