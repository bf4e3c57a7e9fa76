"""One training step: in micro-batches, scanned, rematerialised, with non-finite losses, in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from aspd_jax import Layout
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import abstract_parameters
from tests.aot.abstract import placed
from tests.helpers.training import changed, first_batch, prepared, small, wide
from train.config import OptimiserSection, TrainConfig
from train.step import make_optimiser, rounded, train_step

SGD = optax.sgd(1.0)  # an update is the gradient


def stepped(config: TrainConfig) -> tuple[Any, Any]:
    """Metrics and full parameters after one step."""
    setup = prepared(config)
    batch = first_batch(config, setup.lm)
    take = train_step(setup.model, setup.optimiser, config.optimiser.accumulate)
    state, metrics = take(setup.state, setup.frozen, setup.place(batch))
    return metrics, setup.language_model(state).params


WAYS: list[Any] = [
    {"optimiser__accumulate": 4},
    pytest.param(
        {"model__scan": True, "model__remat": True, "optimiser__accumulate": 2, "mesh__fsdp": 4},
        marks=pytest.mark.several,
    ),
]

WAYS += [pytest.param(change, marks=pytest.mark.slow) for change in ({"model__scan": True}, {"model__remat": True})]


@pytest.mark.further
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("change", WAYS, ids=str)
def test_the_same_step_in_another_way(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that accumulated, scanned and rematerialised steps equal the plain step, by plain gradient descent."""
    monkeypatch.setattr("train.setup.make_optimiser", lambda config, steps: SGD)
    base = changed(wide(), steps=1)
    metrics, params = stepped(base)
    other, after = stepped(changed(base, **change))
    assert float(other["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert float(other["gradient_norm"]) == pytest.approx(float(metrics["gradient_norm"]), rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, after)


@pytest.mark.parametrize(("warmup", "rate"), [(0.0, 3e-3), (0.5, 0.0)])
def test_without_warm_up_the_first_step_has_the_peak_rate(warmup: float, rate: float) -> None:
    params = {"kernel": jnp.ones(2)}
    optimiser = make_optimiser(OptimiserSection(warmup=warmup, weight_decay=0.0), 4)
    updates: Any = optimiser.update(params, optimiser.init(params), params)[0]
    np.testing.assert_allclose(updates["kernel"], -rate, rtol=1e-5)


def test_stacked_layers_are_gathered_one_by_one(monkeypatch: Any) -> None:
    """Check what is gathered onto every device when several processes share the parameters."""

    class Shared(np.ndarray):
        is_fully_addressable = False

    gathered: list[Any] = []
    monkeypatch.setattr(
        "train.setup.multihost_utils.process_allgather", lambda leaf, tiled: gathered.append(leaf.shape) or leaf
    )
    setup = prepared(changed(wide(), model__scan=True))
    params = jax.tree.map(lambda leaf: np.asarray(leaf).view(Shared), setup.state.params)
    trained = setup.language_model(setup.state._replace(params=params))
    jax.tree.map(np.testing.assert_array_equal, trained.params, setup.language_model(setup.state).params)
    stacked = {leaf.shape for leaf in jax.tree.leaves(params["layers"])}
    assert gathered and not stacked & set(gathered) and {shape[1:] for shape in stacked} <= set(gathered)


def test_gradients_of_an_accumulated_step_are_those_of_the_whole(monkeypatch: Any) -> None:
    """Check the gradients by plain gradient descent, in which an update is the gradient."""
    monkeypatch.setattr("train.setup.make_optimiser", lambda config, steps: SGD)
    whole, parts = (stepped(changed(wide(), optimiser__accumulate=parts))[1] for parts in (1, 4))
    start = prepared(wide()).language_model(prepared(wide()).state).params
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(start), strict=True)]
    assert max(moved) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, parts)


def test_a_step_that_is_not_finite_is_skipped_and_counted() -> None:
    setup = prepared(small())
    batch = first_batch(small(), setup.lm)
    before = jax.device_get(setup.state)
    bad = batch._replace(loss=np.where(batch.loss > 0, np.inf, 0).astype(np.float32))
    take = train_step(setup.model, setup.optimiser)
    state, metrics = take(setup.state, setup.frozen, setup.place(bad))
    assert int(metrics["skipped"]) == 1 and int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, before.optimiser, state.optimiser)
    for _ in range(2):  # the first one has a learning rate of 0
        state, metrics = take(state, setup.frozen, setup.place(batch))
    assert int(metrics["skipped"]) == 1 and np.isfinite(float(metrics["loss"]))
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before.params, state.params)), strict=True)]
    assert max(moved) > 0


@pytest.mark.further
@pytest.mark.several
def test_a_step_keeps_the_shardings_of_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepared(changed(wide(), mesh__data=2, mesh__fsdp=2, mesh__tensor=2))
    batch = setup.place(first_batch(wide(), setup.lm))
    given = jax.tree.map(lambda leaf: (leaf.sharding, leaf.ndim), setup.state)

    def kept(step: Any) -> list[bool]:
        shardings, metrics = step.lower(setup.state, setup.frozen, batch).compile().output_shardings
        assert all(place.is_fully_replicated for place in jax.tree.leaves(metrics))
        return jax.tree.leaves(jax.tree.map(lambda place, own: place.is_equivalent_to(*own), shardings, given))

    assert all(kept(train_step(setup.model, setup.optimiser)))
    assert len({str(leaf.sharding.spec) for leaf in jax.tree.leaves(setup.state)}) > 3
    # Negative control: the pinned shardings decide, not those that the compiler would propagate.
    replicated = placed(setup.state, setup.state.step.sharding)
    monkeypatch.setattr("train.step.abstract_state", lambda *_: replicated)
    assert not all(kept(train_step.__wrapped__(setup.model, setup.optimiser)))


def test_bfloat16_parameters_move_on_average() -> None:
    """Updates far below the spacing of bfloat16 add up, as they would not with rounding to the nearest."""
    old = {"a": jnp.ones((64, 64), jnp.bfloat16)}
    new = {"a": jnp.full((64, 64), 1.0 + 2.0**-11)}
    moved = rounded(new, old, jax.random.key(0))["a"]
    assert moved.dtype == jnp.bfloat16 and set(np.unique(np.asarray(moved, np.float32))) == {1.0, 1.0 + 2.0**-7}
    assert float(moved.astype(jnp.float32).mean()) == pytest.approx(1.0 + 2.0**-11, abs=2.0**-13)
    config = changed(small(), model__parameters="bfloat16")
    setup = prepared(config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(setup.state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(setup.state.optimiser[1][0].nu)} == {"float32"}


@pytest.mark.further
def test_memory_of_attention_grows_with_the_length() -> None:
    """Check that a row of 8k tokens needs at most twice the gradient memory of 4k tokens."""
    shape = ModelConfig(vocab_size=64, hidden_size=64, feed_forward=64, layers=1, heads=2, kv_heads=1, head_dim=32)

    def bytes_of(length: int, attention: str) -> int:
        model = Transformer(replace(shape, attention=attention))
        params = nn.meta.unbox(abstract_parameters(model))
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(params: Any, tokens: Any, layout: Any) -> Any:
            return model.apply({"params": params}, tokens, layout, head=False).sum()

        lowered = jax.jit(jax.grad(loss)).lower(params, tokens, Layout(tokens, tokens, tokens, tokens))
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    assert bytes_of(8192, "chunked") <= 2.001 * bytes_of(4096, "chunked")  # arrays are aligned
    assert bytes_of(4096, "reference") > 3.5 * bytes_of(2048, "reference"), "the measure sees what is quadratic"
