"""Meshes, and the table that maps logical axes to mesh axes.

Parameters and cache name their axes logically (`embed`, `heads`, …) where they are defined. `RULES` alone decides which
of these axes are split, and over which axes of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from aspd_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor")

# Mesh axes of each logical axis; () means replicated.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": (),
    "layers": (),
    "vocabulary": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head": ("tensor",),  # used if the number of heads is not divisible
    "part": (),
    "feed_forward": ("tensor",),
    "norm": (),
    "rank": (),
    "new_tokens": (),
}


def make_mesh(shape: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh with the axes data, fsdp and tensor; an axis without a size has size 1.

    Args:
        shape: size of each axis, such as `{"tensor": 8}`; default: all devices on `tensor`.
        devices: devices of the mesh; default: all devices of all processes.

    Raises:
        ConfigError: an axis is unknown, or the mesh needs more devices than there are.
    """
    devices = jax.devices() if devices is None else devices
    shape = {"tensor": len(devices)} if shape is None else shape
    unknown = set(shape) - set(MESH_AXES)
    if unknown:
        raise ConfigError(f"mesh: expected the axes {', '.join(MESH_AXES)}, got {', '.join(sorted(unknown))}")
    sizes = tuple(shape.get(axis, 1) for axis in MESH_AXES)
    wanted = sizes[0] * sizes[1] * sizes[2]
    if wanted > len(devices):
        raise ConfigError(f"mesh {dict(shape)}: expected {wanted} devices, got {len(devices)}")
    # The logical partitioning of Linen requires Auto axes.
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=list(devices)[:wanted])


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Set the abstract mesh while tracing, so that kernels can read it with `jax.sharding.get_abstract_mesh`."""
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def partition_spec(logical: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return the partition spec of an array; an axis that its mesh axes do not divide is replicated.

    Args:
        logical: logical name of each axis; None: replicated.
        shape: shape of the array.
        mesh: mesh with the axes of `MESH_AXES`.

    Raises:
        ConfigError: a logical axis has no rule.
    """
    entries: list[tuple[str, ...] | None] = []
    used: set[str] = set()
    for name, size in zip(logical, shape, strict=True):
        if name is not None and name not in RULES:
            raise ConfigError(f"logical axis: expected one of {', '.join(sorted(RULES))}, got {name!r}")
        axes = tuple(a for a in RULES.get(name or "", ()) if a not in used and mesh.shape[a] > 1)
        divided = bool(axes) and size % prod(mesh.shape[axis] for axis in axes) == 0
        entries.append(axes if divided else None)
        used.update(axes if divided else ())
    return PartitionSpec(*entries)


def named_sharding(logical: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array on a mesh; see `partition_spec`."""
    return NamedSharding(mesh, partition_spec(logical, shape, mesh))


def shardings(abstract: Any, mesh: Mesh) -> Any:
    """Return the shardings of a tree of abstract parameters, whose leaves are `nn.Partitioned` as in Linen's `init`."""

    def leaf_sharding(leaf: Any) -> NamedSharding:
        if isinstance(leaf, nn.Partitioned):
            return named_sharding(leaf.names, leaf.value.shape, mesh)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(leaf_sharding, abstract, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
