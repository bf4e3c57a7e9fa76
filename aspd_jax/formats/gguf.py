"""GGUF files (llama.cpp): metadata -> a Hugging Face configuration, tensors -> Hugging Face tensors in float32.

N heads, H head size, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from transformers import AutoConfig

from aspd_jax.errors import CheckpointError
from aspd_jax.formats import Checkpoint, Tensors
from aspd_jax.formats.gguf_metadata import Metadata
from aspd_jax.formats.gguf_tokenizer import read_tokenizer

# Architectures by their GGUF name; Mistral files call themselves llama.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
GEMMA_PERIOD = 6  # every so many layers of Gemma 3, one sees everything
GEMMA_LOCAL_BASE = 10000.0

OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INSIDE_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# In Gemma, which has norms after attention and feed-forward too; the converter has added 1 to all its norms.
GEMMA_LAYERS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"  # what the frequencies of Llama 3.1 and later are divided by
LLAMA3_LENGTH = 8192
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def open_gguf(path: Path) -> Checkpoint:
    """A GGUF file.

    Raises:
        CheckpointError: it is cut off, or of an architecture, rope scaling or tokenizer that is not supported.
    """
    try:
        reader = GGUFReader(path)
        metadata = Metadata(path, reader)
        family = metadata["general.architecture"]
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} cannot be read: it is cut off, or not a GGUF file ({error})") from None
    if family not in FAMILIES:
        raise CheckpointError(f"{path}: architecture {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    hf_config = _config(metadata, family, tensors)
    tokenizer = read_tokenizer(metadata)
    return Checkpoint(
        source=str(path),
        hf_config=hf_config,
        hf=AutoConfig.for_model(**hf_config),
        tokenizer=tokenizer,
        end_ids=() if hf_config["eos_token_id"] is None else (hf_config["eos_token_id"],),
        tensors=lambda: _read(path, family, hf_config, tensors),
    )


def _config(metadata: Metadata, family: str, tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """What config.json would hold."""

    def of(key: str, default: Any = None) -> Any:
        return metadata.get(f"{family}.{key}", default)

    def needed(key: str) -> Any:
        return metadata[f"{family}.{key}"]

    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{metadata.path} has no tensor 'token_embd.weight'; it is not a complete GGUF model")
    heads, hidden = needed("attention.head_count"), needed("embedding_length")
    if not isinstance(heads, int):
        raise CheckpointError(f"{metadata.path}: layers with different numbers of heads are not supported")
    head = of("attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if of(key, head) != head:
            raise CheckpointError(
                f"{metadata.path}: {family}.{key} is {of(key)}; only the head size, {head}, is supported"
            )
    config = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": needed("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": needed("context_length"),
        "rope_theta": of("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, family, head, tensors),
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if (positions := metadata.get("aspd.positions")) is not None:  # of a model that was fine-tuned here
        config["aspd"] = {"positions": positions, "siblings": metadata["aspd.siblings"]}
    types = metadata.get("tokenizer.ggml.token_type") or []
    if unused := [[number, number + 1] for number, of_token in enumerate(types) if of_token == TokenType.UNUSED]:
        config.setdefault("aspd", {})["unused_tokens"] = unused
    return config if family != "gemma3" else config | _gemma(config, needed("attention.sliding_window"))


def _gemma(config: dict[str, Any], window: int) -> dict[str, Any]:
    """What is different in Gemma 3; llama.cpp has it in its code, not in the file."""
    layers, heads, head = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    # The 27B model alone scales by something else than the size of a head.
    scale = config["hidden_size"] // heads if layers == 62 else head
    kinds = ["full_attention" if (n + 1) % GEMMA_PERIOD == 0 else "sliding_attention" for n in range(layers)]
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    ropes = {
        "full_attention": scaling | {"rope_theta": config["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA_LOCAL_BASE},
    }
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": window,
        "layer_types": kinds,
        "rope_parameters": ropes,
        "rope_scaling": None,
    }


def _rope_scaling(
    metadata: Metadata, family: str, head: int, tensors: dict[str, ReaderTensor]
) -> dict[str, Any] | None:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if ROPE_FACTORS in tensors:
        return _llama3_scaling(metadata, family, head, _values(metadata.path, tensors[ROPE_FACTORS]))
    if kind == "none":
        return None
    factor = metadata.get(f"{family}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = metadata[f"{family}.rope.scaling.original_context_length"]
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    raise CheckpointError(
        f"{metadata.path}: rope scaling {kind!r} is not supported; supported are none, linear and yarn"
    )


def _llama3_scaling(metadata: Metadata, family: str, head: int, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's scaling, which the file holds as what it comes to for each frequency.

    Raises:
        CheckpointError: the factors are not those of Llama 3.
    """
    from aspd_jax.model.config import RopeConfig
    from aspd_jax.model.rope import rope_frequencies

    theta, factor = float(metadata.get(f"{family}.rope.freq_base", 10000.0)), float(factors.max())
    scaled = rope_frequencies(RopeConfig(theta, "llama3", factor, LLAMA3_LENGTH), head)
    if not np.allclose(rope_frequencies(RopeConfig(theta), head) / factors, scaled, rtol=1e-4):
        raise CheckpointError(
            f"{metadata.path}: {ROPE_FACTORS} holds other factors than Llama 3's, the only ones supported"
        )
    return LLAMA3 | {"factor": factor, "original_max_position_embeddings": LLAMA3_LENGTH}


def _read(path: Path, family: str, hf_config: dict[str, Any], tensors: dict[str, ReaderTensor]) -> Tensors:
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        values = _values(path, tensor)
        if family == "llama":
            for part, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
                if name.split(".")[-2] == part:
                    values = halves_of_heads(values, hf_config[heads])
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values - 1
        yield hugging_face_name(name, family), values


def _values(path: Path, tensor: ReaderTensor) -> np.ndarray:
    """Float32 numbers of a tensor.

    Raises:
        CheckpointError: they are quantised in a way that the `gguf` library does not read.
    """
    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError:
        raise CheckpointError(
            f"{path}: {tensor.name} is quantised as {tensor.tensor_type.name}, which cannot be read; "
            "use a file of Q4_0 to Q8_0, Q2_K to Q6_K, IQ, F16, BF16 or F32"
        ) from None


def hugging_face_name(name: str, family: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that is not known stays as it is, and is refused on loading."""
    inside = INSIDE_LAYERS | (GEMMA_LAYERS if family == "gemma3" else {})
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{inside[part]}.{kind}" if part in inside else name
    return f"{OUTSIDE_LAYERS[stem]}.{kind}" if stem in OUTSIDE_LAYERS else name


def halves_of_heads(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys [N * H, ...] from llama.cpp's order, in which neighbours are rotated together, in Hugging
    Face's, in which these are half a head apart.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def neighbours_of_heads(values: np.ndarray, heads: int) -> np.ndarray:
    """Inverse of `halves_of_heads`."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
