"""Tool calls of an answer: the grammar that the answer follows, and the calls that its text holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from aspd_jax.errors import RequestError
from aspd_jax.fields import fields_template
from aspd_jax.json_schema import ReadSchema, json_rule, read_schema
from aspd_jax.template import Template
from aspd_jax.tokens import TextCodec
from aspd_jax.tool_format import ID, ToolFormat
from infer.answers.stop import canonical, undecided
from infer.request import Fields, SamplingParams

ID_CHARACTERS, MAX_ID = "A-Za-z0-9_-", 64  # pattern of call ids in the model's text; responses have other ids
# White space after a call, and inside of bare calls. With more, a small model may never stop repeating it.
AFTER, INDENTATION = r"\s{0,4}", r"\s{0,16}"
FENCE = "```[a-z]{0,12}"  # beginning of a code block
KEYS = '"(arguments|parameters)"'  # of a bare call
# Keywords next to which a schema must not be closed, because they may name further properties.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if"}


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: name of the function.
        description: description for the model; empty: none.
        parameters: JSON schema of its arguments; null means the default of a keyword.
        strict: refuse what grammars do not support in the schema; it is ignored otherwise (`aspd_jax.json_schema`).
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def __post_init__(self) -> None:
        given = {key: value for key, value in self.parameters.items() if value is not None}
        object.__setattr__(self, "parameters", {"type": "object", "properties": {}} | given)

    @property
    def tool(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema that arguments follow.

        Arguments have only the properties that the schema names, unless it says otherwise.
        """
        schema = dict(self.parameters)
        properties = schema["properties"] if not _OPEN & set(schema) else None
        required = schema.get("required", [])
        if isinstance(properties, dict) and isinstance(required, list) and set(map(str, required)) <= set(properties):
            schema["additionalProperties"] = False
        return schema

    @cached_property
    def arguments(self) -> ReadSchema:
        """Return the schema of arguments as grammars take it.

        Raises:
            RequestError: it is malformed, or a keyword is not supported and `strict` is set.
        """
        return read_schema(self.schema, approximate=not self.strict)


class ToolChoice(NamedTuple):
    """Calls that an answer may or must have.

    Attributes:
        mode: `auto`: text or calls; `required`: calls.
        name: the only function that is called; empty: any.
        parallel: whether an answer may have several calls.
    """

    mode: Literal["auto", "required"] = "auto"
    name: str = ""
    parallel: bool = True


class CallText:
    """Format of calls as the text of an answer shows it.

    Calls without the tags of the format are *bare*: the answer begins with a JSON object that has the name of a known
    function and its arguments, possibly in a code block.

    Args:
        form: format of the model.
        codec: codec of the model's tokenizer.
        bare: names of the functions that bare calls may have; none where the answer may be another JSON value.

    Attributes:
        begin, middle: see `ToolFormat`, without special tokens, which are no part of the text.
        between: pattern of the text between two calls; None: an answer has one call.
        trigger: text that begins a call wherever it occurs; empty: calls stand at the beginning of an answer.
        bare: pattern of the text up to the arguments of a bare call at the beginning of an answer; None: there is none.
        next_bare: pattern of the text between the arguments of a bare call and those of the next.

    Raises:
        RequestError: the text of an answer does not show where a call begins.
    """

    def __init__(self, form: ToolFormat, codec: TextCodec, bare: Sequence[str] = ()) -> None:
        def visible(text: str) -> str:
            return codec.special.sub("", text)

        self.begin, self.middle = visible(form.begin).lstrip(), visible(form.middle)
        self.between: re.Pattern[str] | None = None
        if form.between is not None:
            parts = [visible(form.end), self.begin] if form.separate else [visible(form.between)]
            texts = (f"[{ID_CHARACTERS}]+".join(map(re.escape, part.split(ID))) for part in parts)
            self.between = re.compile(r"\s*".join(texts))
        hides = self.begin != form.begin.lstrip()
        self.trigger = "" if hides else re.split(r"[\[{]", self.begin, maxsplit=1)[0].rstrip()
        if not self.middle or (hides and not self.begin.startswith(("{", "["))):
            raise RequestError(
                "tools: expected a model that writes calls as text, got one that marks them by special tokens alone. "
                "Use another chat_template."
            )
        names = bare if self.trigger else ()  # without a trigger, the format itself is JSON at the beginning
        self._heads = tuple(f'{{"name":"{name}","{key}":' for name in names for key in ("arguments", "parameters"))
        head = rf'(?P<name>{_either(names)})"{_KEY}'
        self.bare = re.compile(_FIRST + head) if names else None
        self.next_bare = re.compile(rf"\s*\}}{_NEXT}{head}") if names else None

    def may_be_bare(self, text: str) -> bool:
        """Return whether an answer that begins with this text may begin with a bare call."""
        words = re.sub(r"\s+", "", text)
        if self.bare is None or re.fullmatch(rf"`{{0,2}}|{FENCE}", words):
            return self.bare is not None
        rest = re.sub(rf"^(?:{FENCE})?\[?", "", words)
        return any(head.startswith(rest) or rest.startswith(head) for head in self._heads)


