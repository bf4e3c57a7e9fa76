"""Packing of small arrays into one transfer between host and device, because each transfer has a fixed cost."""

from __future__ import annotations

from math import prod
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


@jax.tree_util.register_pytree_node_class
class Packed(Generic[Tree]):
    """A pytree of arrays of 32 bits and of bool, packed into one array.

    Attributes:
        array: elements of all leaves, int32 [T].
        form: structure of the tree, and shape and dtype of each leaf.
    """

    def __init__(self, array: Any, form: tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]) -> None:
        self.array, self.form = array, form

    @classmethod
    def pack(cls, tree: Tree) -> Packed[Tree]:
        """Pack a tree of NumPy arrays on the host, or of JAX arrays on the device.

        Raises:
            TypeError: a leaf has another dtype.
        """
        leaves, structure = jax.tree.flatten(tree)
        if any(leaf.dtype != jnp.bool_ and leaf.dtype.itemsize != 4 for leaf in leaves):
            raise TypeError("expected arrays of 32 bits and of bool only")
        flat = [leaf.reshape(-1) for leaf in leaves]
        parts = [leaf.astype(np.int32) if leaf.dtype == jnp.bool_ else leaf.view(np.int32) for leaf in flat]
        on_host = all(isinstance(leaf, np.ndarray) for leaf in flat)
        array = np.concatenate(parts) if on_host else jnp.concatenate(parts)
        return cls(array, (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)))

    def read(self) -> Tree:
        """Transfer the array to the host and return the tree with NumPy arrays."""
        return Packed(np.asarray(self.array), self.form).unpack()

    def unpack(self) -> Tree:
        """Return the tree; inside of compiled programs, too."""
        structure, kinds = self.form
        shaped, start = [], 0
        for shape, kind in kinds:
            end = start + prod(shape)
            part = self.array[start:end].reshape(shape)
            shaped.append(part.astype(kind) if kind == jnp.bool_ else part.view(kind))
            start = end
        tree: Tree = jax.tree.unflatten(structure, shaped)
        return tree

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """Return children and auxiliary data, for JAX."""
        return (self.array,), self.form

    @classmethod
    def tree_unflatten(cls, form: Any, arrays: tuple[Any]) -> Packed[Tree]:
        """Rebuild the object, for JAX."""
        return cls(*arrays, form)
