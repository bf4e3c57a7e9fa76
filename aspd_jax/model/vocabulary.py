"""Embedding and head with separate rows for new tokens, and the head as a function of its parameters.

D hidden size, V padded vocabulary, T new tokens, A adapters.
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
    """Rows of embedding and head for `ModelConfig.new_tokens`, float32.

    The shape of both is [T, D], or [A, T, D] with several adapters. A tied model has only the embedding.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Create the rows."""
        c = self.config
        for name in ("embedding",) if c.tied else ("embedding", "head"):
            of_adapters = (c.adapters,) if c.adapters else ()
            axes = (*(None for _ in of_adapters), "new_tokens", "embed")
            make = nn.with_partitioning(nn.initializers.normal(0.02), axes)
            shape = (*of_adapters, len(c.new_tokens), c.hidden_size)
            setattr(self, name, self.param(name, make, shape, jnp.float32))

    def __call__(self, tokens: jax.Array, x: jax.Array, adapter: jax.Array | None = None) -> jax.Array:
        """Return the embeddings of tokens, with the rows of new tokens in place of those of the base model.

        Args:
            tokens: token ids [...].
            x: embeddings [..., D] from the base model.
            adapter: index of the adapter of each token [...], if the model has several; negative: the base model.
        """
        is_new = tokens[..., None] == jnp.asarray(self.config.new_tokens)
        if adapter is not None:
            of_adapter = adapter[..., None] == jnp.arange(self.config.adapters)
            is_new = (of_adapter[..., None] & is_new[..., None, :]).reshape(*tokens.shape, -1)
        table = self.embedding.reshape(-1, self.embedding.shape[-1]).astype(x.dtype)
        rows = is_new.astype(x.dtype) @ table
        return jnp.where(is_new.any(axis=-1, keepdims=True), rows, x)


class Head(NamedTuple):
    """Parameters of the head.

    A tree of the same form holds properties of both, such as logical axes.

    Attributes:
        kernel: [V, D], the kernel of the embedding in a tied model; V may be the part of the vocabulary on one device.
        new_tokens: separate rows of new tokens, float32 [T, D], or None.
    """

    kernel: Any
    new_tokens: Any


HEAD_AXES = Head(("vocabulary", "embed"), ("new_tokens", "embed"))  # logical axes


def head_of(config: ModelConfig, params: Any, adapter: jax.Array | int = -1) -> Head:
    """Return the head from the parameters of a model.

    Args:
        config: configuration of the model.
        params: all parameters.
        adapter: index of the adapter whose rows of new tokens are used, if the model has several; negative: the rows of
            the base model.
    """
    kernel = params["embedding"]["embedding"] if config.tied else params["head"]["kernel"]
    rows = params[NEW_TOKENS]["embedding" if config.tied else "head"] if config.new_tokens else None
    if rows is not None and config.adapters:
        of_all = kernel[jnp.asarray(config.new_tokens)].astype(rows.dtype)
        rows = jnp.where(adapter >= 0, rows[jnp.maximum(adapter, 0)], of_all)
    return Head(kernel, rows)


def lm_head(config: ModelConfig, head: Head, x: jax.Array, first: int | jax.Array = 0) -> jax.Array:
    """Return the logits float32 [..., V] of the activations [..., D] that precede the head.

    Args:
        config: configuration of the model.
        head: parameters of the head.
        x: activations.
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
    """Complete logits of the base model: replace those of new tokens, and hide those of padding and unused tokens.

    Args:
        config: configuration of the model.
        logits: float32 [..., V].
        x: activations [..., D] that the logits were computed from.
        rows: separate rows of new tokens in the head, [T, D] or [A, T, D]; None: no replacement.
        first: id of the first logit; new tokens outside the logits are skipped.
        adapter: index of the adapter per token [...], if the model has several; negative: the rows of the base model.

    Returns:
        float32 [..., V].
    """
    if config.hidden_tokens:
        ids = first + jnp.arange(logits.shape[-1])[:, None]
        starts, ends = np.asarray(config.hidden_tokens, np.int32).T
        logits = jnp.where(((starts <= ids) & (ids < ends)).any(axis=-1), HIDDEN, logits)
    if rows is None:
        return logits
    new_logits = einsum("...D,TD->...T", x, rows.reshape(-1, rows.shape[-1]).astype(x.dtype), jnp.float32)
    new_ids = jnp.asarray(config.new_tokens) - first
    if adapter is not None:
        of_adapters = new_logits.reshape(*adapter.shape, config.adapters, -1)
        new_logits = jnp.take_along_axis(of_adapters, jnp.maximum(adapter, 0)[..., None, None], axis=-2)[..., 0, :]
        new_logits = jnp.where(adapter[..., None] >= 0, new_logits, logits[..., new_ids])
    outside = logits.shape[-1]  # out of range on purpose: a negative index would count from the end
    return logits.at[..., jnp.where(new_ids < 0, outside, new_ids)].set(new_logits, mode="drop")
