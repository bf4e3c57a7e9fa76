"""Models that are shapes and places only: nothing is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from aspd.aot.topology import Topology
from aspd_jax.errors import RequestError
from aspd_jax.formats import open_checkpoint
from aspd_jax.language_model import LanguageModel
from aspd_jax.model.model_config import ModelConfig, Weights, from_hugging_face, padded
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.shapes import SHAPES
from aspd_jax.sharding import shardings
from aspd_jax.tokens import SpecialTokens, add_special_tokens


def placed(tree: Any, places: Any) -> Any:
    """The shapes of a tree of arrays or shapes, each with a sharding: one for all, or a tree of them."""
    if isinstance(places, Sharding):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places), tree)
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, places)


def everywhere(on: Topology, mesh: Mesh | None) -> Sharding:
    """Whole on every device of the mesh; without one, on the first device."""
    return SingleDeviceSharding(on.devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())


def configuration(model: str | None, shape: str, dtype: str, weights: Weights, decode_attention: str) -> ModelConfig:
    """The configuration of a checkpoint, of which no weights are read, or else of a named shape.

    Raises:
        RequestError: unknown shape.
        CheckpointError, ConfigError: what is wrong with the checkpoint or the back end.
    """
    if model is None:
        if shape not in SHAPES:
            raise RequestError(f"unknown shape {shape!r}; known are {', '.join(SHAPES)}")
        config = replace(SHAPES[shape], dtype=dtype)
    else:
        checkpoint = open_checkpoint(model)
        config = from_hugging_face(checkpoint.hf, dtype)
        if checkpoint.tokenizer is not None:
            add_special_tokens(checkpoint.tokenizer)
            config = replace(config, vocab_size=max(config.vocab_size, len(checkpoint.tokenizer)))
    return replace(config, weights=weights, decode_attention=decode_attention)


def abstract_model(config: ModelConfig, on: Topology, mesh: Mesh | None) -> LanguageModel:
    """A model without a tokenizer, whose parameters are shapes with the places that they have on a mesh; its last six
    tokens are the tags, its first ends a text.
    """
    config = config if mesh is None else padded(config)
    model = Transformer(config, mesh=mesh)
    boxed = abstract_parameters(model)
    params = placed(nn.meta.unbox(boxed), everywhere(on, None) if mesh is None else shardings(boxed, mesh))
    special = SpecialTokens(*range(config.vocab_size - 6, config.vocab_size))
    return LanguageModel(model, params, None, special, config, {}, (0,), 1 << 20, mesh)
