"""Answers on a terminal: growing text, branches side by side, and a comparison of the two modes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aspd_jax.language_model import LanguageModel
from aspd_jax.shapes import benchmark_model
from aspd_jax.structure import Parallel
from infer.answer import Result
from infer.benchmark import answer_times
from infer.engine import Engine
from infer.request import Mode, SamplingParams

STREAM_STEPS = 2  # passes between two pictures
REPEATS = 3


def print_growing(results: Iterator[Result]) -> None:
    """Show an answer as it grows: live on a terminal, in reading order as far as it is final elsewhere."""
    console = Console()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=20) as live:
            for result in results:
                live.update(picture(result))
        return
    shown = ""
    for result in results:
        final = result.text if result.finish_reason else _settled(result)
        if final.startswith(shown):
            print(final[len(shown) :], end="", flush=True)
            shown = final
    print()


def _settled(result: Result) -> str:
    """The part of a growing answer that will not change: everything before an open block, and its first branch."""
    parts: list[str] = []
    for number, item in enumerate(result.structure):
        if isinstance(item, Parallel):
            last = number + 1 == len(result.structure)
            parts.extend(branch.text for branch in (item.branches[:1] if last else item.branches))
        else:
            parts.append(item.text)
    return "".join(parts).rstrip("\ufffd")


def picture(result: Result) -> RenderableType:
    """An answer with the branches of every block side by side."""
    parts: list[RenderableType] = []
    for item in result.structure:
        if isinstance(item, Parallel):
            panels = [
                Panel(
                    Text(branch.text.strip()),
                    title=Text(branch.title),
                    title_align="left",
                    width=36,
                    border_style="cyan",
                )
                for branch in item.branches
            ]
            parts.append(Columns(panels))
        else:
            parts.append(Text(item.text.rstrip("\n")))
    return Group(*parts)


@dataclass(frozen=True)
class _Timing:
    result: Result
    seconds: float


def demonstrate(lm: LanguageModel, questions: Sequence[tuple[str, str]], max_length: int) -> Result | None:
    """Answer questions, given with their right answers, in adaptive and in serial mode, and compare.

    Returns:
        The first adaptive answer that has a block.
    """
    console = Console()
    first: Result | None = None
    engine = Engine(lm, max_length=max_length, max_batch=1, reuse=False)
    params = SamplingParams(max_new_tokens=1024)
    table = Table(title="both modes, the same weights", title_justify="left")
    for column in ("question", "right", "mode", "content tokens", "passes", "ms", "speed-up", "ideal"):
        table.add_column(column, justify="left" if column in ("question", "mode", "right") else "right")
    for number, (question, answer) in enumerate(questions, 1):
        messages = [{"role": "user", "content": question}]
        console.rule(f"question {number}")
        console.print(Text(question, style="bold"))
        timings: dict[Mode, _Timing] = {}
        modes: tuple[Mode, ...] = ("adaptive", "serial")
        for mode in modes:
            console.print(Text(f"\n{mode}", style="dim"))
            with console.status("compiling for this length of prompt and answer"):
                result = engine.generate([messages], params, mode)[0]
            if console.is_terminal:
                _show_growing(console, engine, messages, params, mode)
            else:
                console.print(picture(result))
        for mode in modes:
            timings[mode] = _time(engine, messages, params, mode)
        if first is None and timings["adaptive"].result.stats.blocks:
            first = timings["adaptive"].result
        for mode in modes:
            result = timings[mode].result
            table.add_row(
                str(number) if mode == "adaptive" else "",
                "yes" if result.text == answer else "no",
                mode,
                str(result.stats.content_tokens),
                str(result.stats.passes),
                f"{1000 * timings[mode].seconds:.1f}",
                f"{_content_rate(timings[mode]) / _content_rate(timings['serial']):.2f}x",
                f"{result.stats.ideal_speedup:.2f}x",
            )
    console.rule()
    console.print(table)
    console.print(
        f"Median of {REPEATS} runs after warm-up, batch 1, float32, prefill included. speed-up: content tokens per "
        "second against serial mode with the same weights. ideal: content tokens per token of the critical path.",
        style="dim",
    )
    return first


def demonstrate_larger(like: Result, shape: str) -> None:
    """Time answers of a random model with as many branches, of as many tokens, as one that was given."""
    console = Console()
    block = next(item for item in like.structure if isinstance(item, Parallel))
    branches = len(block.branches)
    length = max(8, (like.stats.generated_tokens - like.stats.critical_path) // (branches - 1))
    with console.status("compiling, and timing a larger model"):
        lm = benchmark_model(shape, "float32")
        adaptive, serial = answer_times(lm, branches, length, like.stats.prompt_tokens, repeats=REPEATS)
    took = [
        f"{1000 * of.seconds:.0f} ms and {of.passes} passes in {mode} mode"
        for mode, of in (("adaptive", adaptive), ("serial", serial))
    ]
    console.print(
        "\nThe model above fits into a processor's caches, where a pass of several tokens costs more than one of one. "
        f"In one of {shape.upper()} parameters (random weights) an answer with {branches} branches of {length} tokens "
        f"takes "
        f"{' and '.join(took)}: {serial.seconds / adaptive.seconds:.2f}x, ideal {adaptive.ideal:.2f}x."
    )


def _show_growing(
    console: Console, engine: Engine, messages: list[dict[str, str]], params: SamplingParams, mode: Mode
) -> None:
    """Decode for the eye: slowly enough to see branches grow."""
    with Live(console=console, refresh_per_second=30) as live:
        for result in engine.stream(messages, params, mode, STREAM_STEPS):
            live.update(picture(result))
            time.sleep(0.02)


def _content_rate(timing: _Timing) -> float:
    """Content tokens per second."""
    return timing.result.stats.content_tokens / timing.seconds


def _time(engine: Engine, messages: list[dict[str, str]], params: SamplingParams, mode: Mode) -> _Timing:
    runs = []
    for _ in range(REPEATS):
        result = engine.generate([messages], params, mode)[0]
        runs.append(_Timing(result, result.stats.seconds["total"]))
    return sorted(runs, key=lambda run: run.seconds)[REPEATS // 2]
