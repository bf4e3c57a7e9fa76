"""Answers on a terminal: streamed text, branches side by side, and a comparison of both modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.progress import waiting
from aspd_jax.structure import Parallel
from infer.answers.answer import Result, content_ids
from infer.engine import Engine, Prompt
from infer.request import Mode, SamplingParams

Part = TypeVar("Part")
STREAM_STEPS = 2  # engine steps between two updates


def print_growing(engine: Engine, prompt: Prompt, params: SamplingParams, mode: Mode) -> None:
    """Stream an answer: with branches side by side on a terminal, else as text in reading order.

    Raises:
        RequestError: the answer cannot follow its schema.
    """
    console, last = Console(), None
    if console.is_terminal:
        results = _after_first(engine.stream(prompt, params, mode))
        with Live(console=console, refresh_per_second=20) as live:
            for last in results:
                live.update(picture(last))
    else:
        for event in _after_first(engine.submit(prompt, params, mode, max_steps=1, stream="text")):
            last = event.result
            if event.kind == "token":
                print(event.text, end="", flush=True)
        print()
    if last is not None and last.error:
        raise RequestError(last.error)


def _after_first(parts: Iterable[Part]) -> Iterator[Part]:
    """Return an iterator over the parts of an answer, once the first one is there."""
    iterator = iter(parts)
    with waiting("answering"):
        first = next(iterator)
    return chain((first,), iterator)


def picture(result: Result) -> RenderableType:
    """Render an answer with the branches of each block side by side."""
    parts: list[RenderableType] = []
    for item in result.structure:
        if isinstance(item, Parallel):
            panels = [
                Panel(
                    Text(branch.text.strip().removeprefix(",").strip()),
                    title=Text(branch.caption),
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


def compare_modes(lm: LanguageModel, questions: Sequence[str], params: SamplingParams, max_length: int | None) -> None:
    """Answer questions in adaptive mode, then in serial mode with the same content, and compare."""
    console = Console()
    engine = Engine(lm, max_length=max_length, max_batch=1, reuse=False)
    table = Table(title="both modes, the same weights, the same content", title_justify="left")
    for column in ("", "mode", "content tokens", "branches", "steps", "seconds", "speed-up", "ideal"):
        table.add_column(column, justify="left" if column in ("", "mode") else "right")
    total = {"adaptive": 0.0, "serial": 0.0}
    for number, question in enumerate(questions, 1):
        messages = [{"role": "user", "content": question}]
        console.rule(f"question {number}")
        console.print(Text(question, style="bold"))
        adaptive = _watch(console, engine, messages, params, "adaptive")
        content = content_ids(engine.config, adaptive)
        serial = _watch(console, engine, messages, params.saying(content), "serial")
        for mode, result in (("adaptive", adaptive), ("serial", serial)):
            seconds = result.stats.seconds["total"]
            total[mode] += seconds
            table.add_row(
                str(number) if result is adaptive else "",
                mode,
                str(result.stats.content_tokens),
                str(sum(len(item.branches) for item in result.structure if isinstance(item, Parallel)) or ""),
                str(result.stats.steps),
                f"{seconds:.2f}",
                f"{serial.stats.seconds['total'] / seconds:.2f}x",
                f"{result.stats.ideal_speedup:.2f}x" if result is adaptive else "",
            )
    console.rule()
    console.print(table)
    console.print(
        f"All questions: {total['adaptive']:.1f} s in adaptive mode, {total['serial']:.1f} s in serial mode, "
        f"{total['serial'] / total['adaptive']:.2f}x. One run of each after one that compiles, batch 1, prefill "
        "included. Serial mode is forced to the content of the adaptive answer, so that both decode the same text. "
        "ideal: content tokens per token of the critical path.",
        style="dim",
    )


def _watch(
    console: Console,
    engine: Engine,
    messages: list[dict[str, str]],
    params: SamplingParams,
    mode: Mode,
) -> Result:
    """Decode an answer to compile, again to show it on a terminal, and a last time to measure it."""
    console.print(Text(f"\n{mode}", style="dim"))
    with waiting("compiling for this length of prompt and answer"):
        engine.generate([messages], params, mode)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=30) as live:
            for growing in engine.stream(messages, params, mode, STREAM_STEPS):
                live.update(picture(growing))
    (result,) = engine.generate([messages], params, mode)
    if not console.is_terminal:
        console.print(picture(result))
    return result
