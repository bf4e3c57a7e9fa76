"""Sampling parameters, the mode, and a checked request.

`SamplingParams` declares every sampling parameter once. The options of `aspd generate`, the fields of HTTP requests,
the keys of the section `decoding` of an evaluation, the arrays on the device and the fields that the proxy forwards are
derived from `PARAMETERS`.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import cleandoc
from math import isfinite
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

from aspd_jax.errors import RequestError
from aspd_jax.fields import fields_template
from aspd_jax.json_schema import read_schema
from aspd_jax.layout import check_choice
from aspd_jax.template import Hole, Template

Mode = Literal["adaptive", "serial"]
ListMode = Literal["parallel", "serial"]  # how lists of models without tags are decoded in adaptive mode
Fields = Literal["serial", "parallel", "exact"]
Stream: TypeAlias = Literal["text", "branches"] | None
GRAMMARS = ("json_schema", "regex", "choices", "grammar")  # fields that constrain a whole answer
BESIDE_TEMPLATES = ("script", "min_tokens", "prediction")  # fields that a template excludes
MAX_TITLE_TOKENS = 24  # default of the engine, and limit of the proxy (protocol, section 5)
STRINGS, BIASES = tuple[str, ...], Mapping[Any, float]  # types of parameters that are no single value


class Bounds(NamedTuple):
    """Bounds of a number, by the names that `operator` and pydantic's `Field` give them; None: no bound."""

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
        is_finite = isinstance(value, int) or isfinite(value)
        return is_finite and all(getattr(operator, name)(value, limit) for name, limit in self.limits.items())

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
        help: meaning of a value, as help texts and the HTTP schema show it: its description in `SamplingParams`.
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

    help: str = ""
    bounds: Bounds = UNBOUNDED
    cli: Offer | None = OFFERED
    http: Offer | None = OFFERED
    yaml: Offer | None = OFFERED
    proxy: Forward | None = None
    device: bool = True
    name: str = ""
    kind: Any = None
    default: Any = None

    def named(self, name: str, kind: Any, default: Any, help: str) -> Parameter:
        """Return the declaration with the name, type, default and description of its field."""

        def filled(offer: Offer | None) -> Offer | None:
            if offer is None:
                return None
            bounds = self.bounds if offer.bounds == UNBOUNDED else offer.bounds
            return Offer(default if offer.default is ... else offer.default, bounds, offer.nullable)

        offers: dict[str, Any] = {interface: filled(getattr(self, interface)) for interface in ("cli", "http", "yaml")}
        return replace(self, name=name, kind=kind, default=default, help=help, **offers)

    def read(self, value: Any) -> Any:
        """Return a value of the parameter in the form in which `SamplingParams` keeps it.

        Raises:
            RequestError: it has another type, or is out of bounds; the message names the parameter.
        """
        if self.kind in (int, float):
            return self._number(self.name, value)
        if self.name in READERS:
            return READERS[self.name](self, value)
        if self.kind is str and not (isinstance(value, str) and value):
            raise self.refusal("a non-empty string", value)
        return value

    def strings(self, value: Any) -> tuple[str, ...]:
        """Return a list of strings; one string is a list of one."""
        texts = (value,) if isinstance(value, str) else value
        if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
            raise self.refusal("strings", value)
        texts = tuple(texts)
        if not all(isinstance(text, str) and text for text in texts):
            raise self.refusal("non-empty strings", value)
        return texts

    def biases(self, value: Any) -> dict[int, float]:
        """Return biases by token id; JSON has strings for ids."""
        if not isinstance(value, Mapping) or not all(str(key).isascii() and str(key).isdecimal() for key in value):
            raise self.refusal("numbers by token id", value)
        return {int(key): self._number(f"{self.name}[{key}]", bias, float) for key, bias in value.items()}

    def schema(self, value: Any) -> str:
        """Return a schema as text."""
        schema = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if isinstance(schema, Mapping):
                return json.dumps(dict(schema))
            problem = f"{type(value).__name__} instead of an object, text or a pydantic model"
        except (TypeError, ValueError) as error:
            problem = str(error)
        raise RequestError(f"{self.name}: expected a JSON schema, got: {problem}")

    def written(self, value: Any) -> Template:
        """Return a template that is given as text, or as the JSON form of one."""
        if isinstance(value, Template):
            return value
        if isinstance(value, str):
            return Template(value)
        try:
            parts = [Hole(**part) if isinstance(part, Mapping) else part for part in value["parts"]]
            return Template(parts, value["opening"])
        except (KeyError, TypeError):
            raise self.refusal("a text or a Template", value) from None

    def segments(self, value: Any) -> tuple[tuple[int, ...], ...]:
        """Return lists of token ids."""
        try:
            return tuple(tuple(int(token) for token in segment) for segment in value)
        except (TypeError, ValueError):
            raise self.refusal("lists of token ids", value) from None

    def choice(self, value: Any) -> Any:
        """Return a value of a literal type."""
        check_choice(self.name, value, self.kind)
        return value

    def refusal(self, expected: str, value: Any) -> RequestError:
        """Return the error of a value."""
        return RequestError(f"{self.name}: expected {expected}, got {value!r:.80}.")

    def _number(self, name: str, value: Any, kind: type | None = None) -> Any:
        """Return a number of Python for one of Python or NumPy; neither true nor, for an integer, 5.0 is one."""
        whole = (kind or self.kind) is int
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            raise RequestError(f"{name}: expected {'an integer' if whole else 'a number'}, got {value!r:.80}.")
        if not self.bounds.contain(number := int(value) if isinstance(value, Integral) else float(value)):
            raise RequestError(f"{name}: expected {self.bounds}, got {value!r}.")
        return number if whole else float(number)


