"""Answering the questions of a benchmark: conversations, each turn on the cache of the ones before.

A conversation is added to a file as soon as it has ended, so a killed run goes on with what is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from aspd_jax.errors import AspdError
from aspd_jax.files import Log, write_whole
from aspd_jax.structure import to_json
from infer.answers.answer import Result
from infer.answers.timeline import timeline
from infer.engine import Engine
from infer.evaluation.eval_config import DecodingSection, System
from infer.evaluation.health import health
from infer.evaluation.questions import Question
from infer.evaluation.scoring import correct
from infer.offline.journal import append, read_journal
from infer.request import Mode
from infer.scheduling.handle import Handle

STEPS = 256  # passes between two looks at who has ended


def answer_questions(
    engine: Engine, system: System, questions: Sequence[Question], decoding: DecodingSection, file: Path, title: str
) -> list[dict[str, Any]]:
    """Records of all conversations, in the order of the questions; those that are in the file already are not repeated.

    A record has `question_id`, `category`, `turns` (see `turn_record`), `correct` (None where nothing says so), and
    `error` where a turn could not be asked, in place of that turn and what follows.
    """
    done = {record["question_id"]: record for record in read_journal(file)}
    waiting = [(place, q) for place, q in enumerate(questions) if q.id not in done][::-1]
    running: list[_Conversation] = []
    with Log(file) as log, tqdm(total=len(questions), initial=len(questions) - len(waiting), desc=title) as bar:
        while waiting or running:
            # No more than there are rows: a first turn would take the row that a second turn goes on in.
            while waiting and len(running) < engine.max_batch:
                place, question = waiting.pop()
                running.append(_Conversation(engine, system.mode, question, decoding, place))
            engine.step(STEPS)
            for conversation in running:
                if conversation.ended():
                    record = conversation.record()
                    append(log, record)
                    done[record["question_id"]] = record
                    bar.update()
            running = [conversation for conversation in running if not conversation.over]
    return [done[question.id] for question in questions]


class _Conversation:
    """A question under way."""

    def __init__(self, engine: Engine, mode: Mode, question: Question, decoding: DecodingSection, place: int) -> None:
        self._engine, self._mode, self._question = engine, mode, question
        self._params = decoding.params(question.temperature, place)
        self._messages: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []
        self._error: str | None = None
        self._handle: Handle | None = None
        self.over = False
        self._ask()

    def ended(self) -> bool:
        """Take what was answered, and go on; whether nothing is left to ask."""
        if self._handle is not None and self._handle.result is not None:
            result = self._handle.result
            said = "\n\n".join(message["content"] for message in self._messages)
            self._turns.append(turn_record(self._engine, result, said))
            self._messages.append({"role": "assistant", "content": result.text, "token_ids": result.token_ids})
            self._handle = None
            if len(self._turns) < len(self._question.turns):
                self._ask()
        self.over = self._handle is None
        return self.over

    def record(self) -> dict[str, Any]:
        whole = len(self._turns) == len(self._question.turns)
        last = self._turns[-1]["text"] if whole else ""
        return {
            "question_id": self._question.id,
            "category": self._question.category,
            "turns": self._turns,
            "correct": correct(self._question, last),
            "forks": self._question.forks,
        } | ({} if self._error is None else {"error": self._error})

    def _ask(self) -> None:
        self._messages.append({"role": "user", "content": self._question.turns[len(self._turns)]})
        try:
            self._handle = self._engine.submit(self._messages, self._params, self._mode)
        except AspdError as error:
            self._error = str(error)


def turn_record(engine: Engine, result: Result, said: str) -> dict[str, Any]:
    """An answer as it is kept: text, structure, finish reason, statistics, health of its structure, and when what was
    decoded (`infer.answers.timeline`).
    """
    encode = engine.lm.codec.text.encode

    def count(text: str) -> int:
        return len(encode(text))

    return {
        "text": result.text,
        "structure": to_json(result.structure),
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
        "health": asdict(health(said, result.structure, result.finish_reason == "stop", count)),
        "timeline": [list(span) for span in timeline(engine.config, result)],
    }


def write_model_answers(records: Iterable[dict[str, Any]], system: System, file: Path) -> None:
    """The same in FastChat's `model_answer` form, whole or not at all."""
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
