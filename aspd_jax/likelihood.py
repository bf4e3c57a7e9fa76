"""Measure how much less likely a branch is to a model when its siblings are hidden (protocol, section 7, stage 2).

B answers, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.blocks.spans import BlockSpan
from aspd_jax.chat import encode_turns
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.vocabulary import head_of, lm_head

PEAK_TOKENS = 8  # length of the window of `Rise.peak`
CHUNK = 128  # tokens whose logits are in memory at a time


class Rise(NamedTuple):
    """Increase of the negative log-likelihood of a branch, nats per token.

    Attributes:
        mean: mean over all tokens of the branch.
        peak: largest mean over `PEAK_TOKENS` consecutive tokens.
    """

    mean: float
    peak: float


class Row(NamedTuple):
    """An answer as tokens, with two layouts; [S] per field.

    Attributes:
        tokens: token ids.
        hidden: layout with branches that are invisible to each other.
        plain: layout of plain text.
        branch: 1, 2, … for the tokens scored for a branch, over all blocks; 0: not scored. Leads are not scored,
            because they are known before the block.
    """

    tokens: np.ndarray
    hidden: Layout
    plain: Layout
    branch: np.ndarray


def encode(lm: LanguageModel, question: str, answer: str, blocks: Sequence[BlockSpan]) -> Row:
    """Return a question and an answer as a row; every segment is encoded separately, and without tags.

    The question is rendered by the chat template of the model, if it has one.
    """
    encode_text = lm.codec.text.encode
    tokens: list[int] = []
    position: list[int] = []
    block_of: list[int] = []
    branch_of: list[int] = []
    counted: list[int] = []
    number = 0

    def put(ids: Sequence[int], first: int, block: int, branch: int, counts: int) -> None:
        tokens.extend(ids)
        position.extend(range(first, first + len(ids)))
        block_of.extend([block] * len(ids))
        branch_of.extend([branch] * len(ids))
        counted.extend([counts] * len(ids))

    put(_prompt(lm, question), 0, 0, 0, 0)
    place = 0
    for index, block in enumerate(blocks, 1):
        put(encode_text(answer[place : block.start]), len(tokens), 0, 0, 0)
        begin = len(tokens)
        for branch_index, branch in enumerate(block.branches, 1):
            number += 1
            text = answer[branch.start : branch.end]
            head, body = encode_text(text[: branch.lead]), encode_text(text[branch.lead :])
            put(head, begin, index, branch_index, 0 if body else number)
            put(body, begin + len(head), index, branch_index, number)
        place = block.end
    put(encode_text(answer[place:]), len(tokens), 0, 0, 0)
    ones = np.ones(len(tokens), np.int32)
    hidden = Layout(*(np.asarray(field, np.int32) for field in (position, ones, block_of, branch_of)))
    plain = Layout(np.arange(len(tokens), dtype=np.int32), ones, 0 * ones, 0 * ones)
    return Row(np.asarray(tokens, np.int32), hidden, plain, np.asarray(counted, np.int32))


def _prompt(lm: LanguageModel, question: str) -> list[int]:
    if not lm.tokenizer.chat_template:
        return lm.codec.text.encode_normalised(f"{question}\n\n")
    messages = [{"role": "user", "content": question}]
    return encode_turns(lm.tokenizer, lm.codec.text, lm.end_ids, messages, prompt=True)[0]


def nll_increases(lm: LanguageModel, rows: Sequence[Row], size: int) -> Iterator[list[Rise]]:
    """Yield the increases of every branch of each row, from two full passes; the first branch of a block has none.

    Args:
        lm: model that scores.
        rows: rows of one batch.
        size: S, to which rows are padded.
    """
    losses = []
    for layouts in ([row.hidden for row in rows], [row.plain for row in rows]):
        tokens = np.stack([_filled(row.tokens, size) for row in rows])
        layout = Layout(
            *(np.stack([_filled(field, size) for field in fields]) for fields in zip(*layouts, strict=True))
        )
        losses.append(np.asarray(token_losses(lm.model, lm.params, tokens, layout)))
    hidden, plain = losses
    for index, row in enumerate(rows):
        rise = hidden[index, : len(row.branch)] - plain[index, : len(row.branch)]
        of_branches = [rise[row.branch == number] for number in range(1, int(row.branch.max(initial=0)) + 1)]
        yield [Rise(float(values.mean()), _peak(values)) if values.size else Rise(0.0, 0.0) for values in of_branches]


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    return np.pad(values, (0, size - len(values)))


def _peak(values: np.ndarray) -> float:
    width = min(PEAK_TOKENS, len(values))
    return float(np.convolve(values, np.ones(width) / width, "valid").max())


@partial(jax.jit, static_argnames="model")
def token_losses(model: Transformer, params: Any, tokens: jax.Array, layout: Layout) -> jax.Array:
    """Return the negative log-likelihood of each token given the visible tokens before it; float32 [B, S].

    The token before the first token of a branch is not its left neighbour but the last token before the block.
    """
    x: jax.Array = jnp.asarray(model.apply({"params": params}, tokens, layout, head=False))
    B, S = tokens.shape
    first = (layout.branch != jnp.roll(layout.branch, 1, axis=1)) | (layout.block != jnp.roll(layout.block, 1, axis=1))
    serial = jnp.where(layout.branch == 0, jnp.arange(S)[None], -1)
    before_block = jax.lax.cummax(serial, axis=1)
    left = jnp.arange(S)[None] - 1
    source = jnp.where((layout.branch > 0) & first, before_block, jnp.broadcast_to(left, (B, S)))
    seen = jnp.take_along_axis(x, jnp.maximum(source, 0)[..., None], axis=1)

    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, targets = part
        logits = lm_head(model.config, head_of(model.config, params), hidden)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    parts = (seen.reshape(B, -1, CHUNK, x.shape[-1]), tokens.reshape(B, -1, CHUNK))
    losses = jax.lax.map(chunk, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), parts))
    return jnp.moveaxis(losses, 0, 1).reshape(B, S) * (source >= 0)
