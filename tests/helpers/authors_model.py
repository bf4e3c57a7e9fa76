"""The model of the authors' engine from its seed: a random Qwen2 of 2.6 million weights.

The vectors in `tests/golden/engine` were computed with weights that torch drew in the order of their names from
`torch.manual_seed(20240607)`. NumPy has the same generator (MT19937), so the weights need no file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from aspd_jax import LanguageModel, SpecialTokens, load_model
from tests.conftest import tensor_shapes, tiny_config, write_checkpoint

CONFIG = tiny_config(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    vocab_size=600,
    max_position_embeddings=2048,
    eos_token_id=599,
)
SPECIAL = SpecialTokens(594, 595, 596, 597, 592, 593)
SEED = 20240607


def scale_of(name: str) -> float:
    """Return the standard deviation of a tensor's values."""
    if name == "lm_head.weight":
        return 0.15
    if name == "model.embed_tokens.weight":
        return 0.5
    return 0.2 if name.endswith("bias") or "norm" in name else 0.06


def torch_normal(random: np.random.RandomState, size: int) -> np.ndarray:
    """Return what `torch.randn` draws on CPU, float32 [size]: Box-Muller over groups of 16 numbers of 24 bits."""
    uniform = (random.randint(1 << 24, size=size, dtype=np.uint32) / 2.0**24).reshape(-1, 2, 8)
    radius, angle = np.sqrt(-2 * np.log(1 - uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1).astype(np.float32)


def authors_tensors() -> dict[str, np.ndarray]:
    """Return the weights by name, float32; norms are around one."""
    random = np.random.RandomState(SEED)
    tensors = {}
    for name, shape in sorted(tensor_shapes(CONFIG).items()):
        values = torch_normal(random, int(np.prod(shape))).reshape(shape) * np.float32(scale_of(name))
        tensors[name] = values + np.float32("norm" in name)
    return tensors


def load_authors_model(folder: Path) -> LanguageModel:
    """Write the checkpoint into a folder and load it."""
    lm = load_model(write_checkpoint(folder, CONFIG, tensors=authors_tensors()))
    lm.special_tokens = SPECIAL
    return lm