# Parts of a bare call in the syntax that Python and Rust share: text up to the name of the first call of an answer,
# text from the brace that closes a call to the next name, and text from a name to its arguments.
_NAME = rf'{INDENTATION}\{{{INDENTATION}"name"\s?:\s?"'
_FIRST = rf"{INDENTATION}(?:{FENCE})?{INDENTATION}\[?{_NAME}"
_NEXT, _KEY = rf"{INDENTATION},?{_NAME}", rf"\s?,{INDENTATION}{KEYS}\s?:"


class ToolCalls:
    """The calls that an answer may have.

    Args:
        functions: functions of the request.
        choice: which of them are called.
        form: format of the model.
        codec: codec of the model's tokenizer.
        schema: JSON schema of an answer without calls; None: any text.

    Raises:
        RequestError: the format cannot be read from text, or calls cannot be told from answers of the schema.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        choice: ToolChoice,
        form: ToolFormat,
        codec: TextCodec,
        schema: str | Mapping[str, Any] | None = None,
    ) -> None:
        self.functions, self.choice = functions, choice
        self._form, self._codec, self._schema = form, codec, schema
        bare = choice.mode == "auto" and schema is None
        self.text = CallText(form, codec, [function.name for function in functions] if bare else ())
        if schema is not None and choice.mode == "auto" and not self.text.trigger and form.begin.startswith("{"):
            raise RequestError(
                "tools: expected tool_choice: required or none beside response_format, got auto, because this model "
                "writes calls as bare JSON, like the answer"
            )
        if schema is not None:  # a tag in the answer is text of a string
            self.text.trigger = ""

    def reader(self) -> CallReader:
        """Return a reader of one answer."""
        return CallReader(self.text)

    def params(self, params: SamplingParams, fields: Fields) -> SamplingParams:
        """Return the sampling parameters of an answer.

        Args:
            params: parameters of the request.
            fields: how arguments are decoded; serially, if they are not divisible (`template`).
        """
        params = replace(params, json_schema=None, fields="serial")
        template = None if fields == "serial" else self.template
        if fields == "parallel" and template is not None:
            return replace(params, template=template)
        params = replace(params, grammar=self.grammar, end_at_repeat=self.repeats)
        return params if template is None else replace(params, fields=fields, template=template)

    @cached_property
    def grammar(self) -> str:
        """Return the grammar of the answer in Lark's syntax; its first line, which errors quote, names the functions.

        In mode `auto` an answer is text up to the trigger of a call, which has to be completed.
        """
        form, functions = self._form, self._candidates
        lines = [f"arguments_{n}: {json_rule(function.arguments.schema)}" for n, function in enumerate(functions)]
        lines += [
            f"function_{number}: {self._literal(function.name + form.middle)} arguments_{number}"
            for number, function in enumerate(functions)
        ]
        lines.append(f"function: {_any('function', functions)}")
        begin, end = self._literal(form.begin.lstrip()), self._literal(form.end)
        if not self._several:
            lines.append(f"calls: function {end} AFTER")
        elif form.separate:
            lines.append(f"calls: function {end} AFTER ({begin} function {end} AFTER)*")
        else:
            # The text between calls may begin as the end does, so that the grammar decides only after the common part.
            lines.append(f"calls: function ({self._literal(form.between or '')} function)* {end} AFTER")
        lines.append(f"AFTER: /{AFTER}/")
        names = ", ".join(function.name for function in functions)
        return "\n".join([f"// tools: {names}", *self._start(), *lines])

    @property
    def repeats(self) -> str | None:
        """Return the pattern of the text before the arguments of a call (`SamplingParams.end_at_repeat`)."""
        if not self._several:
            return None
        text, names = self.text, _either([function.name for function in self._candidates])
        begin = re.escape(text.begin) if text.trigger else rf"\A\s*{re.escape(text.begin)}"
        before = [begin, *([text.between.pattern] if text.between else [])]
        after = [re.escape(text.middle)]
        if text.bare:
            before, after = [*before, rf"\A{_FIRST}", rf"\}}{_NEXT}"], [*after, f'"{_KEY}']
        return rf"(?:{'|'.join(before)})({names})(?:{'|'.join(after)})\s*"

    @property
    def _several(self) -> bool:
        """Return whether an answer may have several calls."""
        return self.choice.parallel and self._form.between is not None

    @cached_property
    def template(self) -> Template | None:
        """Return the template of a call whose arguments are decoded in parallel; None: `grammar` applies.

        The answer has to be one call of a known function, whose arguments are divisible (`aspd_jax.fields`).
        """
        before, end = self._form.begin.lstrip(), self._form.end
        if self.choice.mode != "required" or self._several or len(self._candidates) != 1:
            return None
        if self._codec.special.search(before + self._form.middle + end):
            return None
        (function,) = self._candidates
        arguments = fields_template(function.arguments.schema)
        opening = f"{before}{function.name}{self._form.middle}"
        return None if arguments is None else Template([opening, *arguments.parts, end], opening)

    @property
    def _candidates(self) -> list[Function]:
        """Return the functions that may be called."""
        return [function for function in self.functions if self.choice.name in ("", function.name)]

    def _start(self) -> list[str]:
        """Return the rules for the beginning of the answer."""
        begin = self._form.begin.lstrip()
        if self.choice.mode == "required":
            return [f"start: {self._first(begin)} calls"]
        if self._schema is not None:
            schema = json.loads(self._schema) if isinstance(self._schema, str) else self._schema
            return [f"start: value | {self._first(begin)} calls", f"value: {json_rule(schema)}"]
        if not self.text.trigger:
            other = rf"TEXT: /(?s:.+)/ & ~/ ?{_pattern(self.text.begin)}(?s:.*)/"
            return [f"start: TEXT? | {self._first(begin)} calls", other]
        names = [function.name for function in self._candidates]
        further = "(NEXT named)*" if self._several else ""
        return [
            f"start: text | FIRST (text_1 | NAME text_2 | named {further} LAST)",
            *self._text("text", "TEXT", _FIRST),
            *self._text("text_1", "TEXT_1", f'({_either(names)})"'),
            *self._text("text_2", "TEXT_2", _KEY),
            *(f"named_{n}: {json.dumps(name + chr(34))} KEY arguments_{n} CLOSE" for n, name in enumerate(names)),
            f"named: {_any('named', names)}",
            f"NAME: {' | '.join(json.dumps(name + chr(34)) for name in names)}",
            f"FIRST: /{_FIRST}/",
            f"NEXT: /{_NEXT}/",
            rf"KEY: /{_KEY}\s?/",
            rf"CLOSE: /{INDENTATION}\}}/",
            rf"LAST: /{INDENTATION}\]?{INDENTATION}(```)?{AFTER}/",
        ]

    def _text(self, rule: str, terminal: str, head: str) -> list[str]:
        """Return the rule for text, or text and calls.

        Args:
            rule: name of the rule.
            terminal: name of the terminal for text without calls.
            head: pattern that the text does not begin with, because a bare call may continue this way.
        """
        begin, trigger = self._form.begin.lstrip(), _pattern(self.text.trigger)
        other = f"~/{head}(?s:.*)/"
        lines = [rf"{terminal}: /(?s:.+)/ & ~/(?s:.*){trigger}(?s:.*)/ & {other}"]
        if isinstance(self._codec.split_markers(begin)[0], int):  # no text holds this token
            return [f"{rule}: {terminal}? | {terminal}? {self._literal(begin)} calls", *lines]
        rest = self._literal(begin[len(self.text.trigger) :])
        lines.append(f"{rule}_before[lazy]: /(?s:.*){trigger}/ & {other}")
        return [f"{rule}: {terminal}? | {rule}_before {rest} calls", *lines]

    def _first(self, begin: str) -> str:
        """Return the rule for the first text of an answer, before which some tokenizers write a space."""
        literal = self._literal(begin)
        return literal if literal.startswith("<") else f"/ ?/ {literal}"

    def _literal(self, text: str) -> str:
        """Return a text as the right side of a rule; tokens that stand for text in it are named by id."""
        parts = []
        for part in self._codec.split_markers(text):
            if isinstance(part, int):
                parts.append(f"<[{part}]>")
                continue
            for number, piece in enumerate(part.split(ID)):
                parts += [f"/[{ID_CHARACTERS}]{{1,{MAX_ID}}}/"] if number else []
                parts += [json.dumps(piece, ensure_ascii=False)] if piece else []
        return " ".join(parts)


def _either(names: Sequence[str]) -> str:
    """Return the pattern of any of these texts."""
    return "|".join(map(re.escape, names))


def _any(rule: str, functions: Sequence[Any]) -> str:
    """Return the alternatives of the rules of all functions."""
    return " | ".join(f"{rule}_{number}" for number in range(len(functions)))


def check_schemas(functions: Sequence[Function], where: str) -> None:
    """Check the schemas of functions one at a time.

    Args:
        functions: functions of a request.
        where: place of a schema in the request, with `{}` for the number of the function.

    Raises:
        RequestError: a schema is malformed or not supported; the message names its place.
    """
    for number, function in enumerate(functions):
        try:
            function.arguments  # noqa: B018
        except RequestError as error:
            raise RequestError(f"{where.format(number)}: {error}") from None


def _pattern(text: str) -> str:
    """Return the regular expression, in Rust's syntax between slashes, of exactly this text."""
    spaces = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(spaces.get(c, f"\\{c}" if c in "\\/.+*?()|[]{}^$#&~-" else c) for c in text)


