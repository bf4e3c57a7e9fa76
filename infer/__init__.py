"""Inference: the decoding engine, its scheduler, server, benchmarks and evaluation."""

from infer.answers.answer import Result, Statistics
from infer.answers.events import Event
from infer.decode.tag_automaton import TextTags
from infer.engine import Engine
from infer.request import SamplingParams
from infer.scheduling.replay import Trace
from infer.scheduling.scheduler import Handle

__all__ = ["Engine", "Event", "Handle", "Result", "SamplingParams", "Statistics", "TextTags", "Trace"]
