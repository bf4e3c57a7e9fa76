"""A language model as judge: scores of answers, and comparisons of two systems in both orders.

Prompts are the project's, which ask for JSON with a schema, or FastChat's `judge_prompts.jsonl`, which ask for `[[7]]`.
Judgments are written in FastChat's `model_judgment` format. Replies are stored, so that no request is repeated.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aspd_jax.endpoint import Endpoint, Form, Unanswered, parse_json
from aspd_jax.errors import ConfigError, DataError, RequestError
from aspd_jax.progress import Bar
from aspd_jax.store import Store
from infer.evaluation.config import EvalConfig, JudgeSection
from infer.evaluation.questions import Question

Verdict = TypeVar("Verdict")
WITH_REFERENCE = ("math", "reasoning", "coding", "arena-hard-200")  # FastChat shows the judge a reference for these
NAMES = ("single-v1", "single-math-v1", "single-v1-multi-turn", "single-math-v1-multi-turn")
PAIR_NAMES = ("pair-v2", "pair-math-v1", "pair-v2-multi-turn", "pair-math-v1-multi-turn")


class Prompt(NamedTuple):
    """Prompt of a judge.

    Attributes:
        system: system message.
        template: message of the user with placeholders.
        form: JSON schema of the reply; None: the reply is text.
    """

    system: str
    template: str
    form: Form | None


def _form(name: str, **verdict: Any) -> Form:
    fields = {"explanation": {"type": "string"}, **verdict}
    return Form(name, {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})


RATING = _form("rating", rating={"type": "integer", "minimum": 1, "maximum": 10})
WINNER = _form("winner", winner={"type": "string", "enum": ["A", "B", "C"]})


def read_prompts(file: str) -> dict[str, Prompt]:
    """Read prompts by name; an empty file name means the project's prompts.

    Raises:
        ConfigError: the file is missing, invalid or lacks a prompt.
    """
    where = file or "the project's judge prompts"
    try:
        text = Path(file).read_bytes() if file else (files(__package__) / "judge_prompts.jsonl").read_bytes()
        prompts = {}
        for line in text.split(b"\n"):
            if line.strip():
                record = json.loads(line)
                form = WINNER if record["name"].startswith("pair") else RATING
                is_json = record.get("output_format") == "json"
                prompts[record["name"]] = Prompt(
                    record["system_prompt"], record["prompt_template"], form if is_json else None
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"judge.prompts: {where}: {type(error).__name__}: {error}") from None
    missing = [name for name in (*NAMES, *PAIR_NAMES) if name not in prompts]
    if missing:
        raise ConfigError(f"judge.prompts: {where}: expected prompts named {', '.join(missing)}, got none.")
    return prompts


def read_score(reply: str) -> float:
    """Parse the rating of a reply, 1 to 10.

    Raises:
        DataError: the reply has no rating.
    """
    rating = _field(reply, "rating")
    matches = re.findall(r"\[\[(\d+(?:\.\d+)?)\]\]", reply) or re.findall(r"\[(\d+(?:\.\d+)?)\]", reply)
    try:
        score = 0.0 if isinstance(rating, bool) else float(matches[-1] if rating is None else rating)
    except (IndexError, TypeError, ValueError):
        score = 0.0
    if not 1 <= score <= 10:
        raise DataError(f"expected a rating from 1 to 10 as JSON or as [[7]], got {reply[-80:]!r}")
    return score


def read_winner(reply: str) -> str:
    """Parse the verdict of a reply: `A`, `B` or `C` (a tie).

    Raises:
        DataError: the reply has no verdict.
    """
    winner = _field(reply, "winner")
    verdicts = re.findall(r"\[\[([ABC])\]\]", reply) if winner is None else [winner]
    if not verdicts or verdicts[-1] not in ("A", "B", "C"):
        raise DataError(f"expected a verdict A, B or C as JSON or as [[A]], got {reply[-80:]!r}")
    return str(verdicts[-1])


def _field(reply: str, name: str) -> Any:
    """Return a field of a reply that is a JSON object; None if the reply is none or lacks the field."""
    try:
        return parse_json(reply).get(name)
    except (DataError, AttributeError):
        return None


class Answers(NamedTuple):
    """Texts of a system's complete conversations on one benchmark, by question id."""

    system: str
    turns: dict[str | int, list[str]]


class Task(NamedTuple):
    """Unit of judging: one turn (counted from 0) of a question, answered by one or two systems."""

    question: Question
    turn: int
    systems: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]


class Outcome(NamedTuple):
    """Judgments, and the number of missing ones: requests that failed and replies without a verdict."""

    single: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    unanswered: int
    malformed: int


