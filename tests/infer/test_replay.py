"""Stepwise logits against those of full passes, as in training (protocol, sections 6.1 and 6.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from aspd_jax import LanguageModel, SpecialTokens
from aspd_jax.errors import RequestError
from aspd_jax.model.transformer import Transformer
from infer import Engine
from tests.conftest import GOLDEN, shared
from tests.helpers.answers import EXAMPLE, SEPARATOR, TEXT, critical_path, full_pass, linearise
from tests.helpers.authors_model import authors_tensors, load_authors_model
from tests.helpers.replay import replay

text = st.lists(st.sampled_from(TEXT), max_size=5)
title = st.lists(st.sampled_from(TEXT), min_size=1, max_size=3)
block = st.lists(st.tuples(title, text), min_size=2, max_size=5)
parts = st.lists(st.one_of(text, block), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def wide(bare_lm: LanguageModel) -> Engine:
    """An engine whose limits hold all answers, so that they share programs."""
    return Engine(bare_lm, max_length=256, max_branches=8, max_title_tokens=4, separator_ids=SEPARATOR)


@settings(max_examples=7)
@given(parts=parts, prompt=st.lists(st.sampled_from(TEXT), min_size=1, max_size=5))
def test_stepwise_logits_equal_the_full_pass(wide: Engine, parts: list, prompt: list[int]) -> None:
    special = wide.config.special
    answer = linearise(special, parts)
    trace = replay(wide, prompt, answer)
    np.testing.assert_allclose(trace.logits, full_pass(wide.lm, special, prompt, answer), atol=1e-4)
    assert trace.steps == critical_path(special, parts) - 1


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("scheme", ["sequential", "max"])
def test_stepwise_logits_for_every_position_scheme(bare_lm: LanguageModel, scheme: Any) -> None:
    config = replace(bare_lm.config, positions=scheme)
    lm = replace(bare_lm, config=config, model=Transformer(config))
    own = Engine(lm, max_length=512, separator_ids=SEPARATOR)
    answer = linearise(own.config.special, EXAMPLE)
    logits = replay(own, [1, 2], answer).logits
    np.testing.assert_allclose(logits, full_pass(lm, own.config.special, [1, 2], answer), atol=1e-4)
    if scheme != "sequential":  # negative control: trained with one scheme, decoded with another
        assert np.abs(logits - full_pass(bare_lm, own.config.special, [1, 2], answer)).max() > 1e-2


def test_shared_siblings_break_the_equality(bare_lm: LanguageModel) -> None:
    """Negative control: a full pass with rule 3 dropped shows branches what decoding does not."""
    config = replace(bare_lm.config, siblings="shared")
    shared = replace(bare_lm, config=config, model=Transformer(config))
    own = Engine(bare_lm, max_length=512, separator_ids=SEPARATOR)
    answer = linearise(own.config.special, EXAMPLE)
    error = np.abs(replay(own, [1], answer).logits - full_pass(shared, own.config.special, [1], answer)).max(axis=1)
    assert error.max() > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": "predict"}, "positions: expected sequential or max for decoding, got predict"),
        ({"siblings": "shared"}, "siblings: expected invisible for decoding, got shared"),
    ],
)
def test_ablations_that_are_not_decoded_are_refused(bare_lm: LanguageModel, change: Any, message: str) -> None:
    config = replace(bare_lm.config, **change)
    with pytest.raises(RequestError, match=rf"{message}\..* commit 8c87dab"):
        Engine(replace(bare_lm, config=config, model=Transformer(config)))


def test_every_token_is_fed_once(engine: Engine) -> None:
    answer = linearise(engine.config.special, EXAMPLE)
    trace = replay(engine, [1], answer)
    assert sum(trace.widths) == len(answer) - 1, "all but the last, which no step has to feed"
    fork = 1 + (1 + 1 + 2) + (1 + 2 + 2) + (1 + 1 + 2)
    assert fork in trace.widths, "`<|para|>` and all heads go in one step"
    assert 3 + 1 in trace.widths, "all closing tags and `<|/para|>` go in one step"


@pytest.fixture(scope="module")
def authors_lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """The model that the authors' engine ran with."""
    return load_authors_model(tmp_path_factory.mktemp("authors"))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("file", sorted((GOLDEN / "engine").glob("*.npz")), ids=lambda file: file.stem)
