"""A language model as judge: a score for every answer, and comparisons of two systems in both orders.

Prompts are the project's own, which ask for JSON and hold an endpoint to it, or FastChat's `judge_prompts.jsonl`, which
ask for `[[7]]`; what is judged is written in FastChat's `model_judgment` form. Replies are kept, so that no question is
asked twice.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from aspd_jax.endpoint import Endpoint, Form, Unanswered, parse_json
from aspd_jax.errors import ConfigError, DataError, RequestError
from aspd_jax.store import Store
from infer.evaluation.eval_config import EvalConfig, JudgeSection
from infer.evaluation.questions import Question

Verdict = TypeVar("Verdict")
WITH_REFERENCE = ("math", "reasoning", "coding", "arena-hard-200")  # categories that FastChat judges beside a reference
NAMES = ("single-v1", "single-math-v1", "single-v1-multi-turn", "single-math-v1-multi-turn")
PAIR_NAMES = ("pair-v2", "pair-math-v1", "pair-v2-multi-turn", "pair-math-v1-multi-turn")


class Prompt(NamedTuple):
    """System message and message of the user, with placeholders; and what a reply has to look like, if it is JSON."""

    system: str
    template: str
    form: Form | None


def _form(name: str, **verdict: Any) -> Form:
    fields = {"explanation": {"type": "string"}, **verdict}
    return Form(name, {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})


RATING = _form("rating", rating={"type": "integer", "minimum": 1, "maximum": 10})
WINNER = _form("winner", winner={"type": "string", "enum": ["A", "B", "C"]})


def read_prompts(file: str) -> dict[str, Prompt]:
    """Prompts by name.

    Raises:
        ConfigError: the file is missing, or lacks a prompt.
    """
    where = file or "the project's judge prompts"
    try:
        text = Path(file).read_bytes() if file else (files(__package__) / "judge_prompts.jsonl").read_bytes()
        found = {}
        for line in text.split(b"\n"):
            if line.strip():
                record = json.loads(line)
                form = WINNER if record["name"].startswith("pair") else RATING
                is_json = record.get("output_format") == "json"
                found[record["name"]] = Prompt(
                    record["system_prompt"], record["prompt_template"], form if is_json else None
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"judge.prompts: {where}: {type(error).__name__}: {error}") from None
    missing = [name for name in (*NAMES, *PAIR_NAMES) if name not in found]
    if missing:
        raise ConfigError(f"judge.prompts: {where} has no prompt named {', '.join(missing)}")
    return found


def read_score(reply: str) -> float:
    """The rating of a reply, 1 to 10.

    Raises:
        DataError: there is none.
    """
    rating = _field(reply, "rating")
    found = re.findall(r"\[\[(\d+(?:\.\d+)?)\]\]", reply) or re.findall(r"\[(\d+(?:\.\d+)?)\]", reply)
    try:
        said = 0.0 if isinstance(rating, bool) else float(found[-1] if rating is None else rating)
    except (IndexError, TypeError, ValueError):
        said = 0.0
    if not 1 <= said <= 10:
        raise DataError(f"no rating between 1 and 10, as JSON or as [[7]], in the reply {reply[-80:]!r}")
    return said


def read_winner(reply: str) -> str:
    """`A`, `B` or `C` (a tie).

    Raises:
        DataError: there is none.
    """
    winner = _field(reply, "winner")
    said = re.findall(r"\[\[([ABC])\]\]", reply) if winner is None else [winner]
    if not said or said[-1] not in ("A", "B", "C"):
        raise DataError(f"no verdict A, B or C, as JSON or as [[A]], in the reply {reply[-80:]!r}")
    return str(said[-1])


def _field(reply: str, name: str) -> Any:
    """Of the JSON object that a reply is; None: it is none, or has no such field."""
    try:
        return parse_json(reply).get(name)
    except (DataError, AttributeError):
        return None


class Answers(NamedTuple):
    """Texts of a system's answers by question id, of one benchmark; only whole conversations."""

    system: str
    turns: dict[str | int, list[str]]


class Task(NamedTuple):
    """Something to judge: a turn (from 0) of a question by one system, or by two."""

    question: Question
    turn: int
    systems: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]


class Outcome(NamedTuple):
    """Judgments, and counts of those missing because the endpoint failed or a reply had no verdict."""

    single: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    unanswered: int
    malformed: int


def judge(config: EvalConfig, questions: Sequence[Question], answers: Sequence[Answers], store: Store) -> Outcome:
    """Judge the answers to one benchmark's questions.

    Raises:
        RequestError: no judge is named, or the endpoint refuses, or fails so often that going on makes no sense.
    """
    if not config.judge.base_url:
        raise RequestError("no judge is named; set judge.base_url and judge.model")
    return asyncio.run(_judge(config.judge, questions, {one.system: one for one in answers}, store))


