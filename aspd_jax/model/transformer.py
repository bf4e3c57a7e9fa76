"""The decoder: Llama 2/3, Vicuna, Mistral, Qwen2/2.5 and Qwen3 in one Flax Linen module.

B batch, S tokens, W rows that get logits, D embed, N heads, K kv heads, G = N / K, H head size,
F feed-forward, V vocabulary, C cache slots.

Pure in (parameters, tokens, layout, cache): nothing about positions or visibility is inferred inside.
"""

from __future__ import annotations

from math import ceil, floor, log, pi, prod
from typing import Any, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from aspd_jax.layout import Layout
from aspd_jax.model.attention import Attention, View, Window, dense
from aspd_jax.model.cache import Cache, LayerCache, feed_slots, record, write
from aspd_jax.model.config import ModelConfig, RopeConfig
from aspd_jax.sharding import named_sharding

LAYERS = "layers"  # name of the stacked layers' parameters
NO_WINDOW = 1 << 30

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
        return y.astype(x.dtype) * scale.astype(x.dtype)


class Projection(nn.Module):
    """A linear layer over the last `inputs` axes.

    Beside its kernel it may hold a low-rank adapter (LoRA: Hu et al., 2021), and the kernel may be int8 with one
    float32 scale per output.

    Attributes:
        features: sizes of the output axes.
        axes: logical axes of the kernel, inputs first.
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: tuple[str, ...]
    inputs: int = 1
    bias: bool = False
    adapted: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, inputs = self.config, self.inputs
        sizes = x.shape[-inputs:]
        into, out = self.axes[:inputs], self.axes[inputs:]
        rank = c.lora_rank if self.adapted else 0

        def weight(name: str, make: Any, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any = c.dtype) -> Any:
            return self.param(name, nn.with_partitioning(make, axes), shape, dtype)

        def times(x: jax.Array, kernel: jax.Array, inputs: int) -> jax.Array:
            contract = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
            return jax.lax.dot_general(x, kernel.astype(c.dtype), (contract, ((), ())))

        x = x.astype(c.dtype)
        if c.weights == "int8" and self.adapted:
            kernel = weight("kernel", nn.initializers.zeros, sizes + self.features, self.axes, jnp.int8)
            scale = weight("kernel_scale", nn.initializers.ones, self.features, out, jnp.float32)
            y = (times(x, kernel, inputs) * scale).astype(c.dtype)
        else:
            y = times(x, weight("kernel", fan_in_normal(inputs), sizes + self.features, self.axes), inputs)
        if rank:
            down = weight("lora_down", fan_in_normal(inputs), (*sizes, rank), (*into, "rank"), jnp.float32)
            up = weight("lora_up", nn.initializers.zeros, (rank, *self.features), ("rank", *out), jnp.float32)
            y = y + c.lora_alpha / rank * times(times(x, down, inputs), up, 1)
        if self.bias:
            y = y + weight("bias", nn.initializers.zeros, self.features, out).astype(c.dtype)
        return y


def fan_in_normal(inputs: int) -> Any:
    """LeCun's initialiser for a kernel whose first `inputs` axes are its inputs."""

    def make(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        flat = (prod(shape[:inputs]), prod(shape[inputs:]))
        return nn.initializers.lecun_normal()(key, flat, dtype).reshape(shape)

    return make


class AttentionLayer(nn.Module):
    """Grouped-query attention with RoPE, optionally over a cache."""

    config: ModelConfig
    attention: Attention

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turn: tuple[jax.Array, jax.Array],
        view: View,
        cache: LayerCache | None,
        window: Window,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        of_queries, of_keys = ("embed", "heads", "head"), ("embed", "kv_heads", "head")
        query = Projection(c, (c.heads, c.head), of_queries, bias=c.query_bias, name="query")(x)
        key = Projection(c, (c.kv_heads, c.head), of_keys, bias=c.query_bias, name="key")(x)
        value = Projection(c, (c.kv_heads, c.head), of_keys, bias=c.query_bias, name="value")(x)
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
        out = self.attention(grouped, keys, values, view, c.siblings, window)
        out = out.reshape(query.shape)
        output = Projection(c, (c.embed,), ("heads", "head", "embed"), 2, c.output_bias, name="output")
        return output(out), cache


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        bias = c.feed_forward_bias
        gate = Projection(c, (c.feed_forward,), ("embed", "feed_forward"), bias=bias, name="gate")(x)
        up = Projection(c, (c.feed_forward,), ("embed", "feed_forward"), bias=bias, name="up")(x)
        down = Projection(c, (c.embed,), ("feed_forward", "embed"), bias=bias, name="down")
        return down(ACTIVATION[c.activation](gate) * up)


class Layer(nn.Module):
    """One layer: attention and feed-forward, each after a norm and beside a residual."""

    config: ModelConfig
    attention: Attention

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turn: tuple[jax.Array, jax.Array],
        view: View,
        cache: LayerCache | None,
        window: Window,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        normed = RMSNorm(c.norm_epsilon, name="attention_norm")(x)
        out, cache = AttentionLayer(c, self.attention, name="attention")(normed, turn, view, cache, window)
        x = x + out
        normed = RMSNorm(c.norm_epsilon, name="feed_forward_norm")(x)
        return x + FeedForward(c, name="feed_forward")(normed), cache


class Transformer(nn.Module):
    """The decoder.

    Attributes:
        config: shape and arithmetic.
        attention: one of `aspd_jax.model.attention`, for passes without a cache.
        scan: layers as one program run `config.layers` times over parameters stacked along a first axis, as
            `stack_layers` makes them. For training: it compiles once, however deep the model is.
        remat: keep only the input of each layer for the backward pass, and compute the rest again.
        mesh: keep activations split over its batch axes.
    """

    config: ModelConfig
    attention: Attention = dense
    scan: bool = False
    remat: bool = False
    mesh: Mesh | None = None

    @overload
    def __call__(self, tokens: jax.Array, layout: Layout, *, head: bool = True) -> jax.Array: ...
    @overload
    def __call__(
        self, tokens: jax.Array, layout: Layout, cache: Cache, rows: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]: ...
    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        layout: Layout,
        cache: Cache | None = None,
        rows: jax.Array | None = None,
        *,
        head: bool = True,
    ) -> jax.Array | tuple[jax.Array, Cache]:
        """Logits of every token, or, with a cache, of the tokens asked for.

        Args:
            tokens: int32 [B, S].
            layout: of the tokens, int32 [B, S] each.
            cache: what was fed before. The tokens are added to it (padding excepted) and see it.
            rows: int32 [B, W], which of the S tokens get logits; default: all.
            head: false: stop before the head, for a loss that multiplies with `head_kernel` a part at a time.

        Returns:
            float32 [B, S, V] (without the head: [B, S, D]); with a cache, (float32 [B, W, V], the cache with these
            tokens in it).
        """
        c = self.config
        layout = Layout(*(jnp.asarray(field) for field in layout))
        embedding = nn.Embed(
            c.vocabulary,
            c.embed,
            dtype=c.dtype,
            param_dtype=c.dtype,
            # An untied embedding starts as large as what the layers add to it, or they drown it.
            embedding_init=nn.with_partitioning(
                nn.initializers.normal(0.02 if c.tied else 1.0), ("vocabulary", "embed")
            ),
            name="embedding",
        )
        x = self.spread(embedding(jnp.asarray(tokens)))
        turn = rotation(c.rope, c.head, layout.position)
        layers: list[Any] = []
        if cache is None:
            view = View(layout, layout)
            layer = nn.remat(Layer, prevent_cse=not self.scan) if self.remat else Layer
            if self.scan:
                x = self.scanned(layer, x, turn, view)
            else:
                for number in range(c.layers):
                    window = c.layer_window(number)
                    x, _ = layer(c, self.attention, name=f"layer_{number}")(x, turn, view, None, window)
                    x = self.spread(x)
        else:
            slots = feed_slots(cache, layout)
            cache = record(cache, tokens, layout, slots)
            view = View(layout, cache.layout, slots, jnp.arange(cache.tokens.shape[1])[None])
            for number in range(c.layers):
                window = c.layer_window(number)
                x, after = Layer(c, dense, name=f"layer_{number}")(x, turn, view, cache.layers[number], window)
                layers.append(after)
        if rows is not None:
            x = jnp.take_along_axis(x, rows[:, :, None], axis=1)
        x = RMSNorm(c.norm_epsilon, name="norm")(x)
        if c.tied:
            x = embedding.attend(x) if head else x
        elif head or self.is_initializing():
            logits = Projection(c, (c.vocabulary,), ("embed", "vocabulary"), adapted=False, name="head")(x)
            x = logits if head else x
        x = x.astype(jnp.float32) if head else x
        return x if cache is None else (x, cache._replace(layers=tuple(layers)))

    def scanned(self, layer: Any, x: jax.Array, turn: tuple[jax.Array, jax.Array], view: View) -> jax.Array:
        """All layers, over stacked parameters."""
        c = self.config
        windows = [c.layer_window(number) for number in range(c.layers)]
        mixed = len(set(windows)) > 1

        def body(module: nn.Module, x: jax.Array, window: jax.Array) -> tuple[jax.Array, None]:
            x, _ = module(x, turn, view, None, window if mixed else windows[0])
            return self.spread(x), None

        # A layer without a window, among others that have one, has one that nothing falls out of.
        limits = jnp.asarray([NO_WINDOW if window is None else window for window in windows])
        run = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = run(layer(c, self.attention, name=LAYERS), x, limits)
        return x

    def spread(self, x: jax.Array) -> jax.Array:
        """Keep activations [B, S, …] split over the batch axes of the mesh."""
        if self.mesh is None:
            return x
        place = named_sharding(("batch", "sequence", *[None] * (x.ndim - 2)), x.shape, self.mesh)
        return jax.lax.with_sharding_constraint(x, place)


def head_kernel(config: ModelConfig, params: Any) -> jax.Array:
    """What turns the activations before the head into logits; [D, V]."""
    return params["embedding"]["embedding"].T if config.tied else params["head"]["kernel"]


def stack_layers(params: Any, layers: int) -> Any:
    """Parameters of a plain model -> those of one with `scan`: the layers' leaves stacked along a new first axis."""
    rest = {name: value for name, value in params.items() if not name.startswith("layer_")}
    each = [params[f"layer_{number}"] for number in range(layers)]
    return rest | {LAYERS: jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)}


def unstack_layers(params: Any, layers: int) -> Any:
    """Inverse of `stack_layers`."""
    rest = {name: value for name, value in params.items() if name != LAYERS}
    return rest | {
        f"layer_{number}": jax.tree.map(lambda leaf, number=number: leaf[number], params[LAYERS])
        for number in range(layers)
    }
