"""Decoding: the hybrid engine, its grammar and sampling."""

from infer.answer import Result, Statistics
from infer.engine import Engine
from infer.replay import Trace
from infer.request import SamplingParams

__all__ = ["Engine", "Result", "SamplingParams", "Statistics", "Trace"]
