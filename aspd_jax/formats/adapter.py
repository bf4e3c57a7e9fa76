"""Adapter folders in PEFT's format: LoRA factors, and the rows of new tokens in embedding and head."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aspd_jax.errors import CheckpointError
from aspd_jax.files import write_folder
from aspd_jax.formats import Tensors

CONFIG, WEIGHTS, OURS = "adapter_config.json", "adapter_model.safetensors", "aspd.json"
PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ROWS = ".token_adapter.trainable_tokens_delta"
# What of PEFT's LoRA changes the arithmetic, and the only value of it that is read.
PLAIN = {"bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None, "lora_bias": False}
PLAIN |= {"rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None, "use_rslora": False}


class Factors(NamedTuple):
    """A low-rank change of a kernel [outputs, inputs]: `scale * up @ down`, up [outputs, R], down [R, inputs]."""

    down: np.ndarray
    up: np.ndarray
    scale: float

    def change(self) -> np.ndarray:
        """Float32 [outputs, inputs]."""
        change: np.ndarray = self.scale * (self.up.astype(np.float32) @ self.down.astype(np.float32))
        return change


@dataclass(frozen=True)
class Adapter:
    """What an adapter folder holds.

    Attributes:
        source: where it lies, for messages.
        factors: by the Hugging Face name of the linear layer.
        tokens: ids of the new tokens; `rows` of embedding and head for them, [T, D], by name.
        settings: position scheme and mask it was trained with.
    """

    source: str
    factors: Mapping[str, Factors]
    tokens: tuple[int, ...] = ()
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, tensors: Tensors, source: str) -> Tensors:
        """The tensors of a base with this adapter in them; embedding and head get the rows that they are too short for.

        Raises:
            CheckpointError: a tensor of the adapter has no place in the base, or one of another shape.
        """
        left = {*self.factors, *self.rows}
        for name, tensor in tensors:
            layer = name.removesuffix(".weight")
            if layer in self.factors:
                change = self.factors[layer].change()
                self._same(layer, change.shape, tensor.shape, source)
                tensor = tensor.astype(np.float32) + change  # rounded once, when it is a parameter
            if layer in self.rows:
                self._same(layer, self.rows[layer].shape[1:], tensor.shape[1:], source)
                tensor = np.pad(tensor, ((0, max(0, max(self.tokens) + 1 - len(tensor))), (0, 0)))
                tensor[list(self.tokens)] = self.rows[layer]
            left.discard(layer)
            yield name, tensor
        if left:
            raise CheckpointError(f"{self.source} is an adapter for another base: {source} has no {sorted(left)[0]}")

    def _same(self, layer: str, ours: tuple[int, ...], theirs: tuple[int, ...], source: str) -> None:
        if ours != theirs:
            raise CheckpointError(
                f"{self.source} is an adapter for another base: it changes {layer} as {list(ours)}, "
                f"{source} has {list(theirs)}"
            )


def open_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read an adapter folder.

    Raises:
        CheckpointError: what is missing from it or unknown in it.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} is no adapter folder: it must hold {CONFIG} and {WEIGHTS}")
    try:
        config = json.loads((folder / CONFIG).read_text())
        settings = json.loads((folder / OURS).read_text()) if (folder / OURS).exists() else {}
        with safe_open(folder / WEIGHTS, framework="numpy") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder / CONFIG}: peft_type {config.get('peft_type')!r} is not supported; only LORA is"
        )
    for key, value in PLAIN.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{folder / CONFIG}: {key} {config[key]!r} is not supported; only {value!r} is")
    factors, rows = {}, {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(PREFIX)
        if bare.endswith(".lora_A.weight"):
            layer = bare.removesuffix(".lora_A.weight")
            up = tensors.get(f"{PREFIX}{layer}.lora_B.weight")
            if up is None:
                raise CheckpointError(f"{folder / WEIGHTS} has {name} without its lora_B")
            factors[layer] = Factors(tensor, up, config["lora_alpha"] / config["r"])
        elif bare.endswith(ROWS):
            rows[bare.removesuffix(ROWS)] = tensor
        elif not bare.endswith(".lora_B.weight"):
            raise CheckpointError(f"{folder / WEIGHTS} has an unknown tensor {name}")
    indices = config.get("trainable_token_indices") or {}
    each = {tuple(ids) for ids in (indices.values() if isinstance(indices, dict) else [indices])}
    if len(each) > 1 or bool(rows) != bool(each):
        raise CheckpointError(f"{folder / CONFIG}: trainable_token_indices must name the same tokens for all its rows")
    return Adapter(str(folder), factors, next(iter(each), ()), rows, settings)


def write_adapter(
    adapter: Adapter, path: str | os.PathLike[str], base: str, alpha: float, dtype: Any, tokenizer: Any
) -> None:
    """Write an adapter folder that `peft` loads on a base whose embedding was made long enough; it appears whole or not
    at all.

    Args:
        base: what it was trained on, for readers.
        alpha: LoRA's alpha; all factors have one rank.
        dtype: of the tensors.
        tokenizer: with the new tokens.

    Raises:
        CheckpointError: something is at `path` already.
    """
    rank = len(next(iter(adapter.factors.values())).down)
    indices = {layer.split(".")[-1]: list(adapter.tokens) for layer in adapter.rows}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({re.split(r"\.", layer)[-1] for layer in adapter.factors}),
        "trainable_token_indices": indices or None,
        "inference_mode": True,
        **PLAIN,
    }
    tensors = {f"{PREFIX}{layer}{ROWS}": rows for layer, rows in adapter.rows.items()}
    for layer, of in adapter.factors.items():
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = of.down
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = of.up
    with write_folder(Path(path)) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (folder / OURS).write_text(json.dumps(dict(adapter.settings), indent=2) + "\n")
        whole = {name: np.ascontiguousarray(tensor.astype(dtype)) for name, tensor in tensors.items()}
        save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
