"""`/v1/decisions` in OpenAI's form and `/v1/systemone`: questions about one input, answered with probabilities."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag, model_validator

from aspd_jax.errors import RequestError
from infer.answers.answer import Result
from infer.decisions import MAX_OPTIONS, MAX_QUESTIONS, Calibration, Decision, Option, Question
from infer.server.messages import Message, Part
from infer.server.neutral import PART, REQUEST, Neutral, Strict, fault
from infer.server.responses import conversation, kind_of_item
from infer.server.tool_requests import CallItem, OutputItem, check_results

MAX_DEPTH, MAX_VALUES, MAX_BYTES = 32, 10_000, 256 << 10  # OpenAI's limits of JSON in an input


class JsonPart(Strict):
    """JSON that is shown as compact text."""

    neutral: ClassVar = PART
    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]

    @model_validator(mode="after")
    def _is_small(self) -> Self:
        depth, values, level = 0, 0, [self.data]
        while level and depth <= MAX_DEPTH and values <= MAX_VALUES:
            containers = [value for value in level if isinstance(value, (dict, list))]
            depth, values = depth + bool(containers), values + len(level)
            level = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
        if depth > MAX_DEPTH or values > MAX_VALUES or len(self.text.encode()) > MAX_BYTES:
            raise fault(f"expected at most {MAX_DEPTH} levels, {MAX_VALUES} values and {MAX_BYTES} bytes", "data")
        return self

    @property
    def text(self) -> str:
        """Return the text."""
        return json.dumps(self.data, ensure_ascii=False, separators=(",", ":"))


def _kind_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "json" if kind == "input_json" else "text"


InputPart = Annotated[Annotated[Part, Tag("text")] | Annotated[JsonPart, Tag("json")], Discriminator(_kind_of_part)]
Parts: TypeAlias = str | list[InputPart]


class DecisionMessage(Message):
    """A message of the input, which may hold JSON or a refusal."""

    content: Parts  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _refusals_are_text(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("role") != "assistant" or not isinstance(data.get("content"), list):
            return data
        parts = [
            {"type": "output_text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in data["content"]
        ]
        return {**data, "content": parts}


class DecisionCall(CallItem):
    """A call of a function, or of a custom tool, whose input is text."""

    neutral: ClassVar = CallItem.neutral | {"namespace": Neutral(kinds=(str,))}
    type: Literal["function_call", "custom_tool_call"]  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _input_is_an_argument(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("type") != "custom_tool_call" or "input" not in data:
            return data
        kept = {name: value for name, value in data.items() if name != "input"}
        return kept | {"arguments": json.dumps({"input": data["input"]}, ensure_ascii=False)}


class DecisionOutput(OutputItem):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]  # type: ignore[assignment]


InputItem = Annotated[
    Annotated[DecisionMessage, Tag("said")]
    | Annotated[DecisionCall, Tag("call")]
    | Annotated[DecisionOutput, Tag("output")],
    Discriminator(kind_of_item),
]


class Choice(Strict):
    """An option."""

    value: StrictStr | StrictBool
    description: str = ""

    @property
    def option(self) -> Option:
        """Return the option."""
        return Option(self.value, self.description)


class Level(Strict):
    """A level of a score."""

    label: str
    description: str = ""

    @property
    def option(self) -> Option:
        """Return the level as an option."""
        return Option(self.label, self.description)


class Asked(Strict):
    """A question."""

    @property
    @abstractmethod
    def question(self) -> Question:
        """Return the question."""

    @property
    @abstractmethod
    def listed(self) -> str:
        """Return the field of the options."""

    @model_validator(mode="after")
    def _has_options(self) -> Self:
        try:
            self.question  # noqa: B018
        except RequestError as error:
            raise fault(str(error).removeprefix("options: ").rstrip("."), self.listed) from None
        return self

    @abstractmethod
    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer."""


