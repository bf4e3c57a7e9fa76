from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspd_jax import LanguageModel, SpecialTokens, build_layout, load_model, visible
from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.layout import Layout
from aspd_jax.model.attention import DECODE_BACK_ENDS, FULL_PASS_BACK_ENDS, View
from aspd_jax.model.cache import Bucket, TokenBatch, empty_cache
from aspd_jax.model.config import ModelConfig, RopeConfig
from aspd_jax.model.transformer import Transformer, stack_layers, unstack_layers
from aspd_jax.model.vocabulary import head_of, lm_head
from aspd_jax.model.weights import abstract_parameters
from tests.conftest import GOLDEN, tiny_config, write_checkpoint
from tests.helpers.make_parity import CASES, prompt, torch_logits

SPECIAL = SpecialTokens(57, 58, 59, 60, 61, 62)
PARITY = np.load(GOLDEN / "parity.npz")
BLOCK = [3, 57, 4, 58, 57, 5, 58, 59, 61, 4, 7, 8, 62, 61, 5, 9, 62, 60, 11, 12]


def logits_of(lm: LanguageModel, tokens: np.ndarray | None = None) -> np.ndarray:
    tokens = prompt() if tokens is None else tokens
    layout = build_layout(tokens, SPECIAL, lm.config.positions)
    return np.asarray(lm.model.apply({"params": lm.params}, tokens, layout))


@pytest.mark.default_cases(100)
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


BASE = ModelConfig(vocab_size=64, hidden_size=32, feed_forward=48, layers=2, heads=4, kv_heads=2, head_dim=8)
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
    "vocab_size": (BASE, 80),
    "hidden_size": (BASE, 48),
    "feed_forward": (BASE, 64),
    "layers": (BASE, 3),
    "heads": (BASE, 2),
    "kv_heads": (BASE, 4),
    "head_dim": (BASE, 16),
    "activation": (BASE, "gelu"),
    "norm_epsilon": (BASE, 1e-1),
    "norm_offset": (BASE, 1.0),
    "after_norms": (BASE, True),
    "embedding_scale": (BASE, 3.0),
    "query_scale": (BASE, 1.0),
    "window_rope": (replace(BASE, windows=(12, None)), RopeConfig(theta=3.0)),
    "rope": (BASE, RopeConfig(theta=100.0)),
    "query_bias": (BASE, True),
    "output_bias": (BASE, True),
    "feed_forward_bias": (BASE, True),
    "query_norm": (BASE, True),
    "tied": (BASE, True),
    "windows": (replace(BASE, windows=(12, 12)), (4, 4)),
    "positions": (BASE, "max"),
    "siblings": (BASE, "shared"),
    "dtype": (BASE, "bfloat16"),
    "weights": (BASE, "int8"),
    "lora_rank": (BASE, 2),
    "lora_alpha": (replace(BASE, lora_rank=2), 4.0),
    "adapters": (replace(BASE, lora_rank=2), 2),
    "new_tokens": (BASE, (17, 18)),
    "vocab_padding": (BASE, 8),
    "unused_tokens": (BASE, ((20, 24),)),
}


BACK_END_FIELDS = ("attention", "decode_attention")  # which change how it is computed, see below
# What the engine and training make of titles and draft heads: tests/infer/decode/test_leads.py, test_speculation.py.
OF_THE_ENGINE = ("titles", "draft_heads")


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


@pytest.mark.parametrize(
    "name", [field.name for field in fields(ModelConfig) if field.name not in BACK_END_FIELDS + OF_THE_ENGINE]
)
def test_every_field_changes_the_output(name: str) -> None:
    config, value = CHANGES[name]
    assert getattr(config, name) != value
    before, after = seeded(config), seeded(replace(config, **{name: value}))
    assert before.shape != after.shape or np.abs(before - after).max() > 1e-3


