"""Memory estimate of a run on every device from shapes alone, without allocating or reading weights.

B: rows on a device at a time; S: tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, NamedSharding

from aspd_jax.formats import NAMES, find_model, open_checkpoint
from aspd_jax.formats.hf_config import make_config, read_config
from aspd_jax.model.attention import QUERY_CHUNK
from aspd_jax.model.config import ModelConfig, from_hugging_face, padded
from aspd_jax.model.transformer import LAYERS, Transformer
from aspd_jax.model.vocabulary import HEAD_AXES
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.sharding import MESH_AXES, partition_spec
from aspd_jax.tables import markdown_table
from aspd_jax.tokens import TAGS
from train.config import ModelSection, TrainConfig
from train.loss import CHUNK
from train.setup import as_configured
from train.step import is_trained

SHAPE = ("vocab_size", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "feed_forward")
DEFAULTS = {item.name: item.default for item in fields(ModelSection)}
MOMENTS = 2  # float32 moments of AdamW per parameter


@dataclass(frozen=True)
class Plan:
    """Number of parameters, and memory in bytes on each device.

    Attributes:
        parameters: number of parameters.
        trained: number of trained parameters.
        weights: parameters in their dtypes.
        gradient: gradients of the trained parameters, float32.
        moments: moments of the trained parameters, float32.
        activations: activations that are kept from the forward to the backward pass.
        working: activations of one layer and logits of one chunk; with `fsdp` also the gathered layer and head and
            their gradients; with `scan` also a copy of the layers' parameters in the dtype of activations if that
            differs, because the compiler converts all layers before the loop.
    """

    parameters: int
    trained: int
    weights: int
    gradient: int
    moments: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """Peak bytes on a device."""
        return self.weights + self.gradient + self.moments + self.activations + self.working


def planned_shape(config: TrainConfig) -> ModelConfig:
    """Return the shape of the checkpoint; of a checkpoint that does not exist, the shape in the configuration.

    Raises:
        CheckpointError: the checkpoint cannot be read, or it does not exist and the configuration has no shape.
    """
    section = config.model
    if is_present(config) or all(getattr(section, key) == DEFAULTS[key] for key in SHAPE):
        file = Path(section.checkpoint) / "config.json"  # a folder without weights suffices
        hf = make_config(read_config(file)[0], str(file)) if file.exists() else open_checkpoint(section.checkpoint).hf
        shape = padded(as_configured(from_hugging_face(hf, section.dtype), config))
    else:
        size = {key: getattr(section, key) for key in SHAPE}
        shape = as_configured(ModelConfig(**size, dtype=section.dtype), config)
    return replace(shape, new_tokens=tuple(range(len(TAGS))) if section.lora_rank else ())


def is_present(config: TrainConfig) -> bool:
    """Return whether the checkpoint of a configuration exists."""
    return Path(config.model.checkpoint).exists() or config.model.checkpoint in NAMES


def check_named_checkpoint(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Check that a checkpoint that an override names exists: the shape in the file is that of another one.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if any(override.startswith("model.checkpoint=") for override in overrides):
        find_model(config.model.checkpoint)


def plan(config: TrainConfig) -> Plan:
    """Estimate the memory of a run."""
    section, shape = config.model, planned_shape(config)
    mesh = AbstractMesh(tuple(getattr(config.mesh, axis) for axis in MESH_AXES), MESH_AXES)
    counted = dict.fromkeys(("parameters", "trained", "weights", "gradient", "moments"), 0)
    item, converted = jnp.dtype(section.parameters).itemsize, 0
    abstract = abstract_parameters(Transformer(shape, scan=section.scan))
    for path, leaf in flatten_dict(abstract, is_leaf=lambda _, leaf: isinstance(leaf, nn.Partitioned)).items():
        sizes = leaf.value.shape
        local = _local(leaf.names, sizes, mesh)
        counted["parameters"] += prod(sizes)
        if is_trained(path, shape):
            counted["trained"] += prod(sizes)
            counted["weights"] += item * local
            # Gradients have the dtype of the parameters and are summed over parts in float32.
            counted["gradient"] += 4 * local + (item * local if config.optimiser.accumulate > 1 else 0)
            counted["moments"] += MOMENTS * 4 * local
            if path[0] == LAYERS and section.parameters != section.dtype:
                converted += jnp.dtype(section.dtype).itemsize * local
        else:
            counted["weights"] += leaf.value.dtype.itemsize * local
    activations, working = _activations(config, shape)
    working += converted
    if config.mesh.fsdp > 1:
        # The weights of one layer are gathered while it runs, and its whole gradient exists before it is scattered.
        outside = 2 * shape.padded_vocab_size * shape.hidden_size
        layer = (counted["parameters"] - outside) // shape.layers // config.mesh.tensor
        working += layer * (jnp.dtype(section.dtype).itemsize + 4)
        # The head is gathered for the whole loss; its gradient has the dtype of the parameters.
        head = _vocabulary(config, shape) * shape.hidden_size
        working += head * (jnp.dtype(section.dtype).itemsize + (0 if section.lora_rank else item))
    return Plan(**counted, activations=activations, working=working)


def _local(names: Any, sizes: tuple[int, ...], mesh: Any) -> int:
    """Return the number of elements of an array on one device."""
    place = NamedSharding(mesh, partition_spec(names, sizes, mesh))
    return prod(place.shard_shape(sizes))


def _vocabulary(config: TrainConfig, shape: ModelConfig) -> int:
    """Return the number of tokens whose logits one device computes."""
    over_tensor = AbstractMesh((1, 1, config.mesh.tensor), MESH_AXES)
    return _local(HEAD_AXES.kernel, (shape.padded_vocab_size, 1), over_tensor)


def _activations(config: TrainConfig, shape: ModelConfig) -> tuple[int, int]:
    """Return the bytes of activations that are kept until the backward pass, and of temporary ones."""
    section, data, tensor = config.model, config.data, config.mesh.tensor
    B = data.rows // (config.mesh.data * config.mesh.fsdp * config.optimiser.accumulate)
    S = data.length
    item = jnp.dtype(section.dtype).itemsize
    heads, kv_heads = ceil(shape.heads / tensor), ceil(shape.kv_heads / tensor)
    feed_forward = ceil(shape.feed_forward / tensor)
    # In a layer: outputs of both norms, queries, keys and values before and after RoPE, attention, gate, up, product.
    inside = B * S * item * (2 * shape.hidden_size + (3 * heads + 4 * kv_heads) * shape.head_dim + 3 * feed_forward)
    scores = B * heads * min(QUERY_CHUNK, S) * S * (4 + 4 + item)
    logits = 2 * B * min(CHUNK, S) * _vocabulary(config, shape) * 4
    entering = B * S * shape.hidden_size * item
    kept = shape.layers * (entering if section.remat else entering + inside)
    return kept, 2 * inside + scores + logits


def report(config: TrainConfig) -> str:
    """Return the plan as a Markdown table."""
    memory, shape = plan(config), planned_shape(config)
    mesh = " x ".join(f"{axis} {getattr(config.mesh, axis)}" for axis in MESH_AXES)
    tokens = config.data.rows * config.data.length
    sizes = {
        "parameters": memory.weights,
        "gradient": memory.gradient,
        "optimiser moments": memory.moments,
        "activations kept": memory.activations,
        "activations in work": memory.working,
        "total": memory.total,
    }
    table = markdown_table([{"on each device": name, "GiB": f"{size / 2**30:.2f}"} for name, size in sizes.items()])
    absent = f"{config.model.checkpoint}: no such file or folder; this is the shape in the configuration"
    lines = [
        *([] if is_present(config) else [absent]),
        f"{memory.parameters / 1e9:.3f} billion parameters, {memory.trained / 1e9:.3f} billion of them trained; "
        f"{shape.layers} layers of {shape.hidden_size}, {config.model.dtype}",
        f"mesh {mesh}; {config.data.rows} rows of {config.data.length} tokens a step ({tokens} tokens) "
        f"in {config.optimiser.accumulate} part{'s' if config.optimiser.accumulate > 1 else ''}",
        "",
        table,
    ]
    return "\n".join(lines)
