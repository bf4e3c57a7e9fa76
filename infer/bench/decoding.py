"""Benchmark of whole answers with a given structure in serial and in adaptive mode.

Both modes run alternately on the same engine and weights. The tokens are forced, so that lengths are exact; everything
else, including sampling, is computed as usual.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.tables import markdown_table
from infer.answers.answer import Result
from infer.bench.step_times import random_prompt
from infer.engine import NO_TOKENS, Engine
from infer.request import Mode, SamplingParams

SERIAL_TEXT = 32  # tokens before and after the block together
TITLE = 2  # tokens of a title
SEPARATOR = (1,)


@dataclass(frozen=True)
class AnswerTime:
    """Times of whole answers with one structure in one mode; medians over runs.

    Attributes:
        name: mode.
        batch: number of simultaneous requests.
        branches: number of branches of the block; 0: no block.
        length: tokens of a branch, with head and closing tag.
        content, raw: content tokens and all tokens of an answer.
        steps: steps after prefill.
        seconds: seconds from request to the last token of the batch.
        fastest, slowest: extremes of `seconds`.
        latency: seconds of one request, median over requests.
        first_token: seconds from request to first token.
        ideal: content tokens divided by the critical path.
        compile_seconds: time of the warm-up, of both modes.
        decisions: decisions of the host at tags, in one answer.
        deciding: seconds of these decisions.
    """

    name: Mode
    batch: int
    branches: int
    length: int
    content: int
    raw: int
    steps: int
    seconds: float
    fastest: float
    slowest: float
    latency: float
    first_token: float
    ideal: float
    compile_seconds: float
    decisions: int
    deciding: float


def scripted_answer(lm: LanguageModel, branches: int, length: int, text: int) -> list[list[int]]:
    """Return the forced tokens of an answer in the form of `SamplingParams.script`.

    Args:
        lm: model whose token ids are used.
        branches: number of branches; 0: no block.
        length: tokens of a branch, with head and closing tag.
        text: tokens of serial text, half of them before the block.
    """
    special = lm.special_tokens or NO_TOKENS
    tokens = iter(random_prompt(lm, text + branches * (TITLE + length), seed=1))
    serial = [next(tokens) for _ in range(text // 2 if branches else text)]
    for _ in range(branches):
        serial += [special.title_start, *(next(tokens) for _ in range(TITLE)), special.title_end]
    if branches:
        serial.append(special.parallel_start)
        serial += [next(tokens) for _ in range(text - text // 2)]
    head = 1 + TITLE + len(SEPARATOR)
    written = [[*(next(tokens) for _ in range(length - head - 1)), special.branch_end] for _ in range(branches)]
    return [[*serial, *lm.end_ids[:1]], *written]


def answer_times(
    lm: LanguageModel,
    branches: int,
    length: int,
    context: int,
    batch: int = 1,
    repeats: int = 5,
) -> list[AnswerTime]:
    """Time answers with a block and serial answers with as many content tokens, alternately.

    Args:
        lm: model.
        branches: number of branches of the block.
        length: tokens of a branch, with head and closing tag.
        context: tokens of the prompt.
        batch: number of simultaneous requests.
        repeats: timed runs.

    Raises:
        RequestError: there are fewer than two branches, or a branch is too short for its head.
    """
    head = 1 + TITLE + len(SEPARATOR)
    if branches < 2 or length < head + 2:
        raise RequestError(f"expected at least 2 branches of at least {head + 2} tokens, got {branches} of {length}")
    adaptive = scripted_answer(lm, branches, length, SERIAL_TEXT)
    content = SERIAL_TEXT + branches * (length - head - 1)
    raw = len(adaptive[0]) + branches * length + 1
    engine = Engine(
        lm,
        max_length=min(context + raw + 4 * branches + 8, lm.context_length),  # reserve for tags of the grammar
        max_batch=batch,
        max_branches=branches,
        max_title_tokens=TITLE,
        separator_ids=SEPARATOR,
        reuse=False,
    )
    compile_seconds = engine.warm_up(alone=batch == 1)
    scripts: dict[Mode, Sequence[Sequence[int]]] = {
        "adaptive": adaptive,
        "serial": scripted_answer(lm, 0, length, content),
    }
    prompts = [random_prompt(lm, context, seed) for seed in range(batch)]
    params = SamplingParams(max_new_tokens=raw + 4 * branches + 8, max_branch_tokens=length)
    seconds: dict[Mode, list[float]] = {mode: [] for mode in scripts}
    results: dict[Mode, list[Result]] = {mode: [] for mode in scripts}
    for repeat in range(repeats + 1):
        for mode in scripts:
            scripted = replace(params, script=scripts[mode])
            start = time.perf_counter()
            answers = engine.generate(prompts, scripted, mode)
            seconds[mode].append(time.perf_counter() - start)
            results[mode] += answers if repeat else []
            if any(answer.stats.content_tokens != content for answer in answers):
                counts = sorted({answer.stats.content_tokens for answer in answers})
                raise RequestError(f"{mode} mode: expected {content} content tokens, got {counts}. Please report this.")
    times = []
    for mode in scripts:
        measured = seconds[mode][1:]
        stats = [result.stats for result in results[mode]]
        times.append(
            AnswerTime(
                name=mode,
                batch=batch,
                branches=branches if mode == "adaptive" else 0,
                length=length if mode == "adaptive" else 0,
                content=content,
                raw=stats[0].generated_tokens,
                steps=stats[0].steps,
                seconds=median(measured),
                fastest=min(measured),
                slowest=max(measured),
                latency=median(s.seconds["total"] for s in stats),
                first_token=median(s.seconds["first_token"] for s in stats),
                ideal=stats[0].ideal_speedup,
                compile_seconds=compile_seconds,
                decisions=stats[0].decisions,
                deciding=median(s.seconds["deciding"] for s in stats),
            )
        )
    return times


def answer_table(pair: Sequence[AnswerTime], head: bool = True) -> str:
    """Return the times of answers with equal content as rows of a table; serial mode is the baseline.

    Args:
        pair: times in both modes.
        head: whether the head is above the rows.
    """
    serial = next(r for r in pair if r.name == "serial")
    rows = [
        {
            "batch": r.batch,
            "answer": f"{r.branches} branches of {r.length}" if r.branches else r.name,
            "content tokens": r.content,
            "steps": r.steps,
            "s (median)": f"{r.seconds:.3f}",
            "fastest - slowest": f"{r.fastest:.3f} - {r.slowest:.3f}",
            "content tokens/s": f"{r.batch * r.content / r.seconds:.0f}",
            "raw tokens/s": f"{r.batch * r.raw / r.seconds:.0f}",
            "latency, ms": f"{1000 * r.latency:.0f}",
            "first token, ms": f"{1000 * r.first_token:.1f}",
            "ideal": f"{r.ideal:.2f}x",
            "realised": f"{serial.seconds / r.seconds:.2f}x",
            "efficiency": f"{serial.seconds / r.seconds / r.ideal:.2f}",
            "decisions of the host": r.decisions,
            "their share of the time": f"{100 * r.deciding / r.seconds:.1f} %",
            "compiling, s": f"{r.compile_seconds:.1f}",
        }
        for r in pair
    ]
    return markdown_table(rows, head)
