"""Merge, extract and insert low-rank adapters in the parameters of a model (LoRA: Hu et al., 2021).

R rank of an adapter, T new tokens, D hidden size, A adapters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from aspd_jax.errors import CheckpointError
from aspd_jax.model.adapter import EMBEDDING, HEAD, Adapter, Factors, Rows
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.vocabulary import NEW_TOKENS
from aspd_jax.model.weights import ADAPTERS, MADE_HERE, Path_, Tensor, input_axes, tensors_of

# Names of the embedding and of an untied head in an adapter, and the paths of their parameters.
ROWS = {"embedding": EMBEDDING, "head": HEAD}
KERNELS = {"embedding": ("embedding", "embedding"), "head": ("head", "kernel")}


def merge_adapters(config: ModelConfig, parameters: Any) -> Any:
    """Return equivalent parameters on the host, without adapters and with float kernels.

    Args:
        config: configuration of the model that owns `parameters`.
        parameters: pytree with adapters, int8 kernels or rows of new tokens; each is optional.

    Returns:
        A pytree of NumPy arrays. Int8 kernels become `config.dtype`; other kernels keep their dtype.
    """
    leaves = flatten_dict(parameters)
    merged = {path: leaf for path, leaf in leaves.items() if path[-1] not in MADE_HERE and path[0] != NEW_TOKENS}
    for path in leaves:
        if path[-1] != "kernel":
            continue
        kernel = np.asarray(jax.device_get(leaves[path]))
        scale, down, up = (leaves.get((*path[:-1], name)) for name in ("kernel_scale", *ADAPTERS))
        dtype = kernel.dtype
        if scale is not None:
            dtype = jnp.dtype(config.dtype)
            scale = np.expand_dims(np.asarray(jax.device_get(scale)), input_axes(path))
            kernel = kernel.astype(np.float32) * scale
        if down is not None and up is not None:
            change = np.tensordot(np.asarray(jax.device_get(up)), np.asarray(jax.device_get(down)), 1)
            kernel = kernel.astype(np.float32) + config.lora_alpha / config.lora_rank * change
        merged[path] = kernel.astype(dtype, copy=False)
    for name, target in KERNELS.items():
        if (rows := leaves.get((NEW_TOKENS, name))) is not None:
            merged[target] = np.array(jax.device_get(leaves[target]))
            merged[target][list(config.new_tokens)] = np.asarray(jax.device_get(rows))
    return unflatten_dict(merged)


def trained_adapter(config: ModelConfig, parameters: Any, source: str) -> Adapter:
    """Return the parameters that LoRA trains, on the host. Layers that share a joint kernel here share their `down`."""
    leaves = flatten_dict(parameters)
    factors, scale = {}, config.lora_alpha / config.lora_rank
    for name, tensor in tensors_of(config, leaves).items():
        down, up = (leaves.get((*tensor.path[:-1], part)) for part in ADAPTERS)
        if tensor.path[-1] == "kernel" and down is not None and up is not None:
            part = tensor.cut(np.asarray(jax.device_get(up)))
            flat = np.asarray(jax.device_get(down)).reshape(config.lora_rank, -1)
            factors[name.removesuffix(".weight")] = Factors(flat, part.reshape(-1, config.lora_rank), scale)
    rows = {name: leaves.get((NEW_TOKENS, parameter)) for parameter, name in ROWS.items()}
    trained = {name: np.asarray(jax.device_get(values)) for name, values in rows.items() if values is not None}
    return Adapter(source, factors, {name: Rows(config.new_tokens, values) for name, values in trained.items()})


def adapter_parameters(config: ModelConfig, parameters: Any, adapter: Adapter | None, number: int) -> Any:
    """Return the parameters of a model with several adapters after replacing the adapter at index `number`.

    Args:
        config: configuration with `adapters` > 0.
        parameters: pytree; it is not modified.
        adapter: adapter with rows for all new tokens or for none; without rows, the new tokens keep the rows of the
            base model. None: clear the index.
        number: index of the adapter, 0 to A - 1.

    Raises:
        CheckpointError: the adapter has a tensor that the model does not have, or one of another shape or rank.
    """
    leaves, rank = flatten_dict(parameters), config.lora_rank // config.adapters
    own_ranks = slice(number * rank, (number + 1) * rank)
    parts: dict[Path_, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors_of(config, leaves).items():
        if tensor.path[-1] == "kernel" and (*tensor.path[:-1], "lora_down") in leaves:
            parts.setdefault(tensor.path[:-1], []).append((name.removesuffix(".weight"), tensor))
    if adapter is not None:
        with_factors = {name for layers in parts.values() for name, _ in layers}
        with_rows = {tensor for name, tensor in ROWS.items() if (NEW_TOKENS, name) in leaves}
        for kind, names, known in (("factors", adapter.factors, with_factors), ("rows", adapter.rows, with_rows)):
            if unknown := sorted(names.keys() - known):
                raise CheckpointError(
                    f"{adapter.source}: expected a base with slots for {kind} of {unknown[0]}, got one without. "
                    "Merge the adapter into its base."
                )
    new: dict[Path_, np.ndarray] = {}
    for path, layers in parts.items():
        down, up = (np.zeros(leaves[(*path, name)].shape, np.float32) for name in ADAPTERS)
        down, up = down[own_ranks], up[..., own_ranks]
        if adapter is not None:
            _fill(adapter, layers, down.reshape(rank, -1), up)
        new[(*path, "lora_down")], new[(*path, "lora_up")] = down, up
    for name, tensor_name in ROWS.items():
        if (current_rows := leaves.get((NEW_TOKENS, name))) is not None:
            kernel = leaves[KERNELS[name]]
            rows = adapter.rows.get(tensor_name) if adapter is not None else None
            if rows is not None and rows.values.shape != current_rows.shape[1:]:
                raise CheckpointError(
                    f"{adapter.source if adapter else ''}: expected rows {current_rows.shape[1:]} for {tensor_name}, "
                    f"got {rows.values.shape}"
                )
            values = kernel[jnp.asarray(config.new_tokens)] if rows is None else rows.values
            new[NEW_TOKENS, name] = np.asarray(jax.device_get(values))
    for path, values in new.items():
        place = (number,) if path[0] == NEW_TOKENS else (..., own_ranks) if path[-1] == "lora_up" else (own_ranks,)
        old = leaves[path]
        leaf = old.at[place].set(values.astype(old.dtype))
        # `device_put` to an equal sharding would commit the array to its device, which recompiles the programs.
        leaves[path] = leaf if leaf.sharding == old.sharding else jax.device_put(leaf, old.sharding)
    return unflatten_dict(leaves)


def _fill(adapter: Adapter, parts: Iterable[tuple[str, Tensor]], down: np.ndarray, up: np.ndarray) -> None:
    """Write the factors of the layers that share a joint kernel into `down` [R, inputs] and `up` [..., R], in place.

    Layers with equal `down` share ranks; other layers use separate ranks.

    Raises:
        CheckpointError: a factor has another shape, or the layers need more than R ranks.
    """
    rank, used = len(down), 0
    placed: list[tuple[np.ndarray, slice]] = []
    for name, tensor in parts:
        factors = adapter.factors.get(name)
        if factors is None:
            continue
        down_factor = factors.down.astype(np.float32)
        part = tensor.cut(up)
        if down_factor.shape[1:] != down.shape[1:] or factors.up.shape != (part[..., 0].size, len(down_factor)):
            raise CheckpointError(
                f"{adapter.source}: {name}: expected factors [r, {down.shape[1]}] and [{part[..., 0].size}, r], "
                f"got {list(down_factor.shape)} and {list(factors.up.shape)}"
            )
        ranks = next((ranks for other, ranks in placed if np.array_equal(other, down_factor)), None)
        if ranks is None:
            ranks, used = slice(used, used + len(down_factor)), used + len(down_factor)
            if used > rank:
                raise CheckpointError(f"{adapter.source}: {name}: expected at most {rank} ranks in all, got {used}")
            down[ranks] = down_factor
            placed.append((down_factor, ranks))
        part[..., ranks] = factors.scale * factors.up.astype(np.float32).reshape(*part.shape[:-1], -1)
