"""The text of tool calls in the answers of a model, read from its chat template.

Templates differ in how they write calls. The format is found by rendering conversations that hold known calls: what
stands around their names and arguments is the format. Models whose template has no tools get the Hermes format, with
the tools described in a system message, or in the first message of the user if the template has no system role.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from aspd_jax.errors import ConversationError

ID = "\ue002"  # stands for the id of a call in a format
UNREADABLE = "tools: expected a chat_template that writes calls as name and JSON, and their results, got {}"

_FIRST, _SECOND, _RESULT, _ANSWER = "qzx_first", "qzx_second", "qzx result", "\ue003"
_IDS = ("call_qzx0123456789abcdef", "qzxid0123")
_ARGUMENTS = {"qzx_key": "qzx value"}
_USER = {"role": "user", "content": "qzx question"}


@dataclass(frozen=True)
class ToolFormat:
    """Text of the calls in an answer: `begin name middle arguments (between name middle arguments)* end`.

    Special tokens are spelled in it, and `ID` stands for the id of a call.

    Attributes:
        begin: text before the name of the first function.
        middle: text between a name and its arguments, which are a JSON object.
        between: text between the arguments of a call and the next name; None: an answer has one call.
        end: text after the arguments of the last call.
        native: whether the chat template writes calls, tools and results.
        short_ids: whether the template takes ids of nine alphanumeric characters only.
        text_arguments: whether the template takes arguments as JSON text, not as objects.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    native: bool = True
    short_ids: bool = False
    text_arguments: bool = False

    @property
    def separate(self) -> bool:
        """Return whether calls are complete on their own, with white space between them."""
        if self.between is None:
            return False
        begin = self.begin.lstrip()
        middle = self.between.removeprefix(self.end).removesuffix(begin)
        return self.between == self.end + middle + begin and not middle.strip()


HERMES = ToolFormat(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
    native=False,
)
_INSTRUCTION = """# Tools

You can call functions. Their signatures are within the tags <tools></tools>, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments within the tags <tool_call></tool_call>:
<tool_call>
{{"name": "<name of the function>", "arguments": <object of its arguments>}}
</tool_call>
The results follow within the tags <tool_response></tool_response>."""


def read_tool_format(tokenizer: Any) -> ToolFormat:
    """Return the format of tool calls of a model; `HERMES` if its chat template does not describe tools.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.

    Raises:
        ConversationError: the template describes tools, but its calls cannot be read.
    """
    probe = _Probe(tokenizer, _IDS[0])
    if _FIRST not in probe.render([_USER], prompt=True):
        return HERMES
    for id, text_arguments in product(_IDS, (False, True)):
        probe = _Probe(tokenizer, id, text_arguments)
        if (body := probe.calls(_FIRST)) is None:
            continue
        called = {"role": "tool", "content": _RESULT, "tool_call_id": id, "name": _FIRST}
        if _RESULT not in probe.render([_USER, probe.answer(_FIRST), called], prompt=True):
            raise ConversationError(UNREADABLE.format("no results"))
        found = _split(body, probe.calls(_FIRST, _SECOND))
        if found is not None:
            return replace(found, short_ids=id == _IDS[1], text_arguments=text_arguments)
    raise ConversationError(UNREADABLE.format("other calls"))


class _Probe:
    """Renderer of conversations with known calls.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        id: id of the calls.
        text_arguments: whether arguments are given as JSON text.
    """

    def __init__(self, tokenizer: Any, id: str, text_arguments: bool = False) -> None:
        self._tokenizer, self._id = tokenizer, id
        self._arguments: Any = json.dumps(_ARGUMENTS) if text_arguments else _ARGUMENTS
        properties = {key: {"type": "string", "description": "qzx"} for key in _ARGUMENTS}
        schema = {"type": "object", "properties": properties, "required": list(_ARGUMENTS)}
        self._tools = [
            {"type": "function", "function": {"name": name, "description": "qzx", "parameters": schema}}
            for name in (_FIRST, _SECOND)
        ]

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        """Return the text of a conversation; empty if the template refuses it."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=self._tools, tokenize=False, add_generation_prompt=prompt
                )
            )
        except Exception:  # a template is a program, which may raise any error
            return ""

    def answer(self, *names: str) -> dict[str, Any]:
        """Return an answer that calls functions."""
        ids = (f"{self._id[:-1]}{number}" for number in range(len(names)))
        functions = ({"name": name, "arguments": self._arguments} for name in names)
        calls = [
            {"id": id, "type": "function", "function": function} for id, function in zip(ids, functions, strict=True)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def calls(self, *names: str) -> str | None:
        """Return the text that the template writes for an answer that calls functions; None: it shows no calls."""
        whole = self.render([_USER, self.answer(*names)])
        if not all(name in whole for name in names):
            return None
        plain = self.render([_USER, {"role": "assistant", "content": _ANSWER}])
        begin = max(_common_prefix(whole, other) for other in (plain, self.render([_USER], prompt=True)))
        rest = whole[begin:]
        body = rest[: len(rest) - _common_prefix(rest[::-1], plain[::-1])]
        for number in range(len(names)):
            body = body.replace(f"{self._id[:-1]}{number}", ID)
        return body


def _common_prefix(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with alike."""
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def _split(one: str, two: str | None) -> ToolFormat | None:
    """Return the format of calls as they are written for one function, and for two; None: it cannot be read."""
    begin, _, rest = one.partition(_FIRST)
    arguments = _arguments_of(rest)
    if not begin.strip() or arguments is None:
        return None
    middle, end = arguments
    if not middle or ID in begin + middle:
        return None
    between: str | None = None
    if two is not None:
        head, _, rest = two.partition(_FIRST)
        first, second = _arguments_of(rest), _arguments_of(rest.partition(_SECOND)[2])
        if head == begin and first is not None and second == (middle, end) and first[0] == middle:
            between = first[1].partition(_SECOND)[0]
    return ToolFormat(begin, middle, between or None, end)