@pytest.mark.parametrize("name", [field.name for field in fields(RopeConfig)])
def test_every_rope_field_changes_the_output(name: str) -> None:
    rope, value = ROPE_CHANGES[name]
    base = replace(BASE, head_dim=32)
    changed = replace(base, rope=replace(rope, **{name: value}))
    assert np.abs(seeded(replace(base, rope=rope)) - seeded(changed)).max() > 1e-3


@pytest.mark.parametrize("name", FULL_PASS_BACK_ENDS)
@pytest.mark.parametrize("siblings", ["invisible", "shared"])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_against_brute_force(name: str, siblings: Any, window: int | None, monkeypatch: Any) -> None:
    """Check each back end for full passes against a softmax in float64 over the keys that `visible` allows."""
    monkeypatch.setattr("aspd_jax.model.attention.QUERY_CHUNK", 16)
    monkeypatch.setattr("aspd_jax.model.attention.GROUPS", 2)
    random = np.random.default_rng(3)
    tokens = np.array([BLOCK * 3, [9] * 2 + BLOCK * 2 + [0] * 18])
    owner = np.array([[1] * 40 + [2] * 20, [1] * 42 + [0] * 18])
    layout = build_layout(tokens, SPECIAL, sequence=owner)
    B, S, K, G, H = 2, 60, 2, 3, 4
    q, k, v = (random.standard_normal(s).astype(np.float32) for s in ((B, S, K, G, H), (B, S, K, H), (B, S, K, H)))
    view = View(Layout(*map(jnp.asarray, layout)), Layout(*map(jnp.asarray, layout)))
    out = np.asarray(FULL_PASS_BACK_ENDS[name](q, k, v, view, siblings, window))
    mask = visible(layout, layout, siblings, window)
    for b in range(B):
        for i in range(S):
            if not owner[b, i]:
                continue
            keys = np.flatnonzero(mask[b, i])
            for h in range(K):
                scores = k[b, keys, h].astype(float) @ q[b, i, h].T.astype(float) / np.sqrt(H)
                weights = np.exp(scores - scores.max(0))
                expected = (weights / weights.sum(0)).T @ v[b, keys, h]
                np.testing.assert_allclose(out[b, i, h], expected, atol=1e-5)


def test_back_ends_are_chosen_by_name(monkeypatch: Any) -> None:
    """Check that full passes and steps have separate back ends."""
    used: list[str] = []

    def noted(name: str, plain: Any) -> Any:
        return lambda *args: used.append(name) or plain(*args)

    for back_ends in (FULL_PASS_BACK_ENDS, DECODE_BACK_ENDS):
        for name, plain in back_ends.items():
            monkeypatch.setitem(back_ends, name, noted(name, plain))
    config = replace(BASE, attention="chunked", decode_attention="reference")
    seeded(config)
    assert set(used) == {"chunked"}
    params = nn.meta.unbox(Transformer(BASE).init(jax.random.key(0), np.array([[1]]), Layout(*[np.array([[1]])] * 4)))
    used.clear()
    fed(config, np.array([BLOCK]), np.arange(20)[None], [20], params["params"])
    assert set(used) == {"reference"}


@pytest.mark.parametrize("name", [*FULL_PASS_BACK_ENDS, *DECODE_BACK_ENDS, "dense"])
def test_a_back_end_of_the_other_table_is_refused(name: str) -> None:
    for field, back_ends in (("attention", FULL_PASS_BACK_ENDS), ("decode_attention", DECODE_BACK_ENDS)):
        if name in back_ends:
            replace(BASE, **{field: name})
            continue
        with pytest.raises(ConfigError, match=f"^{field}: expected one of {', '.join(back_ends)}, got '{name}'"):
            replace(BASE, **{field: name})


