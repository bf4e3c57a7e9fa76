"""Answers to the questions of a benchmark: conversations whose turns reuse the cache of earlier turns.

A conversation is appended to a file when it ends, so that an interrupted run resumes with the missing ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from aspd_jax.errors import AspdError
from aspd_jax.files import Log, write_whole
from aspd_jax.journal import append, read_journal
from aspd_jax.progress import Bar
from aspd_jax.structure import to_json
from infer import decisions
from infer.answers.answer import Result
from infer.engine import Engine
from infer.evaluation.config import DecodingSection, System
from infer.evaluation.health import health
from infer.evaluation.questions import Question, last_number
from infer.request import Mode
from infer.scheduling.handle import run_together

WHICH = "Which answer is right?"


def answer_questions(
    engine: Engine, system: System, questions: Sequence[Question], decoding: DecodingSection, file: Path, title: str
) -> list[dict[str, Any]]:
    """Answer all questions that the file does not hold yet, and return the records of all questions in order.

    A record has `question_id`, `category`, `turns` (see `turn_record`), and `error` if a turn could not be submitted;
    this and the following turns are then missing. A question with options is a decision: its record has no turns, but
    `probabilities` of the options, and `correct`.
    """
    done = {record["question_id"]: record for record in read_journal(file)}
    missing = [(place, question) for place, question in enumerate(questions) if question.id not in done]
    conversations = (_converse(engine, system.mode, question, decoding, place) for place, question in missing)
    with Log(file) as log, Bar(total=len(questions), initial=len(questions) - len(missing), desc=title) as bar:
        # At most one conversation per cache row: another first turn would evict the prefix of a second turn.
        for record in run_together(engine.step, conversations, engine.max_batch):
            append(log, record)
            done[record["question_id"]] = record
            bar.update()
    return [done[question.id] for question in questions]


def _converse(
    engine: Engine, mode: Mode, question: Question, decoding: DecodingSection, place: int
) -> Generator[None, None, dict[str, Any]]:
    """Hold the conversation of a question for `run_together`, and return its record."""
    params = decoding.params(question.temperature, place, mode)
    messages, turns = list[dict[str, Any]](), list[dict[str, Any]]()
    grade, error_field = dict[str, Any](), dict[str, str]()
    for text in question.turns:
        messages.append({"role": "user", "content": text})
        try:
            if question.options:
                asked = engine.ask(messages, [_choice(question)])
                handle = engine.submit_checked(asked.asked[0].request)
            else:
                handle = engine.submit(messages, params, mode)
        except AspdError as error:
            error_field = {"error": str(error)}
            break
        while handle.result is None:
            yield
        if question.options:
            (decision,) = engine.read_decisions(asked, [handle.result.scores])
            correct = question.options[decision.best] == question.right
            grade = {"probabilities": decision.probabilities, "correct": correct}
            break
        turns.append(turn_record(engine, handle.result, [message["content"] for message in messages]))
        messages.append({"role": "assistant", "content": handle.result.text, "token_ids": handle.result.token_ids})
    if question.options:
        grade = grade or {"correct": False}  # it could not be asked
    elif question.right:
        whole = len(turns) == len(question.turns)
        grade = {"correct": whole and last_number(turns[-1]["text"]) == last_number(question.right)}
    record = {"question_id": question.id, "category": question.category, "turns": turns, "forks": question.forks}
    return grade | record | error_field


def _choice(question: Question) -> decisions.Question:
    """Return the decision that a question with options asks for."""
    return decisions.Question("choice", WHICH, tuple(map(decisions.Option, question.options)))


def turn_record(engine: Engine, result: Result, messages: Sequence[str]) -> dict[str, Any]:
    """Return the record of an answer.

    It has the text, the structure, the finish reason, statistics, and measures of the structure
    (`infer.evaluation.health`).

    Args:
        messages: all earlier messages of the conversation.
    """
    encode, titles = engine.lm.codec.text.encode, engine.lm.config.titles

    def count(text: str) -> int:
        return len(encode(text))

    return {
        "text": result.text,
        "structure": to_json(result.structure),
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
        "health": health(messages, result.structure, result.finish_reason == "stop", count, titles),
    }


def write_model_answers(records: Iterable[dict[str, Any]], system: System, file: Path) -> None:
    """Write records in FastChat's `model_answer` format, atomically."""
    lines = []
    for record in records:
        turns = [turn["text"] for turn in record["turns"]]
        line = {
            "question_id": record["question_id"],
            "answer_id": f"{system.name}-{record['question_id']}",
            "model_id": system.name,
            "choices": [{"index": 0, "turns": turns}],
            "tstamp": time.time(),
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_whole(file, "".join(lines))
