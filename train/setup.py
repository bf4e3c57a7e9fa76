"""From a configuration to everything that a run needs: mesh, model, what is trained of it, and where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from transformers import AutoConfig, PreTrainedTokenizerFast

from aspd_jax.errors import ConfigError
from aspd_jax.language_model import LanguageModel, for_conversations, load_model, random_model
from aspd_jax.model.model_config import ModelConfig, from_hugging_face
from aspd_jax.model.transformer import Transformer, stack_layers, unstack_layers
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.sharding import named_sharding, shardings
from aspd_jax.structure import Parallel
from train.batches import Batch
from train.byte_tokenizer import train_tokenizer
from train.tasks import problem
from train.train_config import TrainConfig
from train.train_step import TrainState, abstract_state, in_float32, is_trained, join, make_optimiser

TOKENIZER_PROBLEMS = 4000


@dataclass
class Setup:
    """A run before its first step.

    Attributes:
        lm: tokenizer, special tokens and end ids, without parameters: `language_model` puts those of a state in.
        model: as it is trained (chunked attention; scan, remat, mesh as configured).
        frozen: parameters that are not trained; empty in full fine-tuning.
        state: step 0.
    """

    lm: LanguageModel
    mesh: Mesh
    model: Transformer
    optimiser: optax.GradientTransformation
    frozen: Any
    state: TrainState

    def place(self, batch: Batch) -> Batch:
        """A batch spread over the mesh; every process gives the rows that its devices hold."""

        def one(array: np.ndarray) -> jax.Array:
            place = named_sharding(("batch", "sequence"), array.shape, self.mesh)
            return jax.make_array_from_callback(array.shape, place, lambda index: array[index])

        return jax.tree.map(one, batch)

    def language_model(self, state: TrainState) -> LanguageModel:
        """The model as it stands, on the host, with plain layers."""
        params = jax.tree.map(_to_host, join(state.params, self.frozen))
        if self.model.scan:
            params = unstack_layers(params, self.lm.config.layers)
        return replace(self.lm, params=params)


def _to_host(leaf: jax.Array) -> np.ndarray:
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def load(config: TrainConfig, mesh: Mesh) -> LanguageModel:
    """Load the model that a configuration starts from, with its positions and mask.

    A checkpoint is read onto the mesh; a new model is spread over it later.

    Raises:
        ConfigError, CheckpointError: what cannot work.
    """
    of = config.model
    if not of.checkpoint:
        return initial_model(config)
    lm = load_model(of.checkpoint, of.dtype, mesh, of.weights, of.lora_rank, of.lora_alpha)
    for_conversations(lm, of.checkpoint, config.data.chat_template)
    shape = as_configured(lm.config, config)
    return replace(lm, config=shape, model=Transformer(shape))


def set_up(config: TrainConfig, lm: LanguageModel, mesh: Mesh, steps: int) -> Setup:
    """Split the parameters into what is trained and what is not, and make the state of step 0.

    The parameters are taken out of `lm`, so that nothing holds the ones that were read while others are trained.
    """
    of = config.model
    model = trained_model(config, lm.config, mesh)
    params, lm.params = lm.params, None
    params = stack_layers(params, lm.config.layers) if of.scan else params
    places = flatten_dict(shardings(abstract_parameters(model), mesh))
    trained, frozen = {}, {}
    for path, leaf in flatten_dict(params).items():
        if is_trained(path, of.lora_rank):
            trained[path] = jax.device_put(jnp.asarray(leaf, of.parameters), places[path])
        else:
            frozen[path] = jax.device_put(leaf, places[path])
    optimiser = make_optimiser(config.optimiser, steps)
    state = initial_state(model, optimiser, unflatten_dict(trained))
    return Setup(lm, mesh, model, optimiser, unflatten_dict(frozen), state)


def trained_model(config: TrainConfig, shape: ModelConfig, mesh: Mesh) -> Transformer:
    """The model as it is trained."""
    of = config.model
    return Transformer(replace(shape, attention=of.attention), scan=of.scan, remat=of.remat, mesh=mesh)


def initial_state(model: Transformer, optimiser: optax.GradientTransformation, params: Any) -> TrainState:
    """Return the state of step 0 for parameters that lie where `abstract_state` says; moments join them there."""
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimiser))

    def init(params: Any) -> Any:
        return optimiser.init(in_float32(params))

    step, skipped = (jax.device_put(jnp.zeros((), jnp.int32), place) for place in places[:2])
    return TrainState(step, skipped, params, jax.jit(init, out_shardings=places.optimiser)(params))


@cache
def task_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The tokenizer of models from scratch; always the same for a size, so it is made once."""

    def texts() -> Iterator[str]:
        for seed in range(TOKENIZER_PROBLEMS):
            item = problem(seed, held_out=False)
            yield item.question
            yield item.answer
            for part in item.structure:
                if isinstance(part, Parallel):
                    yield from (branch.title for branch in part.branches)

    tokenizer = train_tokenizer(texts(), vocabulary)
    if len(tokenizer) > vocabulary:
        raise ConfigError(f"model.vocab_size must be at least {len(tokenizer)}, got {vocabulary}")
    return tokenizer


def initial_model(config: TrainConfig) -> LanguageModel:
    """A random Qwen3-style model and a tokenizer made for the tasks."""
    tokenizer = deepcopy(task_tokenizer(config.model.vocab_size))
    end = tokenizer.eos_token_id
    hf_config = {**scratch_config(config), "bos_token_id": None, "eos_token_id": end}
    return random_model(scratch_shape(config), tokenizer, hf_config, config.seed, (end,))


def scratch_config(config: TrainConfig) -> dict[str, Any]:
    """The Hugging Face configuration of a model from scratch."""
    of = config.model
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": of.hidden_size,
        "intermediate_size": of.feed_forward,
        "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads,
        "num_key_value_heads": of.kv_heads,
        "head_dim": of.head_dim,
        "vocab_size": of.vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def scratch_shape(config: TrainConfig) -> ModelConfig:
    """The shape that the configuration gives, for a model from scratch."""
    hf = AutoConfig.for_model(**scratch_config(config))
    return as_configured(from_hugging_face(hf, config.model.dtype), config)


def as_configured(shape: ModelConfig, config: TrainConfig) -> ModelConfig:
    """A shape with what a configuration decides about it."""
    of = config.model
    return replace(
        shape,
        positions=of.positions,
        siblings=of.siblings,
        weights=of.weights,
        lora_rank=of.lora_rank,
        lora_alpha=of.lora_alpha,
    )
