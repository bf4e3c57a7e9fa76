"""Pytrees with shapes and dtypes declared in their annotations: `tokens: Int32[Array, "B C"]`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast, get_type_hints

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
    tree: Tree = _shapes(cast(Any, kind), tuple(sizes.items()))
    return tree


@lru_cache(maxsize=256)
def _shapes(kind: Any, sizes: tuple[tuple[str, int], ...]) -> Any:
    def leaf(hint: Any) -> Any:
        if isinstance(hint, type) and issubclass(hint, AbstractArray):
            shape = tuple(dict(sizes)[axis] for axis in hint.dim_str.split())
            return jax.ShapeDtypeStruct(shape, jnp.dtype(hint.dtypes[0]))
        return _shapes(hint, sizes)

    return kind(**{name: leaf(hint) for name, hint in get_type_hints(kind).items()})


def zeros(kind: type[Tree], sizes: Mapping[str, int], numpy: Any = jnp) -> Tree:
    """Return a NamedTuple of zeros from its annotations; `numpy`: module of the arrays. See `shapes`."""
    tree: Tree = jax.tree.map(lambda leaf: numpy.zeros(leaf.shape, leaf.dtype), shapes(kind, sizes))
    return tree
