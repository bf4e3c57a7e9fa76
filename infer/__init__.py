"""Decoding: the hybrid engine, its grammar and sampling."""

from infer.answer import Result, Statistics
from infer.engine import Engine
from infer.events import Event
from infer.recogniser import TextTags
from infer.replay import Trace
from infer.request import SamplingParams
from infer.scheduler import Handle

__all__ = ["Engine", "Event", "Handle", "Result", "SamplingParams", "Statistics", "TextTags", "Trace"]