def test_chunked_gradients_equal_the_reference(monkeypatch: Any) -> None:
    monkeypatch.setattr("aspd_jax.model.attention.QUERY_CHUNK", 4)
    monkeypatch.setattr("aspd_jax.model.attention.GROUPS", 2)
    tokens = np.array([BLOCK])
    layout = build_layout(tokens, SPECIAL)
    reference, in_chunks = Transformer(BASE), Transformer(replace(BASE, attention="chunked"))
    params = reference.init(jax.random.key(0), tokens, layout)

    def loss(params: Any, model: Transformer) -> jax.Array:
        return jnp.sum(jnp.sin(model.apply(params, tokens, layout)))

    a, b = jax.grad(loss)(params, reference), jax.grad(loss)(params, in_chunks)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(x)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("windows", "window_rope"),
    [((), None), ((5, 5), None), ((None, 5), None), ((None, 5), RopeConfig(theta=3.0))],
    ids=str,
)
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_are_the_same_layers(
    windows: tuple[int | None, ...], window_rope: RopeConfig | None, remat: bool
) -> None:
    config = replace(BASE, windows=windows, window_rope=window_rope)
    tokens = np.array([BLOCK])
    layout = build_layout(tokens, SPECIAL)
    plain = Transformer(config)
    scanned = Transformer(replace(config, attention="chunked"), scan=True, remat=remat)
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


def test_scanned_layers_do_not_decode() -> None:
    with pytest.raises(ConfigError, match="decode: expected separate layers, got scan=True"):
        Transformer(BASE, scan=True).apply({}, None, None, Bucket(1, 1, 1, 1), method="decode")


def test_the_head_applied_apart(tmp_path: Path) -> None:
    for tied in (False, True):
        config = replace(BASE, tied=tied)
        tokens = np.array([BLOCK])
        layout = build_layout(tokens, SPECIAL)
        model = Transformer(config)
        params = nn.meta.unbox(model.init(jax.random.key(0), tokens, layout))["params"]
        hidden = model.apply({"params": params}, tokens, layout, head=False)
        logits = model.apply({"params": params}, tokens, layout)
        np.testing.assert_allclose(lm_head(config, head_of(config, params), hidden), logits, atol=1e-5)


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


