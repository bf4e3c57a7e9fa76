"""A checkpoint folder in, everything that is needed to train or decode out, and back (Hugging Face layout)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import AutoConfig

from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.files import write_folder
from aspd_jax.formats import open_checkpoint
from aspd_jax.formats.adapter import HEAD, Adapter, Factors, Rows, open_adapter, write_adapter
from aspd_jax.formats.folder import write_settings, write_tensors
from aspd_jax.formats.gguf_writer import write_gguf
from aspd_jax.layout import Layout
from aspd_jax.model.adapters import adapter_parameters, adapter_tensors, merge_adapters
from aspd_jax.model.config import ModelConfig, Weights, from_hugging_face, padded
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import load_parameters, quantise_layers, tensors_from
from aspd_jax.tokens import Codec, SpecialTokens, add_special_tokens


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
        generation: the contents of generation_config.json, for export.
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
    generation: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def codec(self) -> Codec:
        """Structured answers <-> token ids.

        Raises:
            CheckpointError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise CheckpointError("this model has no tokenizer; pass token ids, or put tokenizer.json into its folder")
        return Codec(self.tokenizer, self.special_tokens)


def for_conversations(lm: LanguageModel, path: str | os.PathLike[str], template: str | os.PathLike[str] = "") -> None:
    """See to it that a model, loaded from `path`, has a tokenizer, and the chat template of a file if one is named.

    Args:
        template: Jinja file, for a tokenizer that has no template of its own.

    Raises:
        CheckpointError: it has no tokenizer.
        ConfigError: the file cannot be read.
    """
    read_template(lm.tokenizer, path, template)


