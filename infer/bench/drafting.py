"""Benchmark of speculation: steps of serial and adaptive answers, with draft tokens and without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aspd_jax.language_model import LanguageModel
from infer.answers.answer import Result
from infer.decode.state import DraftSource
from infer.engine import Engine
from infer.request import Mode, SamplingParams

MODES: tuple[Mode, ...] = ("serial", "adaptive")


@dataclass(frozen=True)
class DraftFigures:
    """Answers to all questions in one mode.

    Attributes:
        mode: mode of the answers.
        drafts: source of the draft tokens.
        results: one answer for each question.
        seconds: wall time of all answers in batches.
    """

    mode: Mode
    drafts: DraftSource
    results: tuple[Result, ...]
    seconds: float

    def content(self, chosen: Sequence[int]) -> int:
        """Return the content tokens of chosen answers."""
        return sum(self.results[number].stats.content_tokens for number in chosen)

    def steps(self, chosen: Sequence[int]) -> int:
        """Return the steps of chosen answers after prefill."""
        return sum(self.results[number].stats.steps for number in chosen)

    def accepted(self, chosen: Sequence[int]) -> tuple[int, int]:
        """Return the draft tokens of chosen answers that were accepted, and those that were fed."""
        stats = [self.results[number].stats for number in chosen]
        return sum(s.accepted_tokens for s in stats), sum(s.drafted_tokens for s in stats)


def draft_figures(
    lm: LanguageModel,
    prompts: Sequence[Any],
    sources: Sequence[DraftSource],
    params: SamplingParams,
    batch: int,
    draft_tokens: int,
) -> list[DraftFigures]:
    """Answer all prompts in both modes without draft tokens, and with those of each source in every step.

    Args:
        lm: model.
        prompts: prompts as `Engine.generate` takes them.
        sources: sources of draft tokens.
        params: sampling parameters.
        batch: simultaneous requests.
        draft_tokens: maximum draft tokens of a segment in a step.
    """
    figures = []
    for drafts in ("none", *sources):
        engine = Engine(lm, max_batch=batch, drafts=drafts, draft_tokens=draft_tokens, force_drafts=True)
        for mode in MODES:
            begun = time.perf_counter()
            results = engine.generate(prompts, params, mode)
            figures.append(DraftFigures(mode, drafts, tuple(results), time.perf_counter() - begun))
    return figures


def draft_table(figures: Sequence[DraftFigures]) -> str:
    """Return Markdown tables: all answers, and those that fork in adaptive mode.

    Answers of the two modes differ in length, so content tokens per step are compared with those of serial mode without
    draft tokens.
    """
    adaptive = next(one for one in figures if one.mode == "adaptive")
    forking = [number for number, result in enumerate(adaptive.results) if result.stats.blocks]
    every = range(len(adaptive.results))
    tables = []
    for about, chosen in ((f"all {len(every)} answers", every), (f"the {len(forking)} that fork", forking)):
        if not chosen:
            continue
        head = f"| {about} | content tokens | steps | tokens per step | of serial | drafts accepted of fed | differ |"
        lines = [head, "|---" * 7 + "|"]
        base = figures[0].content(chosen) / max(1, figures[0].steps(chosen))
        for one in figures:
            plain = next(other for other in figures if other.mode == one.mode)
            differ = sum(one.results[n].token_ids != plain.results[n].token_ids for n in chosen)
            accepted, fed = one.accepted(chosen)
            share = f"{accepted} of {fed} ({accepted / fed:.0%})" if fed else ""
            name = one.mode if one.drafts == "none" else f"{one.mode}, {one.drafts}"
            content, steps = one.content(chosen), one.steps(chosen)
            rate = content / max(1, steps)
            lines.append(f"| {name} | {content} | {steps} | {rate:.2f} | {rate / base:.2f}x | {share} | {differ} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)
