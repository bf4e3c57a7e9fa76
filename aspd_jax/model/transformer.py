"""The decoder: Llama 2/3, Vicuna, Mistral, Qwen2/2.5, Qwen3 and Gemma 3 in one Flax Linen module.

B batch, S tokens of a row, T tokens of a step over the cache, L tokens that get logits, C cache slots, D hidden size,
N heads, K kv heads, G = N / K, H head size, F feed-forward, V padded vocabulary, R ranks of adapters, P parts of a
joint kernel: G queries, key and value of a kv head (P = G + 2), or gate and up (P = 2).

The module is a pure function of (parameters, tokens, layout, cache). Positions and visibility are always inputs.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from aspd_jax.errors import ConfigError
from aspd_jax.layout import NO_WINDOW, Layout
from aspd_jax.model.attention import DECODE_BACK_ENDS, FULL_PASS_BACK_ENDS, View, Window
from aspd_jax.model.cache import Bucket, ByRow, Cache, LayerCache, TokenBatch, by_row, record, write
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.cpu import einsum, letters, materialise
from aspd_jax.model.draft_heads import DRAFT_HEADS, DraftHeads, shift_left
from aspd_jax.model.rope import Rope, rotate, rotation
from aspd_jax.model.vocabulary import NEW_TOKENS, NewTokens, completed
from aspd_jax.sharding import named_sharding, use_mesh

LAYERS = "layers"  # name of the parameters of stacked layers

# Logical axis of each letter in the equations of linear layers; `RULES` in `sharding` maps it to the mesh.
AXES = {
    "D": "embed",
    "N": "heads",
    "K": "kv_heads",
    "P": "part",
    "H": "head",
    "F": "feed_forward",
    "V": "vocabulary",
    "R": "rank",
}

ACTIVATION = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: nn.gelu(x, approximate=True),
    "relu": nn.relu,
}


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x` [..., X] over its last axis."""
        c = self.config
        initial = nn.with_partitioning(nn.initializers.constant(1.0 - c.norm_offset), ("norm",))
        scale: Any = self.param("scale", initial, (x.shape[-1],), x.dtype)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + c.norm_epsilon)
        if c.norm_offset:  # the weights are near 0, where their dtype is more precise than near the offset
            return (y * (c.norm_offset + scale.astype(jnp.float32))).astype(x.dtype)
        return y.astype(x.dtype) * scale.astype(x.dtype)


