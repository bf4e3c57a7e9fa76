"""Prometheus metrics of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from aspd_jax.progress import programs_compiled
from infer.answers.answer import Result
from infer.server.engine_thread import EngineThread

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
STEP_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "aspd_requests", "Requests by path and HTTP status", ["path", "status"], registry=registry
        )
        self.answers = Counter(
            "aspd_answers", "Answers by mode and how they ended", ["mode", "finish"], registry=registry
        )
        self.tokens = Counter("aspd_tokens", "Tokens by kind", ["kind"], registry=registry)
        self.blocks = Counter("aspd_blocks", "Blocks decoded", registry=registry)
        self.first_token = Histogram(
            "aspd_first_token_seconds", "Request to first token", buckets=SECONDS, registry=registry
        )
        self.last_token = Histogram(
            "aspd_last_token_seconds", "Request to last token", ["mode"], buckets=SECONDS, registry=registry
        )
        self.steps = Histogram("aspd_step_seconds", "Time of a step", buckets=STEP_SECONDS, registry=registry)
        self._programs = Counter("aspd_programs", "Programs compiled or read from disk", registry=registry)
        self._running = Gauge("aspd_running", "Requests that hold a cache row", registry=registry)
        self._waiting = Gauge("aspd_waiting", "Requests that wait for a cache row", registry=registry)
        self._compiled = programs_compiled()  # programs that existed before, or that `_programs` has counted

    def chunk(self, seconds: float, steps: int) -> None:
        """Record the mean time of the steps of a chunk."""
        self.steps.observe(seconds / steps)

    def answer(self, mode: str, result: Result) -> None:
        """Count an answer that has ended."""
        stats = result.stats
        self.answers.labels(mode, result.finish_reason).inc()
        self.tokens.labels("prompt").inc(stats.prompt_tokens)
        self.tokens.labels("reused").inc(stats.reused_tokens)
        self.tokens.labels("generated").inc(stats.generated_tokens)
        self.tokens.labels("content").inc(stats.content_tokens)
        self.blocks.inc(stats.blocks)
        if "first_token" in stats.seconds:
            self.first_token.observe(stats.seconds["first_token"])
            self.last_token.labels(mode).observe(stats.seconds["total"])

    def text(self, engine_thread: EngineThread) -> bytes:
        """Return all metrics in Prometheus' text format."""
        compiled = programs_compiled()
        self._programs.inc(compiled - self._compiled)
        self._compiled = compiled
        running, waiting = engine_thread.occupancy
        self._running.set(running)
        self._waiting.set(waiting)
        return generate_latest(self._registry)
