"""GGUF models: metadata to a Hugging Face configuration, tensors to Hugging Face tensors in float32.

N: heads; H: head size; D: hidden size.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import TokenType

from aspd_jax.errors import CheckpointError
from aspd_jax.formats import Checkpoint, Tensors
from aspd_jax.formats.gguf_file import GgufTensor, Metadata, open_gguf_file
from aspd_jax.formats.gguf_tokenizer import read_end_ids, read_tokenizer
from aspd_jax.formats.hf_config import COUNT, NOT_NEGATIVE, POSITIVE, TEXT, Kind, check_fields, make_config
from aspd_jax.model.config import FAMILIES, RopeConfig
from aspd_jax.model.rope import rope_frequencies

# Families by the name of their architecture in GGUF; Mistral files have the architecture llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
GEMMA_PERIOD = 6  # every sixth layer of Gemma 3 has full attention
BASE = 10000.0  # of the frequencies, where the file does not state it

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
# Gemma also has norms after attention and feed-forward. llama.cpp's converter adds 1 to all norms of Gemma.
GEMMA_LAYERS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies of Llama 3.1 and later
LLAMA3_LENGTH = 8192
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")  # a part of a split file
# Keys below the architecture's name that are read, first those of all architectures.
HEAD_SIZES = (
    *("rope.dimension_count", "rope.dimension_count_swa"),
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
)
READ: dict[str, Kind] = {
    **dict.fromkeys(("block_count", "context_length", "embedding_length", "feed_forward_length", *HEAD_SIZES), COUNT),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv", "attention.key_length"), COUNT),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.freq_base"), POSITIVE),
    **dict.fromkeys(("rope.scale_linear", "rope.scaling.factor"), NOT_NEGATIVE),  # 0: no scaling
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), POSITIVE),
    ORIGINAL_LENGTH: COUNT,
    "rope.scaling.type": TEXT,
}
READ_GEMMA = {"attention.sliding_window": COUNT, "rope.freq_base_swa": POSITIVE}
NEEDED = (
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
)
NEEDED_GEMMA = ("attention.sliding_window",)
UNREAD = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")  # keys without an effect
# Values without an effect of other keys; for keys not listed: 0, false and empty values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (0, GEMMA_PERIOD),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0.0, 1.0)),
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all parts of a split model.

    Args:
        path: file, or any part of a split model.

    Raises:
        CheckpointError: the file is truncated, a part is missing, or a feature is not supported.
    """
    parts = _open_parts(path)
    metadata = parts[0][0]
    family = metadata["general.architecture"]
    if family not in ARCHITECTURES:
        expected = f"one of {', '.join(ARCHITECTURES)}"
        raise CheckpointError(f"{path}: general.architecture: expected {expected}, got {family!r}")
    tensors = {name: tensor for _, of_part in parts for name, tensor in of_part.items()}
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise CheckpointError(f"{path}: expected {expected} tensors in all parts, got {len(tensors)}")
    hf_config = _config(metadata, family, tensors)
    check_fields(str(path), hf_config)
    tokenizer = read_tokenizer(metadata)
    return Checkpoint(
        source=str(path),
        hf_config=hf_config,
        hf=make_config(hf_config, str(path)),
        tokenizer=tokenizer,
        end_ids=read_end_ids(metadata, hf_config["vocab_size"]),
        tensors=lambda: _read(family, hf_config, tensors),
    )


def _open_parts(path: Path) -> list[tuple[Metadata, dict[str, GgufTensor]]]:
    """Read the metadata of a file, or of all parts of a split model.

    Raises:
        CheckpointError: a part is missing from the folder.
    """
    opened = open_gguf_file(path)
    number, count = opened[0].get("split.no", 0), opened[0].get("split.count", 1)
    if count <= 1:
        return [opened]
    name = PART.fullmatch(path.name)
    files = [path.with_name(f"{name[1]}-{k:05d}-of-{count:05d}.gguf") for k in range(1, count + 1)] if name else []
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files or files[number : number + 1] != [path]:
        problem = f"no {', '.join(missing)}" if missing else f"part {number + 1} under another name"
        raise CheckpointError(f"{path}: expected {count} parts with their original names in one folder, got {problem}")
    parts = [opened if file == path else open_gguf_file(file) for file in files]
    for place, (metadata, _) in enumerate(parts):
        if (metadata.get("split.no"), metadata.get("split.count")) != (place, count):
            raise CheckpointError(f"{metadata.path}: expected part {place + 1} of {count}, got a part of another model")
    return parts


