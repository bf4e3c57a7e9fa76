"""A model inside a wider one: the same logits at first, and all of it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from aspd_jax import LanguageModel, Layout
from aspd_jax.errors import ConfigError
from aspd_jax.language_model import load_model, random_model
from aspd_jax.model.config import ModelConfig
from tests.training import changed, losses, on_records
from train.config import ModelSection, TrainConfig
from train.grow import grow
from train.loop import train as run_training
from train.plan import planned_shape

SHAPE = ModelConfig(vocab_size=96, hidden_size=48, feed_forward=40, layers=2, heads=4, kv_heads=2, head_dim=12)
BIASES = {"query_bias": True, "output_bias": True, "feed_forward_bias": True}


def logits(lm: LanguageModel) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (2, 24)).astype(np.int32)
    place = np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape)
    nothing = np.zeros_like(place)
    return np.asarray(lm.model.apply({"params": lm.params}, tokens, Layout(place, nothing, nothing, nothing)))


def trained(lm: LanguageModel) -> LanguageModel:
    """As if it had learned something: no parameter is where it began, norms and biases neither."""
    random = np.random.default_rng(1)
    lm.params = jax.tree.map(lambda leaf: leaf + 0.2 * random.standard_normal(leaf.shape).astype(leaf.dtype), lm.params)
    return lm


@pytest.mark.parametrize("changes", [{}, {"query_norm": True}, {"tied": True}, BIASES], ids=str)
def test_a_grown_model_computes_the_same(changes: dict[str, Any]) -> None:
    lm = trained(random_model(replace(SHAPE, **changes), None, {}))
    wide = grow(lm, 80, 104, seed=3)
    assert (wide.config.hidden_size, wide.config.feed_forward) == (80, 104)
    assert (wide.hf_config["hidden_size"], wide.hf_config["intermediate_size"]) == (80, 104)
    np.testing.assert_allclose(logits(wide), logits(lm), atol=2e-4)
    other = grow(lm, 80, 104, seed=4)  # what is new is random, and changes nothing
    np.testing.assert_allclose(logits(other), logits(lm), atol=2e-4)
    assert not np.array_equal(other.params["layer_0"]["feed_forward"]["gate_up"]["kernel"],
                              wide.params["layer_0"]["feed_forward"]["gate_up"]["kernel"])  # fmt: skip
    # Control: it is the parts that write nothing that keep it so.
    wide.params["layer_1"]["feed_forward"]["down"]["kernel"][40:, :48] = 0.2
    assert np.abs(logits(wide) - logits(lm)).max() > 0.01


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return on_records(tmp_path_factory.mktemp("grow"))


def test_a_run_goes_on_in_a_wider_model(growing: TrainConfig, tmp_path: Path) -> None:
    config = changed(growing, model__grow=True, model__hidden_size=48, model__feed_forward=80)
    run_training(config, tmp_path / "wide", progress=False)
    run_training(growing, tmp_path / "narrow", progress=False)
    wide, narrow = losses(tmp_path / "wide"), losses(tmp_path / "narrow")
    assert wide[0] == pytest.approx(narrow[0], rel=1e-4) and wide[-1] < wide[0]
    lm = load_model(tmp_path / "wide" / "model")
    assert (lm.config.hidden_size, lm.config.feed_forward, lm.config.head_dim) == (48, 80, 16)
    for path, leaf in flatten_dict(lm.params).items():  # what wrote nothing has learned to
        if path[-2] in ("embedding", "output", "down"):
            assert np.abs(np.asarray(leaf)[..., 32:]).sum() > 0, path
    assert np.abs(np.asarray(lm.params["layer_0"]["feed_forward"]["down"]["kernel"])[32:]).sum() > 0
    assert planned_shape(config) == lm.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "model.hidden_size: the checkpoint has 32, and grows to no less, got 16"),
        (
            {"hidden_size": 32, "feed_forward": 8},
            "model.feed_forward: the checkpoint has 32, and grows to no less, got 8",
        ),
    ],
)
def test_a_model_does_not_shrink(changes: dict[str, Any], message: str, growing: TrainConfig, tmp_path: Path) -> None:
    config = changed(growing, model__grow=True, **{f"model__{name}": size for name, size in changes.items()})
    with pytest.raises(ConfigError, match=message):
        run_training(config, tmp_path / "run", progress=False)


@pytest.mark.parametrize("changes", [{}, {"checkpoint": "x", "lora_rank": 4}], ids=str)
def test_only_whole_checkpoints_grow(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.grow needs model\.checkpoint, and neither"):
        ModelSection(grow=True, **changes)
