"""Figures of README against the records in results/, computed anew."""

from __future__ import annotations

import gzip
import json
from itertools import compress
from statistics import median
from typing import Any

from tests.conftest import ROOT

RESULTS = ROOT / "results"


def read(name: str) -> list[dict[str, Any]]:
    file = RESULTS / name
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
    return [json.loads(line) for line in text.splitlines()]


def rows(text: str, first: str) -> list[str]:
    """Return the cells of the rows of a page whose first cell is this."""
    return next(line.split("|")[2:-1] for line in text.splitlines() if line.startswith(f"| {first} |"))


def fields_figures() -> dict[str, tuple[int, float, float, float]]:
    """Return, by mode, the fields, the share of right ones, and the ratios of all steps and of all seconds."""
    found = {}
    totals = {}
    for mode in ("serial", "exact", "parallel"):
        tasks = [task for task in read("fields/qwen2.5-coder-0.5b.jsonl") if task["mode"] == mode]
        totals[mode] = [sum(task[name] for task in tasks) for name in ("fields", "steps", "seconds")]
        right = sum(sum(task["right"].values()) for task in tasks) / totals[mode][0]
        steps, seconds = (serial / own for serial, own in zip(totals["serial"][1:], totals[mode][1:], strict=True))
        found[mode] = (totals[mode][0], right, steps, seconds)
    return found


def test_fields() -> None:
    text = (ROOT / "README.md").read_text()
    for mode, (fields, right, steps, seconds) in fields_figures().items():
        if mode == "serial":
            continue
        shown = rows(text, f"2 CPU cores, float32, {mode}")
        assert f"{100 * right:.1f} %" in shown[0] and (mode == "parallel" or f"of {fields} fields" in shown[0])
        assert f"{steps:.1f}x fewer" in shown[2] and f" {seconds:.2f}x less" in shown[3]
    assert " 1.00x less" not in text, "negative control: serial mode beside itself"


def test_lists() -> None:
    text = (ROOT / "README.md").read_text()
    answers = [answer["stats"] for answer in read("smollm2/leads/vicuna.jsonl")]
    forked = [stats for stats in answers if stats["blocks"]]
    lists = [answer["stats"] for answer in read("qwen05/lists.jsonl.gz") if answer["mode"] == "adaptive"]
    parallel = [stats for stats in lists if stats["blocks"]]

    def ideal(some: list[dict[str, Any]]) -> str:
        return f"{sum(one['content_tokens'] for one in some) / sum(one['critical_path'] for one in some):.2f}x"

    assert rows(text, "answers that fork")[:2] == [
        f" {len(parallel)} of {len(lists)} ",
        f" {len(forked)} of {len(answers)} ",
    ]
    (shown,) = (line for line in text.splitlines() if line.startswith("| ideal speed-up"))
    assert f"| {ideal(parallel)}; {ideal(lists)} | {ideal(forked)}; {ideal(answers)} |" in shown
    serial, adaptive = seconds("smollm2/leads/vicuna_speed.jsonl")
    assert f" {serial / adaptive:.2f}x (2 CPU cores) " in rows(text, "realised speed-up (time) of these")
    both = read("qwen05/realised.jsonl.gz")
    timed = {mode: [a for a in both if a["mode"] == mode] for mode in ("serial", "adaptive")}
    forks = [bool(answer["stats"]["blocks"]) for answer in timed["adaptive"]]

    def realised(which: list[bool]) -> str:
        serial, adaptive = (
            sum(a["stats"]["content_tokens"] for a in compress(timed[mode], which))
            / sum(a["stats"]["seconds"]["total"] for a in compress(timed[mode], which))
            for mode in ("serial", "adaptive")
        )
        return f"{adaptive / serial:.2f}x"

    shown = rows(text, "realised speed-up (time) of these")[0]
    assert shown == f" {realised(forks)} in content tokens/s ({sum(forks)} that fork of {len(forks)}, 2 CPU cores) "
    assert (
        f" {realised([True] * len(forks))} in content tokens/s ({len(forks)} answers, 2 CPU cores)"
        in rows(text, "realised speed-up of all")[0]
    )
    share = sum(one["content_tokens"] for one in forked) / sum(one["content_tokens"] for one in answers)
    whole = 1 / (1 - share + share * adaptive / serial)
    assert f" {whole:.2f}x, computed " in rows(text, "realised speed-up of all")


def test_peers() -> None:
    """Check the seconds of 16 fields, and tokens per second, beside other engines."""
    times = {(one["kind"], one["server"], one["way"]): one for one in json.loads((RESULTS / "peers.json").read_text())}
    text = (ROOT / "README.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| vLLM, SGLang, llama.cpp |"))
    asked = [
        ("aspd-jax", "parallel"),
        ("aspd-jax", "exact"),
        ("llama.cpp-f32", ""),
        ("vLLM", ""),
        ("llama.cpp-Q4_K_M", ""),
    ]
    own, drafted, same, vllm, small = (f"{median(times['16 fields', *one]['seconds']):.1f} s" for one in asked)
    assert f"{own} (`parallel`), {drafted} (`exact`), {same} in llama.cpp and {vllm} in vLLM" in row
    assert f"whose record takes {small} " in row

    def speed(server: str, way: str = "") -> float:
        one = times["text", server, way]
        return float(sum(one["tokens"]) / sum(one["seconds"]))

    serial = speed("aspd-jax", "serial")
    ratios = (
        f"{speed('llama.cpp-f32') / serial:.1f} times faster in float32 and {speed('llama.cpp-Q4_K_M') / serial:.1f}"
    )
    assert ratios in row and f"{1 / 1.3:.1f} times faster" not in row, "negative control: the other way round"


def seconds(name: str) -> tuple[float, float]:
    """Return the seconds of all serial and of all adaptive answers, medians of the runs of each."""
    turns = [turn for answer in read(name) for turn in answer["turns"]]
    serial, adaptive = (
        sum(median(run["total"] for run in turn[runs]) for turn in turns) for runs in ("serial_runs", "runs")
    )
    return serial, adaptive
