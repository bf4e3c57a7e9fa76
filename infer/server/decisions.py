"""`/v1/decisions` in OpenAI's form and `/v1/systemone`: questions about one input, answered with probabilities."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
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


class Asked(Strict):
    """A question of OpenAI's form.

    Attributes:
        listed: field of the options; empty: there are none.
    """

    listed: ClassVar[str] = ""
    type: str
    instructions: Parts
    name: str | None = None

    @property
    def question(self) -> Question:
        """Return the question."""
        parts = self.instructions
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return Question(self.type, text, self.options)  # type: ignore[arg-type]

    @property
    def options(self) -> tuple[Option, ...]:
        """Return the options of the question."""
        return ()

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer."""
        return {"type": self.type, "name": self.name} | self.values(decision)

    @abstractmethod
    def values(self, decision: Decision) -> dict[str, Any]:
        """Return the values of the answer."""


class Predicate(Asked):
    """Whether a statement about the input is true."""

    type: Literal["predicate"]

    def values(self, decision: Decision) -> dict[str, Any]:
        """Return what `Asked` describes."""
        return {"probability": decision.probabilities[0]}


class Choice(Strict):
    """An option."""

    value: StrictStr | StrictBool
    description: str = ""


class ChoiceQuestion(Asked):
    """Which of the options fits the input."""

    listed: ClassVar[str] = "choices"
    type: Literal["choice"]
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_OPTIONS)]

    @property
    def options(self) -> tuple[Option, ...]:
        """Return what `Asked` describes."""
        return tuple(Option(choice.value, choice.description) for choice in self.choices)

    def values(self, decision: Decision) -> dict[str, Any]:
        """Return what `Asked` describes."""
        pairs = zip(self.choices, decision.probabilities, strict=True)
        shares = [{"value": choice.value, "probability": share} for choice, share in pairs]
        best = self.choices[decision.best].value
        return {"choice": best, "confidence": decision.confidence, "probabilities": shares}


class Level(Strict):
    """A level of a score."""

    label: str
    description: str = ""


class ScoreQuestion(Asked):
    """Which of the ordered levels fits the input."""

    listed: ClassVar[str] = "levels"
    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_OPTIONS)]

    @property
    def options(self) -> tuple[Option, ...]:
        """Return what `Asked` describes."""
        return tuple(Option(level.label, level.description) for level in self.levels)

    def values(self, decision: Decision) -> dict[str, Any]:
        """Return what `Asked` describes."""
        pairs = enumerate(zip(self.levels, decision.probabilities, strict=True))
        shares = [{"value": n, "label": level.label, "probability": share} for n, (level, share) in pairs]
        return {"score": decision.score, "confidence": decision.confidence, "probabilities": shares}


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

    @model_validator(mode="after")
    def _options_differ(self) -> Self:
        for place, asked in self.places():
            try:
                asked.question  # noqa: B018
            except RequestError as error:
                raise fault(str(error).removeprefix("options: ").rstrip("."), place) from None
        return self

    @abstractmethod
    def places(self) -> Iterator[tuple[str, Any]]:
        """Yield the questions with the fields of their options."""

    @property
    def asked(self) -> list[Question]:
        """Return the questions."""
        return [asked.question for _, asked in self.places()]

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
        tokens = sum(result.stats.prompt_tokens + result.stats.scored_tokens for result in results)
        cached = sum(result.stats.reused_tokens for result in results)
        usage = {
            "input_tokens": tokens, "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": cached},
            "output_tokens": 0, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": tokens,
        }  # fmt: skip
        steps, outside = sum(result.stats.steps for result in results), [decision.outside for decision in decisions]
        own = {"outside": outside, "steps": steps}
        return {"model": self.model, "answers": self.answers(decisions), "usage": usage, "aspd": own}

    @abstractmethod
    def answers(self, decisions: Sequence[Decision]) -> Any:
        """Return the answers."""


class DecisionsRequest(Decisions):
    """Body of `POST /v1/decisions`."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    questions: Annotated[
        list[Annotated[Predicate | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]

    @model_validator(mode="after")
    def _calls_have_results(self) -> Self:
        check_results(*conversation(self.input), "call_id")
        return self

    def places(self) -> Iterator[tuple[str, Any]]:
        """Yield what `Decisions` describes."""
        yield from ((f"questions[{number}].{asked.listed}", asked) for number, asked in enumerate(self.questions))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return what `Decisions` describes."""
        return conversation(self.input)[0]

    def answers(self, decisions: Sequence[Decision]) -> list[dict[str, Any]]:
        """Return what `Decisions` describes."""
        return [asked.answer(decision) for asked, decision in zip(self.questions, decisions, strict=True)]


Json: TypeAlias = str | dict[str, Any] | list[Any]
KINDS: dict[str, Any] = {"noul": "predicate", "choice": "choice", "score": "score"}
DEFAULTS = {
    "noul": "Is this true of the input?",
    "choice": "Which choice best fits the input?",
    "score": "Which level best fits the input?",
}


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
    criteria: dict[str, Json | None] | list[Json] | None = None

    @property
    def question(self) -> Question:
        """Return the question."""
        lines, named = [_shown(self.instructions) or DEFAULTS[self.type]], self.criteria or {}
        options: tuple[Option, ...] = ()
        if isinstance(named, list) != (self.type == "score") and (named or self.type == "score"):
            raise RequestError(
                f"options: expected {'a list' if self.type == 'score' else 'an object'}, got another type"
            )
        if isinstance(named, list):
            options = tuple(Option(_shown(level)) for level in named)
        elif self.type == "choice":
            options = tuple(Option(name, _shown(text)) for name, text in named.items())
        elif set(named) - {"true", "false"}:
            raise RequestError("options: expected true and false, got others")
        else:
            words = {"true": "Yes", "false": "No"}
            lines += [f"Answer {words[name]} when: {_shown(text)}" for name, text in named.items() if text is not None]
        return Question(KINDS[self.type], "\n".join(lines), options)

    def answer(self, decision: Decision) -> dict[str, Any]:
        """Return the answer."""
        if self.type == "noul":
            return {"type": "noul", "noul": decision.probabilities[0]}
        names = list(self.criteria or ()) if self.type == "choice" else list(map(str, range(len(self.criteria or ()))))
        shares = {"probabilities": dict(zip(names, decision.probabilities, strict=True))}
        head = {"type": self.type, "confidence": decision.confidence}
        if self.type == "choice":
            return head | {"choice": names[decision.best]} | shares
        return head | {"score": decision.score, "legend": dict(zip(names, self.criteria or (), strict=True))} | shares


class SystemOneRequest(Decisions):
    """Body of `POST /v1/systemone`."""

    neutral: ClassVar = Decisions.neutral | {
        name: Neutral(([], {}), reason="only text is supported") for name in ("images", "assets", "audio", "videos")
    }
    state: Json
    questions: Annotated[dict[str, SystemOneQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]

    def places(self) -> Iterator[tuple[str, Any]]:
        """Yield what `Decisions` describes."""
        yield from ((f"questions.{name}.criteria", asked) for name, asked in self.questions.items())

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return what `Decisions` describes."""
        return [{"role": "user", "content": _shown(self.state)}]

    def answers(self, decisions: Sequence[Decision]) -> dict[str, Any]:
        """Return what `Decisions` describes."""
        pairs = zip(self.questions.items(), decisions, strict=True)
        return {name: asked.answer(decision) for (name, asked), decision in pairs}