class Projection(nn.Module):
    """A linear layer, stated as an einsum of activations and kernel.

    Every kernel is [*outputs, *inputs], as in Hugging Face checkpoints. A low-rank adapter (LoRA: Hu et al., 2021) may
    be added to it, and it may be int8 with one float32 scale per output.

    Attributes:
        config: configuration of the model.
        equation: "...I,OI->...O", in the letters of `AXES`; I and O stand for one letter or several.
        parts: size of P.
        bias: whether the layer has a bias.
        adapted: whether the layer follows `lora_rank` and `weights` of the configuration.
        dtype: dtype of the outputs; default: the dtype of the activations.
    """

    config: ModelConfig
    equation: str
    parts: int = 1
    bias: bool = False
    adapted: bool = True
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, ranks: jax.Array | None = None) -> jax.Array:
        """Apply the layer to `x` [..., *inputs]; return [..., *outputs].

        Args:
            x: activations.
            ranks: 0 or 1 for each token and rank of the adapters, [..., R]; None: all ranks are used.
        """
        c = self.config
        inputs, outputs = letters(self.equation)
        axes = outputs + inputs
        sizes = axis_sizes(c) | {"P": self.parts}

        def weight(name: str, make: Any, axes: str, dtype: Any = c.dtype) -> Any:
            partitioned = nn.with_partitioning(make, tuple(AXES[axis] for axis in axes))
            return self.param(name, partitioned, tuple(sizes[axis] for axis in axes), dtype)

        def times(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
            return einsum(equation, x, kernel.astype(c.dtype), self.dtype)

        x = x.astype(c.dtype)
        if c.weights == "int8" and self.adapted:
            kernel = weight("kernel", nn.initializers.zeros, axes, jnp.int8)
            scale = weight("kernel_scale", nn.initializers.ones, outputs, jnp.float32)
            y = (times(self.equation, x, kernel) * scale).astype(c.dtype)
        else:
            y = times(self.equation, x, weight("kernel", fan_in_normal(self.equation), axes))
        if c.lora_rank and self.adapted:
            into, out = f"...{inputs},R{inputs}->...R", f"...R,{outputs}R->...{outputs}"
            down = weight("lora_down", fan_in_normal(into), f"R{inputs}", jnp.float32)
            up = weight("lora_up", nn.initializers.zeros, f"{outputs}R", jnp.float32)
            low = times(into, x, down)
            low = low if ranks is None else low * ranks
            y = y + c.lora_alpha / c.lora_rank * times(out, low, up)
        if self.bias:
            y = y + weight("bias", nn.initializers.zeros, outputs).astype(c.dtype)
        return y


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the size of each axis letter that the configuration fixes: all of `AXES` but P."""
    c = config
    return {
        "D": c.hidden_size,
        "N": c.heads,
        "K": c.kv_heads,
        "H": c.head_dim,
        "F": c.feed_forward,
        "V": c.padded_vocab_size,
        "R": c.lora_rank,
    }


def fan_in_normal(equation: str) -> Any:
    """Return LeCun's initialiser for the kernel of a linear layer."""
    _, outputs = letters(equation)

    def make(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        flat = (prod(shape[: len(outputs)]), prod(shape[len(outputs) :]))
        return nn.initializers.lecun_normal(in_axis=1, out_axis=0)(key, flat, dtype).reshape(shape)

    return make


class OverCache(NamedTuple):
    """Context of a step over the cache, shared by all layers.

    Attributes:
        batch: the tokens as a flat list, and their slots.
        rows: the tokens arranged by row.
        views: arguments of the mask for each part of `rows`.
    """

    batch: TokenBatch
    rows: ByRow
    views: tuple[View, ...]


class LayerInputs(NamedTuple):
    """Inputs of a layer other than its activations.

    Attributes:
        rope: cosine and sine of the positions of the tokens.
        context: `View` in a full pass, `OverCache` in decoding.
        window: sliding window of the layer.
        cache: keys and values of the layer; None in a full pass.
        ranks: 0 or 1 for each token and rank of the adapters, [..., R]; None: all ranks are used.
    """

    rope: Rope
    context: View | OverCache
    window: Window
    cache: LayerCache | None = None
    ranks: jax.Array | None = None


class AttentionLayer(nn.Module):
    """Grouped-query attention with RoPE: of tokens [B, S] in a full pass, or of flat tokens [T] over a cache.

    Attributes:
        config: configuration of the model.
        mesh: mesh on which kernels run, or None.
    """

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, LayerCache | None]:
        """Apply attention to `x` [..., D]; return the result [..., D] and the cache of the layer."""
        c, (rope, context, window, cache, ranks) = self.config, inputs
        # One product for query, key and value: with few rows, the time is that of reading the kernels.
        group = c.heads // c.kv_heads
        joint = Projection(c, "...D,KPHD->...KPH", group + 2, bias=c.query_bias, name="query_key_value")(x, ranks)
        query, key, value = joint[..., :group, :], joint[..., group, :], joint[..., group + 1, :]
        query = query.reshape(*x.shape[:-1], c.heads, c.head_dim)
        if c.query_norm:
            query, key = RMSNorm(c, name="query_norm")(query), RMSNorm(c, name="key_norm")(key)
        query, key = rotate(query, *rope), rotate(key, *rope)
        if c.query_scale is not None:  # the back ends divide by the square root of the head size
            query = query * (c.query_scale * c.head_dim**0.5)
        grouped = query.reshape(*x.shape[:-1], c.kv_heads, group, c.head_dim)
        if isinstance(context, View):
            with use_mesh(self.mesh):
                out = FULL_PASS_BACK_ENDS[c.attention](grouped, key, value, context, c.siblings, window)
        else:
            assert cache is not None
            cache = write(cache, context.batch, key, value)
            attend, parts = DECODE_BACK_ENDS[c.decode_attention], []
            for part, view in zip(context.rows.parts, context.views, strict=True):
                keys, values = map(part.select, cache)
                with use_mesh(self.mesh):
                    of_part = attend(grouped[part.token], keys, values, view, window)
                parts.append(of_part.reshape(-1, *of_part.shape[2:]))
            out = jnp.concatenate(parts)[context.rows.place]
        out = out.reshape(query.shape)
        return Projection(c, "...NH,DNH->...D", bias=c.output_bias, name="output")(out, ranks), cache


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, ranks: jax.Array | None) -> jax.Array:
        """Apply the layer to `x` [..., D]."""
        c = self.config
        bias = c.feed_forward_bias
        gate_up = Projection(c, "...D,PFD->...PF", 2, bias=bias, name="gate_up")(x, ranks)
        down = Projection(c, "...F,DF->...D", bias=bias, name="down")
        return down(ACTIVATION[c.activation](gate_up[..., 0, :]) * gate_up[..., 1, :], ranks)


