"""Optimiser and one training step."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from aspd_jax.model.transformer import Transformer
from train.batches import Batch
from train.config import TrainConfig
from train.loss import next_token_loss


class TrainState(NamedTuple):
    """What a checkpoint holds: int32 step, parameters, optimiser state."""

    step: jax.Array
    params: Any
    optimiser: Any


def make_optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a bound on the global norm, cosine after a linear warm-up; norms and biases do not decay."""
    warmup = max(1, round(config.warmup * config.steps))
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(config.steps, warmup + 1), 0.01 * peak)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


@partial(jax.jit, static_argnames=("model", "optimiser"), donate_argnames="state")
def train_step(
    state: TrainState, batch: Batch, model: Transformer, optimiser: optax.GradientTransformation
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update; metrics are the mean loss per learned token and the norm of the gradient."""

    def mean_loss(params: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch.tokens, batch.layout)
        total, weight = next_token_loss(logits, batch.tokens, batch.loss)
        return total / jnp.maximum(weight, 1.0)

    loss, gradient = jax.value_and_grad(mean_loss)(state.params)
    updates, optimiser_state = optimiser.update(gradient, state.optimiser, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "gradient_norm": optax.global_norm(gradient)}
    return TrainState(state.step + 1, params, optimiser_state), metrics
