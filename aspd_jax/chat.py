"""Conversations through a chat template, answers kept apart: as they are trained on, so they are prompted with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aspd_jax.errors import ConfigError


def encode_turns(
    tokenizer: Any, ends: Sequence[int], messages: Sequence[Mapping[str, Any]], prompt: bool
) -> list[list[int]]:
    """Token ids of what stands around the answers of a conversation: one stretch more than there are answers.

    The template is rendered around placeholders, so that answers are encoded stretch by stretch (protocol, section 2),
    and what stands before an answer is what the engine is prompted with. Every stretch but the first begins with the
    end of text that ends the answer before it.

    Args:
        ends: ids that end an answer; the first stands in where the template has none of them.
        messages: `role`, and `content` of all that are no assistant's.
        prompt: the conversation goes on with an answer. Otherwise the last stretch is an end of text and nothing else.

    Raises:
        ConfigError: the chat template does not put answers into the text as they stand.
    """
    marks = [f"\ue000{number}\ue001" for number, message in enumerate(messages) if message["role"] == "assistant"]
    left = iter(marks)
    shown = [m if m["role"] != "assistant" else {"role": "assistant", "content": next(left)} for m in messages]

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
        first = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        begun = render(shown[:first], True)
        if not pieces[0].startswith(begun):
            raise ConfigError(
                "the chat template's generation prompt is not how it begins an answer; use another chat_template"
            )
        extra = pieces[0][len(begun) :]  # such as an empty thought, which the engine is not prompted with
        pieces = [piece.removesuffix(extra) for piece in pieces]
    stretches = [tokenizer.encode(piece, add_special_tokens=False) for piece in [*pieces, rest]]
    first, *others = stretches
    others = [_ended(stretch, ends) for stretch in others]
    if others and not prompt:
        others[-1] = others[-1][:1]
    return [first, *others]


def _ended(stretch: list[int], ends: Sequence[int]) -> list[int]:
    """A stretch that begins with an end of text."""
    return stretch if stretch and stretch[0] in ends else [ends[0], *stretch]
