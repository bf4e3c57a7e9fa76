"""Pytrees with shapes and dtypes declared in their annotations: `tokens: Int32[Array, "B C"]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
from jaxtyping import AbstractArray

Tree = TypeVar("Tree")


def shapes(kind: type[Tree], sizes: Mapping[str, int]) -> Tree:
    """Return a NamedTuple of `jax.ShapeDtypeStruct` from its annotations.

    Args:
        kind: NamedTuple class whose fields are arrays annotated with jaxtyping, or such NamedTuples.
        sizes: size of each axis letter.
    """

    def leaf(hint: Any) -> Any:
        if isinstance(hint, type) and issubclass(hint, AbstractArray):
            shape = tuple(sizes[axis] for axis in hint.dim_str.split())
            return jax.ShapeDtypeStruct(shape, jnp.dtype(hint.dtypes[0]))
        return shapes(hint, sizes)

    return kind(**{name: leaf(hint) for name, hint in get_type_hints(kind).items()})


def zeros(kind: type[Tree], sizes: Mapping[str, int]) -> Tree:
    """Return a NamedTuple of zeros from its annotations; see `shapes`."""
    tree: Tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes(kind, sizes))
    return tree
