from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd_jax import LanguageModel, SpecialTokens, build_layout, load_model, visible
from aspd_jax.errors import CheckpointError
from aspd_jax.layout import Layout
from aspd_jax.model.attention import Attention, View, chunked, dense
from aspd_jax.model.cache import Group, empty_cache
from aspd_jax.model.config import ModelConfig, RopeConfig
from aspd_jax.model.transformer import Transformer, lm_head, stack_layers, unstack_layers
from aspd_jax.model.weights import abstract_parameters
from tests.conftest import GOLDEN, tiny_config, write_checkpoint
from tests.make_parity import CASES, prompt, torch_logits

SPECIAL = SpecialTokens(57, 58, 59, 60, 61, 62)
PARITY = np.load(GOLDEN / "parity.npz")
BLOCK = [3, 57, 4, 58, 57, 5, 58, 59, 61, 4, 7, 8, 62, 61, 5, 9, 62, 60, 11, 12]


def logits_of(lm: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    layout = build_layout(tokens, SPECIAL, lm.config.positions)
    return np.asarray(lm.model.apply({"params": lm.params}, tokens, layout))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    lm = load_model(write_checkpoint(tmp_path, CASES[name]))
    np.testing.assert_allclose(logits_of(lm, prompt()), PARITY[name], atol=1e-4)


def test_parity_vectors_tell_the_cases_apart() -> None:
    """Negative control: with another case's configuration, no case passes."""
    names = [name for name in CASES if name != "mistral"]  # without a window, Mistral is Llama
    for first, name in enumerate(names):
        for other in names[first + 1 :]:
            assert PARITY[name].shape != PARITY[other].shape or np.abs(PARITY[name] - PARITY[other]).max() > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_live(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lm = load_model(write_checkpoint(tmp_path, CASES[name], seed=5))
    np.testing.assert_allclose(logits_of(lm, prompt()), torch_logits(tmp_path), atol=1e-4)


BASE = ModelConfig(vocabulary=64, embed=32, feed_forward=48, layers=2, heads=4, kv_heads=2, head=8)
YARN = RopeConfig(scaling="yarn", factor=4.0, original_length=256, beta_fast=6.0, beta_slow=0.5)
LLAMA3 = RopeConfig(scaling="llama3", factor=4.0, original_length=16)
# For every field: a value to compare with another, both in a setting that reads the field.
ROPE_CHANGES: dict[str, tuple[RopeConfig, Any]] = {
    "theta": (RopeConfig(), 100.0),
    "scaling": (RopeConfig(factor=4.0), "linear"),
    "factor": (LLAMA3, 2.0),
    "original_length": (LLAMA3, 64),
    "low_frequency": (LLAMA3, 3.0),
    "high_frequency": (LLAMA3, 9.0),
    "beta_fast": (YARN, 1.5),
    "beta_slow": (YARN, 0.2),
    "truncate": (YARN, False),
    "attention_factor": (YARN, 1.3),
}
CHANGES: dict[str, tuple[ModelConfig, Any]] = {
    "vocabulary": (BASE, 80),
    "embed": (BASE, 48),
    "feed_forward": (BASE, 64),
    "layers": (BASE, 3),
    "heads": (BASE, 2),
    "kv_heads": (BASE, 4),
    "head": (BASE, 16),
    "activation": (BASE, "gelu"),
    "norm_epsilon": (BASE, 1e-1),
    "norm_offset": (BASE, 1.0),
    "after_norms": (BASE, True),
    "embedding_scale": (BASE, 3.0),
    "query_scale": (BASE, 1.0),
    "window_rope": (replace(BASE, window=12, windowed_layers=(True, False)), RopeConfig(theta=3.0)),
    "rope": (BASE, RopeConfig(theta=100.0)),
    "query_bias": (BASE, True),
    "output_bias": (BASE, True),
    "feed_forward_bias": (BASE, True),
    "query_norm": (BASE, True),
    "tied": (BASE, True),
    "window": (replace(BASE, window=12, windowed_layers=(True, True)), 4),
    "windowed_layers": (replace(BASE, window=4, windowed_layers=(True, True)), (False, True)),
    "positions": (BASE, "max"),
    "siblings": (BASE, "shared"),
    "dtype": (BASE, "bfloat16"),
    "weights": (BASE, "int8"),
    "lora_rank": (BASE, 2),
    "lora_alpha": (replace(BASE, lora_rank=2), 4.0),
    "new_tokens": (BASE, (17, 18)),
}


def seeded(config: ModelConfig) -> np.ndarray:
    """Logits for a block of a model whose parameters are drawn in order of their names."""
    model = Transformer(config)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.standard_normal(leaf.shape) * 0.3, leaf.dtype),
        nn.meta.unbox(abstract_parameters(model)),
    )
    tokens = np.array([BLOCK])
    return np.asarray(model.apply({"params": params}, tokens, build_layout(tokens, SPECIAL, config.positions)))


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_every_field_changes_the_output(name: str) -> None:
    config, value = CHANGES[name]
    assert getattr(config, name) != value
    before, after = seeded(config), seeded(replace(config, **{name: value}))
    assert before.shape != after.shape or np.abs(before - after).max() > 1e-3


