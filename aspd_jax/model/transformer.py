"""The decoder: Llama 2/3, Vicuna, Mistral, Qwen2/2.5, Qwen3 and Gemma 3 in one Flax Linen module.

B batch, S tokens of a row, T tokens of a pass over the cache, L of them that get logits, R rows that feed some,
D hidden size, N heads, K kv heads, G = N / K, H head size, F feed-forward, V vocabulary and its padding, C cache slots.

Pure in (parameters, tokens, layout, cache): nothing about positions or visibility is inferred inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil, floor, log, pi, prod
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from aspd_jax.layout import HIDDEN, NO_WINDOW, Layout
from aspd_jax.model.attention import BACK_ENDS, View, Window
from aspd_jax.model.cache import Bucket, ByRow, Cache, LayerCache, TokenBatch, by_row, record, write
from aspd_jax.model.config import ModelConfig, RopeConfig
from aspd_jax.model.cpu import computed_once, product
from aspd_jax.sharding import named_sharding, over

LAYERS = "layers"  # name of the stacked layers' parameters
NEW_TOKENS = "new_tokens"  # name of the parameters of `ModelConfig.new_tokens`

Rope: TypeAlias = tuple[jax.Array, jax.Array]  # cosine and sine of the positions of all tokens

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


def rotation(rope: RopeConfig, head_dim: int, position: jax.Array) -> Rope:
    """Cosine and sine for positions [...]; float32 [..., H / 2] each."""
    angle = position[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jnp.cos(angle) * rope.attention_factor, jnp.sin(angle) * rope.attention_factor


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Apply RoPE to [..., heads, H]; halves of the head are the two coordinates, as in Hugging Face."""
    dtype = x.dtype
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        initial = nn.with_partitioning(nn.initializers.constant(1.0 - c.norm_offset), ("norm",))
        scale: Any = self.param("scale", initial, (x.shape[-1],), x.dtype)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + c.norm_epsilon)
        if c.norm_offset:  # near 0, as the weights are, they are more exact than the sum would be
            return (y * (c.norm_offset + scale.astype(jnp.float32))).astype(x.dtype)
        return y.astype(x.dtype) * scale.astype(x.dtype)


