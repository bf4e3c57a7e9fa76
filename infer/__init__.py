"""Decoding: the hybrid engine, its grammar and sampling."""

from infer.engine import Engine, Result, SamplingParams, Statistics, Trace

__all__ = ["Engine", "Result", "SamplingParams", "Statistics", "Trace"]
