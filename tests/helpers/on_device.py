"""Real models on a device, beside serial mode: JSON fields in parallel and exactly, decisions, answers with lists.

    python -m tests.helpers.on_device MODEL… --parts fields decisions
    python -m tests.helpers.on_device MODEL… --parts lists --questions FILE --output FOLDER   # FastChat's file

All programs are compiled first, side by side. Answers are appended to FOLDER/answers.jsonl; tables are printed as
Markdown. What does not fit into --seconds is left out, and said so.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import infer
from aspd_jax import load_model
from aspd_jax.language_model import LanguageModel
from infer.answers.answer import Result
from infer.evaluation.extraction import (
    MODES,
    decode_task,
    extraction_table,
    read_tasks,
    spread,
    summarise_extraction,
)
from infer.offline.demonstration import QUESTIONS, demonstrate_decisions
from infer.request import Mode, SamplingParams

PARTS = ("fields", "decisions", "lists")
KINDS: tuple[Mode, ...] = ("serial", "adaptive")
FIRST = ("generic", "knowledge", "common-sense")  # categories whose answers begin most lists that suit branches
HEAD = (
    "| model | batch | answers | fork | ideal, forked, together | realised, forked | realised, all "
    "| host decisions, forked | their share of the time | serial tokens/s | ms per step, serial |\n" + "|---" * 11 + "|"
)


@dataclass(frozen=True)
class Limits:
    """Limits of a run.

    Attributes:
        end: time after which no task begins, in seconds of `time.monotonic`.
        max_new_tokens: maximum tokens of an answer.
        tasks: maximum number of JSON tasks.
    """

    end: float
    max_new_tokens: int
    tasks: int

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="checkpoint")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured, in this order")
    parser.add_argument("--questions", type=Path, help="FastChat's file of questions, for lists")
    parser.add_argument("--output", type=Path, default=Path("."), help="folder for answers")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--limit", type=int, default=80, help="maximum questions")
    parser.add_argument("--tasks", type=int, default=24, help="maximum JSON tasks")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    limits = Limits(time.monotonic() + options.seconds, options.max_new_tokens, options.tasks)
    questions = []
    if "lists" in options.parts:
        if options.questions is None:
            parser.error("--questions: expected a file for lists, got none")
        read = [json.loads(line) for line in options.questions.read_text().splitlines()]
        questions = sorted(read, key=lambda question: question["category"] not in FIRST)[: options.limit]
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}; greedy, repetition penalty 1.1\n", flush=True)
    for model in options.models:
        begun = time.monotonic()
        lm, name = load_model(model, options.dtype), Path(model).stem
        print(f"{name}, {lm.config.dtype}: loaded in {time.monotonic() - begun:.1f} s", flush=True)
        for part in options.parts:
            if part == "fields":
                _fields(lm, name, limits)
            elif part == "decisions":
                _decisions(lm, name)
            else:
                for batch in options.batch:
                    _answers(lm, name, batch, questions, limits, options.output)


def _answers(lm: LanguageModel, name: str, batch: int, questions: Sequence[Any], limits: Limits, output: Path) -> None:
    """Answer questions in both modes, alternately, in groups of the size of a batch."""
    begun = time.monotonic()
    engine = infer.Engine(lm, max_length=min(1024, lm.context_length), max_batch=batch, reuse=False)
    engine.warm_up(alone=batch == 1)
    print(f"batch {batch}: compiled in {time.monotonic() - begun:.1f} s", flush=True)
    params = SamplingParams(max_new_tokens=limits.max_new_tokens, repetition_penalty=1.1, seed=0)
    results: dict[Mode, list[Result]] = {mode: [] for mode in KINDS}
    seconds: dict[Mode, list[float]] = {mode: [] for mode in KINDS}
    groups = [questions[place : place + batch] for place in range(0, len(questions), batch)]
    for number, group in enumerate([groups[0], *groups]):
        if limits.left < 0:
            print(f"batch {batch}: no time for {len(questions) - max(0, number - 1) * batch} questions")
            break
        for mode in KINDS:
            start = time.perf_counter()
            answers = engine.generate([[{"role": "user", "content": one["turns"][0]}] for one in group], params, mode)
            if number:  # the first group warms up
                seconds[mode].append(time.perf_counter() - start)
                results[mode] += answers
    with (output / "answers.jsonl").open("a") as file:
        for mode in KINDS:
            for question, result in zip(questions, results[mode], strict=False):
                record = {
                    "model": name, "batch": batch, "mode": mode, "id": question["question_id"],
                    "kind": question["category"], "prompt": question["turns"][0], "text": result.text,
                    "finish_reason": result.finish_reason, "stats": result.stats.to_json(),
                }  # fmt: skip
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    print(f"{HEAD}\n{_row(name, batch, results, seconds)}", flush=True)


def _row(name: str, batch: int, results: dict[Mode, list[Result]], seconds: dict[Mode, list[float]]) -> str:
    serial, adaptive = (results[mode] for mode in KINDS)
    forked = [place for place, result in enumerate(adaptive) if result.stats.blocks]

    def rate(mode: Mode, places: Sequence[int]) -> float:
        """Content tokens per second of single answers; serial answers have other lengths."""
        found = [results[mode][place].stats for place in places]
        return sum(s.content_tokens for s in found) / max(1e-9, sum(s.seconds["total"] for s in found))

    def whole(mode: Mode) -> float:
        return sum(result.stats.content_tokens for result in results[mode]) / max(1e-9, sum(seconds[mode]))

    stats = [adaptive[place].stats for place in forked]
    path, total = sum(s.critical_path for s in stats), sum(s.seconds["total"] for s in stats)
    steps, spent = sum(r.stats.steps for r in serial), sum(seconds["serial"])
    decisions = sum(s.decisions for s in stats) / max(1, len(stats))
    deciding = sum(s.seconds["deciding"] for s in stats) / max(1e-9, total)
    cells = [
        name, batch, len(adaptive), len(forked), f"{sum(s.content_tokens for s in stats) / max(1, path):.2f}x",
        f"{rate('adaptive', forked) / max(1e-9, rate('serial', forked)):.2f}x",
        f"{whole('adaptive') / max(1e-9, whole('serial')):.2f}x", f"{decisions:.0f}", f"{deciding:.1%}",
        f"{whole('serial'):.0f}", f"{1000 * spent * batch / max(1, steps):.2f}" if batch == 1 else "",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _fields(lm: LanguageModel, name: str, limits: Limits) -> None:
    """Decode JSON tasks in all modes, one at a time."""
    tasks = spread(read_tasks(None), limits.tasks)
    engine = infer.Engine(lm, max_length=min(1024, lm.context_length), max_batch=1)
    engine.warm_up(alone=True, checks=True)
    decoded = []
    for number, task in enumerate(tasks):
        if limits.left < 0:
            print(f"fields: no time for {len(tasks) - number} tasks")
            break
        decoded += [decode_task(engine, task, mode, 400) for mode in MODES]
    if decoded:
        print(
            f"{name}, fields, {len(decoded) // len(MODES)} tasks\n\n{extraction_table(summarise_extraction(decoded))}"
        )


def _decisions(lm: LanguageModel, name: str) -> None:
    """Answer the questions of the demo in one pass, and with one request each."""
    engine = infer.Engine(lm, max_length=512, max_batch=1)
    _, one_each, one_pass = demonstrate_decisions(Console(file=io.StringIO()), engine)
    print(f"{name}, {len(QUESTIONS)} decisions about one text\n\n| | steps | ms |\n|---|---|---|")
    for form, cost in (("one request each, one after the other", one_each), ("one pass", one_pass)):
        print(f"| {form} | {cost.steps} | {1000 * cost.seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
