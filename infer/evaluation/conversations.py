"""Answers to the questions of a benchmark: conversations whose turns reuse the cache of earlier turns.

A conversation is appended to a file when it ends, so that an interrupted run resumes with the missing ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aspd_jax.errors import AspdError
from aspd_jax.files import Log, write_whole
from aspd_jax.journal import append, read_journal
from aspd_jax.progress import Bar
from aspd_jax.structure import to_json
from infer import decisions
from infer.answers.answer import Result
from infer.decisions import Asked, Decision
from infer.engine import Engine
from infer.evaluation.config import DecodingSection, System
from infer.evaluation.health import health
from infer.evaluation.questions import Question, last_number
from infer.request import Mode
from infer.scheduling.handle import Handle

WHICH = "Which answer is right?"
STEPS = 256  # engine steps between two checks for finished answers


def answer_questions(
    engine: Engine, system: System, questions: Sequence[Question], decoding: DecodingSection, file: Path, title: str
) -> list[dict[str, Any]]:
    """Answer all questions that the file does not hold yet, and return the records of all questions in order.

    A record has `question_id`, `category`, `turns` (see `turn_record`), and `error` if a turn could not be submitted;
    this and the following turns are then missing. A question with options is a decision: its record has no turns, but
    `probabilities` of the options, and `correct`.
    """
    done = {record["question_id"]: record for record in read_journal(file)}
    waiting = [(place, q) for place, q in enumerate(questions) if q.id not in done][::-1]
    running: list[_Conversation] = []
    with Log(file) as log, Bar(total=len(questions), initial=len(questions) - len(waiting), desc=title) as bar:
        while waiting or running:
            # At most one conversation per cache row: another first turn would evict the prefix of a second turn.
            while waiting and len(running) < engine.max_batch:
                place, question = waiting.pop()
                running.append(_Conversation(engine, system.mode, question, decoding, place))
            engine.step(STEPS)
            for conversation in running:
                if conversation.advance():
                    record = conversation.record()
                    append(log, record)
                    done[record["question_id"]] = record
                    bar.update()
            running = [conversation for conversation in running if not conversation.over]
    return [done[question.id] for question in questions]


class _Conversation:
    """A conversation in progress."""

    def __init__(self, engine: Engine, mode: Mode, question: Question, decoding: DecodingSection, place: int) -> None:
        self._engine, self._mode, self._question = engine, mode, question
        self._params = decoding.params(question.temperature, place, mode)
        self._messages: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []
        self._error: str | None = None
        self._handle: Handle | None = None
        self._asked: Asked | None = None
        self._decision: Decision | None = None
        self.over = False
        self._ask()

    def advance(self) -> bool:
        """Collect a finished answer and submit the next turn; return whether the conversation has ended."""
        if self._handle is not None and self._handle.result is not None:
            result = self._handle.result
            if self._asked is not None:
                (self._decision,) = self._engine.read_decisions(self._asked, [result.scores])
                self._handle = None
                self.over = True
                return True
            before = [message["content"] for message in self._messages]
            self._turns.append(turn_record(self._engine, result, before))
            self._messages.append({"role": "assistant", "content": result.text, "token_ids": result.token_ids})
            self._handle = None
            if len(self._turns) < len(self._question.turns):
                self._ask()
        self.over = self._handle is None
        return self.over

    def record(self) -> dict[str, Any]:
        question, graded = self._question, dict[str, Any]()
        if self._decision is not None:
            correct = question.options[self._decision.best] == question.right
            graded = {"probabilities": self._decision.probabilities, "correct": correct}
        elif question.options:
            graded = {"correct": False}  # it could not be asked
        elif question.right:
            whole = len(self._turns) == len(question.turns)
            graded = {"correct": whole and last_number(self._turns[-1]["text"]) == last_number(question.right)}
        record = {
            "question_id": question.id,
            "category": question.category,
            "turns": self._turns,
            "forks": question.forks,
        }
        return graded | record | ({} if self._error is None else {"error": self._error})

    def _ask(self) -> None:
        self._messages.append({"role": "user", "content": self._question.turns[len(self._turns)]})
        try:
            if self._question.options:
                asked = decisions.Question("choice", WHICH, tuple(map(decisions.Option, self._question.options)))
                self._asked = self._engine.ask(self._messages, [asked])
                self._handle = self._engine.submit_checked(self._asked.asked[0].request)
                return
            self._handle = self._engine.submit(self._messages, self._params, self._mode)
        except AspdError as error:
            self._error = str(error)


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
        "health": asdict(health(messages, result.structure, result.finish_reason == "stop", count, titles)),
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
