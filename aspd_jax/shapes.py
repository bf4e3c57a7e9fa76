"""Random models of common sizes for benchmarks; the values of weights do not affect the time."""

from __future__ import annotations

from dataclasses import replace

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel, random_model
from aspd_jax.model.config import ModelConfig
from aspd_jax.tokens import SpecialTokens

SHAPES = {
    # The published CPU baseline, Llama-3.2-1B, Llama-2/Vicuna-7B, Llama-3.1-8B and Qwen2.5-32B.
    "27m": ModelConfig(vocab_size=4096, hidden_size=512, feed_forward=1408, layers=8, heads=8, kv_heads=2, head_dim=64),
    "1b": ModelConfig(
        vocab_size=128262, hidden_size=2048, feed_forward=8192, layers=16, heads=32, kv_heads=8, head_dim=64
    ),
    "7b": ModelConfig(
        vocab_size=32006, hidden_size=4096, feed_forward=11008, layers=32, heads=32, kv_heads=32, head_dim=128
    ),
    "8b": ModelConfig(
        vocab_size=128262, hidden_size=4096, feed_forward=14336, layers=32, heads=32, kv_heads=8, head_dim=128
    ),
    "32b": ModelConfig(
        vocab_size=152064,
        hidden_size=5120,
        feed_forward=27648,
        layers=64,
        heads=40,
        kv_heads=8,
        head_dim=128,
        query_bias=True,
    ),
}


def benchmark_model(shape: str, dtype: str, decode_attention: str = "decode") -> LanguageModel:
    """Return a random model of a named size, without a tokenizer.

    The last six ids are the special tokens, and id 0 ends an answer.

    Raises:
        RequestError: the name is unknown.
    """
    if shape not in SHAPES:
        raise RequestError(f"--shape: expected one of {', '.join(SHAPES)}, got {shape!r}")
    config = replace(SHAPES[shape], dtype=dtype, decode_attention=decode_attention)
    lm = random_model(config, None, {"max_position_embeddings": 1 << 20}, end_ids=(0,))
    last = config.vocab_size
    lm.special_tokens = SpecialTokens(*range(last - 6, last))
    return lm
