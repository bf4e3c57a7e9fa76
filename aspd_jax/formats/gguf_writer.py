"""Writer of GGUF files for llama.cpp: configuration, tensors and tokenizer in one file.

It supports Llama, Mistral, Qwen2 and Qwen3 with byte-level tokenizers in float32 or bfloat16; llama.cpp's tools
quantise the files.
"""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType, TokenType, quantize
from tokenizers import Tokenizer

from aspd_jax.errors import CheckpointError
from aspd_jax.files import partial_file
from aspd_jax.formats import Tensors
from aspd_jax.formats.gguf import INSIDE_LAYERS, OUTSIDE_LAYERS, ROPE_FACTORS, neighbours_of_heads
from aspd_jax.formats.gguf_tokenizer import SPLITTINGS, pre_tokenizer
from aspd_jax.model.config import RopeConfig, from_hugging_face
from aspd_jax.model.rope import rope_frequencies

# GGUF architectures by Hugging Face's `model_type`; Mistral files have the architecture llama.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TYPES = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
Ranges = tuple[tuple[int, int], ...]
INSTEAD = "write a Hugging Face folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
PROBE = (  # text that all known tokenizers split differently
    "It's 12345 o'clock, WE'LL see:  a_b\t c\n\n d\r\n 3,141.59!!! Ünïcödé naïve 你好，世界 "
    "x²+y₃ camelCase a/b!!/\n don't CAN'T \n  ... (a) [b] 'tis 10% — “q” 🙂🙂 end  "
)


def write_gguf(
    path: Path,
    hf: Any,
    tokenizer: Any,
    end_ids: tuple[int, ...],
    tensors: Tensors,
    dtype: str,
    aspd: dict[str, str],
    unused: Ranges = (),
) -> None:
    """Write a model atomically.

    Args:
        path: output file.
        hf: `transformers` configuration object.
        tokenizer: tokenizer with all special tokens.
        end_ids: ids of end tokens: end of text, end of turn, end of message.
        tensors: tensors with their Hugging Face names.
        dtype: dtype of matrices, `float32` or `bfloat16`; norms and biases are float32.
        aspd: position scheme and mask, which other programs ignore.
        unused: ranges of ids that are never sampled; their tokens get the type UNUSED.

    Raises:
        CheckpointError: the file exists, or the format does not support the model.
    """
    if path.exists():
        raise CheckpointError(f"{path}: expected a new file, got one that exists. Choose another path.")
    if hf.model_type not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"GGUF output: expected a model of type {names}, got {hf.model_type}; {INSTEAD}")
    with partial_file(path) as partial:
        writer = GGUFWriter(partial, ARCHITECTURES[hf.model_type], use_temp_file=True)
        kind, file_type = TYPES[dtype]
        _write_shape(writer, hf, file_type)
        _write_tokenizer(writer, tokenizer, hf.vocab_size, end_ids, unused)
        for key, value in aspd.items():
            writer.add_string(f"aspd.{key}", value)
        config = from_hugging_face(hf, dtype)
        if config.rope.scaling == "llama3":  # the file holds the factor of each frequency
            plain = RopeConfig(theta=config.rope.theta)
            factors = rope_frequencies(plain, config.head_dim) / rope_frequencies(config.rope, config.head_dim)
            writer.add_tensor(ROPE_FACTORS, factors.astype(np.float32))
        for name, tensor in tensors:
            ours = gguf_name(name)
            values = tensor.astype(np.float32)
            heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(ours.split(".")[-2])
            if heads and writer.arch == "llama":
                values = neighbours_of_heads(values, heads)
            stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
            writer.add_tensor(ours, quantize(values, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor.

    Raises:
        CheckpointError: the tensor has no GGUF name.
    """
    stem, _, kind = name.rpartition(".")
    outside = {theirs: ours for ours, theirs in OUTSIDE_LAYERS.items()}
    inside = {theirs: ours for ours, theirs in INSIDE_LAYERS.items()}
    if stem in outside:
        return f"{outside[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if not stem.startswith("model.layers.") or part not in inside:
        raise CheckpointError(f"GGUF output: expected tensors that have GGUF names, got {name}")
    return f"blk.{layer}.{inside[part]}.{kind}"


def _write_shape(writer: GGUFWriter, hf: Any, file_type: LlamaFileType) -> None:
    config = from_hugging_face(hf, "float32")
    if config.window is not None:
        raise CheckpointError(f"GGUF output: expected a model without a sliding window, got {config.window}; {INSTEAD}")
    writer.add_type("model")
    writer.add_file_type(file_type)
    writer.add_vocab_size(hf.vocab_size)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.feed_forward)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    rope = config.rope
    writer.add_rope_freq_base(rope.theta)
    if rope.scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope.scaling))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.original_length)
        standard = RopeConfig(attention_factor=0.1 * log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
        for field in ("beta_fast", "beta_slow", "truncate", "attention_factor"):
            if getattr(rope, field) != getattr(standard, field):
                raise CheckpointError(
                    f"GGUF output: yarn: {field}: expected {getattr(standard, field)}, "
                    f"got {getattr(rope, field)}; {INSTEAD}"
                )


def _write_tokenizer(
    writer: GGUFWriter, tokenizer: Any, vocab_size: int, end_ids: tuple[int, ...], unused: Ranges
) -> None:
    if tokenizer is None:
        raise CheckpointError("GGUF output: expected a model with a tokenizer, got none")
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "BPE" or state["model"].get("byte_fallback"):
        raise CheckpointError(f"GGUF output: expected a byte-level BPE tokenizer, got another; {INSTEAD}")
    added = backend.get_added_tokens_decoder()
    tokens, types = [], []
    for number in range(vocab_size):
        token = backend.id_to_token(number)
        if token is None:  # padding of the vocabulary
            tokens.append(f"[PAD{number}]")
            types.append(TokenType.UNUSED)
        elif any(first <= number < end for first, end in unused):
            tokens.append(token)
            types.append(TokenType.UNUSED)
        elif number in added:
            tokens.append(added[number].content)
            types.append(TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED)
        else:
            tokens.append(token)
            types.append(TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting_name(backend))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = state["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    first = tokenizer("a")["input_ids"][0]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == tokenizer.bos_token_id)
    ids = {"bos": tokenizer.bos_token_id, "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    ids |= dict(zip(("eos", "eot", "eom"), end_ids, strict=False))  # GGUF has these; aspd.end_ids has all
    if end_ids:
        writer.add_array("aspd.end_ids", list(end_ids))
    for role, number in ids.items():
        if number is not None:
            getattr(writer, f"add_{role}_token_id")(number)
    if isinstance(tokenizer.chat_template, dict):
        named = tokenizer.chat_template.items()
        writer.add_chat_template([{"name": name, "template": template} for name, template in named])
    elif tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _splitting_name(backend: Tokenizer) -> str:
    """Return llama.cpp's name of a pre-tokenizer, found by comparing how it splits a probe.

    Raises:
        CheckpointError: the pre-tokenizer is unknown.
    """
    cut = backend.pre_tokenizer.pre_tokenize_str(PROBE) if backend.pre_tokenizer else []
    for name, splitting in SPLITTINGS.items():
        if pre_tokenizer(splitting).pre_tokenize_str(PROBE) == cut:
            return name
    known = ", ".join(SPLITTINGS)
    raise CheckpointError(f"GGUF output: expected a pre-tokenizer like one of {known}, got another; {INSTEAD}")
