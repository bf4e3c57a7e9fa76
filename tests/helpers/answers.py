"""Answers of the tiny model without a tokenizer (`bare_lm`), written down independently of the project."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from aspd_jax import LanguageModel, Layout, SpecialTokens, build_layout
from aspd_jax.model.transformer import Transformer
from infer import Result

SEPARATOR = (15, 16)
TEXT = list(range(1, 15))
EXAMPLE = [[3, 4], [([5], [6, 7, 8]), ([9, 2], [1]), ([5], [])], [4], [([1], [2]), ([2], [3, 4, 5, 6])], [7, 7]]


def linearise(special: SpecialTokens, parts: list, end: int | None = 0) -> list[int]:
    """Serial segments (lists) and blocks (lists of (title, text)), as the protocol writes them down."""
    ids: list[int] = []
    for part in parts:
        if part and isinstance(part[0], tuple):
            for title, _ in part:
                ids += [special.title_start, *title, special.title_end]
            ids.append(special.parallel_start)
            for title, text in part:
                ids += [special.branch_start, *title, *SEPARATOR, *text, special.branch_end]
            ids.append(special.parallel_end)
        else:
            ids += part
    return ids + ([end] if end is not None else [])


def critical_path(special: SpecialTokens, parts: list) -> int:
    """Section 8, counted from the structure: end of text included."""
    path = 1
    for part in parts:
        if part and isinstance(part[0], tuple):
            path += sum(len(title) + 2 for title, _ in part) + 1
            path += max(len(text) + 1 for _, text in part)
        else:
            path += len(part)
    return path


def full_pass(lm: LanguageModel, special: SpecialTokens, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Logits [T, V] of an answer of T tokens, from one pass over all; padded, so that few lengths are compiled."""
    tokens = np.array([prompt + answer])
    padding = [(0, 0), (0, -tokens.shape[1] % 64)]
    layout = Layout(*(np.pad(part, padding) for part in build_layout(tokens, special, lm.config.positions)))
    logits = np.asarray(_logits(lm.model, lm.params, np.pad(tokens, padding), layout))
    return logits[0, len(prompt) : tokens.shape[1]]


@partial(jax.jit, static_argnames="model")
def _logits(model: Transformer, params: Any, tokens: np.ndarray, layout: Layout) -> Any:
    return model.apply({"params": params}, tokens, layout)


def same(a: Result, b: Result) -> bool:
    return a.token_ids == b.token_ids and a.finish_reason == b.finish_reason and a.stats.steps == b.stats.steps
