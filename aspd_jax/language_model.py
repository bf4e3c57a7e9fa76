"""A checkpoint folder in, everything that is needed to train or decode out, and back (Hugging Face layout)."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from transformers import AutoConfig, AutoTokenizer

from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.layout import Layout
from aspd_jax.model.config import ModelConfig, Weights, from_hugging_face
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import load_parameters, merge_adapters, quantise_layers, save_parameters
from aspd_jax.tokens import Codec, SpecialTokens, add_special_tokens

# The models that ship inside the package: `demo` forks, `demo-seq` was trained on the same data, all serial.
EMBEDDED = {"demo": "aspd", "demo-seq": "seq"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass
class LanguageModel:
    """A decoder with its parameters, tokenizer and special tokens.

    Attributes:
        model: pure in (parameters, tokens, layout, cache).
        params: pytree for `model.apply({"params": params}, …)`.
        tokenizer: a `transformers` tokenizer, or None for a folder that has none.
        special_tokens: ids of the six special tokens, or None without a tokenizer.
        config: shape of the model.
        hf_config: the contents of config.json, for export.
        end_ids: ids that end an answer.
        context_length: positions the checkpoint was made for.
        mesh: the mesh that the parameters are spread over, or None.
    """

    model: Transformer
    params: Any
    tokenizer: Any
    special_tokens: SpecialTokens | None
    config: ModelConfig
    hf_config: dict[str, Any]
    end_ids: tuple[int, ...]
    context_length: int
    mesh: Mesh | None = None

    @cached_property
    def codec(self) -> Codec:
        """Structured answers <-> token ids.

        Raises:
            CheckpointError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise CheckpointError("this model has no tokenizer; pass token ids, or put tokenizer.json into its folder")
        return Codec(self.tokenizer, self.special_tokens)


def model_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that a model name or path stands for; `demo` and `demo-seq` are inside the package."""
    if str(path) in EMBEDDED:
        return Path(__file__).parent / "embedded" / EMBEDDED[str(path)]
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a Hugging Face checkpoint folder, or `demo`")
    return folder


def for_conversations(lm: LanguageModel, path: str | os.PathLike[str], template: str | os.PathLike[str] = "") -> None:
    """See to it that a model, loaded from `path`, has a tokenizer, and the chat template of a file if one is named.

    Args:
        template: Jinja file, for a tokenizer that has no template of its own.

    Raises:
        CheckpointError: it has no tokenizer.
        ConfigError: the file cannot be read.
    """
    if lm.tokenizer is None:
        raise CheckpointError(f"{path} has no tokenizer; put tokenizer.json into the folder")
    if os.fspath(template):
        try:
            lm.tokenizer.chat_template = Path(template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {error}") from None


def load_model(
    path: str | os.PathLike[str],
    dtype: str = "float32",
    mesh: Mesh | None = None,
    weights: Weights = "float",
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
) -> LanguageModel:
    """Load a Hugging Face folder (config.json, safetensors, tokenizer), or `demo`.

    The six special tokens are added to the tokenizer if they are not there; rows of the embedding and of
    an untied head that they need start as the mean of the old rows. A vocabulary that is padded beyond
    the tokenizer keeps its size as long as they fit.

    Args:
        path: a folder, `demo` or `demo-seq`.
        dtype: `float32` or `bfloat16`, of parameters and activations.
        mesh: spread the parameters over it by the rules of `aspd_jax.sharding`.
        weights: `int8`: kernels of the layers rounded to int8 as they are read, with a scale per output.
        lora_rank, lora_alpha: add fresh adapters to the kernels of the layers, for training.

    Raises:
        CheckpointError: what is missing from, unknown in or unsupported about the folder.
    """
    folder = model_folder(path)
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json; it is not a Hugging Face checkpoint")
    try:
        hf_config = json.loads((folder / "config.json").read_text())
        hf = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    config = from_hugging_face(hf, dtype)
    config = replace(config, weights=weights, lora_rank=lora_rank, lora_alpha=lora_alpha)
    tokenizer, special, new_rows = None, None, {}
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        old_length = len(tokenizer)
        special = add_special_tokens(tokenizer)
        new_rows = {i: min(old_length, config.vocabulary) for i in special.ids if i >= old_length}
        config = replace(config, vocabulary=max(config.vocabulary, len(tokenizer)))
    model = Transformer(config)
    return LanguageModel(
        model=model,
        params=load_parameters(folder, model, mesh, hf.vocab_size, new_rows),
        tokenizer=tokenizer,
        special_tokens=special,
        config=config,
        hf_config=hf_config,
        end_ids=_end_ids(folder, hf, tokenizer),
        context_length=hf.max_position_embeddings,
        mesh=mesh,
    )


def _end_ids(folder: Path, hf: Any, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text ids, from where `transformers` takes them: generation config, then config, then tokenizer."""
    generation = folder / "generation_config.json"
    found = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    for candidate in (found, hf.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        if candidate is not None:
            return tuple(candidate) if isinstance(candidate, list) else (int(candidate),)
    return ()


def save_model(lm: LanguageModel, path: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Write a Hugging Face folder that `transformers` and `load_model` load; adapters are merged into their kernels.

    The folder appears whole or not at all.

    Args:
        dtype: `float32` or `bfloat16`, of what is written; default: as the parameters are.

    Raises:
        CheckpointError: something is at `path` already.
    """
    target = Path(path)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is not empty; choose another folder")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    hf_config = {
        **lm.hf_config,
        "vocab_size": lm.config.vocabulary,
        "aspd": {"positions": lm.config.positions, "siblings": lm.config.siblings},
    }
    for key in ("torch_dtype", "dtype"):
        hf_config.pop(key, None)
    hf_config["torch_dtype"] = dtype or lm.config.dtype
    (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    if lm.end_ids:
        end = lm.end_ids[0] if len(lm.end_ids) == 1 else list(lm.end_ids)
        (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": end}, indent=2) + "\n")
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(partial)
    save_parameters(partial, lm.config, merge_adapters(lm.config, lm.params), dtype)
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read
    if target.exists():
        target.rmdir()
    partial.rename(target)


def as_int8(lm: LanguageModel) -> LanguageModel:
    """A model with the kernels of its layers rounded to int8, a scale per output; as `load_model(weights="int8")`."""
    config = replace(lm.config, weights="int8")
    return replace(lm, config=config, model=Transformer(config), params=quantise_layers(lm.params))


def random_model(
    config: ModelConfig, tokenizer: Any, hf_config: dict[str, Any], seed: int = 0, end_ids: tuple[int, ...] = ()
) -> LanguageModel:
    """A model with random weights; `config.vocabulary` must hold the tokenizer with the six tokens."""
    special = None if tokenizer is None else add_special_tokens(tokenizer)
    if tokenizer is not None and len(tokenizer) > config.vocabulary:
        raise CheckpointError(f"vocabulary is {config.vocabulary}, the tokenizer with its tags has {len(tokenizer)}")
    model = Transformer(config)
    one = np.zeros((1, 1), np.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(seed), one, Layout(one, one, one, one))["params"])
    length = int(hf_config.get("max_position_embeddings", 2048))
    return LanguageModel(model, params, tokenizer, special, config, hf_config, end_ids, length)