class OpenAIQuestion(Asked):
    """A question of `/v1/decisions`: `choices` belong to a choice, `levels` to a score."""

    type: Literal["predicate", "choice", "score"]
    instructions: Parts
    name: str | None = None
    choices: Annotated[list[Choice], Field(max_length=MAX_OPTIONS)] = Field(default_factory=list)
    levels: Annotated[list[Level], Field(max_length=MAX_OPTIONS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_its_own_options(self) -> Self:
        for kind, field in (("choice", "choices"), ("score", "levels")):
            if field in self.model_fields_set and self.type != kind:
                raise fault(f"expected none for a {self.type}, got some", field)
        return self

    @property
    def listed(self) -> str:
        """Return what `Asked` describes."""
        return "levels" if self.type == "score" else "choices"

    @property
    def question(self) -> Question:
        """Return what `Asked` describes."""
        parts = self.instructions
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        listed = self.levels if self.type == "score" else self.choices if self.type == "choice" else []
        return Question(self.type, text, tuple(one.option for one in listed))

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return what `Asked` describes."""
        head: dict[str, Any] = {"type": self.type, "name": self.name}
        shares = decision.probabilities
        if self.type == "predicate":
            return head | {"probability": shares[0]}
        head |= {"confidence": decision.confidence}
        if self.type == "choice":
            values = [choice.value for choice in self.choices]
            listed = [{"value": value, "probability": share} for value, share in zip(values, shares, strict=True)]
            return head | {"choice": values[decision.best], "probabilities": listed}
        levels = enumerate(zip(self.levels, shares, strict=True))
        listed = [{"value": n, "label": level.label, "probability": share} for n, (level, share) in levels]
        return head | {"score": decision.score, "probabilities": listed}


Json: TypeAlias = str | dict[str, Any] | list[Any]
DEFAULTS = {
    "noul": "Is this true of the input?",
    "choice": "Which choice best fits the input?",
    "score": "Which level best fits the input?",
}


def _shown(value: Json | None) -> str:
    """Return a value as text; None: no text."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


class SystemOneQuestion(Asked):
    """A question of `/v1/systemone`.

    Attributes:
        type: `noul`: yes or no; `choice`: one of named options; `score`: one of ordered levels.
        instructions: the question.
        criteria: what makes the answer `true` and `false`; descriptions of the options by name; or the levels.
    """

    type: Literal["noul", "choice", "score"]
    instructions: Json | None = None
    criteria: dict[str, Json | None] | list[Json] = Field(default_factory=dict)

    @property
    def listed(self) -> str:
        """Return what `Asked` describes."""
        return "criteria"

    @property
    def question(self) -> Question:
        """Return what `Asked` describes."""
        text, criteria = _shown(self.instructions) or DEFAULTS[self.type], self.criteria
        if isinstance(criteria, list) != (self.type == "score"):
            raise RequestError(
                f"options: expected {'a list' if self.type == 'score' else 'an object'}, got another type"
            )
        if isinstance(criteria, list):
            return Question("score", text, tuple(Option(_shown(level)) for level in criteria))
        if self.type == "choice":
            return Question("choice", text, tuple(Option(name, _shown(rule)) for name, rule in criteria.items()))
        if set(criteria) - {"true", "false"}:
            raise RequestError("options: expected true and false, got others")
        words = {"true": "Yes", "false": "No"}
        rules = [f"Answer {words[name]} when: {_shown(rule)}" for name, rule in criteria.items() if rule is not None]
        return Question("predicate", "\n".join([text, *rules]))

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return what `Asked` describes."""
        if self.type == "noul":
            return {"type": "noul", "noul": decision.probabilities[0]}
        names = list(self.criteria) if self.type == "choice" else list(map(str, range(len(self.criteria))))
        shares = dict(zip(names, decision.probabilities, strict=True))
        head = {"type": self.type, "confidence": decision.confidence, "probabilities": shares}
        if self.type == "choice":
            return head | {"choice": names[decision.best]}
        return head | {"score": decision.score, "legend": dict(zip(names, self.criteria, strict=True))}


class DecisionSettings(Strict):
    """Fields that this server adds.

    Attributes:
        calibration: orders of the options, and the prior (`Engine.decide`). Default: the server's.
    """

    calibration: Calibration | None = None


class Decisions(Strict):
    """Fields of both kinds of requests."""

    neutral: ClassVar = {**REQUEST, "prompt_cache_options": Neutral(kinds=(dict,))}
    model: str
    aspd: DecisionSettings = DecisionSettings()

    @property
    @abstractmethod
    def asked(self) -> Sequence[Asked]:
        """Return the questions."""

    @property
    @abstractmethod
    def messages(self) -> list[dict[str, Any]]:
        """Return the input in the form of the chat template."""

    def response(self, decisions: Sequence[Decision], results: Sequence[Result]) -> dict[str, Any]:
        """Return the response.

        Args:
            decisions: answers to the questions.
            results: results of the requests whose scores they are.
        """
        answers = [asked.answer(decision) for asked, decision in zip(self.asked, decisions, strict=True)]
        tokens = sum(result.stats.prompt_tokens + result.stats.scored_tokens for result in results)
        cached = sum(result.stats.reused_tokens for result in results)
        usage = {
            "input_tokens": tokens, "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": cached},
            "output_tokens": 0, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": tokens,
        }  # fmt: skip
        steps, outside = sum(result.stats.steps for result in results), [decision.outside for decision in decisions]
        own = {"outside": outside, "steps": steps}
        return {"model": self.model, "answers": self.arranged(answers), "usage": usage, "aspd": own}

    def arranged(self, answers: list[dict[str, Any]]) -> Any:
        """Return the answers as the response has them."""
        return answers


class DecisionsRequest(Decisions):
    """Body of `POST /v1/decisions`."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    questions: Annotated[list[OpenAIQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]

    @model_validator(mode="after")
    def _calls_have_results(self) -> Self:
        check_results(*conversation(self.input), "call_id")
        return self

    @property
    def asked(self) -> Sequence[Asked]:
        """Return what `Decisions` describes."""
        return self.questions

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return what `Decisions` describes."""
        return conversation(self.input)[0]


class SystemOneRequest(Decisions):
    """Body of `POST /v1/systemone`."""

    neutral: ClassVar = Decisions.neutral | {
        name: Neutral(([], {}), reason="only text is supported") for name in ("images", "assets", "audio", "videos")
    }
    state: Json
    questions: Annotated[dict[str, SystemOneQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]

    @property
    def asked(self) -> Sequence[Asked]:
        """Return what `Decisions` describes."""
        return list(self.questions.values())

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return what `Decisions` describes."""
        return [{"role": "user", "content": _shown(self.state)}]

    def arranged(self, answers: list[dict[str, Any]]) -> Any:
        """Return what `Decisions` describes."""
        return dict(zip(self.questions, answers, strict=True))
