"""Report of an evaluation as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aspd_jax.files import write_whole
from aspd_jax.tables import markdown_table
from infer.evaluation.config import EvalConfig
from infer.evaluation.figures import figures, list_pairs
from infer.evaluation.lists import ListPair, lists_table
from infer.evaluation.questions import Question


def write_report(
    config: EvalConfig, environment: dict[str, Any], questions: dict[str, Sequence[Question]], folder: Path
) -> str:
    """Write report.md and report.json, and return the Markdown."""
    results = figures(config, questions, folder)
    pairs = {bench: list_pairs(config, asked, folder, bench) for bench, asked in questions.items()}
    text = markdown(config, environment, results, pairs)
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
            rows = [
                {"system": name, "questions": s["values"], "right": _around(s, "{:.1f}", 100, " %")}
                for name, s in graded.items()
            ]
            lines += ["### Right answers", "", markdown_table(rows), ""]
        speeds = {name: s["all"]["speed"] for name, s in systems.items() if s["all"]["speed"]}
        if speeds:
            lines += ["### Speed", "", markdown_table([_speed_row(*one) for one in speeds.items()]), ""]
        if speeds and result["comparisons"]:
            lines += [markdown_table([_comparison_row(one) for one in result["comparisons"]]), ""]
        rows = [_structure_row(name, s["all"]) for name, s in systems.items()]
        lines += ["### Structure", "", markdown_table(rows), ""]
        for name, answers in pairs[bench].items():
            if any(pair.adaptive["stats"]["blocks"] for pair in answers):
                lines += [f"### Lists of {name}", "", lists_table(answers), ""]
        for name, system in systems.items():
            if len(system["categories"]) > 1:
                rows = [_category_row(*one) for one in system["categories"].items()]
                lines += [f"### {name}, by category", "", markdown_table(rows), ""]
    if environment.get("left_out"):
        lines += ["## Invalid lines of question files", "", *(f"* {line}" for line in environment["left_out"]), ""]
    lines += _repeat(environment)
    return "\n".join(lines).rstrip()


def _setting(config: EvalConfig, environment: dict[str, Any]) -> list[str]:
    d, s = config.decoding, config.speed
    how = "greedy" if d.temperature == 0 else f"temperature {d.temperature}, top-k {d.top_k}, top-p {d.top_p}"
    models = [
        {"model": name, "role": m.role, "folder": m.path, "dtype": m.dtype, "weights": m.weights}
        for name, m in config.models.items()
    ]
    return [
        markdown_table(models),
        "",
        f"{environment['devices']} ({environment['processor']}, {environment['cores']} cores), jax "
        f"{environment['versions']['jax']}. Decoding: {how}, at most {d.max_new_tokens} new tokens, seed {d.seed}. "
        f"Answers: batches of {d.batch}. Speed: batch 1, no other requests, prefill included, medians of {s.repeats} "
        "runs after one that compiles; serial mode decodes the same content with the same weights. Tags, titles and "
        "heads are not content. Intervals: 95 %, bootstrap over questions; p: permutation test of paired differences.",
        "",
    ]


def _comparison_row(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "system": one["ours"],
        "against": one["theirs"],
        "questions": one["values"],
        "content tokens/s, ratio": f"{one['mean']:.2f}x [{one['low']:.2f}x, {one['high']:.2f}x]",
        "p": f"{one['p']:.4f}",
    }


def _speed_row(name: str, s: dict[str, Any]) -> dict[str, Any]:
    realised = s["realised"]
    return {
        "system": name,
        "answers": f"{s['answers']} x {s['runs']}",
        "content tokens/s": _around(s["content_per_second"], "{:.0f}"),
        "s per answer": _around(s["seconds"], "{:.3f}"),
        "spread of runs": _percent(s["spread"]),
        "first token, ms": f"{s['first_token_ms']:.1f}",
        "steps": f"{s['steps']:.0f}",
        "ms per step": f"{s['ms_per_step']:.2f}",
        "parallel share": _percent(s["parallel_share"]),
        "realised": _around(realised, "{:.2f}", 1, "x"),
        "with a block": _around(s["realised_with_block"], "{:.2f}", 1, "x") if realised else "",
        "p10 / p50 / p90 / best": " / ".join(f"{v:.2f}" for v in s["realised_quantiles"].values()) if realised else "",
        "ideal": _around(s["ideal"], "{:.2f}", 1, "x") if realised else "",
        "efficiency": f"{s['efficiency']:.2f}" if realised else "",
    }


def _structure_row(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    s = summary["structure"]
    return {
        "system": name,
        "answers": summary["answers"],
        "errors": summary["errors"],
        "trigger rate": _percent(s["trigger_rate"]),
        "well-formed": _percent(s["well_formed_rate"]),
        "finish": ", ".join(f"{count} {reason}" for reason, count in s["finish"].items()),
        "branches per block": _number(s["branches_per_block"]),
        "dependent blocks": f"{s['dependent_blocks']} of {s['blocks']}" if s["blocks"] else "",
        "chains forked": _percent(s["wrongly_forked"]),
        "parallel forked": _percent(s["rightly_forked"]),
        "DP": _number(s["degree_of_parallelism"]),
        "PE": _number(s["parallel_efficiency"]),
        "content tokens": _number(s["content_tokens"], "{:.0f}"),
        "ideal": f"{s['ideal']:.2f}x",
        "ideal, answers that fork": _around(s["ideal_forked"], "{:.2f}", 1, "x"),
        "best": _number(s["ideal_best"]),
    }


def _category_row(name: str, s: dict[str, Any]) -> dict[str, Any]:
    speed = s["speed"] or {"realised": None, "content_per_second": None}
    return {
        "category": name,
        "answers": s["answers"],
        "trigger rate": _percent(s["structure"]["trigger_rate"]),
        "ideal": f"{s['structure']['ideal']:.2f}x",
        "realised": _around(speed["realised"], "{:.2f}", 1, "x"),
        "content tokens/s": _around(speed["content_per_second"], "{:.0f}"),
    }


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


def _around(interval: dict[str, float] | None, form: str, factor: float = 1, unit: str = "") -> str:
    if interval is None or not interval["values"]:
        return ""
    mean, low, high = (form.format(factor * interval[key]) for key in ("mean", "low", "high"))
    return f"{mean}{unit}" if low == high else f"{mean}{unit} [{low}, {high}]"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "" if value is None else form.format(value)
