"""Render conversations by a chat template with separate answers; training and prompting share this rendering.

Messages are text: a special token spelled in a message is never encoded as one (protocol, section 2). Only the template
writes special tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from aspd_jax.errors import ConversationError, check_unicode
from aspd_jax.tokens import TAGS, TextCodec

_TAG = re.compile("({})".format("|".join(map(re.escape, TAGS.values()))))
_USER, _ANSWER = ({"role": role, "content": f"qzx {role}"} for role in ("user", "assistant"))


class Chat:
    """A conversation and the template that renders it, as text with placeholders for the answers.

    Every rendering covers the messages before one answer and the generation prompt that asks for it.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        codec: codec of the tokenizer.
        messages: messages with `role` and `content`, both strings.
        variables: variables of the template, such as `enable_thinking`: strings, numbers, true, false or None.
        tools: tools for the template, in OpenAI's form.

    Raises:
        ConversationError: a message or a tool is not valid Unicode, or a variable has another kind of value or a name
            that rendering itself uses.
    """

    def __init__(
        self,
        tokenizer: Any,
        codec: TextCodec,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer, self._codec, self._messages = tokenizer, codec, messages
        self._sign = "\ue000"  # extended until no message and no tool contains it
        parts = {"messages": messages, "tools": tools}
        for where, part in ((f"{name}[{n}]", part) for name, values in parts.items() for n, part in enumerate(values)):
            said = "".join(_strings(part))
            check_unicode(said, where)
            while self._sign in said:
                self._sign += "\ue000"
        _check_variables(tokenizer, variables)
        while any(self._sign in value for value in variables.values() if isinstance(value, str)):
            self._sign += "\ue000"
        self._spelt: list[str] = []
        self._variables = self._hide(variables)
        if tools:
            self._variables["tools"] = [self._hide(tool) for tool in tools]
        self._shown = [
            {"role": "assistant", "content": self._mark(number)} if is_answer(message) else self._hide(message)
            for number, message in enumerate(messages)
        ]

    def _hide(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with placeholders for the special tokens that they spell, nested strings included."""

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return self.hide_text(value)
            if isinstance(value, Mapping):
                return {hide(key): hide(item) for key, item in value.items()}
            return [hide(item) for item in value] if isinstance(value, (list, tuple)) else value

        return dict(hide(fields))

    def hide_text(self, text: str) -> str:
        """Return a text with placeholders for the special tokens that it spells."""

        def mark(found: re.Match[str]) -> str:
            self._spelt.append(found[0])
            return f"{self._sign}s{len(self._spelt) - 1}\ue001"

        return self._codec.special.sub(mark, text)

    def _mark(self, place: int) -> str:
        return f"{self._sign}{place}\ue001"

    def _places(self, stop: int) -> list[int]:
        return [place for place in range(stop) if is_answer(self._messages[place])]

    def prompt(self, stop: int) -> list[str]:
        """Return the prompt that asks for message `stop`, as the text around its earlier answers.

        Special tokens that messages spell are placeholders in it.

        Raises:
            ConversationError: the template refuses the conversation or omits an answer.
        """
        if not stop or self._messages[stop - 1]["role"] == "assistant":
            raise ConversationError(f"messages[{stop}]: expected a message that asks for this answer, got none")
        return self._split(self._render(self._shown[:stop], True), stop)

    def answers(self, stop: int) -> list[str]:
        """Return the answers before message `stop` as a prompt contains them.

        Some templates drop a part of earlier answers, such as a thought or the white space around them.

        Raises:
            ConversationError: see `prompt`.
        """
        places = self._places(stop)
        if not places:
            return []
        said = {place: self._messages[place]["content"] for place in places}
        marked = self._render(self._shown[:stop], True)
        filled = marked
        for place, content in said.items():
            filled = filled.replace(self._mark(place), content, 1)
        if self._render(self._with(said, stop), True) == filled:
            return list(said.values())
        shown = []
        for place in places:
            before, _, after = marked.partition(self._mark(place))
            whole = self._render(self._with({place: said[place]}, stop), True)
            middle = whole[len(before) : len(whole) - len(after)]
            if before + middle + after != whole:
                raise ConversationError(
                    f"messages[{place}]: expected a chat template that writes equal text around all answers, "
                    "got other text here. Use another chat_template."
                )
            shown.append(middle)
        return shown

    def continuation(self) -> tuple[list[str], str]:
        """Return the prompt in which the last answer begins, as the text around its earlier answers, and that answer.

        The text equals that of `apply_chat_template(continue_final_message=True)`: white space that the template strips
        around an answer is also stripped here.

        Raises:
            ConversationError: see `prompt`.
        """
        last = len(self._messages) - 1
        text, mark = self._messages[last]["content"], self._mark(last)
        marked = self._render(self._shown, False)
        begins, ends = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        if self._render(self._with({last: begins + mark}, last + 1), False) == marked:
            text = text.lstrip()
        if self._render(self._with({last: mark + ends}, last + 1), False) == marked:
            text = text.rstrip()
        return self._split(marked, last + 1)[:-1], text

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a part of a prompt."""
        parts = re.split(f"{self._sign}s([0-9]+)\ue001", text)
        spelt = [self._spelt[int(part)] if number % 2 else part for number, part in enumerate(parts)]
        return _encode_alternating(self._tokenizer, self._codec, spelt)

    def join(self, segments: Sequence[str], answers: Sequence[str | Sequence[int]]) -> list[int]:
        """Return the token ids of a prompt, equal to those of `apply_chat_template` where all answers are text.

        Args:
            segments: the text around the answers.
            answers: each as text, which is encoded together with the text around it, or as token ids.
        """
        ids: list[int] = []
        text = segments[0]
        for answer, after in zip(answers, segments[1:], strict=True):
            if isinstance(answer, str):
                text += self.hide_text(answer) + after
            else:
                ids += [*self.encode(text), *map(int, answer)]
                text = after
        return [*ids, *self.encode(text)]

    def _with(self, contents: Mapping[int, str], stop: int) -> list[dict[str, Any]]:
        return [
            {"role": "assistant", "content": contents[place]} if place in contents else message
            for place, message in enumerate(self._shown[:stop])
        ]

    def _split(self, text: str, stop: int) -> list[str]:
        segments, rest = [], text
        for place in self._places(stop):
            segment, found, rest = rest.partition(self._mark(place))
            if not found:
                raise ConversationError(
                    f"messages[{place}]: expected a chat template that shows this answer unchanged, got other text. "
                    "Use another chat_template."
                )
            segments.append(segment)
        return [*segments, rest]

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:  # a template is a program, which may raise any error
            kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
            roles = ", ".join(str(message["role"]) for message in messages[:8]) + (", …" if len(messages) > 8 else "")
            raise ConversationError(
                f"messages: the chat template refuses a conversation of {roles}: {kind}{error}"
            ) from None
        return str(rendered)


def is_answer(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer in plain text, which is encoded apart from the text around it.

    An answer that calls tools is a part of the text, because the template writes its calls.
    """
    return message["role"] == "assistant" and not message.get("tool_calls")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings of a value, those of nested lists and objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    renderers = (type(tokenizer).apply_chat_template, render_jinja_template)
    own = {"messages", *tokenizer.special_tokens_map}.union(*(inspect.signature(one).parameters for one in renderers))
    for name, value in variables.items():
        where = f"chat_template_kwargs.{name}"
        if name in own:
            raise ConversationError(f"{where}: expected a variable of the chat template, got a name of its renderer")
        if not isinstance(value, (str, bool, int, float, type(None))):
            raise ConversationError(f"{where}: expected a string, number, boolean or null, got {type(value).__name__}")
        check_unicode(f"{name}{value}", "chat_template_kwargs")


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the token that the chat template writes behind an answer, or else before the next message.

    Returns:
        The id of an added token; None: the template writes text or nothing there, or there is no template.
    """
    if not tokenizer.chat_template:
        return None
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    for messages in ([_USER, _ANSWER], [_USER, _ANSWER, _USER]):
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is a program, which may raise any error; a request reports it
            return None
        rest = text.partition(_ANSWER["content"])[2].lstrip()
        if rest:
            found = [content for content in added if rest.startswith(content)]
            return int(added[max(found, key=len)]) if found else None
    return None


def with_end_of_turn(tokenizer: Any, end_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end an answer: those of the checkpoint, and the one of the chat template."""
    end = None if tokenizer is None else end_of_turn(tokenizer)
    return tuple(dict.fromkeys([*end_ids, *([] if end is None else [end])]))