def read_template(tokenizer: Any, path: str | os.PathLike[str], template: str | os.PathLike[str]) -> None:
    """As `for_conversations`, of a tokenizer; None: there is none."""
    if tokenizer is None:
        raise CheckpointError(f"{path} has no tokenizer; put tokenizer.json into the folder")
    if os.fspath(template):
        try:
            tokenizer.chat_template = Path(template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {error}") from None


def load_model(
    path: str | os.PathLike[str],
    dtype: str = "float32",
    mesh: Mesh | None = None,
    weights: Weights = "float",
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
    adapter: str | os.PathLike[str] | None = None,
    adapters: int = 0,
) -> LanguageModel:
    """Load a Hugging Face folder (config.json, safetensors, tokenizer), a GGUF file, or a model that has a name.

    The six special tokens are added to the tokenizer if they are not there; rows of the embedding and of
    an untied head that they need start as the mean of the old rows. A vocabulary that is padded beyond
    the tokenizer keeps its size as long as they fit.

    Args:
        path: a folder, a .gguf file, or a name (`aspd_jax.formats.NAMES`), such as `demo` or `smollm2`.
        dtype: `float32` or `bfloat16`, of parameters and activations.
        mesh: spread the parameters over it by the rules of `aspd_jax.sharding`, with the vocabulary padded so that it
            can be split.
        weights: `int8`: kernels of the layers rounded to int8 as they are read, with a scale per output.
        lora_rank, lora_alpha: add fresh adapters to the kernels of the layers, and rows of their own for the special
            tokens, for training.
        adapter: a folder in PEFT's format, which was trained on this model; it is merged into the kernels.
        adapters: room for so many of them, of `lora_rank` each, which requests choose among (`put_adapter`).

    Raises:
        CheckpointError: what is missing from, unknown in or unsupported about it; an adapter for another model.
    """
    checkpoint = open_checkpoint(path)
    config = from_hugging_face(checkpoint.hf, dtype)
    if adapters:
        lora_rank = lora_alpha = adapters * lora_rank  # their factors hold their scales
    config = replace(config, weights=weights, lora_rank=lora_rank, lora_alpha=lora_alpha, adapters=adapters)
    tokenizer, special, new_rows = checkpoint.tokenizer, None, {}
    tensors, stored = checkpoint.tensors(), checkpoint.hf.vocab_size
    old_length = stored if tokenizer is None else len(tokenizer)
    if tokenizer is not None:
        special = add_special_tokens(tokenizer)
        new_rows = {i: min(old_length, config.vocab_size) for i in special.ids if i >= old_length}
        config = replace(config, vocab_size=max(config.vocab_size, len(tokenizer)))
        without_row = [i for i in range(stored, len(tokenizer)) if i not in special.ids]
        new_rows |= dict.fromkeys(without_row, stored)
        ends = checkpoint.end_ids
        if ends and not any(0 <= end < stored for end in ends):
            raise CheckpointError(
                f"{checkpoint.source}: eos_token_id {list(ends)}: expected an id with a row in the embedding, "
                f"which has {stored}. An answer of this model could not end."
            )
        config = replace(config, unused_tokens=_unused_tokens(config, tokenizer, without_row, ends))
        config = replace(config, new_tokens=special.ids if lora_rank else ())
    config = config if mesh is None else padded(config)
    adapter = adapter or checkpoint.adapter
    if adapter is not None:
        if adapters:
            raise CheckpointError(f"{path} has an adapter merged already; several of them need the base itself")
        of = open_adapter(adapter)
        of.check_tokens(min(old_length, stored), special.ids if special else ())
        if config.tied and HEAD in {*of.factors, *of.rows}:
            raise CheckpointError(f"{adapter} changes {HEAD}, which is the embedding in {path}; this is not supported")
        config = replace(config, **of.settings)
        tensors = of.applied(tensors, checkpoint.source)
        if of.tokens and of.tokens[-1] >= old_length:  # rows of the tags
            new_rows, stored = {}, max(stored, of.tokens[-1] + 1)
    model = Transformer(config)
    return LanguageModel(
        model=model,
        params=load_parameters(checkpoint.source, tensors, model, mesh, stored, new_rows),
        tokenizer=tokenizer,
        special_tokens=special,
        config=config,
        hf_config=checkpoint.hf_config,
        end_ids=checkpoint.end_ids,
        context_length=checkpoint.hf.max_position_embeddings,
        mesh=mesh,
        generation=checkpoint.generation,
    )


def _unused_tokens(
    config: ModelConfig, tokenizer: Any, without_row: list[int], ends: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of ids that the tokenizer does not name, or that have no row in the checkpoint.

    Ends of text stay, and so do unused tokens that the checkpoint itself names.
    """
    named = np.zeros(config.vocab_size, bool)
    named[[i for i in (*tokenizer.get_vocab().values(), *ends) if 0 <= i < config.vocab_size]] = True
    named[without_row] = False
    for first, end in config.unused_tokens:
        named[first:end] = False
    edges = np.flatnonzero(np.diff(np.pad(~named, 1).astype(np.int8)))
    return tuple((int(first), int(end)) for first, end in edges.reshape(-1, 2))


def put_adapter(lm: LanguageModel, number: int, adapter: Adapter | None) -> None:
    """Put an adapter into one of the places of a model that was loaded with `adapters`, or make the place empty.

    The parameters become others of the same shapes: programs stay, and who has the old ones may go on with them.

    Raises:
        CheckpointError: it was not made for this model, or for other positions or another mask; nothing changes then.
    """
    if adapter is not None:
        adapter.check_tokens(0, () if lm.special_tokens is None else lm.special_tokens.ids)
        for name, value in adapter.settings.items():
            if getattr(lm.config, name) != value:
                raise CheckpointError(f"{adapter.source} has {name} {value!r}, this model {getattr(lm.config, name)!r}")
    lm.params = adapter_parameters(lm.config, lm.params, adapter, number)


def save_model(lm: LanguageModel, path: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Write a Hugging Face folder that `transformers` and `load_model` load, or a GGUF file, which llama.cpp loads too;
    adapters are merged into their kernels.

    It appears whole or not at all.

    Args:
        path: of a file if it ends with `.gguf`, else of a folder.
        dtype: `float32` or `bfloat16`, of what is written; default: as the parameters are.

    Raises:
        CheckpointError: something is at `path` already.
    """
    if lm.config.adapters:
        raise CheckpointError("a model with several adapters is not one model to save")
    aspd: dict[str, Any] = {"positions": lm.config.positions, "siblings": lm.config.siblings}
    hf_config = {**lm.hf_config, "vocab_size": lm.config.vocab_size, "aspd": aspd}
    target, kept = Path(path), dtype or lm.config.dtype
    tensors = tensors_from(lm.config, merge_adapters(lm.config, lm.params), dtype)
    if target.suffix == ".gguf":
        hf = AutoConfig.for_model(**{key: value for key, value in hf_config.items() if key != "aspd"})
        write_gguf(target, hf, lm.tokenizer, lm.end_ids, tensors, kept, aspd, lm.config.unused_tokens)
        return
    named = () if lm.tokenizer is None else sorted(lm.tokenizer.get_vocab().values())
    if unused := [[token, token + 1] for token in named if lm.config.is_unused(token)]:
        hf_config["aspd"] = aspd | {"unused_tokens": unused}
    with write_folder(target) as folder:
        write_settings(folder, hf_config, kept, lm.end_ids, lm.tokenizer, lm.generation)
        write_tensors(folder, tensors)


def save_adapter(lm: LanguageModel, path: str | os.PathLike[str], base: str) -> None:
    """Write what was trained of a model that was loaded with `lora_rank`, as an adapter folder in PEFT's format.

    The folder appears whole or not at all. Its tensors are bfloat16.

    Args:
        base: what the adapter was trained on, for readers.

    Raises:
        CheckpointError: something is at `path` already.
    """
    factors, rows = adapter_tensors(lm.config, lm.params)
    alpha, rank = lm.config.lora_alpha, lm.config.lora_rank
    settings = {"positions": lm.config.positions, "siblings": lm.config.siblings}
    of_layers = {name: Factors(down, up, alpha / rank) for name, (down, up) in factors.items()}
    of_tokens = {name: Rows(lm.config.new_tokens, values) for name, values in rows.items()}
    adapter = Adapter(str(path), of_layers, of_tokens, settings)
    write_adapter(adapter, path, base, alpha, jnp.bfloat16, lm.tokenizer)


def as_int8(lm: LanguageModel) -> LanguageModel:
    """A model with the kernels of its layers rounded to int8, a scale per output; as `load_model(weights="int8")`."""
    config = replace(lm.config, weights="int8")
    return replace(lm, config=config, model=Transformer(config), params=quantise_layers(lm.params))


def random_model(
    config: ModelConfig, tokenizer: Any, hf_config: dict[str, Any], seed: int = 0, end_ids: tuple[int, ...] = ()
) -> LanguageModel:
    """A model with random weights; `config.vocab_size` must hold the tokenizer with the six tokens."""
    special = None if tokenizer is None else add_special_tokens(tokenizer)
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise CheckpointError(f"vocabulary is {config.vocab_size}, the tokenizer with its tags has {len(tokenizer)}")
    model = Transformer(config)
    one = np.zeros((1, 1), np.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(seed), one, Layout(one, one, one, one))["params"])
    length = int(hf_config.get("max_position_embeddings", 2048))
    return LanguageModel(model, params, tokenizer, special, config, hf_config, end_ids, length)
