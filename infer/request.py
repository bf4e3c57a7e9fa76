"""Sampling parameters, the mode, and a checked request.

`SamplingParams` declares every sampling parameter once. The options of `aspd generate`, the fields of HTTP requests,
the keys of the section `decoding` of an evaluation, the arrays on the device and the fields that the proxy forwards are
derived from `PARAMETERS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import isfinite
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

from aspd_jax.errors import RequestError
from aspd_jax.fields import fields_template
from aspd_jax.layout import check_choice
from aspd_jax.template import Hole, Template

Mode = Literal["adaptive", "serial"]
Fields = Literal["serial", "parallel"]
Stream: TypeAlias = Literal["text", "branches"] | None
GRAMMARS = ("json_schema", "regex", "choices", "grammar")  # fields that constrain a whole answer
BESIDE_TEMPLATES = ("script", "branch_schema", "min_tokens")  # fields that a template excludes
MAX_TITLE_TOKENS = 24  # default of the engine, and limit of the proxy (protocol, section 5)
STRINGS, BIASES = tuple[str, ...], Mapping[Any, float]  # types of parameters that are no single value


class Bounds(NamedTuple):
    """Bounds of a number, by the names that pydantic's `Field` gives them; None: no bound."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """Return the bounds that are set, by name."""
        return {name: limit for name, limit in self._asdict().items() if limit is not None}

    def contain(self, value: float) -> bool:
        """Return whether a number is finite and within the bounds."""
        return (
            (isinstance(value, int) or isfinite(value))
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        highest = self.lt - 1 if self.lt is not None else self.le  # only integers have `lt`
        if self.gt is not None:
            return f"above {self.gt}" + ("" if highest is None else f" and at most {highest}")
        return f"{self.ge} or more" if highest is None else f"between {self.ge} and {highest}"


UNBOUNDED = Bounds()


class PromptTooLong(RequestError):
    """Error of a prompt that leaves no tokens of `max_length` for an answer."""


class Offer(NamedTuple):
    """Default and bounds of a parameter in one interface.

    Attributes:
        default: value where the interface gets none; `...` in a declaration: the default of `SamplingParams`.
        bounds: bounds of the interface; `UNBOUNDED` in a declaration: those of `SamplingParams`.
        nullable: the HTTP schema documents null, which means the default.
    """

    default: Any = ...
    bounds: Bounds = UNBOUNDED
    nullable: bool = False


OFFERED = Offer()


class Forward(NamedTuple):
    """Fields of an upstream's request that carry a parameter.

    Attributes:
        names: fields of the upstream's request that get the value; none where the proxy applies the parameter itself.
        always: send the default, too, because servers have defaults of their own.
    """

    names: tuple[str, ...] = ()
    always: bool = False


@dataclass(frozen=True)
class Parameter:
    """Declaration of a sampling parameter.

    Attributes:
        help: meaning of a value, as help texts and the HTTP schema show it.
        bounds: bounds of a number, or of each value of a mapping.
        cli: option of `aspd generate`; None: there is none.
        http: field of HTTP requests; None: there is none of this name.
        yaml: key of the section `decoding`; None: there is none.
        proxy: None: the proxy refuses values other than the default.
        device: the engine keeps the value of every row in an array of this name (`infer.decode.state`).
        name: name of the field of `SamplingParams`.
        kind: type of a value: `int`, `float`, `str`, `STRINGS`, `BIASES` or another.
        default: default of `SamplingParams`.
    """

    help: str
    bounds: Bounds = UNBOUNDED
    cli: Offer | None = OFFERED
    http: Offer | None = OFFERED
    yaml: Offer | None = OFFERED
    proxy: Forward | None = None
    device: bool = True
    name: str = ""
    kind: Any = None
    default: Any = None

    def named(self, name: str, kind: Any, default: Any) -> Parameter:
        """Return the declaration with the name, type and default of its field."""

        def filled(offer: Offer | None) -> Offer | None:
            if offer is None:
                return None
            bounds = self.bounds if offer.bounds == UNBOUNDED else offer.bounds
            return Offer(default if offer.default is ... else offer.default, bounds, offer.nullable)

        offers: dict[str, Any] = {interface: filled(getattr(self, interface)) for interface in ("cli", "http", "yaml")}
        return replace(self, name=name, kind=kind, default=default, **offers)

    def check(self, value: Any) -> None:
        """Check a value of the parameter against its bounds; strings must not be empty.

        Raises:
            RequestError: it is out of bounds; the message names the parameter.
        """
        if self.kind in (STRINGS, Sequence[str]):
            if not all(isinstance(text, str) and text for text in value):
                raise RequestError(f"{self.name}: expected non-empty strings, got {value!r}.")
        elif self.kind is str:
            if value == "":
                raise RequestError(f"{self.name}: expected a non-empty string, got {value!r}.")
        elif self.kind == BIASES:
            for token, bias in value.items():
                self._check_number(f"{self.name}[{token}]", bias)
        elif self.kind in (int, float) and value is not None:
            self._check_number(self.name, value)

    def _check_number(self, name: str, value: float) -> None:
        if not self.bounds.contain(value):
            raise RequestError(f"{name}: expected {self.bounds}, got {value!r}.")


def _parameter(default: Any, help: str, bounds: Bounds = UNBOUNDED, **details: Any) -> Any:
    """Return a dataclass field with the declaration of a parameter; for `details` see `Parameter`."""
    metadata = {"parameter": Parameter(help, bounds, **details)}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def _library_parameter(default: Any, help: str, bounds: Bounds = UNBOUNDED) -> Any:
    """Return the field of a parameter for which interfaces have fields of their own, or none."""
    return _parameter(default, help, bounds, cli=None, http=None, yaml=None, device=False)


INT32 = 1 << 31
PENALTY = Bounds(ge=-2, le=2)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, in serial segments and in branches alike (protocol, section 5).

    The first argument of a field is its default, the second its meaning. An interface offers a field with this default
    and these bounds unless the field says otherwise. A new parameter takes a field here, an array of its name in
    `infer.decode.state` and its effect in `infer.decode.sampling`.
    """

    temperature: float = _parameter(
        0.0, "divisor of the logits; 0: greedy decoding", Bounds(ge=0),
        http=Offer(1.0, Bounds(ge=0, le=2), nullable=True), proxy=Forward(("temperature",), always=True),
    )  # fmt: skip
    top_k: int = _parameter(
        0, "number of likeliest tokens to sample from; 0: all", Bounds(ge=0, lt=INT32), proxy=Forward(("top_k",))
    )
    top_p: float = _parameter(
        1.0, "sample from the likeliest tokens that together reach this probability; 1: all", Bounds(gt=0, le=1),
        http=Offer(nullable=True), proxy=Forward(("top_p",), always=True),
    )  # fmt: skip
    min_p: float = _parameter(
        0.0, "minimum probability of a token, as a share of the likeliest token's; 0: none", Bounds(ge=0, le=1),
        proxy=Forward(("min_p",)),
    )  # fmt: skip
    repetition_penalty: float = _parameter(
        1.0, "divides positive logits, and multiplies negative ones, of tokens in the visible plain text of the answer "
        "(for a title: in visible titles); 1: none", Bounds(gt=0),
        http=Offer(bounds=Bounds(gt=0, le=10)),
        proxy=Forward(("repetition_penalty", "repeat_penalty")),  # vLLM's name, and llama.cpp's
    )  # fmt: skip
    frequency_penalty: float = _parameter(
        0.0, "subtracted from the logit of a token for each occurrence in the visible text; 0: none", PENALTY
    )
    presence_penalty: float = _parameter(
        0.0, "subtracted once from the logit of a token that occurs in the visible text; 0: none", PENALTY
    )
    logit_bias: Mapping[Any, float] = _parameter(
        {}, "added to the logit of a token id, wherever the grammar permits the token", Bounds(ge=-100, le=100),
        yaml=None, device=False,
    )  # fmt: skip
    fork_bias: float = _parameter(
        0.0, "added to the logit of the tag that opens a block; positive: more answers fork", Bounds(ge=-100, le=100),
        device=False,
    )  # fmt: skip
    min_tokens: int = _parameter(
        0, "minimum tokens of plain text before the model may end the answer; branches may end earlier",
        Bounds(ge=0, lt=INT32),
    )  # fmt: skip
    max_new_tokens: int = _parameter(
        256, "maximum tokens of an answer, those of branches, tags and heads included", Bounds(ge=1),
        cli=Offer(512), http=None, yaml=Offer(1024), device=False,
    )  # fmt: skip
    max_content_tokens: int | None = _library_parameter(
        None, "maximum tokens of the plain text, which clients see; None: no further bound; 0: no answer, for log "
        "probabilities of the prompt alone", Bounds(ge=0),
    )  # fmt: skip
    max_branch_tokens: int = _parameter(
        1024, "maximum tokens sampled in one branch, its closing tag included", Bounds(ge=1, lt=1 << 24), http=None
    )
    stop: tuple[str, ...] = _parameter(
        (), "string before which the text of the answer ends",
        http=Offer(None), yaml=None, proxy=Forward(), device=False,
    )  # fmt: skip
    end_at_repeat: str | None = _library_parameter(
        None, "regular expression with a group: the answer ends after a JSON object that follows a match, if an equal "
        "object followed an earlier match with an equal group",
    )  # fmt: skip
    seed: int | None = _parameter(
        None, "seed of the random streams; by default a random one", Bounds(ge=0, lt=1 << 32),
        http=Offer(bounds=Bounds(ge=-(1 << 63), lt=1 << 63)), yaml=Offer(0), proxy=Forward(("seed",)), device=False,
    )  # fmt: skip
    json_schema: str | Mapping[str, Any] | None = _library_parameter(
        None, "JSON schema (text or a mapping) of the answer, which is one JSON value and does not fork"
    )
    regex: str | None = _library_parameter(
        None, "regular expression (Rust's syntax) that the answer matches; it does not fork"
    )
    choices: Sequence[str] = _library_parameter((), "strings, one of which is the answer; it does not fork")
    grammar: str | None = _library_parameter(
        None, "grammar (Lark or GBNF) that the answer follows; it does not fork. An answer has at most one of "
        "`json_schema`, `regex`, `choices` and `grammar`",
    )  # fmt: skip
    fields: Fields = _library_parameter(
        "serial", "`parallel`: decode the fields of `json_schema` in parallel (protocol, section 5)"
    )
    template: Template | str | None = _library_parameter(
        None, "literal text with holes, which the model fills in parallel (`aspd_jax.Template`)"
    )
    branch_schema: str | Mapping[str, Any] | None = _library_parameter(
        None, "JSON schema of the text of every branch, which is one JSON value"
    )
    script: Sequence[Sequence[int]] = _library_parameter(
        (), "token ids to take in place of sampled ones: of the serial segment (titles and tags included), of the "
        "first branch, and so on; the same for every block. A segment is sampled after the end of its script. Steps "
        "run as usual, so both modes can be timed on equal content",
    )  # fmt: skip

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for name, value in (
            ("json_schema", _schema_text("json_schema", self.json_schema)),
            ("branch_schema", _schema_text("branch_schema", self.branch_schema)),
            ("stop", stop),
            ("script", tuple(map(tuple, self.script))),
            ("choices", tuple(self.choices)),
            ("logit_bias", _read_biases(self.logit_bias)),
            ("template", _read_template(self.template)),
        ):
            object.__setattr__(self, name, value)
        for parameter in PARAMETERS.values():
            parameter.check(getattr(self, parameter.name))
        limit = self.max_new_tokens if self.max_content_tokens is None else self.max_content_tokens
        if self.min_tokens > limit:
            raise RequestError(f"min_tokens: expected 0 to the limit of the answer, {limit}, got {self.min_tokens}.")
        if len(named := [name for name in (*GRAMMARS, "template") if getattr(self, name)]) > 1:
            raise RequestError(f"{' and '.join(named)}: expected one of them, got {len(named)}")
        check_choice("fields", self.fields, Fields)
        if self.fields == "parallel" and self.json_schema is None:
            raise RequestError("json_schema: expected a schema for fields='parallel', got none.")
        if self.known_text is not None and (beside := [name for name in BESIDE_TEMPLATES if getattr(self, name)]):
            raise RequestError(f"{beside[0]}: expected none with a template or parallel fields, got one")

    @cached_property
    def known_text(self) -> Template | None:
        """Return the template of the answer: `template`, or that of parallel fields; None: there is none."""
        if self.fields == "parallel" and self.json_schema is not None:
            return fields_template(self.json_schema)
        return self.template if isinstance(self.template, Template) else None

    @cached_property
    def answer_grammar(self) -> tuple[str, str] | None:
        """Return the name of the field that constrains the whole answer, and its grammar; None: there is none.

        The grammar of `choices` is a regular expression, which llguidance turns into an automaton. As alternatives of a
        grammar, a step would cost time for each, and 2,000 would be the limit.
        """
        for name in GRAMMARS:
            if value := getattr(self, name):
                return name, "|".join(map(re.escape, value)) if name == "choices" else value
        return None

    def biases(self, title_start: int) -> dict[int, float]:
        """Return the numbers to add to the logits of token ids, `fork_bias` for `title_start` included."""
        if not self.fork_bias:
            return dict(self.logit_bias)
        return {**self.logit_bias, title_start: self.logit_bias.get(title_start, 0.0) + self.fork_bias}

    def saying(self, tokens: Sequence[int]) -> SamplingParams:
        """Return these parameters for an answer in serial mode that consists of `tokens`, the end included."""
        budget = max(1, min(len(tokens), self.max_new_tokens))
        return replace(self, script=(tokens,), max_new_tokens=budget, stop=())


def _declared_parameters() -> dict[str, Parameter]:
    """Return the declarations in the fields of `SamplingParams`, with their names, types and defaults."""
    hints, parameters = get_type_hints(SamplingParams), {}
    for item in fields(SamplingParams):
        kinds = [kind for kind in get_args(hints[item.name]) if kind is not NoneType]
        kind = kinds[0] if NoneType in get_args(hints[item.name]) and len(kinds) == 1 else hints[item.name]
        default = {} if item.default_factory is dict else item.default
        parameters[item.name] = item.metadata["parameter"].named(item.name, kind, default)
    return parameters


PARAMETERS: Mapping[str, Parameter] = _declared_parameters()
_attributes = "\n".join(f"        {name}: {parameter.help}." for name, parameter in PARAMETERS.items())
SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n    Attributes:\n{_attributes}\n"


def _read_biases(biases: Mapping[Any, Any]) -> dict[int, float]:
    """Return biases by token id; JSON has strings for ids."""
    try:
        given = dict(biases)
        if not all(str(token).isascii() and str(token).isdecimal() for token in given):
            raise ValueError
        return {int(token): float(bias) for token, bias in given.items()}
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias: expected numbers by token id, got {biases!r}") from None


def _read_template(template: Any) -> Template | None:
    """Return a template that is given as text, or as the JSON form of one."""
    if template is None or isinstance(template, Template):
        return template
    if isinstance(template, str):
        return Template(template)
    try:
        parts = [Hole(**part) if isinstance(part, Mapping) else part for part in template["parts"]]
        return Template(parts, template["opening"])
    except (KeyError, TypeError):
        raise RequestError(f"template: expected a text or a Template, got {template!r:.80}") from None


def _schema_text(name: str, schema: str | Mapping[str, Any] | None) -> str | None:
    """Return a schema as text."""
    if schema is None:
        return None
    try:
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(value, dict):
            raise ValueError(f"{type(value).__name__} instead of an object")
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}: expected a JSON schema, got: {error}") from None


@dataclass(frozen=True)
class Request:
    """A checked request; the form that all parts of the host share, from HTTP to the scheduler and other processes.

    Attributes:
        prompt: token ids of the prompt, at least one.
        params: sampling parameters.
        mode: decoding mode.
        budget: maximum tokens of the answer, bounded by `max_new_tokens` and by the capacity of the cache.
        seed: seed of the random streams.
        adapter: number of an adapter (`infer.scheduling.adapter_slots`); 0: the base model.
        stream: form of the events while the answer grows: `text`: in reading order; `branches`: all branches as they
            grow; None: events at the end only.
        max_steps: maximum steps of a chunk, when the owner iterates over the events; None: no limit.
        alternatives: number of likeliest tokens that log probabilities come with; None: no log probabilities.
        echo: log probabilities include those of the prompt.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    mode: Mode
    budget: int
    seed: int
    adapter: int = 0
    stream: Stream = None
    max_steps: int | None = None
    alternatives: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, Mode)

    @property
    def template(self) -> Template | None:
        """Return the template of the answer; None: the model writes all of it."""
        return self.params.known_text

    @property
    def constrained(self) -> bool:
        """Return whether a schema, another grammar or a template restricts its tokens."""
        return bool(self.params.answer_grammar or self.params.branch_schema or self.template)

    @property
    def ends_by_text(self) -> bool:
        """Return whether the answer may end where its text holds a stop string or repeats an object."""
        return bool(self.params.stop or self.params.end_at_repeat)

    @property
    def stepwise(self) -> bool:
        """Return whether the host has to read the tokens of every step: it finds ends and follows schemas."""
        return self.ends_by_text or self.constrained
