"""Adapter folders in PEFT's format: LoRA factors, and embedding and head rows of new tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from safetensors.numpy import save_file

from aspd_jax.errors import CheckpointError
from aspd_jax.files import write_folder
from aspd_jax.formats.folder import write_tokenizer
from aspd_jax.formats.hf_config import POSITIVE
from aspd_jax.formats.shards import list_tensors, read_stored, text_name
from aspd_jax.formats.side_files import read_object
from aspd_jax.layout import PositionScheme, Siblings, Titles
from aspd_jax.model.adapter import Adapter, Factors, Rows

CONFIG, WEIGHTS, OURS = "adapter_config.json", "adapter_model.safetensors", "aspd.json"
PREFIX = "base_model.model."
ROWS = ".token_adapter.trainable_tokens_delta"
# Fields of PEFT's LoRA configuration. `open_adapter` implements these:
IMPLEMENTED = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "trainable_token_indices")
# These do not change what a trained adapter computes: they describe the adapter, its training, or which layers have
# factors, which the tensors show too.
NEUTRAL = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
    *("lora_dropout", "corda_config", "eva_config", "loftq_config", "lora_ga_config", "qalora_group_size"),
    *("lora_dtype", "lorap_emb_lr", "lorap_lr_ratio"),  # ms-swift: dtype and learning rates
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
)
# Further accepted values of other fields, in lower case. Other initialisations than these change the base model.
ALLOWED = {
    "bias": ("none",),
    "task_type": ("causal_lm",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
OFF: tuple[Any, ...] = (None, False, [], {})  # accepted for all fields, also those of later versions of PEFT
DEFAULT_RANK = DEFAULT_ALPHA = 8  # defaults of PEFT
SETTINGS = {  # fields of `OURS`
    "positions": get_args(PositionScheme),
    "siblings": get_args(Siblings),
    "titles": get_args(Titles),
}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the protocol (`SETTINGS`) that an adapter was trained with.

    Raises:
        CheckpointError: a setting is unknown.
    """
    settings = read_object(folder / OURS) if (folder / OURS).exists() else {}
    for name, value in settings.items():
        if name not in SETTINGS or value not in SETTINGS[name]:
            expected = {key: " or ".join(values) for key, values in SETTINGS.items()}
            raise CheckpointError(f"{folder / OURS}: expected {expected}, got {name} {value!r}")
    return settings


def open_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read an adapter folder.

    Raises:
        CheckpointError: a part is missing, unknown or not supported.
    """
    folder = Path(path)
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: expected an adapter folder with {CONFIG} and {WEIGHTS}, got no {missing[0]}")
    config = read_object(folder / CONFIG)
    _check_fields(folder / CONFIG, config)
    settings = read_settings(folder)
    tensors = dict(read_stored(list_tensors(folder / WEIGHTS)))
    factors, rows = {}, {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(PREFIX)
        layer, _, part = bare.rpartition(".lora_")
        pair = [tensors.get(f"{PREFIX}{layer}.lora_{side}.weight") for side in "AB"]
        if part in ("A.weight", "B.weight") and name.startswith(PREFIX):
            if pair[0] is None or pair[1] is None:
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {name}: expected a lora_{'B' if part[0] == 'A' else 'A'} beside it, got none"
                )
            factors[text_name(layer)] = _factors(folder, config, layer, pair[0], pair[1])
        elif bare.endswith(ROWS):
            layer = bare.removesuffix(ROWS)
            rows[text_name(layer)] = own = Rows(_trained_tokens(folder / CONFIG, config, layer), tensor)
            if tensor.ndim != 2 or len(tensor) != len(own.tokens):
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {name}: expected {len(own.tokens)} rows, one for each token of "
                    f"trainable_token_indices, got the shape {list(tensor.shape)}"
                )
        else:
            raise CheckpointError(f"{folder / WEIGHTS}: expected factors and rows of tokens, got the tensor {name}")
    if config.get("trainable_token_indices") and not rows:
        raise CheckpointError(f"{folder / WEIGHTS}: expected rows of trainable_token_indices, got none")
    return Adapter(str(folder), factors, rows, settings)


def _check_fields(file: Path, config: Mapping[str, Any]) -> None:
    """Check that all fields have supported values.

    Raises:
        CheckpointError: the value of a field is not supported.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type: expected LORA, got {config.get('peft_type')!r}")
    if not isinstance(config.get("use_rslora"), (bool, type(None))):
        raise CheckpointError(f"{file}: use_rslora: expected true or false, got {config['use_rslora']!r}")
    for key, value in config.items():
        allowed = ALLOWED.get(key, OFF)
        plain = value in OFF or value in allowed or (isinstance(value, str) and value.lower() in allowed)
        if not plain and key not in IMPLEMENTED and key not in NEUTRAL:
            raise CheckpointError(
                f"{file}: {key}: expected {' or '.join(map(repr, allowed))}, got {value!r}. "
                "Merge the adapter into its base with PEFT, and load the result."
            )


