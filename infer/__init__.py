"""Inference: the decoding engine, its scheduler, server, benchmarks and evaluation."""

from typing import TYPE_CHECKING

from aspd_jax.lazy_names import lazy_names

if TYPE_CHECKING:
    from infer.answers.answer import Result, Statistics
    from infer.answers.events import Event
    from infer.decisions import Decision, Option, Question
    from infer.engine import Engine
    from infer.request import SamplingParams
    from infer.scheduling.scheduler import Handle

__all__ = [
    "Decision", "Engine", "Event", "Handle", "Option", "Question", "Result", "SamplingParams", "Statistics",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "answers.answer": ("Result", "Statistics"),
        "answers.events": ("Event",),
        "decisions": ("Decision", "Option", "Question"),
        "engine": ("Engine",),
        "request": ("SamplingParams",),
        "scheduling.scheduler": ("Handle",),
    },
)
