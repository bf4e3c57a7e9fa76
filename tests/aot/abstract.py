"""Abstract models: shapes with shardings, without allocated arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from aspd_jax.errors import RequestError
from aspd_jax.formats import open_checkpoint
from aspd_jax.language_model import LanguageModel
from aspd_jax.model.config import ModelConfig, Weights, from_hugging_face, padded
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.shapes import SHAPES
from aspd_jax.sharding import shardings
from aspd_jax.tokens import SpecialTokens, add_special_tokens
from tests.aot.topology import Topology


def placed(tree: Any, places: Any) -> Any:
    """Return the shapes of a tree with shardings.

    Args:
        tree: tree of arrays or shapes.
        places: one sharding for all leaves, or a tree of shardings.
    """
    if isinstance(places, Sharding):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places), tree)
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, places)


def replicated(topology: Topology, mesh: Mesh | None) -> Sharding:
    """Return the sharding that replicates over the mesh, or that of the first device without a mesh."""
    return SingleDeviceSharding(topology.devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())


def configuration(model: str | None, shape: str, dtype: str, weights: Weights, decode_attention: str) -> ModelConfig:
    """Return the configuration of a checkpoint without reading its weights, or of a named shape.

    Args:
        model: checkpoint; None: use `shape`.
        shape: name of a shape.
        dtype: dtype of activations.
        weights: format of the layers' kernels.
        decode_attention: attention back end for decoding.

    Raises:
        RequestError: the shape is unknown.
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the back end is unknown.
    """
    if model is None:
        if shape not in SHAPES:
            raise RequestError(f"--shape: expected one of {', '.join(SHAPES)}, got {shape!r}")
        config = replace(SHAPES[shape], dtype=dtype)
    else:
        checkpoint = open_checkpoint(model)
        config = from_hugging_face(checkpoint.hf, dtype)
        if checkpoint.tokenizer is not None:
            add_special_tokens(checkpoint.tokenizer)
            config = replace(config, vocab_size=max(config.vocab_size, len(checkpoint.tokenizer)))
    return replace(config, weights=weights, decode_attention=decode_attention)


def abstract_model(config: ModelConfig, topology: Topology, mesh: Mesh | None) -> LanguageModel:
    """Return a model without tokenizer whose parameters are shapes with shardings.

    Its last six tokens are the tags, and its first token ends a text.
    """
    config = config if mesh is None else padded(config)
    model = Transformer(config, mesh=mesh)
    boxed = abstract_parameters(model)
    params = placed(nn.meta.unbox(boxed), replicated(topology, None) if mesh is None else shardings(boxed, mesh))
    special = SpecialTokens(*range(config.vocab_size - 6, config.vocab_size))
    return LanguageModel(model, params, None, special, config, {}, (0,), 1 << 20, mesh)