def encode_history(
    tokenizer: Any,
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    continues: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
    decoded: Callable[[int], Sequence[int] | None] = lambda place: None,
) -> list[int]:
    """Return the prompt of a conversation, with its answers as the template shows them (`Chat.answers`).

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        codec: codec of the tokenizer.
        messages: messages with `role` and `content`.
        continues: whether the last message is the beginning of an answer, with which the prompt ends.
        variables, tools: see `Chat`.
        decoded: returns the token ids of the answer at a place, for an answer that the template shows, with or without
            the white space around it; None: its text is encoded.

    Raises:
        ConversationError: the chat template refuses the conversation, or changes an answer.
    """
    chat = Chat(tokenizer, codec, messages, variables, tools)
    if continues:
        segments, beginning = chat.continuation()
        segments, shown = [*segments, ""], [*chat.answers(len(messages) - 1), beginning]
    else:
        segments, shown = chat.prompt(len(messages)), chat.answers(len(messages))
    return chat.join(segments, _answers(messages, shown, decoded))


def _answers(
    messages: Sequence[Mapping[str, Any]], shown: Sequence[str], decoded: Callable[[int], Sequence[int] | None]
) -> list[str | Sequence[int]]:
    """Return the earlier answers of a conversation as token ids, or as the text that the template shows."""
    places = [place for place, message in enumerate(messages) if is_answer(message)]
    answers: list[str | Sequence[int]] = []
    for place, text in zip(places, shown, strict=True):
        ids = decoded(place) if messages[place]["content"].strip() == text.strip() else None
        answers.append(text if ids is None else ids)
    return answers


