"""Metrics of a run: metrics.jsonl and hardware utilisation."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from aspd_jax.files import Log, write_whole
from aspd_jax.model.config import ModelConfig
from aspd_jax.model.weights import ADAPTERS

# Peak of dense bfloat16 products in FLOP/s by prefix of `device_kind` (vendors' data sheets).
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}


def peak_flops(mesh: Mesh) -> float | None:
    """Return the peak FLOP/s of the devices of a mesh together; None: unknown."""
    kind = mesh.devices.flat[0].device_kind
    known = [peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)]
    return known[0] * mesh.size if known else None


def model_flops(config: ModelConfig, params: Any, length: int) -> float:
    """Return the FLOPs of training per token without recomputation (Chowdhery et al., 2022, appendix B).

    They are 6 per weight of a matrix product, plus attention over half of a row of `length` tokens.
    """
    weights = sum(prod(leaf.shape) for path, leaf in flatten_dict(params).items() if path[-1] in ("kernel", *ADAPTERS))
    weights += config.vocab_size * config.hidden_size if config.tied else 0
    return 6.0 * weights + 6.0 * config.layers * config.heads * config.head_dim * length


def memory_in_use() -> float | None:
    """Return the peak bytes on the fullest device of this process; None if the back end does not report them."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    used = [entry["peak_bytes_in_use"] for entry in stats if entry and "peak_bytes_in_use" in entry]
    return max(used) if used else None


def open_metrics(folder: Path, first: int) -> Log:
    """Open metrics.jsonl in the folder of a run, to append records of steps.

    Args:
        folder: folder of the run.
        first: step from which the run resumes; later records are deleted, so that no step occurs twice, and so are
            damaged lines.
    """
    file = folder / "metrics.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    write_whole(file, "".join(f"{line}\n" for line in lines if _step(line) <= first))
    return Log(file)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
