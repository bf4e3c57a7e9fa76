"""Set-up of a run from its configuration: model, trained and frozen parameters, optimiser and their shardings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from aspd_jax.errors import ConfigError
from aspd_jax.formats import ADAPTED
from aspd_jax.language_model import LanguageModel, for_conversations, load_model
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.transformer import LAYERS, Transformer, stack_layers, unstack_layers
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.sharding import named_sharding, shardings
from train.batches import Batch
from train.config import TrainConfig
from train.step import TrainState, abstract_state, is_trained, join, make_optimiser


@dataclass
class Setup:
    """A run before its first step.

    Attributes:
        lm: language model without parameters; `language_model` adds those of a state.
        mesh: mesh of the run.
        model: transformer with the attention, scan, remat and mesh of the run.
        optimiser: optimiser.
        frozen: parameters that are not trained; empty in full fine-tuning.
        params: trained parameters of step 0.
    """

    lm: LanguageModel
    mesh: Mesh
    model: Transformer
    optimiser: optax.GradientTransformation
    frozen: Any
    params: Any

    @cached_property
    def state(self) -> TrainState:
        """Return the training state of step 0."""
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(self.model, self.optimiser))

        def init(params: Any) -> Any:
            return self.optimiser.init(optax.tree.cast(params, jnp.float32))

        step, skipped = (jax.device_put(jnp.zeros((), jnp.int32), place) for place in places[:2])
        return TrainState(step, skipped, self.params, jax.jit(init, out_shardings=places.optimiser)(self.params))

    def free_state(self) -> TrainState:
        """Free the parameters of step 0, and return its state as shapes with shardings."""
        dtype = jax.tree.leaves(self.params)[0].dtype
        self.params = None
        return abstract_state(self.model, self.optimiser, dtype)

    def place(self, batch: Batch) -> Batch:
        """Shard a batch over the mesh; each process provides the rows of its devices."""

        def shard(array: np.ndarray) -> jax.Array:
            place = named_sharding(("batch", "sequence"), array.shape, self.mesh)
            return jax.make_array_from_callback(array.shape, place, lambda index: array[index])

        return jax.tree.map(shard, batch)

    def language_model(self, state: TrainState) -> LanguageModel:
        """Return the language model of a state, on the host and with unstacked layers."""
        leaves = flatten_dict(join(state.params, self.frozen)).items()
        params = unflatten_dict({path: _to_host(leaf, path[0] == LAYERS) for path, leaf in leaves})
        if self.model.scan:
            params = unstack_layers(params, self.lm.config.layers)
        return replace(self.lm, params=params)


def _to_host(leaf: jax.Array, stacked: bool) -> np.ndarray:
    """Return an array on the host; devices hold one layer at a time of a stacked one that processes share."""
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    if stacked:
        return np.stack([_to_host(leaf[layer], False) for layer in range(len(leaf))])
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def load(config: TrainConfig, mesh: Mesh) -> LanguageModel:
    """Load the checkpoint of a run onto the mesh, with the position scheme and mask of the run.

    Raises:
        ConfigError: the configuration does not fit the model, or adapters are to be trained on one with an adapter.
        CheckpointError: the checkpoint cannot be read.
    """
    section = config.model
    if section.lora_rank and section.checkpoint in ADAPTED:
        raise ConfigError(
            f"model.checkpoint: expected a model without an adapter for model.lora_rank, got {section.checkpoint}. "
            f"Run `aspd convert {section.checkpoint} --output DIR`, and name DIR."
        )
    lm = load_model(
        section.checkpoint, section.dtype, mesh, section.weights, section.lora_rank, section.lora_alpha,
        draft_heads=config.draft.heads,
    )  # fmt: skip
    for_conversations(lm, section.checkpoint, config.data.chat_template)
    shape = as_configured(lm.config, config)
    tagged = lm.tagged or (config.data.structured and not config.draft.heads)
    return replace(lm, config=shape, model=Transformer(shape), tagged=tagged)


def set_up(config: TrainConfig, lm: LanguageModel, mesh: Mesh, steps: int) -> Setup:
    """Split the parameters into trained and frozen ones.

    The parameters are removed from `lm`, so that the memory of the initial ones is freed during training.
    """
    section = config.model
    model = trained_model(config, lm.config, mesh)
    params, lm.params = lm.params, None
    params = stack_layers(params, lm.config.layers) if section.scan else params
    places = flatten_dict(shardings(abstract_parameters(model), mesh))
    trained, frozen = {}, {}
    for path, leaf in flatten_dict(params).items():
        if is_trained(path, model.config):
            trained[path] = jax.device_put(jnp.asarray(leaf, section.parameters), places[path])
        else:
            frozen[path] = jax.device_put(leaf, places[path])
    optimiser = make_optimiser(config.optimiser, steps)
    return Setup(lm, mesh, model, optimiser, unflatten_dict(frozen), unflatten_dict(trained))


def trained_model(config: TrainConfig, shape: ModelConfig, mesh: Mesh) -> Transformer:
    """Return the transformer with the attention, scan and remat of a configuration."""
    section = config.model
    return Transformer(replace(shape, attention=section.attention), scan=section.scan, remat=section.remat, mesh=mesh)


def as_configured(shape: ModelConfig, config: TrainConfig) -> ModelConfig:
    """Return a shape with the weights and LoRA settings of a configuration, and the positions, mask and titles.

    A model with draft heads keeps its own positions, mask and titles, because only the heads are trained.
    """
    section = config.model
    source = shape if config.draft.heads else section
    return replace(
        shape,
        positions=source.positions,
        siblings=source.siblings,
        titles=source.titles,
        weights=section.weights,
        lora_rank=section.lora_rank,
        lora_alpha=section.lora_alpha,
        draft_heads=config.draft.heads,
    )
