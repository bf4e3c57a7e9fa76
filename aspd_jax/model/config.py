"""The shape of a decoder, read from a Hugging Face configuration and written back to one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.layout import PositionScheme, Siblings, check_choice
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
OWN_FIELDS = ("positions", "siblings", "unused_tokens")  # of the object `aspd` in a Hugging Face configuration
VOCABULARY_MULTIPLE = 1024  # eight ways of a tensor axis, of 128 lanes each
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. Fields below `theta` are read by the scalings named beside them.

    Attributes:
        theta: base of the frequencies.
        scaling: `default` (none), `linear`, `llama3` or `yarn`.
        factor: how many times longer than in pretraining (linear, llama3, yarn).
        original_length: positions seen in pretraining (llama3, yarn).
        low_frequency: wavelengths above `original_length / low_frequency` are scaled in full (llama3).
        high_frequency: wavelengths below `original_length / high_frequency` are left alone (llama3).
        beta_fast, beta_slow: rotations over `original_length` that bound the ramp (yarn).
        truncate: round the bounds of the ramp to whole dimensions (yarn).
        attention_factor: multiplies the rotated queries and keys (yarn).
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
        vocab_size: tokens that there are.
        vocab_padding: rows after theirs in embedding and head, so that a mesh can split both. Checkpoints do not have
            them, and their logits are `HIDDEN`.
        unused_tokens: ranges [first, last + 1) of ids without a name in the tokenizer or without a trained row in the
            checkpoint; their logits are `HIDDEN`.
        norm_offset: what is added to the weights of all norms (Gemma: 1).
        after_norms: norms after attention and after feed-forward too, before their results are added (Gemma).
        embedding_scale: embeddings are multiplied by it (Gemma: the root of the hidden size).
        query_scale: scores are multiplied by it; None: one by the root of the head size.
        window: sliding window in positions, or None.
        windowed_layers: which layers use the window; one flag per layer.
        window_rope: rotary embedding of the layers that use the window, where it is another (Gemma).
        query_bias: bias on the query, key and value projections; `output_bias` on the one after attention.
        query_norm: RMS norm on each head of queries and keys (Qwen3).
        positions, siblings: position scheme and mask in training and decoding (protocol, sections 3 and 4).
        dtype: of activations and parameters: `float32` or `bfloat16`. Norms, softmax and logits are float32.
        weights: `float`, or `int8` for the kernels of all layers, with a float32 scale per output.
        attention: back end for full passes (`model.attention.FULL_PASS_BACK_ENDS`).
        decode_attention: back end for passes over a cache (`model.attention.DECODE_BACK_ENDS`).
        lora_rank: rank of the adapters beside the kernels of all layers; 0: none.
        lora_alpha: adapters count `lora_alpha / lora_rank`.
        adapters: so many adapters lie one behind the other in `lora_rank`, and every token of a pass over the cache has
            one of them, or none; 0: there is one, for all tokens.
        new_tokens: ids whose rows of embedding and head are parameters of their own, so that they are trained while
            all other rows are not.
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
    window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    positions: PositionScheme = "sequential"
    siblings: Siblings = "invisible"
    dtype: str = "float32"
    weights: Weights = "float"
    attention: str = "reference"
    decode_attention: str = "decode"
    lora_rank: int = 0
    lora_alpha: float = 16.0
    adapters: int = 0
    new_tokens: tuple[int, ...] = ()
    vocab_padding: int = 0
    unused_tokens: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, PositionScheme)
        check_choice("siblings", self.siblings, Siblings)
        check_choice("weights", self.weights, Weights)
        check_choice("attention", self.attention, FULL_PASS_BACK_ENDS)
        check_choice("decode_attention", self.decode_attention, DECODE_BACK_ENDS)
        if self.adapters and (not self.lora_rank or self.lora_rank % self.adapters):
            raise ConfigError(f"lora_rank ({self.lora_rank}) must be a multiple of adapters ({self.adapters})")
        if self.heads % self.kv_heads:
            raise CheckpointError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of embedding and head, and logits of a token."""
        return self.vocab_size + self.vocab_padding

    @property
    def hidden_tokens(self) -> tuple[tuple[int, int], ...]:
        """Ranges of ids that are never sampled and have no share in the softmax."""
        padding = ((self.vocab_size, self.padded_vocab_size),) if self.vocab_padding else ()
        return (*self.unused_tokens, *padding)

    def is_unused(self, token: int) -> bool:
        """Return whether an id is among the unused tokens."""
        return any(first <= token < end for first, end in self.unused_tokens)

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of one layer, or None."""
        return self.window if self.is_windowed(layer) else None

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer uses the window."""
        return bool(self.windowed_layers) and self.windowed_layers[layer]

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of all layers."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def layer_rope(self, layer: int) -> int:
        """Index in `ropes` of the rotary embedding of one layer."""
        return int(self.window_rope is not None and self.is_windowed(layer))


