"""Meshes, and the one table from logical axes to mesh axes.

Parameters and cache name their axes logically (`embed`, `heads`, …) where they are defined; this table
alone says which of them are split, and over which axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from aspd_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. An axis that is not listed, or is listed with (), is replicated.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": (),
    "layers": (),
    "vocabulary": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head": ("tensor",),  # where the heads are too few to be split
    "part": (),
    "feed_forward": ("tensor",),
    "norm": (),
    "rank": (),
    "new_tokens": (),
}


def make_mesh(shape: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes data, fsdp and tensor; axes left out have size 1.

    Args:
        shape: size of each axis, such as `{"tensor": 8}`. Default: all devices on `tensor`.
        devices: default: all of this process group.
    """
    devices = jax.devices() if devices is None else devices
    shape = {"tensor": len(devices)} if shape is None else shape
    unknown = set(shape) - set(MESH_AXES)
    if unknown:
        raise ConfigError(f"unknown mesh axis {', '.join(sorted(unknown))}; the axes are {', '.join(MESH_AXES)}")
    sizes = tuple(shape.get(axis, 1) for axis in MESH_AXES)
    wanted = sizes[0] * sizes[1] * sizes[2]
    if wanted > len(devices):
        raise ConfigError(f"mesh {dict(shape)} needs {wanted} devices, there are {len(devices)}")
    # Linen's logical partitioning needs Auto axes.
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=list(devices)[:wanted])


def over(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """What is traced inside finds the mesh by `jax.sharding.get_abstract_mesh`; kernels are split by hand."""
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def partition_spec(logical: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where an array with these logical axes lives: an axis that its mesh axes do not divide is replicated.

    Raises:
        ConfigError: a logical axis that the table does not know.
    """
    entries: list[tuple[str, ...] | None] = []
    used: set[str] = set()
    for name, size in zip(logical, shape, strict=True):
        if name is not None and name not in RULES:
            raise ConfigError(f"logical axis {name!r} has no rule; known are {', '.join(sorted(RULES))}")
        axes = tuple(a for a in RULES.get(name or "", ()) if a not in used and mesh.shape[a] > 1)
        ways = 1
        for axis in axes:
            ways *= mesh.shape[axis]
        if not axes or size % ways:
            entries.append(None)
            continue
        used.update(axes)
        entries.append(axes)
    return PartitionSpec(*entries)


def named_sharding(logical: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """`partition_spec` on a mesh."""
    return NamedSharding(mesh, partition_spec(logical, shape, mesh))


def shardings(abstract: Any, mesh: Mesh) -> Any:
    """Shardings of a tree of `nn.Partitioned` abstract parameters, as Linen's `init` gives them."""

    def one(leaf: Any) -> NamedSharding:
        if isinstance(leaf, nn.Partitioned):
            return named_sharding(leaf.names, leaf.value.shape, mesh)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(one, abstract, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
