"""Draft heads: draft tokens after the next token, from the input of the head of the model.

Head k computes its state from the state of head k - 1 and the token before its draft token, so each head reads the
tokens that it follows; the head of the model reads the state. All heads share one gated layer, applied repeatedly.
Medusa's heads (arXiv 2401.10774) see no tokens and share nothing; those of Hydra (arXiv 2402.05109) see them, and the
drafter of ReDrafter (arXiv 2403.09919) shares its parameters, too.

D hidden size, P = 2 gate and up.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aspd_jax.model.config import ModelConfig
from aspd_jax.model.cpu import einsum

DRAFT_HEADS = "draft_heads"  # name of the parameters
NORM_EPSILON = 1e-6


def draft_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name."""
    return {"gate_up": (2, hidden_size, 2 * hidden_size), "down": (hidden_size, hidden_size)}


def shift_left(values: Any, count: int) -> jax.Array:
    """Return each row [B, S] shifted left by `count` tokens, padded with 0."""
    return jnp.pad(jnp.asarray(values)[:, count:], ((0, 0), (0, min(count, values.shape[1]))))


class DraftHeads(nn.Module):
    """The layer of the draft heads: kernels [P, D, 2 D] of state and token, and [D, D]; float32."""

    config: ModelConfig

    def setup(self) -> None:
        """Create the parameters; their values come from a file, or from `formats.draft_file.fresh_draft_heads`."""
        shapes = draft_shapes(self.config.hidden_size)

        def weight(name: str, *axes: str) -> Any:
            return self.param(name, nn.with_partitioning(nn.initializers.zeros, axes), shapes[name], jnp.float32)

        self.gate_up = weight("gate_up", "part", "feed_forward", "embed")
        self.down = weight("down", "embed", "feed_forward")

    def __call__(self, state: jax.Array, embedding: jax.Array) -> jax.Array:
        """Return the state of the next head.

        Args:
            state: state of a head, [..., D]; for the first one, the input of the head of the model.
            embedding: embedding of the token before the draft token, [..., D].
        """
        dtype, x = self.config.dtype, embedding.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON)
        both = jnp.concatenate([state, x.astype(state.dtype)], axis=-1).astype(dtype)
        gate_up = einsum("...I,PFI->...PF", both, self.gate_up.astype(dtype))
        inner = nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return state + einsum("...F,DF->...D", inner, self.down.astype(dtype)).astype(state.dtype)
