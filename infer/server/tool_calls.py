"""Tool calls of an answer: the grammar that the answer follows, and the calls that its text holds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from aspd_jax.errors import RequestError
from aspd_jax.fields import fields_template
from aspd_jax.json_schema import ReadSchema, read_schema
from aspd_jax.template import Template
from aspd_jax.tokens import TextCodec
from aspd_jax.tool_format import ID, ToolFormat
from infer.scheduling.structured import json_rule

ID_CHARACTERS, MAX_ID = "A-Za-z0-9_-", 64  # pattern of call ids in the model's text; responses have other ids
# Keywords next to which a schema must not be closed, because they may name further properties.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if"}


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: name of the function.
        description: description for the model; empty: none.
        parameters: JSON schema of its arguments.
        strict: refuse what grammars do not support in the schema; it is ignored otherwise (`aspd_jax.json_schema`).
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

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
        given = {key: value for key, value in self.parameters.items() if value is not None}
        schema = {"type": "object", **given}
        properties = schema.setdefault("properties", {}) if not _OPEN & set(schema) else None
        required = schema.get("required", [])
        if isinstance(properties, dict) and isinstance(required, list) and all(name in properties for name in required):
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

    Args:
        form: format of the model.
        codec: codec of the model's tokenizer.

    Attributes:
        begin, middle: see `ToolFormat`, without special tokens, which are no part of the text.
        between: pattern of the text between two calls; None: an answer has one call.
        trigger: text that begins a call wherever it occurs; empty: calls stand at the beginning of an answer.

    Raises:
        RequestError: the text of an answer does not show where a call begins.
    """

    def __init__(self, form: ToolFormat, codec: TextCodec) -> None:
        def visible(text: str) -> str:
            return codec.special.sub("", text)

        self.begin, self.middle = visible(form.begin).lstrip(), visible(form.middle)
        parts = None if form.between is None else map(re.escape, visible(form.between).split(ID))
        self.between = None if parts is None else re.compile(f"[{ID_CHARACTERS}]+".join(parts))
        hides = self.begin != form.begin.lstrip()
        self.trigger = "" if hides else re.split(r"[\[{]", self.begin, maxsplit=1)[0].rstrip()
        if not self.middle or (hides and not self.begin.startswith(("{", "["))):
            raise RequestError(
                "tools: expected a model that writes calls as text, got one that marks them by special tokens alone. "
                "Use another chat_template."
            )


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
        self.text = CallText(form, codec)
        if schema is not None and choice.mode == "auto" and not self.text.trigger and form.begin.startswith("{"):
            raise RequestError(
                "tools: expected tool_choice: required or none beside response_format, got auto, because this model "
                "writes calls as bare JSON, like the answer"
            )

    def reader(self) -> CallReader:
        """Return a reader of one answer."""
        return CallReader(self.text)

    @cached_property
    def grammar(self) -> str:
        """Return the grammar of the answer in Lark's syntax.

        In mode `auto` an answer is text up to the trigger of a call, which has to be completed.
        """
        lines = [
            f"function_{number}: {self._literal(function.name + self._form.middle)} {arguments_rule(function)}"
            for number, function in enumerate(self._candidates)
        ]
        lines.append("function: " + " | ".join(f"function_{number}" for number in range(len(self._candidates))))
        calls, end = "function", self._form.end
        if self.choice.parallel and self._form.between is not None:
            # The text between calls may begin as the end does, so that the grammar decides only after the common part.
            calls = "function (between function)*"
            lines.append(f"between: {self._literal(self._form.between)}")
        lines.append(f"calls: {calls} {self._literal(end)}")
        return "\n".join([*self._start(), *lines])

    @cached_property
    def template(self) -> Template | None:
        """Return the template of a call whose arguments are decoded in parallel; None: `grammar` applies.

        The answer has to be one call of a known function, whose arguments are divisible (`aspd_jax.fields`).
        """
        before, end = self._form.begin.lstrip(), self._form.end
        several = self.choice.parallel and self._form.between is not None
        if self.choice.mode != "required" or several or len(self._candidates) != 1:
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
        trigger = _pattern(self.text.trigger)
        other = rf"TEXT: /(?s:.+)/ & ~/(?s:.*){trigger}(?s:.*)/"
        if isinstance(self._codec.split_markers(begin)[0], int):  # no text holds this token
            return [f"start: TEXT? | TEXT? {self._literal(begin)} calls", other]
        rest = self._literal(begin[len(self.text.trigger) :])
        return [f"start: TEXT? | before {rest} calls", other, f"before[lazy]: /(?s:.*){trigger}/"]

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


def arguments_rule(function: Function) -> str:
    """Return the right side of the grammar rule for the arguments of a function."""
    return json_rule(function.arguments.schema)


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

    Attributes:
        complete: number of calls whose arguments have ended.
        count: number of calls that have begun.
    """

    def __init__(self, form: CallText) -> None:
        self.complete = self.count = 0
        self._form = form
        self._buffer, self._state = "", "text"
        self._begun = False  # whether text precedes the buffer
        self._depth, self._in_string, self._escaped = 0, False, False

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
            pieces += {
                "text": self._read_text, "name": self._read_name,
                "arguments": self._read_arguments, "after": self._read_after,
            }[self._state](final)  # fmt: skip
            if (self._state, len(self._buffer)) == before:
                return [piece for piece in pieces if piece.text or piece.kind == "call"]

    def _read_text(self, final: bool) -> list[Piece]:
        at = self._buffer.find(self._form.begin)
        if not self._form.trigger and (self._begun or self._buffer[: max(at, 0)].strip()):
            at = -1
        if at >= 0:
            text, self._state = self._buffer[:at].rstrip(), "name"
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
        held = next((n for n in range(min(len(trigger), size), 0, -1) if trigger.startswith(self._buffer[-n:])), 0)
        return len(self._buffer[: size - held].rstrip())

    def _read_name(self, final: bool) -> list[Piece]:
        name, found, rest = self._buffer.partition(self._form.middle)
        if not found:
            return []
        self._buffer, self._state, self.count = rest, "arguments", self.count + 1
        self._depth, self._in_string, self._escaped = 0, False, False
        return [Piece("call", name, self.count - 1)]

    def _read_arguments(self, final: bool) -> list[Piece]:
        for at, character in enumerate(self._buffer):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
                continue
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if not self._depth:
                text, self._buffer = self._buffer[: at + 1], self._buffer[at + 1 :]
                self._state, self.complete = "after", self.complete + 1
                return [Piece("arguments", text, self.count - 1)]
        text, self._buffer = self._buffer, ""
        return [Piece("arguments", text, self.count - 1)]

    def _read_after(self, final: bool) -> list[Piece]:
        if self._form.between is not None and (found := self._form.between.match(self._buffer)):
            self._buffer, self._state = self._buffer[found.end() :], "name"
        return []
