"""What a run will need on every device, from shapes alone: nothing is allocated and no weight is read.

B rows on a device at a time, S tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, NamedSharding

from aspd_jax.formats import NAMES, open_checkpoint
from aspd_jax.formats.hf_config import make_config, read_config
from aspd_jax.model.attention import QUERY_CHUNK
from aspd_jax.model.model_config import ModelConfig, from_hugging_face, padded
from aspd_jax.model.transformer import LAYERS, Transformer
from aspd_jax.model.vocabulary import HEAD_AXES
from aspd_jax.model.weights import abstract_parameters
from aspd_jax.sharding import MESH_AXES, partition_spec
from aspd_jax.tokens import TAGS
from train.loss import CHUNK
from train.setup import as_configured, scratch_shape
from train.train_config import TrainConfig
from train.train_step import is_trained

MOMENTS = 2  # of AdamW, float32


@dataclass(frozen=True)
class Plan:
    """Parameters in all, and bytes on each device.

    Attributes:
        weights: parameters as they are kept; `gradient` and `moments` are those of what is trained, float32.
        kept: activations that stay from the forward to the backward pass.
        working: the inside of one layer and the logits of one chunk, while they are computed; over `fsdp` also the
            layer and the head that are gathered for that, and their gradients; with `scan`, the layers' parameters in
            the dtype of activations, where they are kept in another: the compiler converts all of them before the loop.
    """

    parameters: int
    trained: int
    weights: int
    gradient: int
    moments: int
    kept: int
    working: int

    @property
    def total(self) -> int:
        """Bytes on a device at the worst moment."""
        return self.weights + self.gradient + self.moments + self.kept + self.working


def planned_shape(config: TrainConfig) -> ModelConfig:
    """Return the shape of the checkpoint, or the configuration's where it is a path at which nothing exists yet."""
    of = config.model
    path = Path(of.checkpoint)
    if of.checkpoint and (path.exists() or of.checkpoint in NAMES):
        file = path / "config.json"  # the weights of a folder need not be there
        hf = make_config(read_config(file)[0], str(file)) if file.exists() else open_checkpoint(of.checkpoint).hf
        shape = padded(as_configured(from_hugging_face(hf, of.dtype), config))
    else:
        shape = scratch_shape(config)
    return replace(shape, new_tokens=tuple(range(len(TAGS))) if of.lora_rank else ())


def plan(config: TrainConfig) -> Plan:
    """Count a run's memory."""
    of, shape = config.model, planned_shape(config)
    mesh = AbstractMesh(tuple(getattr(config.mesh, axis) for axis in MESH_AXES), MESH_AXES)
    counted = dict.fromkeys(("parameters", "trained", "weights", "gradient", "moments"), 0)
    item, converted = jnp.dtype(of.parameters).itemsize, 0
    abstract = abstract_parameters(Transformer(shape, scan=of.scan))
    for path, leaf in flatten_dict(abstract, is_leaf=lambda _, leaf: isinstance(leaf, nn.Partitioned)).items():
        sizes = leaf.value.shape
        here = _local(leaf.names, sizes, mesh)
        counted["parameters"] += prod(sizes)
        if is_trained(path, of.lora_rank):
            counted["trained"] += prod(sizes)
            counted["weights"] += item * here
            # Gradients come in the dtype of the parameters, and are summed over parts in float32.
            counted["gradient"] += 4 * here + (item * here if config.optimiser.accumulate > 1 else 0)
            counted["moments"] += MOMENTS * 4 * here
            if path[0] == LAYERS and of.parameters != of.dtype:
                converted += jnp.dtype(of.dtype).itemsize * here
        else:
            counted["weights"] += leaf.value.dtype.itemsize * here
    kept, working = _activations(config, shape)
    working += converted
    if config.mesh.fsdp > 1:
        # One layer's weights are gathered from all devices while it runs, and its gradient before it is spread again.
        outside = 2 * shape.padded_vocab_size * shape.hidden_size
        layer = (counted["parameters"] - outside) // shape.layers // config.mesh.tensor
        working += layer * (jnp.dtype(of.dtype).itemsize + 4)
        # So is the head, for the whole loss, and its gradient comes in the dtype of the parameters.
        head = _vocabulary(config, shape) * shape.hidden_size
        working += head * (jnp.dtype(of.dtype).itemsize + (0 if of.lora_rank else item))
    return Plan(**counted, kept=kept, working=working)


def _local(names: Any, sizes: tuple[int, ...], mesh: Any) -> int:
    """Elements of an array that one device holds."""
    place = NamedSharding(mesh, partition_spec(names, sizes, mesh))
    return prod(place.shard_shape(sizes))


def _vocabulary(config: TrainConfig, shape: ModelConfig) -> int:
    """Tokens whose logits one device computes."""
    over_tensor = AbstractMesh((1, 1, config.mesh.tensor), MESH_AXES)
    return _local(HEAD_AXES.kernel, (shape.padded_vocab_size, 1), over_tensor)


def _activations(config: TrainConfig, shape: ModelConfig) -> tuple[int, int]:
    """Bytes that stay until the backward pass, and bytes of what is in work."""
    of, data, tensor = config.model, config.data, config.mesh.tensor
    B = data.rows // (config.mesh.data * config.mesh.fsdp * config.optimiser.accumulate)
    S = data.length
    item = jnp.dtype(of.dtype).itemsize
    heads, kv_heads = ceil(shape.heads / tensor), ceil(shape.kv_heads / tensor)
    feed_forward = ceil(shape.feed_forward / tensor)
    # Inside a layer: both norms' outputs, queries, keys and values before and after RoPE, attention, gate, up, product.
    inside = B * S * item * (2 * shape.hidden_size + (3 * heads + 4 * kv_heads) * shape.head_dim + 3 * feed_forward)
    scores = B * heads * min(QUERY_CHUNK, S) * S * (4 + 4 + item)
    logits = 2 * B * min(CHUNK, S) * _vocabulary(config, shape) * 4
    entering = B * S * shape.hidden_size * item
    kept = shape.layers * (entering if of.remat else entering + inside)
    return kept, 2 * inside + scores + logits


def report(config: TrainConfig) -> str:
    """The plan as a table."""
    made, shape = plan(config), planned_shape(config)
    mesh = " x ".join(f"{axis} {getattr(config.mesh, axis)}" for axis in MESH_AXES)
    tokens = config.data.rows * config.data.length
    rows = [
        ("parameters", made.weights),
        ("gradient", made.gradient),
        ("optimiser moments", made.moments),
        ("activations kept", made.kept),
        ("activations in work", made.working),
        ("total", made.total),
    ]
    lines = [
        f"{made.parameters / 1e9:.3f} billion parameters, {made.trained / 1e9:.3f} billion of them trained; "
        f"{shape.layers} layers of {shape.hidden_size}, {config.model.dtype}",
        f"mesh {mesh}; {config.data.rows} rows of {config.data.length} tokens a step ({tokens} tokens) "
        f"in {config.optimiser.accumulate} part{'s' if config.optimiser.accumulate > 1 else ''}",
        "",
        "| on each device | GiB |",
        "|---|---|",
        *(f"| {name} | {size / 2**30:.2f} |" for name, size in rows),
    ]
    return "\n".join(lines)