def _factors(folder: Path, config: Mapping[str, Any], layer: str, down: np.ndarray, up: np.ndarray) -> Factors:
    """Return the factors of a layer scaled by alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""

    def value(patterns: str, field: str, default: float) -> Any:
        for pattern, setting in (config.get(patterns) or {}).items():  # the first that matches the end of the name
            if re.match(rf"(.*\.)?({pattern})$", layer):
                return setting
        return config.get(field, default)

    try:
        rank = value("rank_pattern", "r", DEFAULT_RANK)
        alpha = value("alpha_pattern", "lora_alpha", DEFAULT_ALPHA)
    except (re.error, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: expected patterns with rank and alpha, got: {error}") from None
    for name, number in (("r", rank), ("lora_alpha", alpha)):
        if not POSITIVE.accepts(number):
            raise CheckpointError(f"{folder / CONFIG}: {name} of {layer}: expected {POSITIVE.expected}, got {number!r}")
    if down.ndim != 2 or up.ndim != 2 or not len(down) == up.shape[1] == rank:
        raise CheckpointError(
            f"{folder / WEIGHTS}: {layer}: expected factors of rank {rank!r} as in {CONFIG}, "
            f"got {list(down.shape)} and {list(up.shape)}"
        )
    return Factors(down, up, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _trained_tokens(file: Path, config: Mapping[str, Any], layer: str) -> tuple[int, ...]:
    """Return the ids of the trained tokens of the embedding or the head; a plain list belongs to the embedding."""
    indices = config.get("trainable_token_indices") or {}
    named = indices if isinstance(indices, dict) else {"embed_tokens": indices}
    tokens = next((ids for name, ids in named.items() if f".{layer}".endswith(f".{name}")), None)
    if not isinstance(tokens, list) or not tokens or not all(type(i) is int and i >= 0 for i in tokens):
        raise CheckpointError(f"{file}: trainable_token_indices: expected token ids for {layer}, got {indices!r}")
    return tuple(tokens)


def write_adapter(
    adapter: Adapter, path: str | os.PathLike[str], base: str, alpha: float, dtype: Any, tokenizer: Any
) -> None:
    """Write an adapter folder atomically.

    `peft` loads it on a base model whose embedding has been resized for the new tokens.

    Args:
        adapter: adapter whose factors have one rank.
        path: output folder.
        base: name or path of the base model, for information.
        alpha: LoRA's alpha.
        dtype: dtype of the tensors.
        tokenizer: tokenizer with the new tokens; None: none is written.

    Raises:
        CheckpointError: `path` exists.
    """
    rank = len(next(iter(adapter.factors.values())).down)
    indices = {layer.split(".")[-1]: list(rows.tokens) for layer, rows in adapter.rows.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({re.split(r"\.", layer)[-1] for layer in adapter.factors}),
        "trainable_token_indices": indices or None,
        "inference_mode": True,
    }
    tensors = {f"{PREFIX}{layer}{ROWS}": rows.values for layer, rows in adapter.rows.items()}
    for layer, factors in adapter.factors.items():
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = factors.down
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = factors.up
    with write_folder(Path(path)) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (folder / OURS).write_text(json.dumps(dict(adapter.settings), indent=2) + "\n")
        whole = {name: np.ascontiguousarray(tensor.astype(dtype)) for name, tensor in tensors.items()}
        save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
        if tokenizer is not None:
            write_tokenizer(folder, tokenizer)