@pytest.mark.parametrize("name", [field.name for field in fields(RopeConfig)])
def test_every_rope_field_changes_the_output(name: str) -> None:
    rope, value = ROPE_CHANGES[name]
    base = replace(BASE, head=32)
    changed = replace(base, rope=replace(rope, **{name: value}))
    assert np.abs(seeded(replace(base, rope=rope)) - seeded(changed)).max() > 1e-3


@pytest.mark.parametrize("implementation", [dense, chunked])
@pytest.mark.parametrize("siblings", ["invisible", "shared"])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_against_brute_force(
    implementation: Attention, siblings: Any, window: int | None, monkeypatch: Any
) -> None:
    """Each implementation against a softmax in float64 over just the keys that `visible` allows."""
    monkeypatch.setattr("aspd_jax.model.attention.QUERY_CHUNK", 16)
    monkeypatch.setattr("aspd_jax.model.attention.GROUPS", 2)
    random = np.random.default_rng(3)
    tokens = np.array([BLOCK * 3, [9] * 2 + BLOCK * 2 + [0] * 18])
    owner = np.array([[1] * 40 + [2] * 20, [1] * 42 + [0] * 18])
    layout = build_layout(tokens, SPECIAL, sequence=owner)
    B, S, K, G, H = 2, 60, 2, 3, 4
    q, k, v = (random.standard_normal(s).astype(np.float32) for s in ((B, S, K, G, H), (B, K, S, H), (B, K, S, H)))
    view = View(Layout(*map(jnp.asarray, layout)), Layout(*map(jnp.asarray, layout)))
    out = np.asarray(implementation(q, k, v, view, siblings, window))
    mask = visible(layout, layout, siblings, window)
    for b in range(B):
        for i in range(S):
            if not owner[b, i]:
                continue
            keys = np.flatnonzero(mask[b, i])
            for h in range(K):
                scores = k[b, h, keys].astype(float) @ q[b, i, h].T.astype(float) / np.sqrt(H)
                weights = np.exp(scores - scores.max(0))
                expected = (weights / weights.sum(0)).T @ v[b, h, keys]
                np.testing.assert_allclose(out[b, i, h], expected, atol=1e-5)


def test_chunked_gradients_equal_dense(monkeypatch: Any) -> None:
    monkeypatch.setattr("aspd_jax.model.attention.QUERY_CHUNK", 4)
    monkeypatch.setattr("aspd_jax.model.attention.GROUPS", 2)
    tokens = np.array([BLOCK])
    layout = build_layout(tokens, SPECIAL)
    reference, in_chunks = Transformer(BASE), Transformer(BASE, attention=chunked)
    params = reference.init(jax.random.key(0), tokens, layout)

    def loss(params: Any, model: Transformer) -> jax.Array:
        return jnp.sum(jnp.sin(model.apply(params, tokens, layout)))

    a, b = jax.grad(loss)(params, reference), jax.grad(loss)(params, in_chunks)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(x)


