"""Inference: the decoding engine, its scheduler, server, benchmarks and evaluation."""

from etils import epy

with epy.lazy_api_imports(globals()):  # at their first use, so that commands without a model need no JAX
    from infer.answers.answer import Result, Statistics
    from infer.answers.events import Event
    from infer.decisions import Decision, Option, Question
    from infer.engine import Engine
    from infer.request import SamplingParams
    from infer.scheduling.scheduler import Handle

__all__ = [
    "Decision", "Engine", "Event", "Handle", "Option", "Question", "Result", "SamplingParams", "Statistics",
]  # fmt: skip
