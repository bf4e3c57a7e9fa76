"""What is asked of the engine: sampling parameters, mode, and a checked request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

from aspd_jax.errors import RequestError
from aspd_jax.layout import check_choice

Mode = Literal["adaptive", "serial"]
GRAMMARS = ("json_schema", "regex", "choices", "grammar")  # fields that constrain a whole answer


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, in serial segments and in branches alike (protocol, section 5).

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability; 1 keeps all.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        repetition_penalty: over what a segment can see of the answer's plain text, a title of its titles; 1 is none.
        frequency_penalty: subtracted from the logit of a token for each occurrence in the same text; 0 is none.
        presence_penalty: subtracted once from the logit of a token that occurs in it; 0 is none.
        logit_bias: added to the logits of token ids, wherever they are sampled, -100 to 100; the grammar comes first.
        min_tokens: minimum tokens of the plain text before the model may end the answer; branches may end earlier.
        max_new_tokens: bound on all tokens of the answer: of all branches, tags and heads included.
        max_content_tokens: bound on the tokens of the plain text, which is what a client sees. None: no further bound;
            0: no answer, for log probabilities of the prompt alone.
        max_branch_tokens: bound on the tokens sampled in one branch, its closing tag included.
        stop: strings that end the segment they appear in: a branch, or in a serial segment the answer.
        seed: of the random streams; None draws one.
        json_schema: the answer is one JSON value of this schema (text or a mapping), and does not fork.
        regex, choices, grammar: the answer matches this regular expression (Rust's syntax), is one of these strings, or
            follows this grammar (Lark or GBNF), and does not fork. At most one of these and `json_schema`.
        branch_schema: the text of every branch is one JSON value of this schema.
        script: token ids to take in place of sampled ones: of the serial segment (titles and tags included), of the
            first branch, and so on; every block has the same. A segment that has no more of them is sampled. Passes are
            those of any answer: so two ways to decode one content are compared.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[Any, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_new_tokens: int = 256
    max_content_tokens: int | None = None
    max_branch_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choices: Sequence[str] = ()
    grammar: str | None = None
    branch_schema: str | Mapping[str, Any] | None = None
    script: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        for name in ("json_schema", "branch_schema"):
            object.__setattr__(self, name, _spelled(name, getattr(self, name)))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "script", tuple(tuple(segment) for segment in self.script))
        object.__setattr__(self, "choices", tuple(self.choices))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        most = self.max_new_tokens if self.max_content_tokens is None else self.max_content_tokens
        for name, good, right in (
            ("temperature", isfinite(self.temperature) and self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("min_tokens", 0 <= self.min_tokens <= most, f"between 0 and the limit of the answer, {most}"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("max_content_tokens", self.max_content_tokens is None or self.max_content_tokens >= 0, "at least 0"),
            ("max_branch_tokens", 1 <= self.max_branch_tokens < 1 << 24, "at least 1"),
            ("regex", self.regex != "", "a regular expression"),
            ("grammar", self.grammar != "", "a Lark or GBNF grammar"),
            ("choices", all(isinstance(text, str) and text for text in self.choices), "non-empty strings"),
            ("stop", all(isinstance(text, str) and text for text in stop), "non-empty strings"),
            ("seed", self.seed is None or 0 <= self.seed < 1 << 32, "between 0 and 2^32 - 1"),
        ):
            if not good:
                raise RequestError(f"{name} must be {right}, got {getattr(self, name)!r}")
        if len(named := [name for name in GRAMMARS if getattr(self, name)]) > 1:
            raise RequestError(f"{' and '.join(named)}: expected one of them, got {len(named)}")

    @property
    def answer_grammar(self) -> tuple[str, str] | None:
        """The field that constrains the whole answer, and its value as text."""
        for name in GRAMMARS:
            if value := getattr(self, name):
                return name, json.dumps(value) if name == "choices" else value
        return None

    def saying(self, tokens: Sequence[int]) -> SamplingParams:
        """The same for an answer in serial mode that has these tokens, and ends with them."""
        budget = max(1, min(len(tokens), self.max_new_tokens))
        return replace(self, script=(tokens,), max_new_tokens=budget, stop=())


def _biases(given: Mapping[Any, Any]) -> dict[int, float]:
    """Biases by token id; JSON has strings for ids."""
    try:
        biases = {int(token): float(bias) for token, bias in dict(given).items()}
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias: expected numbers by token id, got {given!r}") from None
    for token, bias in biases.items():
        if not -100 <= bias <= 100:
            raise RequestError(f"logit_bias: expected -100 to 100, got {bias:g} for token {token}")
    return biases


def _spelled(name: str, schema: str | Mapping[str, Any] | None) -> str | None:
    """A schema as text."""
    if schema is None:
        return None
    try:
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(value, dict):
            raise ValueError("a schema is a JSON object")
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} must be a JSON schema: {error}") from None


@dataclass(frozen=True)
class Job:
    """A request that was checked.

    Attributes:
        prompt: token ids, at least one.
        budget: tokens the answer may have, within `max_new_tokens` and what the cache has room for.
        seed: of its random streams.
        adapter: number of an adapter (`infer.scheduling.adapter_slots`); 0: none.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    mode: Mode
    budget: int
    seed: int
    adapter: int = 0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, Mode)

    @property
    def constrained(self) -> bool:
        """Return whether a schema or another grammar restricts its tokens."""
        return bool(self.params.answer_grammar or self.params.branch_schema)
