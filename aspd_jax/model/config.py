"""The configuration of a decoder, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal, cast

from aspd_jax.errors import ConfigError
from aspd_jax.layout import PositionScheme, Siblings, Titles, check_choice
from aspd_jax.model.attention import DECODE_BACK_ENDS, FULL_PASS_BACK_ENDS

Weights = Literal["float", "int8"]
RopeScaling = Literal["default", "linear", "llama3", "yarn"]
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# Fields of a rotary embedding, and their names in `RopeConfig`, which has the defaults.
ROPE_NUMBERS = {
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
OWN_FIELDS = ("positions", "siblings", "titles", "unused_tokens")  # fields of the object `aspd` in config.json
VOCABULARY_MULTIPLE = 1024  # divisible by a tensor axis of 8 devices with 128 lanes each
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. The scalings that read a field below `theta` are named in brackets.

    Attributes:
        theta: base of the frequencies.
        scaling: `default` (none), `linear`, `llama3` or `yarn`.
        factor: ratio of the context length to that of pretraining (linear, llama3, yarn).
        original_length: context length of pretraining, in positions (llama3, yarn).
        low_frequency: wavelengths above `original_length / low_frequency` are scaled in full (llama3).
        high_frequency: wavelengths below `original_length / high_frequency` are not scaled (llama3).
        beta_fast, beta_slow: rotations over `original_length` that bound the ramp (yarn).
        truncate: whether the bounds of the ramp are rounded to whole dimensions (yarn).
        attention_factor: multiplier of the rotated queries and keys (yarn).
    """

    theta: float = 10000.0
    scaling: RopeScaling = "default"
    factor: float = 1.0
    original_length: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder of the Llama line (Llama, Vicuna, Mistral, Qwen2, Qwen3, Gemma 3).

    Attributes:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        feed_forward: inner width of the feed-forward layers.
        layers: number of layers.
        heads, kv_heads: number of query heads, and of key and value heads; `heads` is a multiple of `kv_heads`.
        head_dim: size of a head.
        activation: activation of the feed-forward layers, one of `ACTIVATIONS`.
        norm_epsilon: constant added to the mean square in all norms.
        norm_offset: constant added to the weights of all norms (Gemma: 1).
        after_norms: whether attention and feed-forward have a second norm, before the residual addition (Gemma).
        embedding_scale: multiplier of the embeddings (Gemma: square root of the hidden size).
        query_scale: multiplier of the scores; None: one by the square root of the head size.
        rope: rotary embedding.
        window_rope: rotary embedding of the layers with a sliding window, if it differs (Gemma).
        query_bias: bias on the query, key and value projections.
        output_bias: bias on the projection after attention.
        feed_forward_bias: bias on the projections of the feed-forward layers.
        query_norm: RMS norm on each head of queries and keys (Qwen3).
        tied: whether the head uses the kernel of the embedding.
        windows: sliding window of each layer in positions; None: the layer has none. Empty: no layer has one.
        positions, siblings: position scheme and mask (protocol, sections 3 and 4).
        titles: form of the titles (protocol, section 2).
        dtype: dtype of activations and parameters: `float32` or `bfloat16`. Norms, softmax and logits are float32.
        weights: `float`, or `int8` for the kernels of all layers, with a float32 scale per output.
        attention: back end of full passes (`model.attention.FULL_PASS_BACK_ENDS`).
        decode_attention: back end of steps over a cache (`model.attention.DECODE_BACK_ENDS`).
        lora_rank: rank of the adapters of all layers; 0: no adapters.
        lora_alpha: numerator of the scale of adapters, `lora_alpha / lora_rank`.
        adapters: number of adapters that share `lora_rank`, in consecutive ranges of ranks. In a step over the cache,
            every token uses one of them or none. 0: one adapter for all tokens.
        new_tokens: token ids with separate rows of embedding and head. LoRA trains these rows; all others are frozen.
        draft_heads: number of draft heads (`model.draft_heads`); 0: none.
        vocab_padding: rows added to embedding and head so that a mesh can split both. Checkpoints do not contain them,
            and their logits are `HIDDEN`.
        unused_tokens: ranges [first, last + 1) of ids without a name in the tokenizer or without a trained row in the
            checkpoint; their logits are `HIDDEN`.
    """

    vocab_size: int
    hidden_size: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str = "silu"
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    after_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    rope: RopeConfig = RopeConfig()
    window_rope: RopeConfig | None = None
    query_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    query_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    positions: PositionScheme = "sequential"
    siblings: Siblings = "invisible"
    titles: Titles = "names"
    dtype: str = "float32"
    weights: Weights = "float"
    attention: str = "reference"
    decode_attention: str = "decode"
    lora_rank: int = 0
    lora_alpha: float = 16.0
    adapters: int = 0
    new_tokens: tuple[int, ...] = ()
    draft_heads: int = 0
    vocab_padding: int = 0
    unused_tokens: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, PositionScheme)
        check_choice("siblings", self.siblings, Siblings)
        check_choice("titles", self.titles, Titles)
        check_choice("weights", self.weights, Weights)
        check_choice("attention", self.attention, FULL_PASS_BACK_ENDS)
        check_choice("decode_attention", self.decode_attention, DECODE_BACK_ENDS)
        if self.adapters and (not self.lora_rank or self.lora_rank % self.adapters):
            raise ConfigError(f"lora_rank: expected a multiple of adapters ({self.adapters}), got {self.lora_rank}")

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of rows of embedding and head, which is the number of logits of a token."""
        return self.vocab_size + self.vocab_padding

    @property
    def hidden_tokens(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of ids that are never sampled and have no probability in the softmax."""
        padding = ((self.vocab_size, self.padded_vocab_size),) if self.vocab_padding else ()
        return (*self.unused_tokens, *padding)

    def is_unused(self, token: int) -> bool:
        """Return whether an id is among the unused tokens."""
        return any(first <= token < end for first, end in self.unused_tokens)

    def layer_window(self, layer: int) -> int | None:
        """Return the sliding window of one layer in positions, or None."""
        return self.windows[layer] if self.windows else None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Return the distinct rotary embeddings of the layers."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def layer_rope(self, layer: int) -> int:
        """Return the index in `ropes` of the rotary embedding of one layer."""
        return int(self.window_rope is not None and self.layer_window(layer) is not None)


def padded(config: ModelConfig) -> ModelConfig:
    """Return the configuration with its vocabulary padded to a multiple of `VOCABULARY_MULTIPLE`.

    The size does not depend on the mesh, so that a training run can resume on another mesh.
    """
    return replace(config, vocab_padding=-config.vocab_size % VOCABULARY_MULTIPLE)


def from_hugging_face(hf: Any, dtype: str) -> ModelConfig:
    """Build the configuration of a model from a `transformers` configuration.

    Args:
        hf: a `transformers` configuration object of fields that `formats.hf_config.check_fields` accepts.
        dtype: `float32` or `bfloat16`.
    """
    family = hf.model_type
    gemma = family == "gemma3_text"
    own = dict(getattr(hf, "aspd", None) or {})
    own["unused_tokens"] = tuple((first, end) for first, end in own.get("unused_tokens", ()))
    attention_bias = family in ("llama", "qwen3", "gemma3_text") and bool(getattr(hf, "attention_bias", False))
    layers = hf.num_hidden_layers
    window = None if family == "llama" else getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    if types is None or family == "mistral":  # Mistral uses the window in all layers
        windows = (window,) * layers
    else:
        windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        feed_forward=hf.intermediate_size,
        layers=layers,
        heads=hf.num_attention_heads,
        kv_heads=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        activation=hf.hidden_activation if gemma else hf.hidden_act,
        norm_epsilon=hf.rms_norm_eps,
        norm_offset=1.0 if gemma else 0.0,
        after_norms=gemma,
        embedding_scale=hf.hidden_size**0.5 if gemma else 1.0,
        query_scale=hf.query_pre_attn_scalar**-0.5 if gemma else None,
        rope=_rope(hf, "full_attention"),
        window_rope=_rope(hf, "sliding_attention") if gemma else None,
        query_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        feed_forward_bias=family == "llama" and bool(getattr(hf, "mlp_bias", False)),
        query_norm=gemma or family == "qwen3",
        tied=bool(hf.tie_word_embeddings),
        windows=() if set(windows) == {None} else windows,
        **own,
        dtype=dtype,
    )


def _rope(hf: Any, layers: str) -> RopeConfig:
    """Read the rotary embedding of one kind of layers (`full_attention` or `sliding_attention`)."""
    values = hf.rope_parameters.get(layers, hf.rope_parameters)
    theta, kind = float(values.get("rope_theta") or 10000.0), cast(RopeScaling, rope_kind(values))
    if kind == "default":
        return RopeConfig(theta=theta)
    length = int(values.get("original_max_position_embeddings") or hf.max_position_embeddings)
    factor = float(values.get("factor") or hf.max_position_embeddings / length)
    return RopeConfig(
        theta=theta,
        scaling=kind,
        factor=factor,
        original_length=length,
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor) if kind == "yarn" else 1.0,
        **{name: float(values[key]) for key, name in ROPE_NUMBERS.items() if values.get(key)},
    )


def rope_kind(values: Mapping[str, Any]) -> str:
    """Return the kind of scaling of a rotary embedding; older configurations have it under `type`."""
    kind: str = values.get("rope_type") or values.get("type") or "default"
    return kind


def context_length(hf: Any) -> int:
    """Return the context length of a model in positions, as its RoPE scaling extends it.

    Llama 3 and Gemma 3 state the extended length themselves.
    """
    rope, stated = _rope(hf, "full_attention"), int(hf.max_position_embeddings)
    if rope.scaling == "yarn":
        return max(stated, int(rope.original_length * rope.factor))
    if rope.scaling == "linear" and not hf.model_type.startswith("gemma"):
        return max(stated, int(stated * rope.factor))
    return stated


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    def scale(ratio: float, mscale: float = 1.0) -> float:
        return 1.0 if ratio <= 1 else 0.1 * mscale * log(ratio) + 1.0

    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    return scale(factor, mscale) / scale(factor, mscale_all) if mscale and mscale_all else scale(factor)
