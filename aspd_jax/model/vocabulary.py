"""Embedding and head where some tokens have rows of their own, and the head apart from the model.

D hidden size, V vocabulary and its padding, T new tokens, A adapters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.layout import HIDDEN
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.cpu import einsum

NEW_TOKENS = "new_tokens"  # name of the parameters of `ModelConfig.new_tokens`


class NewTokens(nn.Module):
    """Rows of embedding and head for `ModelConfig.new_tokens`, float32 [T, D] each, or [A, T, D] of A adapters; one for
    both in a tied model.
    """

    config: ModelConfig

    def setup(self) -> None:
        """The rows."""
        c = self.config
        for name in ("embedding",) if c.tied else ("embedding", "head"):
            of_adapters = (c.adapters,) if c.adapters else ()
            axes = (*(None for _ in of_adapters), "new_tokens", "embed")
            make = nn.with_partitioning(nn.initializers.normal(0.02), axes)
            shape = (*of_adapters, len(c.new_tokens), c.hidden_size)
            setattr(self, name, self.param(name, make, shape, jnp.float32))

    def __call__(self, tokens: jax.Array, x: jax.Array, adapter: jax.Array | None = None) -> jax.Array:
        """Embeddings [..., D] of tokens [...], with the rows in the places of new tokens.

        Args:
            adapter: of each token, where there are several.
        """
        mine = tokens[..., None] == jnp.asarray(self.config.new_tokens)
        if adapter is not None:
            of_adapter = adapter[..., None] == jnp.arange(self.config.adapters)
            mine = (of_adapter[..., None] & mine[..., None, :]).reshape(*tokens.shape, -1)
        table = self.embedding.reshape(-1, self.embedding.shape[-1]).astype(x.dtype)
        rows = einsum("...T,TD->...D", mine.astype(x.dtype), table)
        return jnp.where(mine.any(axis=-1, keepdims=True), rows, x)


class Head(NamedTuple):
    """Parameters of the head: its kernel [V, D], the embedding's in a tied model, and rows of new tokens [T, D] if any.

    V may be a part of the vocabulary, where that is split over devices. A tree of the same form says things about both.
    """

    kernel: Any
    new_tokens: Any


HEAD_AXES = Head(("vocabulary", "embed"), ("new_tokens", "embed"))  # logical axes


def head_of(config: ModelConfig, params: Any, adapter: jax.Array | int = -1) -> Head:
    """The head among all parameters.

    Args:
        adapter: whose rows of new tokens it has, where there are several; negative: nobody's.
    """
    kernel = params["embedding"]["embedding"] if config.tied else params["head"]["kernel"]
    rows = params[NEW_TOKENS]["embedding" if config.tied else "head"] if config.new_tokens else None
    if rows is not None and config.adapters:
        of_all = kernel[jnp.asarray(config.new_tokens)].astype(rows.dtype)
        rows = jnp.where(adapter >= 0, rows[jnp.maximum(adapter, 0)], of_all)
    return Head(kernel, rows)


def lm_head(config: ModelConfig, head: Head, x: jax.Array, first: int | jax.Array = 0) -> jax.Array:
    """Float32 [..., V]: `Transformer.logits` of the activations [..., D] that the model has without its head.

    Args:
        first: id of the first row of the kernel.
    """
    logits = einsum("...D,VD->...V", x, head.kernel.astype(x.dtype), jnp.float32)
    return completed(config, logits, x, head.new_tokens, first)


def completed(
    config: ModelConfig,
    logits: jax.Array,
    x: jax.Array,
    rows: jax.Array | None,
    first: int | jax.Array = 0,
    adapter: jax.Array | None = None,
) -> jax.Array:
    """Logits [..., V] of activations [..., D]: those of new tokens by their own rows of the head, [T, D] or [A, T, D],
    if they have any; those of padding and of unused tokens hidden.

    Args:
        first: id of the first logit; new tokens that are not among them are left out.
        adapter: [...], where there are A; negative: new tokens have the rows of all others.
    """
    if config.hidden_tokens:
        ids = first + jnp.arange(logits.shape[-1])[:, None]
        starts, ends = np.asarray(config.hidden_tokens, np.int32).T
        logits = jnp.where(((starts <= ids) & (ids < ends)).any(axis=-1), HIDDEN, logits)
    if rows is None:
        return logits
    own = einsum("...D,TD->...T", x, rows.reshape(-1, rows.shape[-1]).astype(x.dtype), jnp.float32)
    places = jnp.asarray(config.new_tokens) - first
    if adapter is not None:
        of_adapters = own.reshape(*adapter.shape, config.adapters, -1)
        own = jnp.take_along_axis(of_adapters, jnp.maximum(adapter, 0)[..., None, None], axis=-2)[..., 0, :]
        own = jnp.where(adapter[..., None] >= 0, own, logits[..., places])
    outside = logits.shape[-1]  # a negative index would count from the end
    return logits.at[..., jnp.where(places < 0, outside, places)].set(own, mode="drop")