def judge(config: EvalConfig, questions: Sequence[Question], answers: Sequence[Answers], store: Store) -> Outcome:
    """Judge the answers to one benchmark's questions.

    Raises:
        RequestError: no judge is configured, or the endpoint refuses or fails repeatedly.
    """
    if not config.judge.base_url:
        raise RequestError("judge.base_url: expected the URL of a judge, got none. Set judge.base_url and judge.model.")
    return asyncio.run(_judge(config.judge, questions, {system.system: system for system in answers}, store))


async def _judge(
    settings: JudgeSection, questions: Sequence[Question], answers: dict[str, Answers], store: Store
) -> Outcome:
    client = _Judge(settings, store)
    single = [task for system in answers.values() for task in _tasks(questions, [system])] if settings.single else []
    pairs = [
        task
        for pair in settings.pairs
        for task in _tasks(questions, [answers[name] for name in pair.split("/") if name in answers])
        if len(task.systems) == 2
    ]
    try:
        with Bar(total=len(single) + len(pairs), unit="judgment", desc="judge") as bar:

            def step() -> None:
                bar.set_postfix(client.endpoint.spent, refresh=False)
                bar.update()

            scored = await _all([client.score(task) for task in single], step)
            compared = await _all([client.compare(task) for task in pairs], step)
    finally:
        await client.close()
    return Outcome(
        [record for record in scored if record], [record for record in compared if record],
        client.unanswered, client.malformed,
    )  # fmt: skip


def _tasks(questions: Sequence[Question], systems: Sequence[Answers]) -> Iterator[Task]:
    for question in questions:
        turns = [tuple(answers.turns.get(question.id, ())) for answers in systems]
        for turn in range(min(len(t) for t in turns) if turns else 0):
            yield Task(question, turn, tuple(answers.system for answers in systems), tuple(turns))


async def _all(calls: Sequence[Any], step: Callable[[], None]) -> list[Any]:
    async def tracked(call: Any) -> Any:
        try:
            return await call
        finally:
            step()

    tasks = [asyncio.ensure_future(tracked(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Judge:
    def __init__(self, settings: JudgeSection, store: Store) -> None:
        self._settings, self._prompts = settings, read_prompts(settings.prompts)
        self.endpoint = Endpoint(settings, store, settings.schema)
        self.unanswered = self.malformed = 0

    async def close(self) -> None:
        await self.endpoint.close()

    async def score(self, task: Task) -> dict[str, Any] | None:
        """Request a rating of one answer; None: the request failed."""
        name, messages = self._messages(task, NAMES, task.answers)
        judgment = await self._ask(name, messages, read_score)
        if judgment is None:
            return None
        score, reply = judgment
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
        """Compare two answers in both orders; a system wins if it wins in both, as in FastChat."""
        winners = []
        for answers, sides in ((task.answers, ("model_1", "model_2")), (task.answers[::-1], ("model_2", "model_1"))):
            name, messages = self._messages(task, PAIR_NAMES, answers)
            judgment = await self._ask(name, messages, read_winner)
            if judgment is None:
                return None
            winners.append({"A": sides[0], "B": sides[1], "C": "tie"}[judgment[0]])
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
        """Return the name of a task's prompt and its messages.

        FastChat has prompts for one and for two turns; a later turn is shown with the turn before it.
        """
        question, turn = task.question, task.turn
        references = question.references
        with_reference = question.category in WITH_REFERENCE and len(references) > turn
        name = names[2 * (turn > 0) + with_reference]
        values: dict[str, str] = {}
        first = max(0, turn - 1)
        for number, at in enumerate(range(first, turn + 1), 1):
            values[f"question_{number}"] = question.turns[at]
            if with_reference:
                values[f"ref_answer_{number}"] = references[at]
            for letter, texts in zip("ab", answers, strict=False):
                values[f"answer_{letter}_{number}"] = texts[at]
            values[f"answer_{number}"] = answers[0][at]
        values |= {"question": question.turns[turn], "answer": answers[0][turn]}
        values |= {f"answer_{letter}": texts[turn] for letter, texts in zip("ab", answers, strict=False)}
        prompt = self._prompts[name]
        filled = re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), prompt.template)
        return name, [{"role": "system", "content": prompt.system}, {"role": "user", "content": filled}]

    async def _ask(
        self, kind: str, messages: list[dict[str, str]], read: Callable[[str], Verdict]
    ) -> tuple[Verdict, str] | None:
        """Return a verdict and its reply. A missing verdict is counted, and None is returned."""
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
