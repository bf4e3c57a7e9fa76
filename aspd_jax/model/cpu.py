"""Forms of a computation that XLA compiles to faster programs on CPU; on other platforms they are the plain ones.

Each brings 10 % or more of a pass of SmolLM2-135M: `product` makes all products of a pass 5 times faster. `PLAIN` turns
them off, for tests.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax

PLAIN = False


def product(
    x: jax.Array, kernel: jax.Array, inputs: int = 1, inputs_first: bool = False, dtype: Any = None
) -> jax.Array:
    """`x` [..., *sizes] times a kernel, summed over the `inputs` axes of `sizes`: [..., *features].

    XLA on CPU transposes a kernel before a product over more than two axes, so there it meets it as a matrix.

    Args:
        kernel: [*features, *sizes], or with `inputs_first` [*sizes, *features].
        dtype: of the sums; default: that of the inputs.
    """
    outer, cut = x.shape[: x.ndim - inputs], inputs if inputs_first else kernel.ndim - inputs
    features = kernel.shape[cut:] if inputs_first else kernel.shape[:cut]

    def whole(x: jax.Array, kernel: jax.Array, inputs: int = inputs) -> jax.Array:
        first = 0 if inputs_first else kernel.ndim - inputs
        contract = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(first, first + inputs))
        return jax.lax.dot_general(x, kernel, (contract, ((), ())), preferred_element_type=dtype)

    def as_matrices(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows = x.reshape(prod(outer), prod(x.shape[x.ndim - inputs :]))
        matrix = kernel.reshape(prod(kernel.shape[:cut]), prod(kernel.shape[cut:]))
        return whole(rows, matrix, 1).reshape(*outer, *features)

    return whole(x, kernel) if PLAIN else jax.lax.platform_dependent(x, kernel, cpu=as_matrices, default=whole)
