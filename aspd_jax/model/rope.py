"""Rotary embedding (RoPE: Su et al., 2021), with optional scaling; H head size."""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.model.config import RopeConfig

Rope: TypeAlias = tuple[jax.Array, jax.Array]  # cosine and sine of the angles of all tokens


def rope_frequencies(rope: RopeConfig, head: int) -> np.ndarray:
    """Return the frequency of each pair of dimensions in radians per position, float32 [H / 2]."""
    frequency = 1.0 / rope.theta ** (np.arange(0, head, 2, dtype=np.float32) / head)
    if rope.scaling == "linear":
        frequency = frequency / rope.factor
    elif rope.scaling == "llama3":
        wavelength = 2 * pi / frequency
        smooth = (rope.original_length / wavelength - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
        smooth = np.clip(smooth, 0, 1)
        frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
    elif rope.scaling == "yarn":

        def dimension(rotations: float) -> float:
            return head * log(rope.original_length / (rotations * 2 * pi)) / (2 * log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, head - 1)
        ramp = np.clip((np.arange(head // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
        frequency = frequency * (1 - ramp) + frequency / rope.factor * ramp
    return frequency.astype(np.float32)


def rotation(rope: RopeConfig, head_dim: int, position: jax.Array) -> Rope:
    """Return cosine and sine for positions [...]; float32 [..., H / 2] each."""
    angle = position[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jnp.cos(angle) * rope.attention_factor, jnp.sin(angle) * rope.attention_factor


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Apply RoPE to [..., heads, H]; the two coordinates are the halves of a head, as in Hugging Face."""
    dtype = x.dtype
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(dtype)