@pytest.mark.parametrize("windows", [(), (True, True), (False, True)], ids=str)
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_are_the_same_layers(windows: tuple[bool, ...], remat: bool) -> None:
    config = replace(BASE, window=5 if windows else None, windowed_layers=windows)
    tokens = np.array([BLOCK])
    layout = build_layout(tokens, SPECIAL)
    plain, scanned = Transformer(config), Transformer(config, attention=chunked, scan=True, remat=remat)
    params = nn.meta.unbox(plain.init(jax.random.key(0), tokens, layout))["params"]
    stacked = stack_layers(params, config.layers)
    shapes = jax.tree.map(jnp.shape, nn.meta.unbox(abstract_parameters(scanned)))
    assert jax.tree.map(jnp.shape, stacked) == shapes
    back = unstack_layers(stacked, config.layers)
    jax.tree.map(np.testing.assert_array_equal, params, back)
    expected = plain.apply({"params": params}, tokens, layout)
    np.testing.assert_allclose(scanned.apply({"params": stacked}, tokens, layout), expected, atol=1e-5)
    swapped = unstack_layers(stacked, config.layers)
    swapped["layer_0"], swapped["layer_1"] = swapped["layer_1"], swapped["layer_0"]
    other = scanned.apply({"params": stack_layers(swapped, config.layers)}, tokens, layout)
    assert np.abs(other - expected).max() > 1e-3, "negative control: the order of layers matters"


def test_the_head_applied_apart(tmp_path: Path) -> None:
    for tied in (False, True):
        config = replace(BASE, tied=tied)
        tokens = np.array([BLOCK])
        layout = build_layout(tokens, SPECIAL)
        model = Transformer(config)
        params = nn.meta.unbox(model.init(jax.random.key(0), tokens, layout))["params"]
        hidden = model.apply({"params": params}, tokens, layout, head=False)
        logits = model.apply({"params": params}, tokens, layout)
        np.testing.assert_allclose(lm_head(config, params, hidden), logits, atol=1e-5)


def test_gradients_equal_finite_differences() -> None:
    tokens = np.array([BLOCK])
    layout = build_layout(tokens, SPECIAL)
    model = Transformer(BASE)
    params = nn.meta.unbox(model.init(jax.random.key(0), tokens, layout))
    direction = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(x.size).standard_normal(x.shape), x.dtype), params
    )

    def loss(scale: Any) -> jax.Array:
        moved = jax.tree.map(lambda p, d: p + scale * d, params, direction)
        return jnp.mean(model.apply(moved, tokens, layout) ** 2)

    slope, step = float(jax.grad(loss)(0.0)), 1e-3
    assert (float(loss(step)) - float(loss(-step))) / (2 * step) == pytest.approx(slope, rel=2e-2)


def test_packed_sequences_do_not_see_each_other(tmp_path: Path) -> None:
    lm = load_model(write_checkpoint(tmp_path, tiny_config()))
    alone = logits_of(lm, np.array([BLOCK]))[0]
    packed = np.array([[3, 9, 9, *BLOCK]])
    owner = np.array([[1] * 3 + [2] * len(BLOCK)])
    layout = build_layout(packed, SPECIAL, sequence=owner)
    got = np.asarray(lm.model.apply({"params": lm.params}, packed, layout))[0, 3:]
    np.testing.assert_allclose(got, alone, atol=1e-5)
    merged = np.asarray(lm.model.apply({"params": lm.params}, packed, build_layout(packed, SPECIAL)))[0, 3:]
    assert np.abs(merged - alone).max() > 1e-2, "negative control: one sequence instead of two"


def test_cached_pass_equals_full_pass_in_any_order(tmp_path: Path) -> None:
    """Branches fed interleaved, with padding in the feed, give the logits of the linearisation."""
    lm = load_model(write_checkpoint(tmp_path, tiny_config()))
    tokens = np.array([BLOCK])
    layout = build_layout(tokens, SPECIAL)
    expected = logits_of(lm, tokens)[0]
    order = np.lexsort((layout.branch[0], layout.position[0] + 100 * (np.arange(20) >= 17)))
    assert (order != np.arange(20)).any()
    cache = empty_cache(lm.config, 1, 32)
    got = np.zeros_like(expected)
    for piece in np.split(order, [3, 9, 14]):
        feed = np.concatenate([piece, [0, 0]])
        real = np.array([[True] * len(piece) + [False] * 2])
        fed = Layout(*(np.where(real, field[:, feed], 0) for field in layout))
        group = Group(tokens[:, feed], fed)
        (logits,), cache = lm.model.apply({"params": lm.params}, [group], cache, method="decode")
        got[piece] = np.asarray(logits)[0, : len(piece)]
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert int(cache.length[0]) == 20


def test_bfloat16_is_close(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    exact, rounded = (logits_of(load_model(folder, dtype), prompt()) for dtype in ("float32", "bfloat16"))
    error = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert 1e-4 < error < 5e-2
    assert rounded.dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are llama"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
    ],
)
def test_unsupported_checkpoints_say_which_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)
