"""Answers of the tiny model without a tokenizer (`bare_lm`), written down independently of the project."""

from __future__ import annotations

import numpy as np

from aspd_jax import LanguageModel, SpecialTokens, build_layout
from infer import Result

SEPARATOR = (15, 16)
TEXT = list(range(1, 15))
EXAMPLE = [[3, 4], [([5], [6, 7, 8]), ([9, 2], [1]), ([5], [])], [4], [([1], [2]), ([2], [3, 4, 5, 6])], [7, 7]]


def linearise(special: SpecialTokens, parts: list, end: int | None = 0) -> list[int]:
    """Serial stretches (lists) and blocks (lists of (title, text)), as the protocol writes them down."""
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
    tokens = np.array([prompt + answer])
    layout = build_layout(tokens, special, lm.config.positions)
    return np.asarray(lm.model.apply({"params": lm.params}, tokens, layout))[0, len(prompt) :]


def same(a: Result, b: Result) -> bool:
    return a.token_ids == b.token_ids and a.finish_reason == b.finish_reason and a.stats.passes == b.stats.passes