def padded(config: ModelConfig) -> ModelConfig:
    """The vocabulary padded for a mesh: to the same size for all of them, so that a training run may change its own."""
    return replace(config, vocab_padding=-config.vocab_size % VOCABULARY_MULTIPLE)


def from_hugging_face(hf: Any, dtype: str) -> ModelConfig:
    """Read a `transformers` configuration object.

    Raises:
        CheckpointError: naming the field that asks for something this model does not do.
    """
    family = hf.model_type
    if family not in FAMILIES:
        raise CheckpointError(f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    gemma = family == "gemma3_text"
    field = "hidden_activation" if gemma else "hidden_act"
    activation = getattr(hf, field)
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{field} {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(hf, cap, None):
            raise CheckpointError(f"{cap} {getattr(hf, cap)} is not supported; only none is")
    if dtype not in ("float32", "bfloat16"):
        raise CheckpointError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    own = dict(getattr(hf, "aspd", None) or {})
    own["unused_tokens"] = tuple((first, end) for first, end in own.get("unused_tokens", ()))
    attention_bias = family in ("llama", "qwen3", "gemma3_text") and bool(getattr(hf, "attention_bias", False))
    layers = hf.num_hidden_layers
    window = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    if family == "llama" or window is None:
        window, windowed = None, ()
    elif types is not None and family != "mistral":  # which has it in all layers
        windowed = tuple(kind == "sliding_attention" for kind in types)
    else:
        windowed = (True,) * layers
    return ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        feed_forward=hf.intermediate_size,
        layers=layers,
        heads=hf.num_attention_heads,
        kv_heads=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        activation=activation,
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
        window=window if any(windowed) else None,
        windowed_layers=windowed if any(windowed) else (),
        **own,
        dtype=dtype,
    )


def _rope(hf: Any, layers: str) -> RopeConfig:
    """Of all layers, or where these differ of those of one kind."""
    # transformers 5 keeps everything in `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`.
    values = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    values = dict(values.get(layers, values))
    theta = float(values.get("rope_theta") or getattr(hf, "rope_theta", None) or 10000.0)
    kind = values.get("rope_type", values.get("type", "default")) or "default"
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"partial_rotary_factor {values['partial_rotary_factor']} is not supported; only 1.0 is")
    length = int(values.get("original_max_position_embeddings") or hf.max_position_embeddings)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=float(values["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=float(values["factor"]),
            original_length=length,
            low_frequency=float(values["low_freq_factor"]),
            high_frequency=float(values["high_freq_factor"]),
        )
    if kind == "yarn":
        factor = float(values.get("factor") or hf.max_position_embeddings / length)
        return RopeConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_length=length,
            beta_fast=float(values.get("beta_fast") or 32),
            beta_slow=float(values.get("beta_slow") or 1),
            truncate=bool(values.get("truncate", True)),
            attention_factor=_yarn_attention_factor(values, factor),
        )
    raise CheckpointError(f"rope scaling {kind!r} is not supported; supported are default, linear, llama3 and yarn")


def _yarn_attention_factor(values: dict[str, Any], factor: float) -> float:
    def scale(of: float, mscale: float = 1.0) -> float:
        return 1.0 if of <= 1 else 0.1 * mscale * log(of) + 1.0

    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    return scale(factor, mscale) / scale(factor, mscale_all) if mscale and mscale_all else scale(factor)
