"""Small arrays as one: each array that the host reads costs it as much as a large one."""

from __future__ import annotations

from math import prod
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


@jax.tree_util.register_pytree_node_class
class Packed(Generic[Tree]):
    """A pytree of int32 and bool arrays on its way from the device to the host.

    Attributes:
        array: int32 [T], all elements of all leaves.
        form: the structure, and shape and type of each leaf.
    """

    def __init__(self, array: jax.Array, form: tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]) -> None:
        self.array, self.form = array, form

    @classmethod
    def of(cls, tree: Tree) -> Packed[Tree]:
        """On the device."""
        leaves, structure = jax.tree.flatten(tree)
        if any(leaf.dtype not in (jnp.int32, jnp.bool_) for leaf in leaves):
            raise TypeError("only int32 and bool arrays are packed")
        array = jnp.concatenate([leaf.reshape(-1).astype(jnp.int32) for leaf in leaves])
        return cls(array, (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)))

    def read(self) -> Tree:
        """On the host: the tree, of NumPy arrays."""
        structure, kinds = self.form
        array, shaped, start = np.asarray(self.array), [], 0
        for shape, kind in kinds:
            end = start + prod(shape)
            shaped.append(array[start:end].reshape(shape).astype(kind, copy=False))
            start = end
        tree: Tree = jax.tree.unflatten(structure, shaped)
        return tree

    def tree_flatten(self) -> tuple[tuple[jax.Array], Any]:
        """For JAX."""
        return (self.array,), self.form

    @classmethod
    def tree_unflatten(cls, form: Any, arrays: tuple[jax.Array]) -> Packed[Tree]:
        """For JAX."""
        return cls(*arrays, form)