def _arguments_of(text: str) -> tuple[str, str] | None:
    """Return the text before and after the known arguments; None: the text does not hold them as JSON."""
    for at, character in enumerate(text):
        if character == "{":
            try:
                value, end = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                continue
            if value == _ARGUMENTS:
                return text[:at], text[end:]
    return None


def uses_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> bool:
    """Return whether a conversation has tools, calls or results of calls."""
    return bool(tools) or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def tool_conversation(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Return the messages and the tools for the chat template of a model.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        messages: messages with `role` and `content`. Those of the assistant may have `tool_calls` in OpenAI's form;
            those of the role `tool` have a `tool_call_id`.
        tools: tools in OpenAI's form.

    Returns:
        The messages as the template takes them, and its tools. If the template has no tools, both are part of the
        messages, and calls are plain text (`HERMES`). Arguments that are no JSON object, such as those of a call that
        was cut off, remain text.

    Raises:
        ConversationError: the template describes tools, but its calls cannot be read.
    """
    if not uses_tools(messages, tools):
        return messages, ()
    form = read_tool_format(tokenizer)
    return (_native(form, messages), tools) if form.native else (_plain(tokenizer, messages, tools), ())


def _native(form: ToolFormat, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with ids and arguments as the template takes them, and the names of functions in results."""

    def short(id: str) -> str:
        return hashlib.sha256(id.encode()).hexdigest()[:9] if form.short_ids else id

    names: dict[str, str] = {}
    shown: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            id = str(message.get("tool_call_id", ""))
            name = {"name": names[id]} if id in names else {}
            shown.append({**message, "tool_call_id": short(id), **name})
            continue
        calls = []
        for call in message.get("tool_calls") or ():
            name, text = call["function"]["name"], call["function"]["arguments"]
            names[str(call["id"])] = name
            value = text if form.text_arguments else parse_arguments(text)
            function = {"name": name, "arguments": text if value is None else value}
            calls.append({"id": short(call["id"]), "type": "function", "function": function})
        shown.append({**message, "tool_calls": calls} if calls else message)
    return shown


def _plain(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages without tools in the Hermes format, with roles in an order that the template takes."""
    repeats = _takes(tokenizer, "user", "assistant", "user", "user")
    shown: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if number and messages[number - 1]["role"] == "tool":
                shown[-1] = {"role": "user", "content": f"{shown[-1]['content']}\n{result}"}
            else:
                shown.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            texts = [message["content"]] if message["content"] else []
            for call in calls:
                function = call["function"]
                name = json.dumps(function["name"], ensure_ascii=False)
                value = parse_arguments(function["arguments"])
                text = function["arguments"] if value is None else json.dumps(value, ensure_ascii=False)
                texts.append(f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>')
            shown.append({"role": message["role"], "content": "\n".join(texts)})
        elif message["role"] == "user" and number and messages[number - 1]["role"] == "tool" and not repeats:
            shown[-1] = {"role": "user", "content": f"{shown[-1]['content']}\n\n{message['content']}"}
        else:
            shown.append(message)
    if tools:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = _INSTRUCTION.format(tools=described)
        asked = next((place for place, message in enumerate(shown) if message["role"] == "user"), None)
        if asked is not None and not _takes(tokenizer, "system", "user"):
            shown[asked] = {**shown[asked], "content": f"{text}\n\n{shown[asked]['content']}"}
        elif shown and shown[0]["role"] == "system":
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{text}"}
        else:
            shown.insert(0, {"role": "system", "content": text})
    return shown


def _takes(tokenizer: Any, *roles: str) -> bool:
    """Return whether a chat template shows messages of these roles, in this order."""
    messages = [{"role": role, "content": f"qzx {number}"} for number, role in enumerate(roles)]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program, which may raise any error
        return False
    return all(message["content"] in text for message in messages)


def parse_arguments(text: Any) -> dict[str, Any] | None:
    """Return the arguments of a call from their JSON text; no text means none. None: the text is no JSON object."""
    if isinstance(text, dict):  # as templates take them
        return text
    try:
        value = json.loads(text) if text else {}
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
