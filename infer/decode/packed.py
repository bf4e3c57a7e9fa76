"""Packing of small arrays into one device-to-host transfer, because each transfer has a fixed cost."""

from __future__ import annotations

from math import prod
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


@jax.tree_util.register_pytree_node_class
class Packed(Generic[Tree]):
    """A pytree of int32 and bool arrays, packed into one array.

    Attributes:
        array: elements of all leaves, int32 [T].
        form: structure of the tree, and shape and dtype of each leaf.
    """

    def __init__(self, array: jax.Array, form: tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]) -> None:
        self.array, self.form = array, form

    @classmethod
    def pack(cls, tree: Tree) -> Packed[Tree]:
        """Pack a tree on the device.

        Raises:
            TypeError: a leaf is neither int32 nor bool.
        """
        leaves, structure = jax.tree.flatten(tree)
        if any(leaf.dtype not in (jnp.int32, jnp.bool_) for leaf in leaves):
            raise TypeError("expected int32 and bool arrays only")
        array = jnp.concatenate([leaf.reshape(-1).astype(jnp.int32) for leaf in leaves])
        return cls(array, (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)))

    def read(self) -> Tree:
        """Transfer the array to the host and return the tree with NumPy arrays."""
        structure, kinds = self.form
        array, shaped, start = np.asarray(self.array), [], 0
        for shape, kind in kinds:
            end = start + prod(shape)
            shaped.append(array[start:end].reshape(shape).astype(kind, copy=False))
            start = end
        tree: Tree = jax.tree.unflatten(structure, shaped)
        return tree

    def tree_flatten(self) -> tuple[tuple[jax.Array], Any]:
        """Return children and auxiliary data, for JAX."""
        return (self.array,), self.form

    @classmethod
    def tree_unflatten(cls, form: Any, arrays: tuple[jax.Array]) -> Packed[Tree]:
        """Rebuild the object, for JAX."""
        return cls(*arrays, form)