class Projection(nn.Module):
    """A linear layer over the last `inputs` axes.

    Every kernel ends with the hidden size, the embedding and the head too: what reads the residual stream is
    [*features, D], what writes to it [*inputs, D]. So compilers read it as it lies, for one token and for many, on CPU
    and TPU. Beside it there may be a low-rank adapter (LoRA: Hu et al., 2021), and the kernel may be int8 with one
    float32 scale per output.

    Attributes:
        features: sizes of the output axes.
        axes: logical axes of the kernel.
        inputs: how many axes of the kernel are inputs.
        inputs_first: whether these are its first ones.
        adapted: whether there may be an adapter, or int8.
        dtype: of the outputs; default: that of the activations.
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: tuple[str, ...]
    inputs: int = 1
    inputs_first: bool = False
    bias: bool = False
    adapted: bool = True
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, ranks: jax.Array | None = None) -> jax.Array:
        """Args: ranks: which ranks of the adapters count for each token [..., R]; None: all."""
        c, inputs, first = self.config, self.inputs, self.inputs_first
        sizes = x.shape[-inputs:]
        into, out = (self.axes[:inputs], self.axes[inputs:]) if first else (self.axes[-inputs:], self.axes[:-inputs])
        shape = sizes + self.features if first else self.features + sizes
        rank = c.lora_rank if self.adapted else 0

        def weight(name: str, make: Any, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any = c.dtype) -> Any:
            return self.param(name, nn.with_partitioning(make, axes), shape, dtype)

        def times(x: jax.Array, kernel: jax.Array, inputs: int, first: bool = False) -> jax.Array:
            return product(x, kernel.astype(c.dtype), inputs, first, self.dtype)

        x = x.astype(c.dtype)
        if c.weights == "int8" and self.adapted:
            kernel = weight("kernel", nn.initializers.zeros, shape, self.axes, jnp.int8)
            scale = weight("kernel_scale", nn.initializers.ones, self.features, out, jnp.float32)
            y = (times(x, kernel, inputs, first) * scale).astype(c.dtype)
        else:
            y = times(x, weight("kernel", fan_in_normal(inputs, first), shape, self.axes), inputs, first)
        if rank:
            down = weight("lora_down", fan_in_normal(inputs), (rank, *sizes), ("rank", *into), jnp.float32)
            up = weight("lora_up", nn.initializers.zeros, (*self.features, rank), (*out, "rank"), jnp.float32)
            low = times(x, down, inputs)
            low = low if ranks is None else low * ranks
            y = y + c.lora_alpha / rank * times(low, up, 1)
        if self.bias:
            y = y + weight("bias", nn.initializers.zeros, self.features, out).astype(c.dtype)
        return y


def fan_in_normal(inputs: int, inputs_first: bool = False) -> Any:
    """LeCun's initialiser for a kernel whose last (or first) `inputs` axes are its inputs."""
    cut = inputs if inputs_first else -inputs

    def make(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        flat = (prod(shape[:cut]), prod(shape[cut:]))
        normal = nn.initializers.lecun_normal(in_axis=1 - inputs_first, out_axis=int(inputs_first))
        return normal(key, flat, dtype).reshape(shape)

    return make


class OverCache(NamedTuple):
    """A pass over the cache, as every layer sees it.

    Attributes:
        batch: the tokens, flat, and where they stand.
        rows: the same by row.
        views: who looks at whom, in each part of these.
    """

    batch: TokenBatch
    rows: ByRow
    views: tuple[View, ...]


class AttentionLayer(nn.Module):
    """Grouped-query attention with RoPE: of tokens [B, S] among themselves, or of flat tokens [T] over a cache."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        rope: Rope,
        context: View | OverCache,
        cache: LayerCache | None,
        window: Window,
        ranks: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        # One product for everything that looks at `x`: few rows cost what reading the kernels costs.
        axes, group = ("kv_heads", "group", "head", "embed"), c.heads // c.kv_heads
        projection = Projection(c, (c.kv_heads, group + 2, c.head_dim), axes, bias=c.query_bias, name="query_key_value")
        joint = projection(x, ranks)
        query, key, value = joint[..., :group, :], joint[..., group, :], joint[..., group + 1, :]
        query = query.reshape(*x.shape[:-1], c.heads, c.head_dim)
        if c.query_norm:
            query, key = RMSNorm(c, name="query_norm")(query), RMSNorm(c, name="key_norm")(key)
        query, key = rotate(query, *rope), rotate(key, *rope)
        if c.query_scale is not None:  # attention scales by the root of the head size
            query = query * (c.query_scale * c.head_dim**0.5)
        grouped = query.reshape(*x.shape[:-1], c.kv_heads, group, c.head_dim)
        if isinstance(context, View):
            with over(self.mesh):
                out = BACK_ENDS[c.attention](grouped, key, value, context, c.siblings, window)
        else:
            assert cache is not None
            cache = write(cache, context.batch, key, value)
            attend, parts = BACK_ENDS[c.decode_attention], []
            for part, view in zip(context.rows.parts, context.views, strict=True):
                keys, values = map(part.of, cache)
                with over(self.mesh):
                    of_part = attend(grouped[part.token], keys, values, view, c.siblings, window)
                parts.append(of_part.reshape(-1, *of_part.shape[2:]))
            out = jnp.concatenate(parts)[context.rows.place]
        out = out.reshape(query.shape)
        output = Projection(c, (c.hidden_size,), ("heads", "head", "embed"), 2, True, c.output_bias, name="output")
        return output(out, ranks), cache


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, ranks: jax.Array | None) -> jax.Array:
        c = self.config
        bias = c.feed_forward_bias
        gate_up = Projection(c, (2, c.feed_forward), ("pair", "feed_forward", "embed"), bias=bias, name="gate_up")
        both = gate_up(x, ranks)
        down = Projection(c, (c.hidden_size,), ("feed_forward", "embed"), 1, True, bias, name="down")
        return down(ACTIVATION[c.activation](both[..., 0, :]) * both[..., 1, :], ranks)


class Layer(nn.Module):
    """One layer: attention and feed-forward, each after a norm and beside a residual; and before a norm, in some."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        rope: Rope,
        context: View | OverCache,
        cache: LayerCache | None,
        window: Window,
        ranks: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Args: ranks: which ranks of the adapters count for each token [..., R]; None: all."""
        c = self.config
        normed = RMSNorm(c, name="attention_norm")(x)
        out, cache = AttentionLayer(c, self.mesh, name="attention")(normed, rope, context, cache, window, ranks)
        x = x + (RMSNorm(c, name="attention_after_norm")(out) if c.after_norms else out)
        out = FeedForward(c, name="feed_forward")(RMSNorm(c, name="feed_forward_norm")(x), ranks)
        return x + (RMSNorm(c, name="feed_forward_after_norm")(out) if c.after_norms else out), cache


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
        rows = product(mine.astype(x.dtype), table, inputs_first=True)
        return jnp.where(mine.any(axis=-1, keepdims=True), rows, x)


class Transformer(nn.Module):
    """The decoder.

    Attributes:
        config: shape and arithmetic.
        scan: layers as one program run `config.layers` times over parameters stacked along a first axis, as
            `stack_layers` makes them. For training: it compiles once, however deep the model is.
        remat: keep only the input of each layer for the backward pass, and compute the rest again.
        mesh: keep activations split over its batch axes, and the heads of a cache over `tensor`.
    """

    config: ModelConfig
    scan: bool = False
    remat: bool = False
    mesh: Mesh | None = None

    def setup(self) -> None:
        """Embedding, layers (one by one, or as one scanned over), norm and an untied head."""
        c = self.config
        # An untied embedding starts as large as what the layers add to it, or they drown it.
        initial = nn.initializers.normal(0.02 if c.tied else 1.0)
        self.embedding = nn.Embed(
            c.padded_vocab_size,
            c.hidden_size,
            dtype=c.dtype,
            param_dtype=c.dtype,
            embedding_init=nn.with_partitioning(initial, ("vocabulary", "embed")),
        )
        layer: Any = nn.remat(Layer, prevent_cse=not self.scan) if self.remat else Layer
        if self.scan:
            setattr(self, LAYERS, layer(c, self.mesh))
        else:
            for number in range(c.layers):
                setattr(self, f"layer_{number}", layer(c, self.mesh))
        self.norm = RMSNorm(c)
        if not c.tied:
            axes = ("vocabulary", "embed")
            self.head = Projection(c, (c.padded_vocab_size,), axes, adapted=False, dtype=jnp.float32)
        if c.new_tokens:
            setattr(self, NEW_TOKENS, NewTokens(c))

    def __call__(
        self, tokens: jax.Array, layout: Layout, *, head: bool = True, adapter: jax.Array | None = None
    ) -> jax.Array:
        """A full pass: logits of every token.

        Args:
            tokens: int32 [B, S].
            layout: of the tokens, int32 [B, S] each.
            head: false: stop before the head, for a loss that takes `lm_head` of a part at a time.
            adapter: of each token, int32 [B, S], where there are several; negative: none. It goes with the head.

        Returns:
            float32 [B, S, V]; without the head, [B, S, D].
        """
        c = self.config
        layout = Layout(*(jnp.asarray(field) for field in layout))
        if c.adapters:
            adapter = jnp.full(layout.position.shape, -1) if adapter is None else adapter
        x = self.spread(self.embedded(jnp.asarray(tokens), adapter))
        ropes, view, ranks = self.ropes(layout.position), View(layout, layout), self.ranks(adapter)
        if self.scan:
            x = self.scanned(x, ropes, view)
        else:
            for number in range(c.layers):
                x, _ = self._layer(number)(x, ropes[c.layer_rope(number)], view, None, c.layer_window(number), ranks)
                x = self.spread(x)
        x = self.norm(x)
        return self.logits(x, adapter) if head or self.is_initializing() else x

    def decode(self, batch: TokenBatch, cache: Cache, bucket: Bucket) -> tuple[jax.Array, Cache]:
        """A pass over new tokens on top of a cache; they are added to it, and see it.

        Linear layers see the flat tokens, whatever rows they belong to; attention sees rows.

        Args:
            batch: what is fed, and where it goes.
            cache: what was fed before.
            bucket: has room for them.

        Returns:
            Logits float32 [L, V], and the cache.
        """
        c = self.config
        cache = record(cache, batch)
        rows = by_row(batch, bucket)
        views = tuple(
            View(
                part.layout,
                Layout(*(part.of(field)[: len(part.token), : bucket.slots] for field in cache.layout)),
                part.slot,
                jnp.arange(bucket.slots)[None],
            )
            for part in rows.parts
        )
        adapter = batch.adapter if c.adapters else None
        shared = self.ropes(batch.layout.position), OverCache(batch, rows, views), self.ranks(adapter)
        ropes, context, ranks = computed_once(shared, cache.length[0] >= 0)
        batch = context.batch
        x = self.embedded(batch.tokens, adapter)
        layers = []
        for number, layer in enumerate(cache.layers):
            rope, window = ropes[c.layer_rope(number)], c.layer_window(number)
            x, layer = self._layer(number)(x, rope, context, layer, window, ranks)
            layers.append(layer)
        adapter = None if adapter is None else adapter[batch.logits_at]
        return self.logits(self.norm(x[batch.logits_at]), adapter), cache._replace(layers=tuple(layers))

    def ropes(self, position: jax.Array) -> dict[RopeConfig, Rope]:
        """Rotations of positions [...], for every kind of layer."""
        c = self.config
        return {rope: rotation(rope, c.head_dim, position) for rope in map(c.layer_rope, range(c.layers))}

    def ranks(self, adapter: jax.Array | None) -> jax.Array | None:
        """Which ranks of the adapters count for tokens [...] with these adapters: [..., R], 0 or 1."""
        c = self.config
        if adapter is None:
            return None
        of_rank = jnp.arange(c.lora_rank) // (c.lora_rank // c.adapters)
        return (adapter[..., None] == of_rank).astype(c.dtype)

    def embedded(self, tokens: jax.Array, adapter: jax.Array | None = None) -> jax.Array:
        """Embeddings [..., D] of tokens [...], each with its adapter where there are several."""
        c, x = self.config, self.embedding(tokens)
        x = getattr(self, NEW_TOKENS)(tokens, x, adapter) if c.new_tokens else x
        return x if c.embedding_scale == 1.0 else x * jnp.asarray(c.embedding_scale, x.dtype)

    def logits(self, x: jax.Array, adapter: jax.Array | None = None) -> jax.Array:
        """Float32 [..., V] of normed activations [..., D], each with its adapter where there are several."""
        c = self.config
        logits = product(x, self.embedding.embedding, dtype=jnp.float32) if c.tied else self.head(x)
        rows = getattr(self, NEW_TOKENS) if c.new_tokens else None
        return _completed(c, logits, x, rows and (rows.embedding if c.tied else rows.head), adapter=adapter)

    def _layer(self, number: int) -> Any:
        return getattr(self, f"layer_{number}")

    def scanned(self, x: jax.Array, ropes: Mapping[RopeConfig, Rope], view: View) -> jax.Array:
        """All layers, over stacked parameters."""
        c = self.config
        windows = [c.layer_window(number) for number in range(c.layers)]
        mixed, every = len(set(windows)) > 1, list(ropes)

        def body(module: nn.Module, x: jax.Array, of_layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            window, kind = of_layer
            rope = ropes[every[0]]
            for number, other in enumerate(every[1:], 1):
                rope = jax.tree.map(partial(jnp.where, kind == number), ropes[other], rope)
            x, _ = module(x, rope, view, None, window if mixed else windows[0], None)
            return self.spread(x), None

        # A layer without a window, among others that have one, has one that nothing falls out of.
        limits = jnp.asarray([NO_WINDOW if window is None else window for window in windows])
        kinds = jnp.asarray([every.index(c.layer_rope(number)) for number in range(c.layers)])
        run = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = run(getattr(self, LAYERS), x, (limits, kinds))
        return x

    def spread(self, x: jax.Array) -> jax.Array:
        """Keep activations [B, S, …] split over the batch axes of the mesh."""
        if self.mesh is None:
            return x
        place = named_sharding(("batch", "sequence", *[None] * (x.ndim - 2)), x.shape, self.mesh)
        return jax.lax.with_sharding_constraint(x, place)


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
    logits = product(x, head.kernel.astype(x.dtype), dtype=jnp.float32)
    return _completed(config, logits, x, head.new_tokens, first)


def _completed(
    config: ModelConfig,
    logits: jax.Array,
    x: jax.Array,
    rows: jax.Array | None,
    first: int | jax.Array = 0,
    adapter: jax.Array | None = None,
) -> jax.Array:
    """Logits [..., V] of activations [..., D]: those of new tokens by their own rows of the head, [T, D] or [A, T, D],
    if they have any; those of padding hidden.

    Args:
        first: id of the first logit; new tokens that are not among them are left out.
        adapter: [...], where there are A; negative: new tokens have the rows of all others.
    """
    if config.vocab_padding:
        logits = jnp.where(first + jnp.arange(logits.shape[-1]) < config.vocab_size, logits, HIDDEN)
    if rows is None:
        return logits
    own = product(x, rows.reshape(-1, rows.shape[-1]).astype(x.dtype), dtype=jnp.float32)
    places = jnp.asarray(config.new_tokens) - first
    if adapter is not None:
        of_adapters = own.reshape(*adapter.shape, config.adapters, -1)
        own = jnp.take_along_axis(of_adapters, jnp.maximum(adapter, 0)[..., None, None], axis=-2)[..., 0, :]
        own = jnp.where(adapter[..., None] >= 0, own, logits[..., places])
    outside = logits.shape[-1]  # a negative index would count from the end
    return logits.at[..., jnp.where(places < 0, outside, places)].set(own, mode="drop")


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
