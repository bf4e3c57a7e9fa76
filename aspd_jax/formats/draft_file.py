"""The file of the draft heads of a model, beside its tensors or in the folder of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from aspd_jax.errors import CheckpointError
from aspd_jax.files import partial_file
from aspd_jax.formats.shards import list_tensors, read_stored
from aspd_jax.model.draft_heads import DRAFT_HEADS, draft_shapes

FILE = f"{DRAFT_HEADS}.safetensors"
HEADS = "heads"  # key of the file's metadata


def read_draft_heads(folder: Path, hidden_size: int) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of draft heads in a folder, and the tensors of their layer by name; none without such a file.

    Args:
        folder: folder of a model or an adapter.
        hidden_size: hidden size of the model.

    Raises:
        CheckpointError: the number of heads is not stated; tensors are missing, unknown or of another shape.
    """
    file = folder / FILE
    if not file.exists():
        return 0, {}
    tensors = dict(read_stored(list_tensors(file)))
    with safe_open(file, "numpy") as opened:
        heads = (opened.metadata() or {}).get(HEADS, "")
    if not heads.isdecimal() or not int(heads):
        raise CheckpointError(f"{file}: metadata: {HEADS}: expected a number of draft heads, got {heads!r}")
    expected = {f"{DRAFT_HEADS}.{name}": shape for name, shape in draft_shapes(hidden_size).items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != expected:
        raise CheckpointError(
            f"{file}: expected {_listed(expected)} (hidden size {hidden_size}), got {_listed(found)}. "
            "Draft heads belong to the model that they were trained on."
        )
    return int(heads), tensors


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))


def fresh_draft_heads(hidden_size: int) -> dict[str, np.ndarray]:
    """Return the tensors of draft heads for training without an effect: each head predicts the next token again."""
    random, tensors = np.random.default_rng(0), {}
    for name, shape in draft_shapes(hidden_size).items():
        normal = random.standard_normal(shape) * shape[-1] ** -0.5
        tensors[f"{DRAFT_HEADS}.{name}"] = (normal if name == "gate_up" else np.zeros(shape)).astype(np.float32)
    return tensors


def write_draft_heads(file: Path, heads: int, tensors: Mapping[str, np.ndarray]) -> None:
    """Write draft heads to a file.

    Raises:
        OutputError: the file cannot be written.
    """
    with partial_file(file) as partial:
        save_file(dict(tensors), partial, metadata={"format": "pt", HEADS: str(heads)})
        partial.chmod(0o644)  # safetensors creates files that only their owner can read
