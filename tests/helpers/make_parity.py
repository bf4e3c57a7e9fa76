"""Write tests/golden/parity.npz: what `transformers` in torch computes for tiny models of every family.

Run it where torch is installed: `python -m tests.helpers.make_parity`. The weights come from NumPy seeds, so
the tests need only the logits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import GOLDEN, tiny_config, write_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
CASES: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "llama_biases": tiny_config(attention_bias=True, mlp_bias=True),
    "llama_tied_gelu": tiny_config(tie_word_embeddings=True, hidden_act="gelu", num_key_value_heads=4),
    "llama_tanh": tiny_config(hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-3, rope_theta=500.0),
    "llama_linear": tiny_config(rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "llama_llama3": tiny_config(rope_scaling=LLAMA3),
    "llama_head": tiny_config(head_dim=16, hidden_act="relu"),
    "mistral": tiny_config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None),
    "mistral_window": tiny_config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=5),
    "qwen2": tiny_config(**QWEN2),
    "qwen2_yarn": tiny_config(**QWEN2, **LONG, rope_scaling=YARN | {"type": "yarn"}),
    "qwen2_yarn_betas": tiny_config(**QWEN2, **LONG, rope_scaling=YARN | {"beta_fast": 2.0, "beta_slow": 0.25}),
    "qwen2_window": tiny_config(**QWEN2, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": tiny_config(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=12, tie_word_embeddings=True),
    "gemma3": tiny_config(**GEMMA3),
    "gemma3_linear": tiny_config(
        **GEMMA3
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "rope_parameters": GEMMA3["rope_parameters"]
            | {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}},
        }
    ),
    "qwen3_biases": tiny_config(
        model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=8, attention_bias=True
    ),
}


def prompt() -> np.ndarray:
    """Two rows of 24 token ids."""
    return np.random.default_rng(7).integers(0, 64, (2, 24))


def torch_logits(folder: Path) -> np.ndarray:
    """What `transformers` computes for a checkpoint folder, float32 [2, 24, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(prompt())).logits.numpy()


def main() -> None:
    logits = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            logits[name] = torch_logits(write_checkpoint(Path(folder) / name, case))
    np.savez_compressed(GOLDEN / "parity.npz", **logits)


if __name__ == "__main__":
    main()
