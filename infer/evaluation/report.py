"""Report of an evaluation as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aspd_jax.files import write_whole
from infer.evaluation.config import EvalConfig
from infer.evaluation.figures import figures, list_pairs
from infer.evaluation.lists import ListPair, lists_lines
from infer.evaluation.questions import Question


def write_report(
    config: EvalConfig, environment: dict[str, Any], questions: dict[str, Sequence[Question]], folder: Path
) -> str:
    """Write report.md and report.json, and return the Markdown."""
    results = figures(config, questions, folder)
    text = markdown(config, environment, results, list_pairs(config, questions, folder))
    settings = json.loads((folder / "config.json").read_text())
    whole = {"environment": environment, "config": settings, "figures": results}
    write_whole(folder / "report.json", json.dumps(whole, indent=1, allow_nan=False, default=str) + "\n")
    write_whole(folder / "report.md", text + "\n")
    return text


def markdown(
    config: EvalConfig,
    environment: dict[str, Any],
    results: dict[str, Any],
    pairs: dict[str, dict[str, list[ListPair]]],
) -> str:
    """Return the report as Markdown."""
    lines = ["# Evaluation", ""]
    lines += _setting(config, environment)
    for bench, result in results.items():
        lines += [f"## {bench}", "", f"{result['questions']} questions, {result['turns']} turns.", ""]
        systems = result["systems"]
        graded = {name: s["all"]["right"] for name, s in systems.items() if s["all"]["right"]}
        if graded:
            rows = [[name, str(s["values"]), _around(s, "{:.1f}", 100, " %")] for name, s in graded.items()]
            lines += ["### Right answers", "", *_table(["system", "questions", "right"], rows), ""]
        speeds = {name: s["all"]["speed"] for name, s in systems.items() if s["all"]["speed"]}
        if speeds:
            lines += ["### Speed", ""] + _speed_table(speeds) + [""] + _comparison_table(result["comparisons"])
        lines += ["### Structure", ""] + _structure_table({name: s["all"] for name, s in systems.items()}) + [""]
        for name, answers in pairs[bench].items():
            if any(pair.adaptive["stats"]["blocks"] for pair in answers):
                lines += [f"### Lists of {name}", "", *lists_lines(answers), ""]
        for name, system in systems.items():
            if len(system["categories"]) > 1:
                lines += [f"### {name}, by category", ""] + _category_table(system["categories"]) + [""]
    if environment.get("left_out"):
        lines += ["## Invalid lines of question files", "", *(f"* {line}" for line in environment["left_out"]), ""]
    lines += _repeat(environment)
    return "\n".join(lines).rstrip()


def _setting(config: EvalConfig, environment: dict[str, Any]) -> list[str]:
    d, s = config.decoding, config.speed
    how = "greedy" if d.temperature == 0 else f"temperature {d.temperature}, top-k {d.top_k}, top-p {d.top_p}"
    lines = ["| model | role | folder | dtype | weights |", "|---|---|---|---|---|"]
    lines += [f"| {n} | {m.role} | {m.path} | {m.dtype} | {m.weights} |" for n, m in config.models.items()]
    return [
        *lines,
        "",
        f"{environment['devices']} ({environment['processor']}, {environment['cores']} cores), jax "
        f"{environment['versions']['jax']}. Decoding: {how}, at most {d.max_new_tokens} new tokens, seed {d.seed}. "
        f"Answers: batches of {d.batch}. Speed: batch 1, no other requests, prefill included, medians of {s.repeats} "
        "runs after one that compiles; serial mode decodes the same content with the same weights. Tags, titles and "
        "heads are not content. Intervals: 95 %, bootstrap over questions; p: permutation test of paired differences.",
        "",
    ]


def _comparison_table(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    if not comparisons:
        return []
    rows = []
    for c in comparisons:
        ratio = f"{c['mean']:.2f}x [{c['low']:.2f}x, {c['high']:.2f}x]"
        rows.append([c["ours"], c["theirs"], str(c["values"]), ratio, f"{c['p']:.4f}"])
    return [*_table(["system", "against", "questions", "content tokens/s, ratio", "p"], rows), ""]


def _speed_table(systems: dict[str, Any]) -> list[str]:
    head = [
        "system", "answers", "content tokens/s", "s per answer", "spread of runs", "first token, ms", "steps",
        "ms per step", "parallel share", "realised", "with a block", "p10 / p50 / p90 / best", "ideal", "efficiency",
    ]  # fmt: skip
    rows = []
    for name, s in systems.items():
        cells = [
            name,
            f"{s['answers']} x {s['runs']}",
            _around(s["content_per_second"], "{:.0f}"),
            _around(s["seconds"], "{:.3f}"),
            _percent(s["spread"]),
            f"{s['first_token_ms']:.1f}",
            f"{s['steps']:.0f}",
            f"{s['ms_per_step']:.2f}",
            _percent(s["parallel_share"]),
        ]
        if s["realised"]:
            cells += [
                _around(s["realised"], "{:.2f}", 1, "x"),
                _around(s["realised_with_block"], "{:.2f}", 1, "x"),
                " / ".join(f"{value:.2f}" for value in s["realised_quantiles"].values()),
                _around(s["ideal"], "{:.2f}", 1, "x"),
                f"{s['efficiency']:.2f}",
            ]
        else:
            cells += [""] * 5
        rows.append(cells)
    return _table(head, rows)


def _structure_table(systems: dict[str, Any]) -> list[str]:
    head = [
        "system", "answers", "errors", "trigger rate", "well-formed", "finish", "branches per block",
        "dependent blocks", "chains forked", "parallel forked", "DP", "PE", "content tokens",
        "ideal", "ideal, answers that fork", "best",
    ]  # fmt: skip
    rows = []
    for name, summary in systems.items():
        s = summary["structure"]
        against = f"{s['dependent_blocks']} of {s['blocks']}" if s["blocks"] else ""
        rows.append(
            [
                name,
                str(summary["answers"]),
                str(summary["errors"]),
                _percent(s["trigger_rate"]),
                _percent(s["well_formed_rate"]),
                ", ".join(f"{count} {reason}" for reason, count in s["finish"].items()),
                _number(s["branches_per_block"]),
                against,
                _percent(s["wrongly_forked"]),
                _percent(s["rightly_forked"]),
                _number(s["degree_of_parallelism"]),
                _number(s["parallel_efficiency"]),
                _number(s["content_tokens"], "{:.0f}"),
                f"{s['ideal']:.2f}x",
                _around(s["ideal_forked"], "{:.2f}", 1, "x"),
                _number(s["ideal_best"]),
            ]
        )
    return _table(head, rows)


def _category_table(categories: dict[str, Any]) -> list[str]:
    rows = []
    for name, s in categories.items():
        speed = s["speed"]
        rows.append(
            [
                name,
                str(s["answers"]),
                _percent(s["structure"]["trigger_rate"]),
                f"{s['structure']['ideal']:.2f}x",
                _around(speed["realised"], "{:.2f}", 1, "x") if speed and speed["realised"] else "",
                _around(speed["content_per_second"], "{:.0f}") if speed else "",
            ]
        )
    head = ["category", "answers", "trigger rate", "ideal", "realised", "content tokens/s"]
    return _table(head, rows)


def _repeat(environment: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    return [
        "## Reproduction",
        "",
        f"* command: `{environment['command']}`, started {environment['started']}",
        "* config.json holds the configuration with seeds, environment.json the hashes of all questions",
        f"* commit: {environment['commit'] or 'none (an installed package)'}",
        f"* {environment['system']}, Python {environment['python']}; {versions}",
        f"* XLA_FLAGS: `{environment['xla_flags'].strip() or 'none'}`",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table without columns that are empty in all rows."""
    full = [n for n in range(len(head)) if any(row[n] for row in rows)]
    lines = [f"| {' | '.join(head[n] for n in full)} |", "|" + "---|" * len(full)]
    cells = [[row[n].replace("|", "\\|") for n in full] for row in rows]
    return lines + [f"| {' | '.join(row)} |" for row in cells]


def _around(interval: dict[str, float] | None, form: str, factor: float = 1, unit: str = "") -> str:
    if interval is None or not interval["values"]:
        return ""
    mean, low, high = (form.format(factor * interval[key]) for key in ("mean", "low", "high"))
    return f"{mean}{unit}" if low == high else f"{mean}{unit} [{low}, {high}]"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "" if value is None else form.format(value)
