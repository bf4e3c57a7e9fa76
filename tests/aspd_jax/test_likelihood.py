"""Likelihood of branches with and without their siblings, against passes over plain sequences."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from aspd_jax import LanguageModel
from aspd_jax.blocks.spans import BlockSpan, BranchSpan
from aspd_jax.layout import Layout
from aspd_jax.likelihood import PEAK_TOKENS, Row, encode, nll_increases, token_losses

ANSWER = "Two ideas: go out and walk. stay in and read. That is all."
CUTS = (11, 28, 46)


@pytest.fixture(scope="module")
def row(lm: LanguageModel) -> Row:
    block = BlockSpan((BranchSpan("go", CUTS[0], CUTS[1], lead=5), BranchSpan("stay", CUTS[1], CUTS[2], lead=6)))
    return encode(lm, "What now?", ANSWER, [block])


def plain_losses(lm: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """Of every token but the first, in a plain causal pass."""
    ones = np.ones((1, len(tokens)), np.int32)
    layout = Layout(np.arange(len(tokens), dtype=np.int32)[None], ones, 0 * ones, 0 * ones)
    logits = np.asarray(lm.model.apply({"params": lm.params}, tokens[None], layout))[0]
    likely = jax.nn.log_softmax(logits[:-1])
    return -np.take_along_axis(np.asarray(likely), tokens[1:, None], axis=1)[:, 0]


def losses(lm: LanguageModel, row: Row, layout: Layout) -> np.ndarray:
    size = 256
    pad = [(0, size - len(row.tokens))]
    padded = Layout(*(np.pad(field, pad)[None] for field in layout))
    return np.asarray(token_losses(lm.model, lm.params, np.pad(row.tokens, pad)[None], padded))[0, : len(row.tokens)]


def test_hidden_siblings_are_as_if_they_were_not_there(lm: LanguageModel, row: Row) -> None:
    branch = row.hidden.branch
    assert set(branch) == {0, 1, 2}
    before = np.flatnonzero(branch > 0)[0]
    found = losses(lm, row, row.hidden)
    for number in (1, 2):
        own = np.flatnonzero(branch == number)
        alone = np.concatenate([row.tokens[:before], row.tokens[own]])
        np.testing.assert_allclose(found[own], plain_losses(lm, alone)[before - 1 :], atol=2e-4)


def test_visible_siblings_are_the_plain_answer(lm: LanguageModel, row: Row) -> None:
    np.testing.assert_allclose(losses(lm, row, row.plain)[1:], plain_losses(lm, row.tokens), atol=2e-4)


def test_rises_are_what_hiding_costs(lm: LanguageModel, row: Row) -> None:
    (first, second), again = nll_increases(lm, [row, row], 256)
    rise = losses(lm, row, row.hidden) - losses(lm, row, row.plain)
    assert first.mean == pytest.approx(0, abs=1e-4)  # nothing before the first branch is hidden
    own = rise[row.branch == 2]
    assert second.mean == pytest.approx(own.mean(), abs=1e-4) and abs(second.mean) > 1e-3
    windows = [own[start : start + PEAK_TOKENS].mean() for start in range(max(1, len(own) - PEAK_TOKENS + 1))]
    assert second.peak == pytest.approx(max(windows), abs=1e-4)
    np.testing.assert_allclose(again, [first, second], atol=1e-4)


def test_leads_do_not_count(row: Row) -> None:
    counted, branch = row.branch, row.hidden.branch
    assert ((counted == 0) | (counted == branch)).all()
    assert ((branch > 0) & (counted == 0)).any()
