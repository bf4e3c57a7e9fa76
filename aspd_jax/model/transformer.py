"""The decoder: Llama 2/3, Vicuna, Mistral, Qwen2/2.5 and Qwen3 in one Flax Linen module.

B batch, S tokens, W rows that get logits, D embed, N heads, K kv heads, G = N / K, H head size,
F feed-forward, V vocabulary, C cache slots.

Pure in (parameters, tokens, layout, cache): nothing about positions or visibility is inferred inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log, pi
from typing import Any, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.layout import Layout
from aspd_jax.model.attention import IMPLEMENTATIONS, View
from aspd_jax.model.cache import Cache, LayerCache, feed_slots, record, write
from aspd_jax.model.config import ModelConfig, RopeConfig

ACTIVATION = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: nn.gelu(x, approximate=True),
    "relu": nn.relu,
}


def rope_frequencies(rope: RopeConfig, head: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, float32 [H / 2]."""
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


def rotation(rope: RopeConfig, head: int, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for positions [B, S]; float32 [B, S, H / 2] each."""
    angle = position[..., None].astype(jnp.float32) * rope_frequencies(rope, head)
    return jnp.cos(angle) * rope.attention_factor, jnp.sin(angle) * rope.attention_factor


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Apply RoPE to [B, S, heads, H]; halves of the head are the two coordinates, as in Hugging Face."""
    dtype = x.dtype
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale: Any = self.param("scale", nn.with_partitioning(nn.initializers.ones, ("norm",)), (x.shape[-1],), x.dtype)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return y.astype(x.dtype) * scale


def projection(
    config: ModelConfig, features: Any, axes: Sequence[str], name: str, bias: bool = False, inputs: int = 1
) -> nn.DenseGeneral:
    """A linear layer over the last `inputs` axes; `axes` are the logical axes of its kernel."""
    return nn.DenseGeneral(
        features,
        axis=tuple(range(-inputs, 0)),
        use_bias=bias,
        dtype=config.dtype,
        param_dtype=config.dtype,
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), tuple(axes)),
        bias_init=nn.with_partitioning(nn.initializers.zeros, tuple(axes[inputs:])),
        name=name,
    )


class AttentionLayer(nn.Module):
    """Grouped-query attention with RoPE, optionally over a cache."""

    config: ModelConfig
    attention: str
    window: int | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turn: tuple[jax.Array, jax.Array],
        view: View,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        query = projection(c, (c.heads, c.head), ("embed", "heads", "head"), "query", c.query_bias)(x)
        key = projection(c, (c.kv_heads, c.head), ("embed", "kv_heads", "head"), "key", c.query_bias)(x)
        value = projection(c, (c.kv_heads, c.head), ("embed", "kv_heads", "head"), "value", c.query_bias)(x)
        if c.query_norm:
            query = RMSNorm(c.norm_epsilon, name="query_norm")(query)
            key = RMSNorm(c.norm_epsilon, name="key_norm")(key)
        query, key = rotate(query, *turn), rotate(key, *turn)
        if cache is None:
            keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
        else:
            assert view.query_slot is not None
            cache = write(cache, key, value, view.query_slot)
            keys, values = cache
        grouped = query.reshape(*query.shape[:2], c.kv_heads, c.heads // c.kv_heads, c.head)
        out = IMPLEMENTATIONS[self.attention](grouped, keys, values, view, c.siblings, self.window)
        out = out.reshape(query.shape)
        return projection(c, c.embed, ("heads", "head", "embed"), "output", c.output_bias, inputs=2)(out), cache


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        bias = c.feed_forward_bias
        gate = projection(c, c.feed_forward, ("embed", "feed_forward"), "gate", bias)(x)
        up = projection(c, c.feed_forward, ("embed", "feed_forward"), "up", bias)(x)
        return projection(c, c.embed, ("feed_forward", "embed"), "down", bias)(ACTIVATION[c.activation](gate) * up)


class Layer(nn.Module):
    """One layer: attention and feed-forward, each after a norm and beside a residual."""

    config: ModelConfig
    attention: str
    window: int | None

    @nn.compact
    def __call__(
        self, x: jax.Array, turn: tuple[jax.Array, jax.Array], view: View, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        normed = RMSNorm(c.norm_epsilon, name="attention_norm")(x)
        out, cache = AttentionLayer(c, self.attention, self.window, name="attention")(normed, turn, view, cache)
        x = x + out
        normed = RMSNorm(c.norm_epsilon, name="feed_forward_norm")(x)
        return x + FeedForward(c, name="feed_forward")(normed), cache


class Transformer(nn.Module):
    """The decoder.

    Attributes:
        config: shape and arithmetic.
        attention: implementation of `aspd_jax.model.attention` for passes without a cache.
    """

    config: ModelConfig
    attention: str = "dense"

    @overload
    def __call__(self, tokens: jax.Array, layout: Layout) -> jax.Array: ...
    @overload
    def __call__(
        self, tokens: jax.Array, layout: Layout, cache: Cache, rows: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]: ...
    @nn.compact
    def __call__(
        self, tokens: jax.Array, layout: Layout, cache: Cache | None = None, rows: jax.Array | None = None
    ) -> jax.Array | tuple[jax.Array, Cache]:
        """Logits of every token, or, with a cache, of the tokens asked for.

        Args:
            tokens: int32 [B, S].
            layout: of the tokens, int32 [B, S] each.
            cache: what was fed before. The tokens are added to it (padding excepted) and see it.
            rows: int32 [B, W], which of the S tokens get logits; default: all.

        Returns:
            float32 [B, S, V]; with a cache, (float32 [B, W, V], the cache with these tokens in it).
        """
        c = self.config
        layout = Layout(*(jnp.asarray(field) for field in layout))
        embedding = nn.Embed(
            c.vocabulary,
            c.embed,
            dtype=c.dtype,
            param_dtype=c.dtype,
            embedding_init=nn.with_partitioning(nn.initializers.normal(0.02), ("vocabulary", "embed")),
            name="embedding",
        )
        x = embedding(jnp.asarray(tokens))
        turn = rotation(c.rope, c.head, layout.position)
        attention = self.attention
        if cache is None:
            view = View(layout, layout)
        else:
            slots = feed_slots(cache, layout)
            cache = record(cache, tokens, layout, slots)
            view = View(layout, cache.layout, slots, jnp.arange(cache.tokens.shape[1])[None])
            attention = "dense"
        layers: list[Any] = []
        for number in range(c.layers):
            before = None if cache is None else cache.layers[number]
            x, after = Layer(c, attention, c.layer_window(number), name=f"layer_{number}")(x, turn, view, before)
            layers.append(after)
        if rows is not None:
            x = jnp.take_along_axis(x, rows[:, :, None], axis=1)
        x = RMSNorm(c.norm_epsilon, name="norm")(x)
        logits = embedding.attend(x) if c.tied else projection(c, c.vocabulary, ("embed", "vocabulary"), "head")(x)
        logits = logits.astype(jnp.float32)
        return logits if cache is None else (logits, cache._replace(layers=tuple(layers)))
