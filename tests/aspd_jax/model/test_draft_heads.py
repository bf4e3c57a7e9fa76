"""Draft heads: their arithmetic against NumPy, and their file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aspd_jax import LanguageModel, build_layout, load_model, save_model
from aspd_jax.errors import CheckpointError
from aspd_jax.formats import open_checkpoint
from aspd_jax.formats.folder import convert
from aspd_jax.language_model import save_draft_heads
from tests.conftest import tiny_config, write_checkpoint
from tests.helpers.draft_heads import with_draft_heads

HEADS = 3


@pytest.fixture(scope="module")
def drafting(bare_lm: LanguageModel) -> LanguageModel:
    return with_draft_heads(bare_lm, HEADS)


def in_numpy(lm: LanguageModel, hidden: np.ndarray, tokens: list[int]) -> list[np.ndarray]:
    """Logits of heads by the formula of the module's documentation; head k sees the first k tokens."""
    table = np.asarray(lm.params["embedding"]["embedding"], np.float64)
    layer = {name: np.asarray(value, np.float64) for name, value in lm.params["draft_heads"].items()}
    state, logits = hidden.astype(np.float64), []
    for token in tokens:
        x = table[token] / np.sqrt((table[token] ** 2).mean() + 1e-6)
        gate, up = layer["gate_up"] @ np.concatenate([state, x])
        state = state + layer["down"] @ (gate / (1 + np.exp(-gate)) * up)
        logits.append(np.asarray(lm.params["head"]["kernel"], np.float64) @ state)
    return logits


def test_heads_are_as_documented(drafting: LanguageModel) -> None:
    """Check the heads in a full pass with known tokens, and one after the other with their draft tokens."""
    tokens = np.random.default_rng(0).integers(1, 15, (2, 9))
    special = drafting.special_tokens
    assert special is not None
    layout = build_layout(tokens, special, drafting.config.positions)
    run = {"params": drafting.params}
    hidden = np.asarray(drafting.model.apply(run, tokens, layout, head=False))
    states = drafting.model.apply(run, hidden, tokens, method="draft_states")
    assert len(states) == HEADS
    for row, place in ((0, 0), (1, 4), (0, 5)):
        expected = in_numpy(drafting, hidden[row, place], tokens[row, place + 1 : place + 1 + HEADS].tolist())
        for state, logits in zip(states, expected, strict=True):
            found = np.asarray(drafting.model.apply(run, state[row, place], method="logits"))
            np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    guesses = np.asarray(drafting.model.apply(run, hidden[:, 3], jnp.asarray([5, 7]), HEADS, method="draft"))
    for row, first in enumerate((5, 7)):
        known = [first]
        for _ in range(HEADS):
            known.append(int(in_numpy(drafting, hidden[row, 3], known)[-1].argmax()))
        assert guesses[row].tolist() == known[1:]


def test_fresh_heads_guess_the_next_token_again(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tiny_config(vocab_size=24), seed=2)
    lm = load_model(folder, draft_heads=2)
    hidden = jax.random.normal(jax.random.key(0), (5, lm.config.hidden_size))
    run = {"params": lm.params}
    guesses = lm.model.apply(run, hidden, jnp.arange(5), 2, method="draft")
    logits = lm.model.apply(run, hidden, method="logits")
    np.testing.assert_array_equal(guesses, np.repeat(np.asarray(logits).argmax(-1)[:, None], 2, axis=1))


def test_a_folder_keeps_its_heads(drafting: LanguageModel, tmp_path: Path) -> None:
    """Check that folders of models and adapters keep their heads; other tensors do not change."""
    save_model(drafting, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config.draft_heads == HEADS
    np.testing.assert_allclose(
        again.params["draft_heads"]["down"], drafting.params["draft_heads"]["down"], rtol=1e-2
    )  # bfloat16
    assert "draft_heads.down" not in load_file(tmp_path / "model" / "model.safetensors")
    assert load_model(tmp_path / "model", draft_heads=0).config.draft_heads == 0
    further = load_model(tmp_path / "model", draft_heads=HEADS + 1)  # trained further, not begun anew
    assert further.config.draft_heads == HEADS + 1
    np.testing.assert_array_equal(further.params["draft_heads"]["down"], again.params["draft_heads"]["down"])
    (tmp_path / "model" / "draft_heads.safetensors").unlink()
    assert load_model(tmp_path / "model").config.draft_heads == 0


def test_a_conversion_keeps_them(drafting: LanguageModel, tmp_path: Path) -> None:
    save_model(replace(drafting), tmp_path / "model")
    convert(open_checkpoint(tmp_path / "model"), tmp_path / "converted", "float32")
    before, after = (load_model(tmp_path / name) for name in ("model", "converted"))
    assert after.config.draft_heads == HEADS
    jax.tree.map(np.testing.assert_array_equal, after.params["draft_heads"], before.params["draft_heads"])


def test_other_files_are_refused(drafting: LanguageModel, tmp_path: Path) -> None:
    save_model(replace(drafting), tmp_path / "model")
    file = tmp_path / "model" / "draft_heads.safetensors"
    tensors = load_file(file)
    metadata = {"heads": "3"}
    for changed, said, message in (
        ({"draft_heads.down": tensors["draft_heads.down"]}, metadata, "got draft_heads.down \\[32, 32\\]"),
        (tensors | {"more": np.zeros(1, np.float32)}, metadata, "more \\[1\\]"),
        (tensors | {"draft_heads.down": np.zeros((8, 8), np.float32)}, metadata, "hidden size 32"),
        (tensors, {}, "metadata: heads: expected a number of draft heads, got ''"),
        (tensors, {"heads": "0"}, "got '0'"),
    ):
        save_file(changed, file, metadata=said)
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path / "model")
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"draft_heads.safetensors: expected safetensors"):
        load_model(tmp_path / "model")
    assert load_model(tmp_path / "model", draft_heads=0).config.draft_heads == 0, "the file is not read"
    file.unlink()
    save_draft_heads(drafting, file)
    assert load_model(tmp_path / "model").config.draft_heads == HEADS
