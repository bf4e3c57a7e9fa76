"""Optimiser and training step.

B: rows of a batch; A: parts of a batch (gradient accumulation).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from aspd_jax.model.config import ModelConfig
from aspd_jax.model.draft_heads import DRAFT_HEADS, draft_shapes, shift_left
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.vocabulary import NEW_TOKENS, head_of, lm_head
from aspd_jax.model.weights import ADAPTERS, abstract_parameters
from aspd_jax.sharding import shardings
from train.batches import PARTS, Batch
from train.config import OptimiserSection
from train.loss import Sums, loss_over_mesh

DECAYING = ("kernel", "embedding", "head", *draft_shapes(1), *ADAPTERS)  # last names of paths


class TrainState(NamedTuple):
    """Training state.

    Attributes:
        step: finished steps, int32 [].
        skipped: skipped updates, int32 [].
        params: trained parameters.
        optimiser: state of the optimiser.
    """

    step: jax.Array
    skipped: jax.Array
    params: Any
    optimiser: Any


@cache
def make_optimiser(section: OptimiserSection, steps: int) -> optax.GradientTransformation:
    """Return AdamW with gradient clipping, linear warm-up and cosine decay.

    Norms, biases and scales have no weight decay. Equal arguments return the same object, so that a compiled step is
    reused.
    """
    warmup = max(1, round(section.warmup * steps)) if section.warmup else 0
    peak = section.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1), section.final * peak)

    def decays(params: Any) -> Any:
        return unflatten_dict({path: path[-1] in DECAYING for path in flatten_dict(params)})

    return optax.chain(
        optax.clip_by_global_norm(section.clip),
        optax.adamw(schedule, b1=section.beta1, b2=section.beta2, weight_decay=section.weight_decay, mask=decays),
    )


def is_trained(path: tuple[str, ...], config: ModelConfig) -> bool:
    """Return whether a parameter of a model is trained.

    With draft heads, only these are; with LoRA, only adapters and the rows of the special tokens are.
    """
    if config.draft_heads:
        return path[0] == DRAFT_HEADS
    return not config.lora_rank or path[-1] in ADAPTERS or path[0] == NEW_TOKENS


def abstract_state(model: Transformer, optimiser: optax.GradientTransformation, dtype: Any = jnp.float32) -> TrainState:
    """Return the training state as shapes with shardings.

    Moments have the shardings of their parameters; counters are replicated.

    Args:
        model: transformer with its mesh.
        optimiser: optimiser.
        dtype: dtype of the trained parameters.
    """
    mesh = model.mesh
    assert mesh is not None, "a model in training has a mesh"
    everywhere = NamedSharding(mesh, PartitionSpec())
    boxed = abstract_parameters(model)
    places = flatten_dict(shardings(boxed, mesh))
    params = unflatten_dict(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=places[path])
            for path, leaf in flatten_dict(nn.meta.unbox(boxed)).items()
            if is_trained(path, model.config)
        }
    )
    moments = jax.eval_shape(lambda params: optimiser.init(optax.tree.cast(params, jnp.float32)), params)
    moment_places = optax.tree.map_params(
        optimiser, lambda _, leaf: leaf.sharding, moments, params, transform_non_params=lambda _: everywhere
    )
    moments = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), moments, moment_places
    )
    number: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(number, number, params, moments)


def join(trained: Any, frozen: Any) -> Any:
    """Merge trained and frozen parameters into one tree."""
    return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen))


def rounded(new: Any, old: Any, key: jax.Array) -> Any:
    """Convert float32 parameters to the dtypes of the old ones, with stochastic rounding to bfloat16.

    Rounding to nearest would drop updates smaller than about 1/500 of their parameter.
    """

    def convert(new: jax.Array, old: jax.Array, key: jax.Array) -> jax.Array:
        if old.dtype != jnp.bfloat16:
            return new.astype(old.dtype)
        bits = jax.lax.bitcast_convert_type(new, jnp.uint32)
        bits = (bits + (jax.random.bits(key, new.shape, jnp.uint32) >> 16)) >> 16 << 16
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)

    leaves, structure = jax.tree.flatten(new)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [convert(*e) for e in zip(leaves, jax.tree.leaves(old), keys, strict=True)])


def loss_sums(model: Transformer, params: Any, batch: Batch) -> Sums:
    """Return the loss of a batch by part: of the next tokens, or of the draft tokens of all draft heads together."""
    hidden: Any = model.apply({"params": params}, batch.tokens, batch.layout, head=False)
    head, logits = head_of(model.config, params), partial(lm_head, model.config)

    mesh: Any = model.mesh

    def sums(hidden: jax.Array, tokens: Any, weight: Any, part: Any) -> Sums:
        return loss_over_mesh(mesh, hidden, head, logits, tokens, weight, part, len(PARTS))

    if not model.config.draft_heads:
        return sums(hidden, batch.tokens, batch.loss, batch.part)
    states = model.apply({"params": params}, hidden, batch.tokens, method="draft_states")
    of_heads, weight = [], jnp.asarray(batch.loss)
    for number, state in enumerate(states, 1):
        # All tokens up to the draft token are sampled, so in one segment.
        weight = weight * shift_left(batch.loss, number)
        of_heads.append(sums(state, shift_left(batch.tokens, number), weight, shift_left(batch.part, number)))
    total: Sums = jax.tree.map(lambda *values: sum(values[1:], values[0]), *of_heads)
    return total


@cache
def train_step(model: Transformer, optimiser: optax.GradientTransformation, accumulate: int = 1) -> Any:
    """Return the compiled training step: (state, frozen parameters, batch) -> (state, metrics).

    The state is donated and is returned with the shardings of `abstract_state`. Equal arguments return the same object,
    so that a compiled step is reused.

    Args:
        model: transformer with its mesh.
        optimiser: optimiser.
        accumulate: number of parts of a batch that are processed one after another.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimiser))
    return jax.jit(
        partial(_update, model=model, optimiser=optimiser, accumulate=accumulate),
        donate_argnums=0,
        out_shardings=(places, places.step),
    )