class Piece(NamedTuple):
    """New part of an answer.

    Attributes:
        kind: `text`: text outside of calls; `call`: a call begins; `arguments`: its arguments grow.
        text: the text, the name of the called function, or text of its arguments.
        call: number of the call; -1: none.
    """

    kind: Literal["text", "call", "arguments"]
    text: str
    call: int = -1


class CallReader:
    """Reader that splits the growing text of an answer into text and calls.

    A call of a function that was called before is held until its arguments are complete. If they equal those of an
    earlier call, the answer ends before it.

    Attributes:
        complete: number of calls whose arguments have ended.
        count: number of calls that have begun.
    """

    def __init__(self, form: CallText) -> None:
        self.complete = self.count = 0
        self._form = form
        self._buffer = ""
        self._state: Callable[[bool], list[Piece]] = self._read_text  # reads what the buffer begins with
        self._begun = False  # whether text precedes the buffer
        self._depth, self._in_string, self._escaped = 0, False, False
        self._bare = False  # whether the calls are bare
        self._name = self._arguments = ""  # of the last call
        self._held = False  # whether the last call may repeat an earlier one
        self._earlier: dict[str, set[str]] = {}  # arguments of the complete calls, by function

    def read(self, text: str, final: bool = False) -> list[Piece]:
        """Return the new parts of the answer. Text that may be the beginning of a call is held.

        Args:
            text: new text.
            final: whether no text follows; the beginning of an incomplete call is dropped.
        """
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            before = self._state, len(self._buffer)
            pieces += self._state(final)
            if (self._state, len(self._buffer)) == before:
                return [piece for piece in pieces if piece.text or piece.kind == "call"]

    def read_whole(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of a whole answer, and the name and the arguments of each of its calls."""
        pieces = self.read(text, final=True)
        calls = [
            (one.text, "".join(piece.text for piece in pieces if piece.kind == "arguments" and piece.call == one.call))
            for one in pieces
            if one.kind == "call"
        ]
        return "".join(piece.text for piece in pieces if piece.kind == "text"), calls

    def _read_text(self, final: bool) -> list[Piece]:
        if self._form.bare is not None and not self._begun and (head := self._form.bare.match(self._buffer)):
            self._bare = True
            return self._begin_call(head["name"], self._buffer[head.end() :])
        at = self._buffer.find(self._form.begin)
        if not self._form.trigger and (self._begun or self._buffer[: max(at, 0)].strip()):
            at = -1
        if at >= 0:
            text, self._state = self._buffer[:at].rstrip(), self._read_name
            self._buffer = self._buffer[at + len(self._form.begin) :]
            return [Piece("text", text)]
        size = self._certain(final)
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._begun |= bool(text)
        if final:
            self._buffer = ""
        return [Piece("text", text)]

    def _certain(self, final: bool) -> int:
        """Return the number of characters of the buffer that cannot begin a call."""
        begin, trigger, size = self._form.begin, self._form.trigger, len(self._buffer)
        if trigger and (at := self._buffer.find(trigger)) >= 0:
            return len(self._buffer[:at].rstrip())
        if final or (not trigger and self._begun):
            return size
        if not trigger:
            return 0 if begin.startswith(self._buffer.lstrip()) else size
        if not self._begun and self._form.may_be_bare(self._buffer):
            return 0
        return len(self._buffer[: size - undecided(self._buffer, [trigger])].rstrip())

    def _read_name(self, final: bool) -> list[Piece]:
        name, found, rest = self._buffer.partition(self._form.middle)
        return self._begin_call(name, rest) if found else []

    def _begin_call(self, name: str, rest: str) -> list[Piece]:
        """Begin a call; `rest`: text after its head."""
        self._buffer, self._state, self._name, self._arguments = rest.lstrip(), self._read_arguments, name, ""
        self._depth, self._in_string, self._escaped = 0, False, False
        self._held = name in self._earlier
        if self._held:
            return []
        self.count += 1
        return [Piece("call", name, self.count - 1)]

    def _read_arguments(self, final: bool) -> list[Piece]:
        text = self._buffer if self._depth or self._arguments else self._buffer.lstrip()
        size = self._size_of_arguments(text)
        self._arguments += text[:size]
        self._buffer = text[size:]
        ended = bool(self._arguments) and not self._depth
        if ended:
            self._state = self._read_after
            value = canonical(self._arguments)
            if self._held and value in self._earlier[self._name]:
                self._state = self._read_end
                return []
            self._earlier.setdefault(self._name, set()).add(value)
        pieces = [Piece("arguments", text[:size], self.count - 1)]
        if self._held:
            if not (ended or final):
                return []
            self._held, self.count = False, self.count + 1
            pieces = [Piece("call", self._name, self.count - 1), Piece("arguments", self._arguments, self.count - 1)]
        self.complete += ended
        return pieces

    def _size_of_arguments(self, text: str) -> int:
        """Return the number of characters of a text that belong to the arguments."""
        for at, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
                continue
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if not self._depth:
                return at + 1
        return len(text)

    def _read_after(self, final: bool) -> list[Piece]:
        between = self._form.next_bare if self._bare else self._form.between
        if between is None or (found := between.match(self._buffer)) is None:
            return []
        rest = self._buffer[found.end() :]
        if self._bare:
            return self._begin_call(found["name"], rest)
        self._buffer, self._state = rest, self._read_name
        return []

    def _read_end(self, final: bool) -> list[Piece]:
        self._buffer = ""
        return []