def encode_questions(
    tokenizer: Any,
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    questions: Sequence[str],
    variables: Mapping[str, Any] = MappingProxyType({}),
    decoded: Callable[[int], Sequence[int] | None] = lambda place: None,
) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of what conversations share that differ in a question at their end, and of each rest.

    A question continues the last message of the user, or is a message of its own behind another one. The rest is
    encoded apart from what is shared, and ends with the generation prompt.

    Args:
        tokenizer, codec, messages, variables, decoded: see `encode_history`.
        questions: texts of the questions, with what separates them from the input.

    Raises:
        ConversationError: the chat template refuses the conversation, or changes a message.
    """
    said = "".join(text for message in messages for text in _strings(message)) + "".join(questions)
    mark = "\ue002"
    while mark in said:
        mark += "\ue002"
    *before, last = messages or [{"role": "user", "content": ""}]
    if last["role"] == "user":
        marked = [*before, {**last, "content": last["content"] + mark}]
    else:
        marked = [*messages, {"role": "user", "content": mark}]
    chat = Chat(tokenizer, codec, marked, variables)
    *segments, end = chat.prompt(len(marked))
    shared, found, rest = end.partition(mark)
    if not found:
        raise ConversationError("messages: expected a chat template that shows the last message unchanged, got others")
    answers = _answers(messages, chat.answers(len(marked)), decoded)
    return (
        chat.join([*segments, shared], answers),
        [chat.encode(chat.hide_text(question) + rest) for question in questions],
    )


def encode_prompt(tokenizer: Any, codec: TextCodec, text: str) -> list[int]:
    """Return the token ids of a prompt in plain text, as the tokenizer encodes it; the tags of branches are text.

    Raises:
        ConversationError: the text is not valid Unicode.
    """
    check_unicode(text, "prompt")
    first, *others = _TAG.split(text)
    whole, bare = tokenizer(first)["input_ids"], tokenizer.encode(first, add_special_tokens=False)
    return [*_begin_once(whole, bare), *_encode_alternating(tokenizer, codec, ["", *others])]


def _begin_once(whole: list[int], bare: list[int]) -> list[int]:
    """Return the ids of a text without what the tokenizer adds before it, if the text itself begins with that.

    Args:
        whole: ids with the tokens that the tokenizer adds, such as BOS.
        bare: ids without them.
    """
    for start in range(len(whole) - len(bare), 0, -1):
        if whole[start : start + len(bare)] == bare and whole[:start] == bare[:start]:
            return whole[start:]
    return whole


def _encode_alternating(tokenizer: Any, codec: TextCodec, parts: Sequence[str]) -> list[int]:
    """Return the token ids of parts: odd-numbered parts as plain characters, even-numbered ones with special tokens."""
    ids: list[int] = []
    for number, part in enumerate(parts):
        if part:
            spelt = number % 2
            ids += codec.encode_normalised(part) if spelt else tokenizer.encode(part, add_special_tokens=False)
    return ids


def message_texts(prompt: Any) -> tuple[str, ...]:
    """Return the texts of a prompt's messages; of token ids, none. `Engine.encode` refuses other contents."""
    if isinstance(prompt, str):
        return (prompt,)
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    return tuple(content for content in contents if isinstance(content, str))
