"""Examples to packed batches.

B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aspd_jax.errors import ConfigError
from aspd_jax.layout import Layout, PositionScheme, build_layout
from aspd_jax.structure import Serial
from aspd_jax.tokens import Codec, SpecialTokens
from train.config import TrainConfig
from train.tasks import Problem, problem


class Example(NamedTuple):
    """One question with its answer: tokens int32 [T], and loss bool [T], true where a token is learned."""

    tokens: np.ndarray
    loss: np.ndarray


class Batch(NamedTuple):
    """Packed rows.

    Attributes:
        tokens: int32 [B, S].
        layout: int32 [B, S] each.
        loss: float32 [B, S], weight of each token as a target.
    """

    tokens: np.ndarray
    layout: Layout
    loss: np.ndarray


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """Ids of a chat with one question, up to where the answer starts."""
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def example(codec: Codec, tokenizer: Any, problem: Problem, structured: bool, fed_loss: bool = False) -> Example:
    """Prompt, answer and end of text; loss on the answer only, and not on what the engine feeds."""
    prompt = prompt_ids(tokenizer, problem.question)
    answer = codec.linearise(problem.structure if structured else (Serial(problem.answer),))
    tokens = np.asarray([*prompt, *answer.tokens, tokenizer.eos_token_id], np.int32)
    learned = np.ones_like(answer.fed) if fed_loss else ~answer.fed
    return Example(tokens, np.concatenate([np.zeros(len(prompt), bool), learned, [True]]))


def first_fit(sizes: Sequence[int], rows: int, length: int) -> list[int | None]:
    """The row of each example, the longest placed first; None where an example fits nowhere.

    Raises:
        ConfigError: an example is longer than a row.
    """
    if max(sizes) > length:
        raise ConfigError(f"an example has {max(sizes)} tokens, a row has {length}; raise `length`")
    free = np.full(rows, length)
    placed: list[int | None] = [None] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = np.flatnonzero(free >= sizes[index])
        if fits.size:
            placed[index] = int(fits[0])
            free[fits[0]] -= sizes[index]
    return placed


def pack(
    examples: Sequence[Example],
    placed: Sequence[int | None],
    special: SpecialTokens,
    rows: int,
    length: int,
    positions: PositionScheme,
) -> Batch:
    """Lay examples out in their rows; those without one are left out."""
    tokens = np.zeros((rows, length), np.int32)
    sequence = np.zeros((rows, length), np.int32)
    loss = np.zeros((rows, length), np.float32)
    used = [0] * rows
    for item, row in zip(examples, placed, strict=True):
        if row is None:
            continue
        place = slice(used[row], used[row] + len(item.tokens))
        tokens[row, place], loss[row, place] = item.tokens, item.loss
        sequence[row, place] = sequence[row].max() + 1
        used[row] = place.stop
    return Batch(tokens, build_layout(tokens, special, positions, sequence=sequence), loss)


def synthetic_batch(codec: Codec, tokenizer: Any, config: TrainConfig, step: int) -> Batch:
    """The batch of a step, a pure function of (seed, step), so that a resumed run sees what it would have seen.

    ASPD and Seq models get the same problems: which ones fit is decided by the structured form for both.
    """
    problems: list[Problem] = []
    examples: list[Example] = []
    rows, length = config.batch_shape(step)
    total = number = 0
    while total < rows * length:
        made = problem((config.seed << 48) + (step << 16) + number, held_out=False)
        structured = example(codec, tokenizer, made, True, config.fed_loss)
        number += 1
        if len(structured.tokens) > length:
            continue  # a few of the longest problems fit no row
        problems.append(made)
        examples.append(structured)
        total += len(structured.tokens)
    placed = first_fit([len(item.tokens) for item in examples], rows, length)
    serial_share = config.plain_every if step >= config.short_steps else 0
    for number, item in enumerate(problems):
        if not config.structured or (serial_share and number % serial_share == 0):
            examples[number] = example(codec, tokenizer, item, False)
    return pack(examples, placed, codec.special, rows, length, config.positions)
