"""`/v1/decisions` in OpenAI's form and `/v1/systemone`: questions about one input, answered with probabilities."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, StrictBool, StrictStr, model_validator

from aspd_jax.errors import RequestError
from infer.answers.answer import Result
from infer.decisions import MAX_OPTIONS, MAX_QUESTIONS, Calibration, Decision, Option, Question
from infer.server.forms import response_usage
from infer.server.messages import Part
from infer.server.neutral import FAST, REQUEST, Neutral, Strict, fault
from infer.server.responses import InputItem, conversation
from infer.server.tool_requests import check_results

Json: TypeAlias = str | dict[str, Any] | list[Any]
DEFAULTS = {
    "noul": "Is this true of the input?",
    "choice": "Which choice best fits the input?",
    "score": "Which level best fits the input?",
}


@contextmanager
def _errors_at(field: str) -> Iterator[None]:
    """Report errors of a question's options at a field."""
    try:
        yield
    except RequestError as error:
        raise fault(str(error).removeprefix("options: ").rstrip("."), field) from None


class Choice(Strict):
    """An option."""

    value: StrictStr | StrictBool
    description: str = ""


class Level(Strict):
    """A level of a score."""

    label: str
    description: str = ""


class OpenAIQuestion(Strict):
    """A question of `/v1/decisions`: `choices` belong to a choice, `levels` to a score."""

    type: Literal["predicate", "choice", "score"]
    instructions: str | Annotated[list[Part], FAST]
    name: str | None = None
    choices: Annotated[list[Choice], Field(max_length=MAX_OPTIONS)] = Field(default_factory=list)
    levels: Annotated[list[Level], Field(max_length=MAX_OPTIONS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_its_own_options(self) -> Self:
        for kind, field in (("choice", "choices"), ("score", "levels")):
            if field in self.model_fields_set and self.type != kind:
                raise fault(f"expected none for a {self.type}, got some", field)
        with _errors_at("levels" if self.type == "score" else "choices"):
            self.question  # noqa: B018
        return self

    @property
    def question(self) -> Question:
        """Return the question."""
        parts = self.instructions
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        options = [(one.value, one.description) for one in self.choices if self.type == "choice"]
        options += [(one.label, one.description) for one in self.levels if self.type == "score"]
        return Question(self.type, text, tuple(Option(*option) for option in options))


def _shown(value: Json | None) -> str:
    """Return a value as text; None: no text."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


class SystemOneQuestion(Strict):
    """A question of `/v1/systemone`.

    Attributes:
        type: `noul`: yes or no; `choice`: one of named options; `score`: one of ordered levels.
        instructions: the question.
        criteria: what makes the answer `true` and `false`; descriptions of the options by name; or the levels.
    """

    type: Literal["noul", "choice", "score"]
    instructions: Json | None = None
    criteria: dict[str, Json | None] | list[Json] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_criteria(self) -> Self:
        with _errors_at("criteria"):
            self.question  # noqa: B018
        return self

    @property
    def question(self) -> Question:
        """Return the question."""
        text, criteria = _shown(self.instructions) or DEFAULTS[self.type], self.criteria
        if isinstance(criteria, list) != (self.type == "score"):
            raise RequestError(f"expected {'a list' if self.type == 'score' else 'an object'}, got another type")
        if isinstance(criteria, list):
            return Question("score", text, tuple(Option(_shown(level)) for level in criteria))
        if self.type == "choice":
            return Question("choice", text, tuple(Option(name, _shown(rule)) for name, rule in criteria.items()))
        if set(criteria) - {"true", "false"}:
            raise RequestError("expected true and false, got others")
        words = {"true": "Yes", "false": "No"}
        rules = [f"Answer {words[name]} when: {_shown(rule)}" for name, rule in criteria.items() if rule is not None]
        return Question("predicate", "\n".join([text, *rules]))


def answer(question: Question, decision: Decision) -> dict[str, Any]:
    """Return the answer to a question in OpenAI's form, without its name."""
    shares, values = decision.probabilities, [option.value for option in question.options]
    if question.kind == "predicate":
        return {"type": "predicate", "probability": shares[0]}
    head: dict[str, Any] = {"type": question.kind, "confidence": decision.confidence}
    pairs = list(zip(values, shares, strict=True))
    if question.kind == "choice":
        listed = [{"value": value, "probability": share} for value, share in pairs]
        return head | {"choice": values[decision.best], "probabilities": listed}
    levels = [{"value": n, "label": label, "probability": share} for n, (label, share) in enumerate(pairs)]
    return head | {"score": decision.score, "probabilities": levels}


def system_one_answer(question: Question, decision: Decision) -> dict[str, Any]:
    """Return the answer to a question in the form of System One models."""
    own = answer(question, decision)
    if question.kind == "predicate":
        return {"type": "noul", "noul": own["probability"]}
    listed = own["probabilities"]
    legend = {str(one["value"]): one["label"] for one in listed if "label" in one}
    own["probabilities"] = {str(one["value"]): one["probability"] for one in listed}
    return own | ({"legend": legend} if legend else {})


class DecisionSettings(Strict):
    """Fields that this server adds.

    Attributes:
        calibration: orders of the options, and the prior (`Engine.decide`). Default: the server's.
    """

    calibration: Calibration | None = None


class Decisions(Strict):
    """Fields of both kinds of requests."""

    neutral: ClassVar = dict(REQUEST)
    input_field: ClassVar[str]
    model: str
    aspd: DecisionSettings = DecisionSettings()

    @property
    @abstractmethod
    def asked(self) -> tuple[list[dict[str, Any]], list[Question]]:
        """Return the messages of the input in the form of the chat template, and the questions."""

    @abstractmethod
    def answers(self, decisions: Sequence[Decision]) -> Any:
        """Return the answers to the questions as the response has them."""

    def response(self, decisions: Sequence[Decision], results: Sequence[Result]) -> dict[str, Any]:
        """Return the response.

        Args:
            decisions: answers to the questions.
            results: results of the requests whose scores they are.
        """
        tokens = sum(result.stats.prompt_tokens + result.stats.scored_tokens for result in results)
        cached = sum(result.stats.reused_tokens for result in results)
        usage = response_usage(tokens, cached, 0)
        steps, outside = sum(result.stats.steps for result in results), [decision.outside for decision in decisions]
        own = {"outside": outside, "steps": steps}
        return {"model": self.model, "answers": self.answers(decisions), "usage": usage, "aspd": own}


class DecisionsRequest(Decisions):
    """Body of `POST /v1/decisions`."""

    input_field = "input"
    input: str | Annotated[list[InputItem], Field(min_length=1), FAST]
    questions: Annotated[list[OpenAIQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]

    @model_validator(mode="after")
    def _calls_have_results(self) -> Self:
        check_results(*conversation(self.input), "call_id")
        return self

    @property
    def asked(self) -> tuple[list[dict[str, Any]], list[Question]]:
        """Return what `Decisions` describes."""
        return conversation(self.input)[0], [one.question for one in self.questions]

    def answers(self, decisions: Sequence[Decision]) -> Any:
        """Return what `Decisions` describes."""
        asked = zip(self.questions, decisions, strict=True)
        return [{"name": one.name, **answer(one.question, decision)} for one, decision in asked]


class SystemOneRequest(Decisions):
    """Body of `POST /v1/systemone`."""

    neutral: ClassVar = Decisions.neutral | {
        name: Neutral(([], {}), reason="only text is supported") for name in ("images", "assets", "audio", "videos")
    }
    input_field = "state"
    state: Json
    questions: Annotated[dict[str, SystemOneQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]

    @property
    def asked(self) -> tuple[list[dict[str, Any]], list[Question]]:
        """Return what `Decisions` describes."""
        return [{"role": "user", "content": _shown(self.state)}], [one.question for one in self.questions.values()]

    def answers(self, decisions: Sequence[Decision]) -> Any:
        """Return what `Decisions` describes."""
        asked = zip(self.questions.items(), decisions, strict=True)
        return {name: system_one_answer(one.question, decision) for (name, one), decision in asked}