def _update(
    state: TrainState,
    frozen: Any,
    batch: Batch,
    *,
    model: Transformer,
    optimiser: optax.GradientTransformation,
    accumulate: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Apply the update for the mean loss per target of the whole batch; the number of parts does not change it.

    An update with a loss or gradient that is not finite is skipped and counted.
    """

    def total(params: Any, part: Batch) -> tuple[jax.Array, Sums]:
        sums = loss_sums(model, join(params, frozen), part)
        return sums.loss.sum(), sums

    gradient_of = jax.grad(total, has_aux=True)
    if accumulate == 1:
        gradient, sums = gradient_of(state.params, batch)
    else:
        # Part a has rows a, a + A, …, so that rows stay on their devices.
        parts = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(carry: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient_of(state.params, part)), None

        zero = jnp.zeros(len(PARTS), jnp.float32)
        start = (optax.tree.zeros_like(state.params, jnp.float32), Sums(zero, zero))
        (gradient, sums), _ = jax.lax.scan(add, start, parts)
    weight = jnp.maximum(sums.weight.sum(), 1.0)
    gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / weight, gradient)
    norm = optax.tree.norm(gradient)
    exact = optax.tree.cast(state.params, jnp.float32)
    updates, optimiser_state = optimiser.update(gradient, state.optimiser, exact)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss.sum())

    updated = rounded(optax.apply_updates(exact, updates), state.params, jax.random.key(state.step))
    params = optax.tree.where(finite, updated, state.params)
    skipped = state.skipped + 1 - finite.astype(jnp.int32)
    metrics = {"loss": sums.mean(), "gradient_norm": norm, "skipped": skipped, **part_losses(sums)}
    kept = optax.tree.where(finite, optimiser_state, state.optimiser)
    return TrainState(state.step + 1, skipped, params, kept), metrics


def part_losses(sums: Sums) -> dict[str, jax.Array]:
    """Return the mean loss of each part; 0 for a part without targets."""
    means = sums.loss / jnp.maximum(sums.weight, 1.0)
    return {f"loss_{name}": means[index] for index, name in enumerate(PARTS)}


@partial(jax.jit, static_argnames="model")
def evaluation_sums(params: Any, frozen: Any, batch: Batch, model: Transformer) -> Sums:
    """Return the loss of a batch by part without an update."""
    return loss_sums(model, join(params, frozen), batch)
