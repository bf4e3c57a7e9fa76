"""Conversion of parameters from and to Hugging Face tensors, one tensor at a time, by one table of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from aspd_jax.errors import CheckpointError
from aspd_jax.layout import Layout
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.draft_heads import DRAFT_HEADS, draft_shapes
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.vocabulary import NEW_TOKENS
from aspd_jax.sharding import shardings

Path_ = tuple[str, ...]
ADAPTERS = ("lora_down", "lora_up")
MADE_HERE = ("kernel_scale", *ADAPTERS)  # parameters that are not in a Hugging Face checkpoint
OF_VOCABULARY = ("embedding", "head")  # parameters with a row for each token
OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": ("embedding", "embedding"),
    "model.norm.weight": ("norm", "scale"),
    "lm_head.weight": ("head", "kernel"),
    **{f"{DRAFT_HEADS}.{name}": (DRAFT_HEADS, name) for name in draft_shapes(1)},
}
INSIDE_LAYERS: dict[str, Path_] = {
    "input_layernorm": ("attention_norm", "scale"),
    "post_attention_layernorm": ("feed_forward_norm", "scale"),
    "self_attn.q_norm": ("attention", "query_norm", "scale"),
    "self_attn.k_norm": ("attention", "key_norm", "scale"),
    "self_attn.o_proj": ("attention", "output"),
    "mlp.down_proj": ("feed_forward", "down"),
}
# With norms after attention and feed-forward, the norm before feed-forward has another name.
AFTER_NORMS: dict[str, Path_] = {
    "post_attention_layernorm": ("attention_after_norm", "scale"),
    "pre_feedforward_layernorm": ("feed_forward_norm", "scale"),
    "post_feedforward_layernorm": ("feed_forward_after_norm", "scale"),
}
# Linear layers that share a joint kernel here, in order along its `part` axis: the queries of a group, its key and
# its value; gate and up.
QUERY = "self_attn.q_proj"
JOINT: dict[Path_, tuple[str, ...]] = {
    ("attention", "query_key_value"): (QUERY, "self_attn.k_proj", "self_attn.v_proj"),
    ("feed_forward", "gate_up"): ("mlp.gate_proj", "mlp.up_proj"),
}
# Suffixes of tensors that some exporters store although they follow from the configuration.
DERIVED = ("rotary_emb.inv_freq",)


class Tensor(NamedTuple):
    """The parameter that a Hugging Face tensor holds.

    Attributes:
        path: path of the parameter in the tree.
        part: range along the `part` axis of a joint kernel; None: the whole parameter.
    """

    path: Path_
    part: slice | None = None

    @property
    def axis(self) -> int:
        """Return the `part` axis, counted from the end; the axes after it are the outputs of a part and the inputs."""
        return -3 if self.path[-1] == "kernel" else -2

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, for a parameter of shape `whole`."""
        if self.part is None:
            return whole
        axis = self.axis
        return (*whole[:axis], self.part.stop - self.part.start, *whole[axis + 1 :])

    def size(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the Hugging Face tensor, for a parameter of shape `whole`."""
        shape = self.shape(whole)
        if self.path[-1] == "kernel":
            inputs = prod(shape[axis] for axis in input_axes(self.path))
            return (prod(shape) // inputs, inputs)
        return (prod(shape),) if self.path[-1] == "bias" else shape

    def cut(self, whole: np.ndarray) -> np.ndarray:
        """Select the part from a whole parameter; the size of the last axis of a kernel may differ."""
        if self.part is None:
            return whole
        return np.moveaxis(np.moveaxis(whole, self.axis, 0)[self.part], 0, self.axis)

    def write(self, parameter: np.ndarray) -> np.ndarray:
        """Convert the whole parameter to the Hugging Face tensor."""
        parameter = self.cut(parameter)
        size = self.size(parameter.shape)
        return np.ascontiguousarray(parameter.reshape(size))


def abstract_parameters(model: Transformer) -> Any:
    """Return shapes, dtypes and logical axes of all parameters as a tree of `nn.Partitioned`, without allocation."""
    zero = np.zeros((1, 1), np.int32)
    return jax.eval_shape(model.init, jax.random.key(0), zero, Layout(zero, zero, zero, zero))["params"]


def tensors_of(config: ModelConfig, paths: Iterable[Path_]) -> dict[str, Tensor]:
    """Return the Hugging Face tensors, by name, of the parameters at `paths`."""
    names = INSIDE_LAYERS | (AFTER_NORMS if config.after_norms else {})
    inside = {name: Tensor(path) for name, path in names.items()}
    for path, joined in JOINT.items():
        end = 0
        for name in joined:
            start, end = end, end + (config.heads // config.kv_heads if name == QUERY else 1)
            inside[name] = Tensor(path, slice(start, end))
    known = {name: Tensor(path) for name, path in OUTSIDE_LAYERS.items()}
    for layer in range(config.layers):
        for name, (path, part) in inside.items():
            full, prefix = (f"layer_{layer}", *path), f"model.layers.{layer}.{name}"
            if path[-1] == "scale":
                known[f"{prefix}.weight"] = Tensor(full)
            else:
                known[f"{prefix}.weight"] = Tensor((*full, "kernel"), part)
                known[f"{prefix}.bias"] = Tensor((*full, "bias"), part)
    wanted = set(paths)
    return {name: tensor for name, tensor in known.items() if tensor.path in wanted}


def input_axes(path: Path_) -> tuple[int, ...]:
    """Return the input axes of a kernel: heads and head size behind attention, the last axis elsewhere."""
    return (-2, -1) if path[-2] == "output" else (-1,)


def load_parameters(
    source: str,
    tensors: Iterable[tuple[str, np.ndarray]],
    model: Transformer,
    mesh: Mesh | None = None,
    stored_vocabulary: int | None = None,
    new_rows: Mapping[int, int] | None = None,
) -> Any:
    """Load parameters from Hugging Face tensors, one at a time, directly into their shardings.

    Args:
        source: path of the checkpoint, for messages.
        tensors: pairs of name and tensor.
        model: model to load; its vocabulary may be larger than that of the checkpoint.
        mesh: mesh that the parameters are placed on; default: the default device.
        stored_vocabulary: vocabulary rows of the checkpoint; default: those of the model.
        new_rows: {row: count}: vocabulary rows that become the mean of the first `count` rows of the checkpoint, in
            the embedding and in an untied head.

    Returns:
        The parameters of the model; adapters are initialised so that they have no effect.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape; the message names it.
    """
    abstract = abstract_parameters(model)
    leaves = flatten_dict(nn.meta.unbox(abstract))
    places = flatten_dict(shardings(abstract, mesh)) if mesh is not None else dict.fromkeys(leaves)
    names = tensors_of(model.config, (path for path in leaves if path[-1] not in MADE_HERE))
    missing = set(names)
    awaited = Counter(tensor.path for tensor in names.values())
    parts: dict[Path_, dict[int, np.ndarray]] = {}
    loaded: dict[Path_, Any] = {}
    unknown: list[str] = []
    for name, array in tensors:
        tensor = names.get(name)
        if tensor is None:
            tied_head = model.config.tied and name == "lm_head.weight"
            if not tied_head and not name.endswith(DERIVED):
                unknown.append(name)
            continue
        path, shape = tensor.path, leaves[tensor.path].shape
        size = tensor.size(shape)
        of_vocabulary = path[0] in OF_VOCABULARY
        if of_vocabulary and stored_vocabulary is not None:
            size = (stored_vocabulary, size[1])
        if array.shape != size:
            raise CheckpointError(f"{source}: {name}: expected the shape {list(size)}, got {list(array.shape)}")
        if of_vocabulary:
            array = _with_new_rows(array, model.config.padded_vocab_size, new_rows or {})
            rows_path = (NEW_TOKENS, path[0])
            if rows_path in leaves:
                rows = array[list(model.config.new_tokens)].astype(leaves[rows_path].dtype)
                loaded[rows_path] = _place(np.broadcast_to(rows, leaves[rows_path].shape), places[rows_path])
        missing.discard(name)
        parts.setdefault(path, {})[tensor.part.start if tensor.part else 0] = array.reshape(tensor.shape(shape))
        if len(parts[path]) < awaited[path]:
            continue
        in_order = [part for _, part in sorted(parts.pop(path).items())]
        if len({part.dtype for part in in_order}) > 1:
            in_order = [part.astype(np.float32) for part in in_order]
        parameter = in_order[0] if len(in_order) == 1 else np.concatenate(in_order, axis=tensor.axis)
        if leaves[path].dtype == jnp.int8:
            parameter, scale = quantise(parameter, input_axes(path))
            scale_path = (*path[:-1], "kernel_scale")
            loaded[scale_path] = _place(scale, places[scale_path])
        loaded[path] = _place(parameter.astype(leaves[path].dtype, copy=False), places[path])
    if missing or unknown:
        problems = [
            f"{kind} {', '.join(problem_names[:6])}{' …' if len(problem_names) > 6 else ''}"
            for kind, problem_names in (("no", sorted(missing)), ("unknown", unknown))
            if problem_names
        ]
        raise CheckpointError(f"{source}: expected the tensors of its configuration, got {' and '.join(problems)}")
    for path in (path for path in leaves if path[-1] in ADAPTERS):
        loaded[path] = _adapter(path, leaves[path], places[path])
    return unflatten_dict(loaded)


def quantise(kernel: np.ndarray, inputs: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Round a kernel to int8, symmetrically and to the nearest value, with a float32 scale per output.

    Args:
        kernel: float kernel.
        inputs: input axes of the kernel.

    Returns:
        The int8 kernel, and the scales, of the shape of the outputs.
    """
    kernel = kernel.astype(np.float32)
    scale = np.maximum(np.abs(kernel).max(axis=inputs, keepdims=True), 1e-12) / 127
    return np.rint(kernel / scale).astype(np.int8), scale.squeeze(inputs)


def quantise_layers(parameters: Any) -> Any:
    """Convert the parameters of a float model to those of the int8 model: round the kernels of all layers."""
    leaves: dict[Path_, Any] = {}
    for path, leaf in flatten_dict(parameters).items():
        leaves[path] = leaf
        if path[-1] == "kernel" and path[0] != "head":
            kernel, scale = quantise(np.asarray(jax.device_get(leaf)), input_axes(path))
            leaves[path], leaves[(*path[:-1], "kernel_scale")] = jnp.asarray(kernel), jnp.asarray(scale)
    return unflatten_dict(leaves)


def _adapter(path: Path_, leaf: Any, sharding: Any) -> jax.Array:
    """Return a fresh factor of an adapter: `lora_down` random, seeded by its path, and `lora_up` zero."""
    if path[-1] == "lora_up":
        return _place(np.zeros(leaf.shape, leaf.dtype), sharding)
    random = np.random.default_rng(crc32("/".join(path).encode()))
    fan_in = prod(leaf.shape[1:])
    return _place(random.standard_normal(leaf.shape).astype(leaf.dtype) * fan_in**-0.5, sharding)


def _with_new_rows(tensor: np.ndarray, rows: int, new_rows: Mapping[int, int]) -> np.ndarray:
    if not new_rows and rows == len(tensor):
        return tensor
    grown = np.zeros((rows, tensor.shape[1]), tensor.dtype)
    grown[: tensor.shape[0]] = tensor
    means = {old: tensor[:old].mean(axis=0, dtype=np.float32) for old in set(new_rows.values())}
    for row, old in new_rows.items():
        grown[row] = means[old].astype(tensor.dtype)
    return grown


def _place(array: np.ndarray, sharding: Any) -> jax.Array:
    if sharding is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def tensors_from(config: ModelConfig, parameters: Any, dtype: str | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the parameters as Hugging Face tensors, one at a time.

    Args:
        config: configuration of the model.
        parameters: parameters without adapters and with float kernels.
        dtype: dtype of the tensors; default: that of the parameters.

    Yields:
        Pairs of name and tensor on the host.
    """
    leaves = flatten_dict(parameters)
    for name, tensor in tensors_of(config, leaves).items():
        array = tensor.write(np.asarray(jax.device_get(leaves[tensor.path])))
        array = array[: config.vocab_size] if tensor.path[0] in OF_VOCABULARY else array
        yield name, array if dtype is None else array.astype(jnp.dtype(dtype))