# How values are read that are no numbers and not the strings of one field.
READERS: Mapping[str, Callable[[Parameter, Any], Any]] = {
    "stop": Parameter.strings,
    "choices": Parameter.strings,
    "logit_bias": Parameter.biases,
    "json_schema": Parameter.schema,
    "template": Parameter.written,
    "script": Parameter.segments,
    "fields": Parameter.choice,
}


def _parameter(default: Any, bounds: Bounds = UNBOUNDED, **details: Any) -> Any:
    """Return a dataclass field with the declaration of a parameter; for `details` see `Parameter`."""
    metadata = {"parameter": Parameter(bounds=bounds, **details)}
    if default == {}:
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def _library_parameter(default: Any, bounds: Bounds = UNBOUNDED) -> Any:
    """Return the field of a parameter for which interfaces have fields of their own, or none."""
    return _parameter(default, bounds, cli=None, http=None, yaml=None, device=False)


INT32 = 1 << 31
PENALTY = Bounds(ge=-2, le=2)
MAX_ALTERNATIVES = 20  # of log probabilities; computed for every request, so all answers of one length share a program


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, in serial segments and in branches alike (protocol, section 5).

    None means the default of any field. Instances are immutable and hashable; `dataclasses.replace` changes a field.

    Attributes:
        temperature: divisor of the logits; 0: greedy decoding.
        top_k: number of likeliest tokens to sample from; 0: all.
        top_p: sample from the likeliest tokens that together reach this probability; 1: all.
        min_p: minimum probability of a token, as a share of the likeliest token's; 0: none.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the visible plain text
            of the answer (for a title: in visible titles); 1: none.
        frequency_penalty: subtracted from the logit of a token for each occurrence in the visible text; 0: none.
        presence_penalty: subtracted once from the logit of a token that occurs in the visible text; 0: none.
        logit_bias: added to the logit of a token id, wherever the grammar permits the token.
        fork_bias: added to the logit of the tag that opens a block; positive: more answers fork.
        min_tokens: minimum tokens of plain text before the model may end the answer; branches may end earlier.
        max_new_tokens: maximum tokens of an answer, those of branches, tags and heads included.
        max_content_tokens: maximum tokens of the plain text, which clients see; None: no further bound; 0: no answer,
            for log probabilities of the prompt alone.
        max_branch_tokens: maximum tokens sampled in one branch, its closing tag included.
        stop: string before which the text of the answer ends.
        end_at_repeat: regular expression with a group: the answer ends after a JSON object that follows a match, if an
            equal object followed an earlier match with an equal group.
        seed: seed of the random streams; by default a random one.
        n: number of answers to a prompt, each with its own random streams (`Result.outputs`).
        logprobs: log probabilities of the tokens of the plain text (`Result.logprobs`), each with this number of the
            likeliest tokens in its place; None: none.
        json_schema: JSON schema (text, a mapping or a pydantic model) of the answer, which is one JSON value and does
            not fork.
        regex: regular expression (Rust's syntax) that the answer matches; it does not fork.
        choices: strings, one of which is the answer; it does not fork.
        grammar: grammar (Lark or GBNF) that the answer follows; it does not fork. An answer has at most one of
            `json_schema`, `regex`, `choices` and `grammar`.
        fields: how the fields of `json_schema` are decoded (protocol, section 5). `serial`: one after the other;
            `parallel`: side by side, without seeing each other; `exact`: side by side as a draft, which is then checked
            and corrected: the answer is that of `serial`.
        template: literal text with holes, which the model fills in parallel (`aspd_jax.Template`). With
            `fields="exact"`, these values are the draft of the text that is filled from left to right.
        prediction: text that the answer may have, as a source of draft tokens (protocol, section 5); the answer is that
            of serial mode.
        script: token ids to take in place of sampled ones: of the serial segment (titles and tags included), of the
            first branch, and so on; the same for every block. A segment is sampled after the end of its script. Steps
            run as usual, so both modes can be timed on equal content.
    """

    # An interface offers a field with this default and these bounds unless the field says otherwise; its help is the
    # description above. A new parameter takes a description, a field, an array of its name in `infer.decode.state` and
    # its effect in `infer.decode.sampling`.
    temperature: float = _parameter(
        0.0, Bounds(ge=0),
        http=Offer(1.0, Bounds(ge=0, le=2), nullable=True), proxy=Forward(("temperature",), always=True),
    )  # fmt: skip
    top_k: int = _parameter(0, Bounds(ge=0, lt=INT32), proxy=Forward(("top_k",)))
    top_p: float = _parameter(
        1.0, Bounds(ge=0, le=1), http=Offer(nullable=True), proxy=Forward(("top_p",), always=True)
    )
    min_p: float = _parameter(0.0, Bounds(ge=0, le=1), proxy=Forward(("min_p",)))
    repetition_penalty: float = _parameter(
        1.0, Bounds(ge=0.01, le=100), http=Offer(bounds=Bounds(ge=0.01, le=10)),
        proxy=Forward(("repetition_penalty", "repeat_penalty")),  # vLLM's name, and llama.cpp's
    )  # fmt: skip
    frequency_penalty: float = _parameter(0.0, PENALTY)
    presence_penalty: float = _parameter(0.0, PENALTY)
    logit_bias: Mapping[Any, float] = _parameter({}, Bounds(ge=-100, le=100), yaml=None, device=False)
    fork_bias: float = _parameter(0.0, Bounds(ge=-100, le=100), device=False)
    min_tokens: int = _parameter(0, Bounds(ge=0, lt=INT32))
    max_new_tokens: int = _parameter(256, Bounds(ge=1), cli=Offer(512), http=None, yaml=Offer(1024), device=False)
    max_content_tokens: int | None = _library_parameter(None, Bounds(ge=0, lt=INT32))
    max_branch_tokens: int = _parameter(1024, Bounds(ge=1, lt=1 << 24), http=None)
    stop: tuple[str, ...] = _parameter((), http=Offer(None), yaml=None, proxy=Forward(), device=False)
    end_at_repeat: str | None = _library_parameter(None)
    seed: int | None = _parameter(
        None, Bounds(ge=0, lt=1 << 32),
        http=Offer(bounds=Bounds(ge=-(1 << 63), lt=1 << 63)), yaml=Offer(0), proxy=Forward(("seed",)), device=False,
    )  # fmt: skip
    n: int = _library_parameter(1, Bounds(ge=1))
    logprobs: int | None = _library_parameter(None, Bounds(ge=0, le=MAX_ALTERNATIVES))
    json_schema: str | Mapping[str, Any] | type | None = _library_parameter(None)
    regex: str | None = _library_parameter(None)
    choices: Sequence[str] = _library_parameter(())
    grammar: str | None = _library_parameter(None)
    fields: Fields = _library_parameter("serial")
    template: Template | str | None = _library_parameter(None)
    prediction: str | None = _library_parameter(None)
    script: Sequence[Sequence[int]] = _library_parameter(())

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, copy(parameter.default) if value is None else parameter.read(value))
        limit = self.max_new_tokens if self.max_content_tokens is None else self.max_content_tokens
        if self.min_tokens > limit:
            raise RequestError(f"min_tokens: expected 0 to the limit of the answer, {limit}, got {self.min_tokens}.")
        drafted = self.fields == "exact" and self.template is not None
        exclusive = [name for name in (*GRAMMARS, "template") if not (drafted and name == "grammar")]
        if len(named := [name for name in exclusive if getattr(self, name)]) > 1:
            raise RequestError(f"{' and '.join(named)}: expected one of them, got {len(named)}")
        if self.fields != "serial" and self.json_schema is None and not drafted:
            raise RequestError(f"json_schema: expected a schema for fields={self.fields!r}, got none.")
        beside = (name for name in BESIDE_TEMPLATES if getattr(self, name) != PARAMETERS[name].default)
        if self.known_text is not None and (name := next(beside, "")):
            raise RequestError(f"{name}: expected none with a template or parallel fields, got one")

    @cached_property
    def known_text(self) -> Template | None:
        """Return the template of the answer: `template`, or that of parallel fields; None: there is none."""
        return self._template if self.fields != "exact" else None

    @property
    def draft_template(self) -> Template | None:
        """Return the template of the draft of exact fields; None: there is none."""
        return self._template if self.fields == "exact" else None

    @cached_property
    def _template(self) -> Template | None:
        if self.fields != "serial" and isinstance(self.json_schema, str):
            try:
                schema = read_schema(self.json_schema).schema
            except RequestError as error:
                raise RequestError(f"json_schema: {error}") from None
            return fields_template(schema)
        return self.template if isinstance(self.template, Template) else None

    @cached_property
    def answer_grammar(self) -> tuple[str, str] | None:
        """Return the name of the field that constrains the whole answer, and its grammar; None: there is none.

        A template constrains an answer that is filled exactly, by its serial form.

        The grammar of `choices` is a regular expression, which llguidance turns into an automaton. As alternatives of a
        grammar, a step would cost time for each, and 2,000 would be the limit.
        """
        for name in GRAMMARS:
            if value := getattr(self, name):
                return name, "|".join(map(re.escape, value)) if name == "choices" else value
        return ("template", self._template.grammar) if self.fields == "exact" and self._template is not None else None

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
    """Return the declarations in the fields of `SamplingParams`, with their names, types, defaults and descriptions."""
    hints, parameters, descriptions = get_type_hints(SamplingParams), {}, _descriptions()
    for item in fields(SamplingParams):
        kinds = [kind for kind in get_args(hints[item.name]) if kind is not NoneType]
        kind = kinds[0] if NoneType in get_args(hints[item.name]) and len(kinds) == 1 else hints[item.name]
        default = {} if item.default_factory is dict else item.default
        declared: Parameter = item.metadata["parameter"]
        parameters[item.name] = declared.named(item.name, kind, default, descriptions.get(item.name, ""))
    return parameters


def _descriptions() -> dict[str, str]:
    """Return the descriptions of the attributes of `SamplingParams`, without the full stop, by name."""
    attributes = cleandoc(SamplingParams.__doc__ or "").partition("Attributes:\n")[2]
    items = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in items}


PARAMETERS: Mapping[str, Parameter] = _declared_parameters()


class ScoredBranch(NamedTuple):
    """A branch of known tokens, and next tokens whose log probabilities are read in it (protocol, section 5).

    Attributes:
        tokens: token ids of the branch.
        places: indices of tokens of the branch, ascending, after which a log probability is read.
        ids: token id that is read at each of them.
    """

    tokens: tuple[int, ...]
    places: tuple[int, ...]
    ids: tuple[int, ...]


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
        messages: texts of the messages of the prompt, the last of which the answer is for.
        lists: whether lists of the answer are decoded in parallel (adaptive mode of a model without tags).
        drafts: whether a draft of the answer is decoded in parallel, and then checked (exact fields).
        scored: branches whose log probabilities are the answer, instead of text.
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
    messages: tuple[str, ...] = ()
    lists: bool = False
    drafts: bool = False
    scored: tuple[ScoredBranch, ...] = ()

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, Mode)

    @property
    def content_budget(self) -> int:
        """Return the maximum tokens of the plain text of the answer."""
        return self.params.max_content_tokens or self.budget

    @property
    def template(self) -> Template | None:
        """Return the template of the answer; None: the model writes all of it."""
        return self.params.known_text

    @property
    def draft(self) -> Template | None:
        """Return the template of the draft of the answer; None: there is none."""
        return self.params.draft_template if self.drafts else None

    @property
    def untagged(self) -> bool:
        """Return whether no tags mark the blocks of the answer."""
        return self.template is not None or self.lists

    @property
    def ends_by_text(self) -> bool:
        """Return whether the answer may end where its text holds a stop string or repeats an object."""
        return bool(self.params.stop or self.params.end_at_repeat)