def fed(
    config: ModelConfig,
    tokens: np.ndarray,
    order: np.ndarray,
    pieces: list[int],
    params: Any,
    rows: tuple[int, ...] = (1,),
) -> np.ndarray:
    """Logits [B, S, V] of sequences fed over a cache of four rows, in pieces, with padding.

    Args:
        order: [B, S], in which tokens are fed.
        pieces: the first of so many tokens, and so on; a sequence feeds one fewer than the one before it.
        rows: of the cache that the sequences get.
    """
    layout, capacity = build_layout(tokens, SPECIAL, config.positions), 40
    bucket = Bucket(rows=max(rows) + 1, tokens=44, per_row=21, slots=32)
    run = jax.jit(partial(Transformer(config).apply, bucket=bucket, method="decode"))
    cache, done = empty_cache(config, 4, capacity), [0] * len(rows)
    got = np.zeros((*tokens.shape, config.vocab_size), np.float32)
    for size in pieces:
        parts = [order[n, done[n] : done[n] + size - n] for n in range(len(rows))]
        count = sum(map(len, parts))
        owner = np.concatenate([[n] * len(part) for n, part in enumerate(parts)]).astype(int)
        place = np.concatenate(parts)
        slot = np.concatenate([done[n] + np.arange(len(part)) for n, part in enumerate(parts)])

        def padded(values: Any, filling: int, padding: int = bucket.tokens - count) -> jax.Array:
            return jnp.asarray(np.pad(values, (0, padding), constant_values=filling), jnp.int32)

        batch = TokenBatch(
            tokens=padded(tokens[owner, place], 0),
            layout=Layout(*(padded(field[owner, place], 0) for field in layout)),
            row=padded(np.asarray(rows)[owner], 4),
            slot=padded(slot, capacity),
            kind=padded(0 * place, 0),
            adapter=padded(0 * place, 0),
            logits_at=jnp.arange(bucket.tokens)[::-1],
        )
        logits, cache = run({"params": params}, batch, cache)
        got[owner, place] = np.asarray(logits)[::-1][:count]
        done = [n + len(part) for n, part in zip(done, parts, strict=True)]
    length = np.zeros(4, int)
    length[list(rows)] = done
    np.testing.assert_array_equal(cache.length, length)
    return got


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("back_end", DECODE_BACK_ENDS)
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_cached_pass_equals_full_pass_in_any_order(
    back_end: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that interleaved branches, with another row and padding, have the logits of the linearisation."""
    monkeypatch.setattr("aspd_jax.model.attention.DECODE_CHUNK", 7)
    lm = load_model(write_checkpoint(tmp_path, CASES[case]))
    config = replace(lm.config, decode_attention=back_end)
    tokens = np.array([BLOCK, [9, 8, *BLOCK[1:17], 5, 4]])
    layout = build_layout(tokens, SPECIAL)
    expected = logits_of(lm, tokens)
    order = np.lexsort((layout.branch, layout.position + 100 * (layout.block == 0) * (layout.position > 7)))
    assert (order[0] != np.arange(20)).any()
    got = fed(config, tokens, order, [3, 1, 6, 14], lm.params, rows=(0, 2))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    backwards = fed(config, tokens[:1], order[:1, ::-1], [20], lm.params)
    np.testing.assert_allclose(backwards[0], expected[0], atol=1e-4)
    too_early = fed(config, tokens[:1], order[:1, ::-1], [10, 10], lm.params)
    assert np.abs(too_early[0] - expected[0]).max() > 1e-2, "negative control: fed before what it has to see"


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_not_rounded_to_bfloat16(tied: bool) -> None:
    """Check full passes, steps and the separate head against exact products of rounded numbers."""
    config = replace(BASE, tied=tied, dtype="bfloat16")
    tokens = np.array([BLOCK])
    layout = build_layout(tokens, SPECIAL)
    model = Transformer(config)
    params = nn.meta.unbox(model.init(jax.random.key(0), tokens, layout))["params"]
    name = ("embedding", "embedding") if tied else ("head", "kernel")
    params[name[0]][name[1]] = ((300 if tied else 12) * params[name[0]][name[1]]).astype(jnp.bfloat16)
    hidden = model.apply({"params": params}, tokens, layout, head=False)
    exact = np.asarray(hidden, np.float64) @ np.asarray(params[name[0]][name[1]], np.float64).T
    assert np.abs(exact).max() > 16, "there, bfloat16 has a number in every 0.125"
    for logits in (model.apply({"params": params}, tokens, layout), lm_head(config, head_of(config, params), hidden)):
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, exact, atol=1e-3)
        assert np.abs(np.asarray(logits.astype(jnp.bfloat16), np.float64) - exact).max() > 0.02, "negative control"
    decoded = fed(config, tokens, np.arange(20)[None], [20], params)
    assert np.abs(decoded - np.asarray(jnp.asarray(decoded).astype(jnp.bfloat16), np.float32)).max() > 0.02


def test_bfloat16_is_close(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    exact, rounded = (logits_of(load_model(folder, dtype), prompt()) for dtype in ("float32", "bfloat16"))
    error = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert 1e-4 < error < 5e-2
    assert rounded.dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: expected one of llama, .*, got 'gpt2'"),
        ({"hidden_act": "tanh"}, r"config\.json: hidden_act: expected one of silu, .*, got 'tanh'"),
        ({"hidden_act": None}, r"config\.json: hidden_act: expected one of silu, .*, got null"),
        ({"num_key_value_heads": 3}, r"config\.json: num_attention_heads: expected a multiple of .* \(3\), got 4"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling: rope_type: expected one of .*, got 'dynamic'",
        ),
    ],
)
def test_unsupported_checkpoints_say_which_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)
