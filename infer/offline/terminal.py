"""Answers on a terminal, while they are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeVar

from rich.console import Console
from rich.live import Live

from aspd_jax.errors import RequestError
from aspd_jax.pictures import rendered
from aspd_jax.progress import waiting
from infer.engine import Engine, Prompt
from infer.request import Mode, SamplingParams

Part = TypeVar("Part")


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
                live.update(rendered(last.structure))
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