async def _judge(
    settings: JudgeSection, questions: Sequence[Question], answers: dict[str, Answers], store: Store
) -> Outcome:
    asking = _Asking(settings, store)
    single = [task for one in answers.values() for task in _tasks(questions, [one])] if settings.single else []
    pairs = [
        task
        for pair in settings.pairs
        for task in _tasks(questions, [answers[name] for name in pair.split("/") if name in answers])
        if len(task.systems) == 2
    ]
    try:
        with tqdm(total=len(single) + len(pairs), unit="judgment", desc="judge") as bar:

            def step() -> None:
                bar.set_postfix(asking.endpoint.spent, refresh=False)
                bar.update()

            scored = await _all([asking.score(task) for task in single], step)
            compared = await _all([asking.compare(task) for task in pairs], step)
    finally:
        await asking.close()
    return Outcome(
        [record for record in scored if record], [record for record in compared if record],
        asking.unanswered, asking.malformed,
    )  # fmt: skip


def _tasks(questions: Sequence[Question], of: Sequence[Answers]) -> Iterator[Task]:
    for question in questions:
        turns = [tuple(one.turns.get(question.id, ())) for one in of]
        for turn in range(min(len(t) for t in turns) if turns else 0):
            yield Task(question, turn, tuple(one.system for one in of), tuple(turns))


async def _all(calls: Sequence[Any], step: Callable[[], None]) -> list[Any]:
    async def one(call: Any) -> Any:
        try:
            return await call
        finally:
            step()

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Asking:
    def __init__(self, settings: JudgeSection, store: Store) -> None:
        self._settings, self._prompts = settings, read_prompts(settings.prompts)
        self.endpoint = Endpoint(settings, store, settings.schema)
        self.unanswered = self.malformed = 0

    async def close(self) -> None:
        await self.endpoint.close()

    async def score(self, task: Task) -> dict[str, Any] | None:
        """Ask for a rating of one answer."""
        name, messages = self._messages(task, NAMES, task.answers)
        found = await self._ask(name, messages, read_score)
        if found is None:
            return None
        score, reply = found
        return {
            "question_id": task.question.id,
            "category": task.question.category,
            "model": task.systems[0],
            "judge": [self._settings.model, name],
            "user_prompt": messages[-1]["content"],
            "judgment": reply,
            "score": score,
            "turn": task.turn + 1,
        }

    async def compare(self, task: Task) -> dict[str, Any] | None:
        """Both orders; a system wins where it does in both, as FastChat counts."""
        winners = []
        for answers, sides in ((task.answers, ("model_1", "model_2")), (task.answers[::-1], ("model_2", "model_1"))):
            name, messages = self._messages(task, PAIR_NAMES, answers)
            found = await self._ask(name, messages, read_winner)
            if found is None:
                return None
            winners.append({"A": sides[0], "B": sides[1], "C": "tie"}[found[0]])
        return {
            "question_id": task.question.id,
            "category": task.question.category,
            "model_1": task.systems[0],
            "model_2": task.systems[1],
            "g1_winner": winners[0],
            "g2_winner": winners[1],
            "winner": winners[0] if winners[0] == winners[1] else "tie",
            "judge": [self._settings.model, name],
            "turn": task.turn + 1,
        }

    def _messages(
        self, task: Task, names: Sequence[str], answers: Sequence[Sequence[str]]
    ) -> tuple[str, list[dict[str, str]]]:
        """The prompt of a task, and its name.

        FastChat has prompts for the first and for the second turn; a later turn is shown with the one before it.
        """
        question, turn = task.question, task.turn
        references = question.references
        beside = question.category in WITH_REFERENCE and len(references) > turn
        name = names[2 * (turn > 0) + beside]
        values: dict[str, str] = {}
        first = max(0, turn - 1)
        for number, at in enumerate(range(first, turn + 1), 1):
            values[f"question_{number}"] = question.turns[at]
            if beside:
                values[f"ref_answer_{number}"] = references[at]
            for letter, texts in zip("ab", answers, strict=False):
                values[f"answer_{letter}_{number}"] = texts[at]
            values[f"answer_{number}"] = answers[0][at]
        values |= {"question": question.turns[turn], "answer": answers[0][turn]}
        values |= {f"answer_{letter}": texts[turn] for letter, texts in zip("ab", answers, strict=False)}
        prompt = self._prompts[name]
        filled = re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), prompt.template)
        return name, [{"role": "system", "content": prompt.system}, {"role": "user", "content": filled}]

    async def _ask(
        self, kind: str, messages: list[dict[str, str]], read: Callable[[str], Verdict]
    ) -> tuple[Verdict, str] | None:
        """The verdict and the reply it stands in; None: there is none, which is counted."""
        for attempt in range(self._settings.attempts):
            try:
                reply = await self.endpoint.reply(kind, messages, 0, attempt, self._prompts[kind].form)
                return read(reply.text), reply.text
            except Unanswered:
                self.unanswered += 1
                return None
            except DataError:
                continue
        self.malformed += 1
        return None
