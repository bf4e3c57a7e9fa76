"""Collectives of a step on a mesh: none on keys and values."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd_jax.language_model import LanguageModel, random_model
from aspd_jax.model import cpu
from aspd_jax.model.cache import Bucket, empty_cache
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.sharding import make_mesh, shardings
from aspd_jax.tokens import SpecialTokens
from infer import Engine
from infer.decode.decode_step import run
from infer.decode.slots import admit
from infer.decode.state import DecodeState, EngineConfig, place_state
from infer.request import Request, SamplingParams
from infer.scheduling.admission import admission, new_state
from infer.scheduling.warm_up import NO_STEP

SHAPE = ModelConfig(vocab_size=64, hidden_size=64, feed_forward=96, layers=2, heads=8, kv_heads=4, head_dim=24)
SLOTS = 384  # of the cache; no other axis has this size
KEYS = re.compile(rf"f32\[\d+,{SLOTS},")
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    lm = random_model(SHAPE, None, {"max_position_embeddings": SLOTS}, end_ids=(0,))
    lm.special_tokens = SpecialTokens(*range(58, 64))
    return lm


def over(lm: LanguageModel, mesh: Any) -> tuple[LanguageModel, EngineConfig, DecodeState]:
    """Return a model over a mesh, the configuration of its engine, and a state of 4 rows."""
    split = replace(lm, model=lm.model.clone(mesh=mesh), mesh=mesh)
    split.params = jax.device_put(lm.params, shardings(abstract_parameters(lm.model), mesh))
    config = Engine(split, max_batch=4, max_length=SLOTS, max_branches=4, separator_ids=(1,)).config
    return split, config, new_state(split, config, 4, SLOTS)


def shard_shape(array: jax.Array) -> tuple[int, ...]:
    """Return the shape of the part of an array that a device holds."""
    return tuple(array.sharding.shard_shape(array.shape))


def program(lm: LanguageModel, mesh: Any, bucket: Bucket) -> str:
    """Return the optimised HLO of steps over a mesh."""
    split, config, state = over(lm, mesh)
    return run.lower(split.params, state, NO_STEP, config, bucket, False).compile().as_text()


def collectives(text: str) -> list[str]:
    """Return the shapes of all collectives."""
    return [match[1] for match in COLLECTIVE.finditer(text)]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("bucket", [Bucket(4, 4, 1, SLOTS), Bucket(4, 16, 8, SLOTS)], ids=["serial", "branches"])
def test_no_collective_on_keys_and_values(
    model: LanguageModel, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also a mesh with a data axis: each device reads its own rows. Programs are those of accelerators."""
    monkeypatch.setattr(cpu, "PLAIN", True)
    said = collectives(program(model, make_mesh({"data": 2, "tensor": 4}), bucket))
    assert said, "layers split over tensor have to be added up"
    assert not [shape for shape in said if KEYS.search(shape)]


def test_masks_and_biases_are_split(model: LanguageModel) -> None:
    """Check the sizes on a device: the vocabulary is divided as in the head, where it can be."""
    mesh = make_mesh({"data": 2, "tensor": 4})
    lm, config, state = over(model, mesh)
    request = Request((1, 2), SamplingParams(logit_bias=dict(enumerate(range(64)))), "serial", 9, 0)
    for _ in range(2):
        held = {name: shard_shape(getattr(state, name)) for name in ("token_mask", "bias", "classes")}
        assert held == {"token_mask": (4, 5, 1, 2), "bias": (4, 16), "classes": (64,)}, "two words are not divided by 4"
        state = admit(state, admission(lm, config, state, request, 1), config)
    assert np.asarray(state.bias).sum(axis=1).tolist() == [0, 63 * 32, 0, 0]
    wide = state._replace(token_mask=jnp.zeros((4, 5, 1, 8), jnp.uint32))
    assert shard_shape(place_state(wide, mesh).token_mask) == (4, 5, 1, 2)


def test_gathered_rows_are_heard_of() -> None:
    """Check that the test finds gathered rows (negative control): some rows of a cache, taken by number."""
    mesh = make_mesh({"data": 2, "tensor": 4})
    layer = empty_cache(SHAPE, 4, SLOTS, mesh).layers[0]
    gathered = jax.jit(lambda key, rows: jnp.take(key, rows, axis=0)).lower(layer.key, jnp.arange(2)).compile()
    assert [shape for shape in collectives(gathered.as_text()) if KEYS.search(shape)]