class Layer(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it, a residual, and optionally a norm after it.

    Attributes:
        config: configuration of the model.
        mesh: mesh on which kernels run, or None.
    """

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, LayerCache | None]:
        """Apply the layer to `x` [..., D]; return the result [..., D] and the cache of the layer."""
        c = self.config
        normed = RMSNorm(c, name="attention_norm")(x)
        out, cache = AttentionLayer(c, self.mesh, name="attention")(normed, inputs)
        x = x + (RMSNorm(c, name="attention_after_norm")(out) if c.after_norms else out)
        out = FeedForward(c, name="feed_forward")(RMSNorm(c, name="feed_forward_norm")(x), inputs.ranks)
        return x + (RMSNorm(c, name="feed_forward_after_norm")(out) if c.after_norms else out), cache


class Transformer(nn.Module):
    """The decoder.

    Attributes:
        config: shape and arithmetic.
        scan: whether the layers are one scanned layer with parameters stacked along a first axis, as `stack_layers`
            makes them. Compile time does not grow with the number of layers. For training only: `decode` refuses it.
        remat: whether only the input of each layer is kept for the backward pass, and the rest is recomputed.
        mesh: mesh whose batch axes split the activations and whose `tensor` axis splits the heads of a cache, or None.
    """

    config: ModelConfig
    scan: bool = False
    remat: bool = False
    mesh: Mesh | None = None

    def setup(self) -> None:
        """Create embedding, layers (separate or scanned), norm and an untied head."""
        c = self.config
        # An untied embedding starts at the scale of the layers' outputs; otherwise these outweigh it.
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
            traced_once: Any = nn.jit(layer)  # for all layers of equal shapes
            for number in range(c.layers):
                setattr(self, f"layer_{number}", traced_once(c, self.mesh))
        self.norm = RMSNorm(c)
        if not c.tied:
            self.head = Projection(c, "...D,VD->...V", adapted=False, dtype=jnp.float32)
        if c.new_tokens:
            setattr(self, NEW_TOKENS, NewTokens(c))
        if c.draft_heads:
            setattr(self, DRAFT_HEADS, DraftHeads(c))

    def __call__(
        self, tokens: jax.Array, layout: Layout, *, head: bool = True, adapter: jax.Array | None = None
    ) -> jax.Array:
        """Return the logits of all tokens, from a full pass.

        Args:
            tokens: token ids, int32 [B, S].
            layout: layout of the tokens, int32 [B, S] per field.
            head: false: return the input of the head, for a loss that applies `lm_head` to a part of the tokens at a
                time.
            adapter: index of the adapter of each token, int32 [B, S], if the model has several; negative or None: the
                base model. Requires the head.

        Returns:
            float32 [B, S, V]; without the head, [B, S, D].
        """
        c = self.config
        layout = Layout(*(jnp.asarray(field) for field in layout))
        if c.adapters:
            adapter = jnp.full(layout.position.shape, -1) if adapter is None else adapter
        x = self.constrain_activations(self.embedded(jnp.asarray(tokens), adapter))
        ropes, view, ranks = self.ropes(layout.position), View(layout, layout), self.ranks(adapter)
        if self.scan:
            x = self.scanned(x, ropes, view)
        else:
            for number in range(c.layers):
                rope, window = ropes[c.layer_rope(number)], c.layer_window(number)
                x, _ = self._layer(number)(x, LayerInputs(rope, view, window, ranks=ranks))
                x = self.constrain_activations(x)
        x = self.norm(x)
        if self.is_initializing() and c.draft_heads:
            self.draft_states(x, jnp.asarray(tokens))
        return self.logits(x, adapter) if head or self.is_initializing() else x

    def decode(self, batch: TokenBatch, cache: Cache, bucket: Bucket, *, head: bool = True) -> tuple[jax.Array, Cache]:
        """Return the logits of new tokens over a cache, and the cache with these tokens added.

        Linear layers receive the flat tokens of all rows; attention receives them by row, and siblings do not see
        each other.

        Args:
            batch: the new tokens and their slots.
            cache: the tokens of earlier steps.
            bucket: sizes that hold `batch` and the used slots.
            head: false: return the input of the head in place of logits.

        Returns:
            Logits float32 [L, V], or without the head [L, D]; and the cache.

        Raises:
            ConfigError: the layers are scanned.
        """
        c = self.config
        if self.scan:
            raise ConfigError("decode: expected separate layers, got scan=True. Use unstack_layers and scan=False.")
        cache = record(cache, batch)
        rows = by_row(batch, bucket)
        views = tuple(
            View(
                part.layout,
                Layout(*(part.select(field)[: len(part.token), : bucket.slots] for field in cache.layout)),
            )
            for part in rows.parts
        )
        adapter = batch.adapter if c.adapters else None
        shared = self.ropes(batch.layout.position), OverCache(batch, rows, views), self.ranks(adapter)
        ropes, context, ranks = materialise(shared, cache.length[0] >= 0)
        batch = context.batch
        # The sum of all layers is float32, so that answers in bfloat16 depend less on the shape of a step.
        x = self.embedded(batch.tokens, adapter).astype(jnp.float32)
        layers = []
        for number, layer in enumerate(cache.layers):
            rope, window = ropes[c.layer_rope(number)], c.layer_window(number)
            x, layer = self._layer(number)(x, LayerInputs(rope, context, window, layer, ranks))
            layers.append(layer)
        x = self.norm(x[batch.logits_at]).astype(c.dtype)
        adapter = None if adapter is None else adapter[batch.logits_at]
        return self.logits(x, adapter) if head else x, cache._replace(layers=tuple(layers))

    def draft_states(self, x: jax.Array, tokens: jax.Array) -> list[jax.Array]:
        """Return the states of the draft heads in a full pass, [B, S, D] each.

        Head k predicts token s + k + 1 from the state at s and tokens s + 1 to s + k.

        Args:
            x: input of the head, [B, S, D].
            tokens: token ids, int32 [B, S].
        """
        states = []
        for number in range(self.config.draft_heads):
            x = getattr(self, DRAFT_HEADS)(x, self.embedded(shift_left(tokens, 1 + number)))
            states.append(x)
        return states

    def draft(self, x: jax.Array, tokens: jax.Array, count: int, adapter: jax.Array | None = None) -> jax.Array:
        """Return the draft tokens of the first draft heads, int32 [L, count], after tokens [L].

        Args:
            x: input of the head from which each token was sampled, [L, D].
            tokens: token ids, int32 [L].
            count: number of heads.
            adapter: index of the adapter of each token, if the model has several.
        """
        drafts = []
        for _ in range(count):
            x = getattr(self, DRAFT_HEADS)(x, self.embedded(tokens, adapter))
            tokens = jnp.argmax(self.logits(x, adapter), axis=-1).astype(jnp.int32)
            drafts.append(tokens)
        return jnp.stack(drafts, axis=-1)

    def ropes(self, position: jax.Array) -> tuple[Rope, ...]:
        """Return cosine and sine of positions [...] for each of `config.ropes`."""
        return tuple(rotation(rope, self.config.head_dim, position) for rope in self.config.ropes)

    def ranks(self, adapter: jax.Array | None) -> jax.Array | None:
        """Return which ranks of the adapters each token uses: 0 or 1, [..., R].

        Args:
            adapter: index of the adapter of each token [...]; negative: none. None: the model has no several adapters.
        """
        c = self.config
        if adapter is None:
            return None
        of_rank = jnp.arange(c.lora_rank) // (c.lora_rank // c.adapters)
        return (adapter[..., None] == of_rank).astype(c.dtype)

    def embedded(self, tokens: jax.Array, adapter: jax.Array | None = None) -> jax.Array:
        """Return embeddings [..., D] of tokens [...]; `adapter` is the index per token if the model has several."""
        c, x = self.config, self.embedding(tokens)
        x = getattr(self, NEW_TOKENS)(tokens, x, adapter) if c.new_tokens else x
        return x if c.embedding_scale == 1.0 else x * jnp.asarray(c.embedding_scale, x.dtype)

    def logits(self, x: jax.Array, adapter: jax.Array | None = None) -> jax.Array:
        """Return logits float32 [..., V] of normed activations [..., D]; `adapter` is the index per token."""
        c = self.config
        logits = einsum("...D,VD->...V", x, self.embedding.embedding, jnp.float32) if c.tied else self.head(x)
        rows = getattr(self, NEW_TOKENS) if c.new_tokens else None
        return completed(c, logits, x, rows and (rows.embedding if c.tied else rows.head), adapter=adapter)

    def _layer(self, number: int) -> Any:
        return getattr(self, f"layer_{number}")

    def scanned(self, x: jax.Array, ropes: tuple[Rope, ...], view: View) -> jax.Array:
        """Apply all layers to `x` [B, S, D] by a scan over stacked parameters."""
        c = self.config
        windows = [c.layer_window(number) for number in range(c.layers)]
        mixed, tables = len(set(windows)) > 1, jax.tree.map(lambda *kinds: jnp.stack(kinds), *ropes)

        def body(module: nn.Module, x: jax.Array, of_layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            window, kind = of_layer
            rope = ropes[0] if len(ropes) == 1 else jax.tree.map(lambda table: table[kind], tables)
            x, _ = module(x, LayerInputs(rope, view, window if mixed else windows[0]))
            return self.constrain_activations(x), None

        # Scanned layers share one program, so a layer without a window gets one that hides no key.
        limits = jnp.asarray([NO_WINDOW if window is None else window for window in windows])
        kinds = jnp.asarray([c.layer_rope(number) for number in range(c.layers)])
        run = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = run(getattr(self, LAYERS), x, (limits, kinds))
        return x

    def constrain_activations(self, x: jax.Array) -> jax.Array:
        """Constrain activations [B, S, …] to be split over the batch axes of the mesh."""
        if self.mesh is None:
            return x
        place = named_sharding(("batch", "sequence", *[None] * (x.ndim - 2)), x.shape, self.mesh)
        return jax.lax.with_sharding_constraint(x, place)


def stack_layers(params: Any, layers: int) -> Any:
    """Convert parameters for `scan=True`: stack the leaves of all layers along a new first axis."""
    rest = {name: value for name, value in params.items() if not name.startswith("layer_")}
    each = [params[f"layer_{number}"] for number in range(layers)]
    return rest | {LAYERS: jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)}


def unstack_layers(params: Any, layers: int) -> Any:
    """Convert parameters for `scan=False`: the inverse of `stack_layers`."""
    rest = {name: value for name, value in params.items() if name != LAYERS}
    return rest | {
        f"layer_{number}": jax.tree.map(lambda leaf, number=number: leaf[number], params[LAYERS])
        for number in range(layers)
    }
