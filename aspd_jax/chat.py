"""Conversations through a chat template, answers kept apart: as they are trained on, so they are prompted with.

Text is text: what messages spell never becomes a special token (protocol, section 2). Only a template writes these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aspd_jax.errors import ConfigError
from aspd_jax.tokens import TAGS, TextCodec

_TAG = re.compile("({})".format("|".join(map(re.escape, TAGS.values()))))


def encode_turns(
    tokenizer: Any, codec: TextCodec, ends: Sequence[int], messages: Sequence[Mapping[str, Any]], prompt: bool
) -> list[list[int]]:
    """Token ids of what stands around the answers of a conversation: one stretch more than there are answers.

    The template is rendered around placeholders, so that answers are encoded stretch by stretch (protocol, section 2),
    and what stands before an answer is what the engine is prompted with. Every stretch but the first begins with the
    end of text that ends the answer before it. Special tokens that other messages spell have placeholders too, and are
    encoded as text.

    Args:
        codec: of the tokenizer.
        ends: ids that end an answer; the first stands in where the template has none of them.
        messages: `role`, and `content` of all that are no assistant's.
        prompt: the conversation goes on with an answer. Otherwise the last stretch is an end of text and nothing else.

    Raises:
        ConfigError: the chat template does not put answers into the text as they stand.
    """
    sign = "\ue000"  # grows until nobody has written it
    while any(sign in message.get("content", "") for message in messages):
        sign += "\ue000"
    marks = [f"{sign}{number}\ue001" for number, message in enumerate(messages) if message["role"] == "assistant"]
    left = iter(marks)
    spelt: list[str] = []

    def hide(found: re.Match[str]) -> str:
        spelt.append(found[0])
        return f"{sign}s{len(spelt) - 1}\ue001"

    def show(message: Mapping[str, Any]) -> dict[str, Any]:
        if message["role"] == "assistant":
            return {"role": "assistant", "content": next(left)}
        return {key: codec.special.sub(hide, text) if isinstance(text, str) else text for key, text in message.items()}

    shown = list(map(show, messages))

    def encode(text: str) -> list[int]:
        parts = re.split(f"{sign}s([0-9]+)\ue001", text)
        return _encode_alternating(tokenizer, codec, [spelt[int(p)] if n % 2 else p for n, p in enumerate(parts)])

    def render(some: Sequence[Mapping[str, Any]], going_on: bool) -> str:
        return str(tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=going_on))

    rest = render(shown, prompt)
    pieces = []
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if not found:
            raise ConfigError("the chat template does not show every answer as it stands; use another chat_template")
        pieces.append(piece)
    if pieces:
        place = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        begun = render(shown[:place], True)
        if not pieces[0].startswith(begun):
            raise ConfigError(
                "the chat template's generation prompt is not how it begins an answer; use another chat_template"
            )
        extra = pieces[0][len(begun) :]  # such as an empty thought, which the engine is not prompted with
        pieces = [piece.removesuffix(extra) for piece in pieces]
    first, *others = map(encode, [*pieces, rest])
    others = [_ended(stretch, ends) for stretch in others]
    if others and not prompt:
        others[-1] = others[-1][:1]
    return [first, *others]


def encode_prompt(tokenizer: Any, codec: TextCodec, text: str) -> list[int]:
    """Token ids of a prompt in plain text: the tokenizer's own, but that tags of branches in it are text."""
    first, *others = _TAG.split(text)
    return [*tokenizer(first)["input_ids"], *_encode_alternating(tokenizer, codec, ["", *others])]


def _encode_alternating(tokenizer: Any, codec: TextCodec, parts: Sequence[str]) -> list[int]:
    """Token ids of parts: of every second one as its characters, of the others as the tokenizer reads them."""
    ids: list[int] = []
    for number, part in enumerate(parts):
        if part:
            ids += codec.encode(part) if number % 2 else tokenizer.encode(part, add_special_tokens=False)
    return ids


def _ended(stretch: list[int], ends: Sequence[int]) -> list[int]:
    """A stretch that begins with an end of text."""
    return stretch if stretch and stretch[0] in ends else [ends[0], *stretch]