def test_authors_engine(file: Path, authors_lm: LanguageModel) -> None:
    """Stepwise decoding and the full pass both give the logits that the authors' engine computed, token by token."""
    vector = np.load(file)
    tokens, prompt, fed = vector["tokens"].tolist(), int(vector["prompt_length"]), vector["fed"]
    trace = replay(Engine(authors_lm), tokens[:prompt], tokens[prompt:])
    np.testing.assert_allclose(trace.logits[fed[prompt:]], vector["logits"][prompt:][fed[prompt:]], atol=1e-4)
    full = full_pass(authors_lm, authors_lm.special_tokens, [], tokens)
    np.testing.assert_allclose(full[fed], vector["logits"][fed], atol=1e-4)


def test_visible_siblings_give_other_logits_than_the_authors(authors_lm: LanguageModel) -> None:
    """Negative control: with rule 3 dropped, the logits are not the authors'."""
    config = replace(authors_lm.config, siblings="shared")
    shared = replace(authors_lm, config=config, model=Transformer(config))
    vector = np.load(GOLDEN / "engine" / "s01_P3_unequal.npz")
    fed = vector["fed"]
    full = full_pass(shared, authors_lm.special_tokens, [], vector["tokens"].tolist())
    assert np.abs(full[fed] - vector["logits"][fed]).max() > 1e-2


def test_seeded_weights_and_vectors_are_the_authors() -> None:
    """The seeded weights are those of the authors' checkpoint, and the vectors are theirs."""
    folder = shared("golden")
    theirs, ours = load_file(folder / "tiny_qwen2" / "model.safetensors"), authors_tensors()
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-6)
    for file in (GOLDEN / "engine").glob("*.npz"):
        assert file.read_bytes() == (folder / "engine" / file.name).read_bytes()


def branch_rows(special: SpecialTokens, answer: list[int], order: list[int]) -> list[np.ndarray]:
    """Places of each branch's tokens in an answer with one block, listed by original branch number."""
    starts = [i for i, token in enumerate(answer) if token == special.branch_start]
    ends = [i for i, token in enumerate(answer) if token == special.branch_end]
    rows = [np.arange(a, b + 1) for a, b in zip(starts, ends, strict=True)]
    return [rows[order.index(number)] for number in range(len(order))]


@pytest.mark.further
@pytest.mark.parametrize("scheme", ["sequential", "max"])
def test_permuting_branches_permutes_their_logits(bare_lm: LanguageModel, scheme: Any) -> None:
    config = replace(bare_lm.config, positions=scheme)
    lm = replace(bare_lm, config=config, model=Transformer(config))
    own = Engine(lm, max_length=512, separator_ids=SEPARATOR)
    special = own.config.special
    block = [([5], [6, 7, 8]), ([5], [1]), ([5], [9, 9])]  # equal titles: the serial text before does not change
    logits, places = {}, {}
    for order in ([0, 1, 2], [2, 0, 1]):
        answer = linearise(special, [[3], [block[i] for i in order], [4, 4]])
        logits[order[0]] = replay(own, [1, 2], answer).logits
        places[order[0]] = branch_rows(special, answer, order)
    for a, b in zip(places[0], places[2], strict=True):
        np.testing.assert_allclose(logits[0][a], logits[2][b], atol=1e-4)
    np.testing.assert_allclose(logits[0][-3:], logits[2][-3:], atol=1e-4)
    assert np.abs(logits[0] - logits[2]).max() > 1e-2, "negative control: unpermuted, they differ"


def test_a_branch_is_the_same_without_its_siblings(engine: Engine) -> None:
    special, block = engine.config.special, [([5], [6, 7, 8]), ([9], [1]), ([2], [9, 9])]
    answer = linearise(special, [[3], block], end=None)
    logits = replay(engine, [1, 2], answer).logits
    head = answer[: answer.index(special.branch_start)]
    for number, rows in enumerate(branch_rows(special, answer, [0, 1, 2])):
        alone = full_pass(engine.lm, special, [1, 2], head + [answer[i] for i in rows])[len(head) :]
        np.testing.assert_allclose(logits[rows], alone, atol=1e-4)
        if number:  # negative control: as plain text behind its sibling it is another
            config = replace(engine.lm.config, siblings="shared")
            shared = replace(engine.lm, config=config, model=Transformer(config))
            assert np.abs(logits[rows] - full_pass(shared, special, [1, 2], answer)[rows]).max() > 1e-2


def test_conversation_with_blocks_in_the_prompt(engine: Engine) -> None:
    """A prompt may hold the blocks of an earlier answer; its branches stay hidden from each other."""
    special = engine.config.special
    earlier = linearise(special, EXAMPLE, end=None)
    later = linearise(special, [[2], [([7], [8]), ([9], [1, 2])]])
    whole = full_pass(engine.lm, special, [1, *earlier, 3], later)
    np.testing.assert_allclose(replay(engine, [1, *earlier, 3], later).logits, whole, atol=1e-4)