def _values(metadata: Metadata, family: str) -> dict[str, Any]:
    """Return the values of the architecture by the rest of their keys: one value where a key has a list for all layers.

    Raises:
        CheckpointError: a value is missing, invalid or not supported, or differs between layers.
    """
    known = READ | (READ_GEMMA if family == "gemma3" else {})
    values: dict[str, Any] = {}
    for key in metadata.keys:
        name, value = key.removeprefix(f"{family}."), metadata.get(key)
        if name == key or name in UNREAD:
            continue
        if name in known:
            if isinstance(value, list):
                if not value or any(other != value[0] for other in value):
                    raise CheckpointError(f"{metadata.path}: {key}: expected one value for all layers, got {value}")
                value = value[0]
            if not known[name].accepts(value):
                raise CheckpointError(f"{metadata.path}: {key}: expected {known[name].expected}, got {value!r}")
            values[name] = value
            continue
        plain = not any(value) if isinstance(value, list) else not value
        if value not in NEUTRAL[name] if name in NEUTRAL else not plain:
            raise CheckpointError(f"{metadata.path}: {key}: expected none, got {value!r}; this is not supported")
    for name in (*NEEDED, *(NEEDED_GEMMA if family == "gemma3" else ())):
        metadata[f"{family}.{name}"]  # raises if it is missing
    return values


def _config(metadata: Metadata, family: str, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """Return the equivalent of config.json."""
    values = _values(metadata, family)
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{metadata.path}: expected a model with the tensor 'token_embd.weight', got none")
    heads, hidden = values["attention.head_count"], values["embedding_length"]
    head = values.get("attention.key_length", hidden // heads)
    for key in HEAD_SIZES:
        if values.get(key, head) != head:
            raise CheckpointError(f"{metadata.path}: {family}.{key}: expected the head size, {head}, got {values[key]}")
    config = {
        "architectures": [FAMILIES[ARCHITECTURES[family]]],
        "model_type": ARCHITECTURES[family],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": values["context_length"],
        "rope_theta": values.get("rope.freq_base", BASE),
        "rope_scaling": _rope_scaling(metadata, family, values, head, tensors),
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    types = metadata.get("tokenizer.ggml.token_type") or []
    if unused := [[number, number + 1] for number, kind in enumerate(types) if kind == TokenType.UNUSED]:
        config["aspd"] = {"unused_tokens": unused}
    if family != "gemma3":
        return config
    return config | _gemma(config, values["attention.sliding_window"], values.get("rope.freq_base_swa", BASE))


def _gemma(config: dict[str, Any], window: int, local_base: float) -> dict[str, Any]:
    """Return the fields specific to Gemma 3, which llama.cpp has in its code instead of the file."""
    layers, heads, head = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    # Only the 27B model does not scale queries by the head size.
    scale = config["hidden_size"] // heads if layers == 62 else head
    kinds = ["full_attention" if (n + 1) % GEMMA_PERIOD == 0 else "sliding_attention" for n in range(layers)]
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    ropes = {
        "full_attention": scaling | {"rope_theta": config["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
    }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": window,
        "layer_types": kinds,
        "rope_parameters": ropes,
        "rope_scaling": None,
    }


def _rope_scaling(
    metadata: Metadata, family: str, values: dict[str, Any], head: int, tensors: dict[str, GgufTensor]
) -> dict[str, Any] | None:
    factor = values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0
    kind = values.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if ROPE_FACTORS in tensors:
        if kind != "none":
            raise CheckpointError(f"{metadata.path}: expected no rope scaling beside {ROPE_FACTORS}, got {kind!r}")
        return _llama3_scaling(metadata, values.get("rope.freq_base", BASE), head, tensors[ROPE_FACTORS].values())
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = values.get(ORIGINAL_LENGTH) or metadata[f"{family}.{ORIGINAL_LENGTH}"]
        ramp = {key: values.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
        ramp = {key: value for key, value in ramp.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length} | ramp
    raise CheckpointError(f"{metadata.path}: rope scaling: expected none, linear or yarn, got {kind!r}")


def _llama3_scaling(metadata: Metadata, theta: float, head: int, factors: np.ndarray) -> dict[str, Any]:
    """Return Llama 3's scaling, which the file holds as a factor for each frequency.

    Raises:
        CheckpointError: the factors are not those of Llama 3.
    """
    theta, factor = float(theta), float(factors.max())
    scaled = rope_frequencies(RopeConfig(theta, "llama3", factor, LLAMA3_LENGTH), head)
    if not np.allclose(rope_frequencies(RopeConfig(theta), head) / factors, scaled, rtol=1e-4):
        raise CheckpointError(f"{metadata.path}: {ROPE_FACTORS}: expected the factors of Llama 3's scaling, got others")
    return LLAMA3 | {"factor": factor, "original_max_position_embeddings": LLAMA3_LENGTH}


def _read(family: str, hf_config: dict[str, Any], tensors: dict[str, GgufTensor]) -> Tensors:
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        values = tensor.values()
        if family == "llama":
            for part, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
                if name.split(".")[-2] == part:
                    values = halves_of_heads(values, hf_config[heads])
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values - 1
        yield hugging_face_name(name, family), values


def hugging_face_name(name: str, family: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; unknown names are returned unchanged and refused on loading."""
    inside = INSIDE_LAYERS | (GEMMA_LAYERS if family == "gemma3" else {})
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{inside[part]}.{kind}" if part in inside else name
    return f"{OUTSIDE_LAYERS[stem]}.{kind}" if stem in OUTSIDE_LAYERS else name


def halves_of_heads(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of query or key kernels, [N * H, ...], from llama.cpp's to Hugging Face's order.

    RoPE rotates neighbouring rows together in llama.cpp, and rows half a head apart in Hugging Face's models.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
