"""Speed of whole answers at batch size 1: adaptive mode against serial mode with the same content.

The serial run is forced to the tokens of the adaptive answer's plain text and computes everything else, including
sampling. The realised speed-up therefore compares the same content (protocol, section 8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from aspd_jax.errors import AspdError, RequestError
from aspd_jax.files import Log
from aspd_jax.journal import append, read_journal
from aspd_jax.progress import Bar
from infer.answers.answer import Result, content_ids
from infer.engine import Engine
from infer.evaluation.config import DecodingSection, SpeedSection, System
from infer.evaluation.questions import Question, select_evenly

PHASES = ("queued", "prefill", "serial", "parallel", "first_token", "total")


def time_questions(
    engine: Engine,
    system: System,
    questions: Sequence[Question],
    decoding: DecodingSection,
    speed: SpeedSection,
    file: Path,
    title: str,
) -> list[dict[str, Any]]:
    """Time the questions that the file does not hold yet, and return the records of all timed questions.

    A record has `question_id`, `category` and `turns`. A turn has `content_tokens`, `generated_tokens`, `steps`,
    `critical_path`, `ideal`, and `runs` with the seconds of every run by phase; in adaptive mode also `serial_runs`,
    the runs of serial mode with the same content.

    Raises:
        RequestError: serial mode did not decode the prescribed tokens.
    """
    chosen = select_evenly(questions, speed.questions)
    done = {record["question_id"]: record for record in read_journal(file)}
    places = {question.id: place for place, question in enumerate(questions)}
    with Log(file) as log:
        for question in Bar([q for q in chosen if q.id not in done], desc=title, unit="question"):
            params = decoding.params(question.temperature, places[question.id], system.mode)
            record = _time(engine, system, question, params, speed.repeats)
            append(log, record)
            done[question.id] = record
    return [done[question.id] for question in chosen]


def _time(engine: Engine, system: System, question: Question, params: Any, repeats: int) -> dict[str, Any]:
    runs: list[list[Result]] = []
    serial_runs: list[list[Result]] = []
    try:
        for _ in range(repeats + 1):  # the first ones compile
            runs.append(list(converse(engine, system.mode, question, params, [None] * len(question.turns))))
            if system.mode == "adaptive":
                content = [content_ids(engine.config, result) for result in runs[-1]]
                serial_runs.append(list(converse(engine, "serial", question, params, content)))
    except AspdError as error:
        return {"question_id": question.id, "category": question.category, "turns": [], "error": str(error)}
    turns = []
    for number in range(len(question.turns)):
        first, *measured = [run[number] for run in runs]
        stats = first.stats
        turn: dict[str, Any] = {
            "content_tokens": stats.content_tokens,
            "generated_tokens": stats.generated_tokens,
            "steps": stats.steps,
            "critical_path": stats.critical_path,
            "blocks": stats.blocks,
            "reused_tokens": stats.reused_tokens,
            "ideal": stats.ideal_speedup,
            "runs": [_seconds(result) for result in measured],
        }
        if serial_runs:
            first, *measured = [run[number] for run in serial_runs]
            if first.stats.content_tokens != stats.content_tokens:
                expected, got = stats.content_tokens, first.stats.content_tokens
                raise RequestError(f"serial mode: expected {expected} content tokens, got {got}. Please report this.")
            turn["serial_runs"] = [_seconds(result) for result in measured]
        turns.append(turn)
    return {"question_id": question.id, "category": question.category, "turns": turns}


def converse(
    engine: Engine, mode: Any, question: Question, params: Any, scripts: Sequence[Sequence[int] | None]
) -> Iterator[Result]:
    """Decode one conversation at batch size 1, starting with an empty prefix cache.

    Args:
        scripts: forced tokens of each answer; None: sampled tokens.
    """
    engine.reset_cache()
    messages: list[dict[str, Any]] = []
    for text, script in zip(question.turns, scripts, strict=True):
        messages.append({"role": "user", "content": text})
        turn_params = params if script is None else params.saying(script)
        (result,) = engine.generate([messages], turn_params, mode)
        yield result
        messages.append({"role": "assistant", "content": result.text, "token_ids": result.token_ids})


def _seconds(result: Result) -> dict[str, float]:
    return {phase: result.stats.seconds.get(phase, 0.0) for phase in PHASES}


def total(runs: Sequence[dict[str, float]], phase: str = "total") -> float:
    """Return the median seconds of a phase over runs."""
    return median(run[phase] for run in runs)
