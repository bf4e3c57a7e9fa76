"""Load a checkpoint with all that training and decoding need, and save it (Hugging Face layout)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from aspd_jax.chat import with_end_of_turn
from aspd_jax.configuration import find_config
from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.files import write_folder
from aspd_jax.formats import find_model, open_checkpoint
from aspd_jax.formats.adapter import SETTINGS, open_adapter, write_adapter
from aspd_jax.formats.draft_file import FILE, fresh_draft_heads, read_draft_heads, write_draft_heads
from aspd_jax.formats.folder import write_settings, write_tensors
from aspd_jax.formats.tokenizer_files import check_template
from aspd_jax.layout import Layout
from aspd_jax.model.adapter import HEAD, Adapter
from aspd_jax.model.config import ModelConfig, Weights, context_length, from_hugging_face, padded
from aspd_jax.model.draft_heads import DRAFT_HEADS
from aspd_jax.model.lora import adapter_parameters, merge_adapters, trained_adapter
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.weights import load_parameters, quantise_layers, tensors_from
from aspd_jax.tokens import Codec, SpecialTokens, add_special_tokens


@dataclass(repr=False)
class LanguageModel:
    """A decoder with its parameters, tokenizer and special tokens.

    Attributes:
        model: Flax module; a pure function of (parameters, tokens, layout, cache).
        params: pytree for `model.apply({"params": params}, …)`.
        tokenizer: a `transformers` tokenizer, or None if the checkpoint has none.
        special_tokens: ids of the six special tokens, or None without a tokenizer.
        config: configuration of the model.
        hf_config: contents of config.json, for export.
        end_ids: ids that end an answer.
        context_length: context length of the checkpoint in positions, as its RoPE scaling extends it.
        mesh: mesh that the parameters are distributed over, or None.
        generation: contents of generation_config.json, for export.
        tagged: whether the model was trained with the special tokens; its config.json or its adapter has settings of
            this project.
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
    tagged: bool = True

    def __repr__(self) -> str:
        c = self.config
        count = sum(int(leaf.size) for leaf in jax.tree.leaves(self.params))
        tokenizer = "" if self.tokenizer is not None else ", no tokenizer"
        return (
            f"LanguageModel({self.hf_config.get('model_type')}, {count:,} parameters, {c.layers} layers, {c.dtype}, "
            f"{self.context_length:,} positions{tokenizer})"
        )

    @cached_property
    def codec(self) -> Codec:
        """Return the codec between structured answers and token ids.

        Raises:
            CheckpointError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise CheckpointError(
                "tokenizer: expected one, got none. Pass token ids, or put tokenizer.json into the folder of the model."
            )
        return Codec(self.tokenizer, self.special_tokens, self.config.titles)


def for_conversations(lm: LanguageModel, path: str | os.PathLike[str], template: str | os.PathLike[str] = "") -> None:
    """Check that a model loaded from `path` has a tokenizer, and set its chat template if a file is given.

    The token that ends a turn of the template is added to `lm.end_ids`.

    Args:
        lm: the model.
        path: path of the checkpoint, for messages.
        template: Jinja file, for a tokenizer without a chat template; empty: no change.

    Raises:
        CheckpointError: the model has no tokenizer, or the template is not valid Jinja.
        ConfigError: the file cannot be read.
    """
    read_template(lm.tokenizer, path, template)
    lm.end_ids = with_end_of_turn(lm.tokenizer, lm.end_ids)


def read_template(tokenizer: Any, path: str | os.PathLike[str], template: str | os.PathLike[str]) -> None:
    """Check a tokenizer and set its chat template; see `for_conversations`."""
    if tokenizer is None:
        raise CheckpointError(f"{path}: expected a tokenizer, got none. Put tokenizer.json into the folder.")
    if os.fspath(template):
        file = find_config(Path(template))
        try:
            tokenizer.chat_template = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {error}") from None
        check_template(file, tokenizer)


def dtype_name(dtype: Any, hf_config: Mapping[str, Any], backend: str) -> str:
    """Return the name of a dtype for parameters and activations.

    Args:
        dtype: name, or dtype of JAX or NumPy; `auto`: float32 on CPU and for checkpoints in float32, else bfloat16.
        hf_config: contents of config.json; without a dtype in it, as of a GGUF file, `auto` means bfloat16.
        backend: platform of JAX.

    Raises:
        CheckpointError: it is another dtype, or none.
    """
    if isinstance(dtype, str) and dtype == "auto":
        stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
        return "float32" if backend == "cpu" or stored == "float32" else "bfloat16"
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = str(dtype)
    if name not in ("float32", "bfloat16"):
        raise CheckpointError(f"dtype: expected float32, bfloat16 or auto, got {name!r}")
    return name


def load_model(
    path: str | os.PathLike[str],
    dtype: Any = "auto",
    mesh: Mesh | None = None,
    weights: Weights = "float",
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
    adapter: str | os.PathLike[str] | None = None,
    adapters: int = 0,
    draft_heads: int | None = None,
    decode_attention: str = "decode",
) -> LanguageModel:
    """Load a Hugging Face folder (config.json, safetensors, tokenizer), a GGUF file, or a named model.

    The six special tokens are added to the tokenizer if they are missing. Their new rows in the embedding and in an
    untied head start as the mean of the old rows. A vocabulary that is padded beyond the tokenizer keeps its size if
    the new tokens fit.

    Args:
        path: a folder, a .gguf file, or a name (`aspd_jax.formats.NAMES`), such as `demo` or `smollm2`.
        dtype: dtype of parameters and activations: `float32` or `bfloat16`, as a name or a dtype of JAX or NumPy;
            `auto`: float32 on CPU and for checkpoints in float32, else bfloat16.
        mesh: mesh to distribute the parameters over, by the rules of `aspd_jax.sharding`; the vocabulary is padded so
            that it can be split.
        weights: `int8`: round the kernels of the layers to int8 while loading, with a scale per output.
        lora_rank, lora_alpha: add fresh adapters to the kernels of the layers, and separate rows for the special
            tokens, for training.
        adapter: folder of an adapter in PEFT's format that was trained on this model; it is merged into the kernels.
        adapters: number of adapters, of rank `lora_rank` each, that requests select (`put_adapter`).
        draft_heads: number of draft heads, for training: those in the folder of the adapter or the model, trained
            further, or fresh ones if it has none; 0: none, and the folder's are not read; None: as in that folder.
        decode_attention: back end of steps over a cache, see `ModelConfig`.

    Raises:
        CheckpointError: a part is missing, unknown or not supported, or the adapter is for another model.
    """
    checkpoint = open_checkpoint(path)
    config = from_hugging_face(checkpoint.hf, dtype_name(dtype, checkpoint.hf_config, jax.default_backend()))
    if adapters:
        lora_rank = lora_alpha = adapters * lora_rank  # the factors include their scales
    config = replace(
        config, weights=weights, decode_attention=decode_attention, lora_rank=lora_rank, lora_alpha=lora_alpha,
        adapters=adapters,
    )  # fmt: skip
    tokenizer, special, new_rows = checkpoint.tokenizer, None, {}
    tensors, stored = checkpoint.tensors(), checkpoint.hf.vocab_size
    known = stored if tokenizer is None else min(stored, len(tokenizer))  # tokens with a name and a row
    if tokenizer is not None:
        special = add_special_tokens(tokenizer)
        new_rows = {i: known for i in special.ids if i >= known}
        config = replace(config, vocab_size=max(config.vocab_size, len(tokenizer)))
        without_row = [i for i in range(stored, len(tokenizer)) if i not in special.ids]
        new_rows |= dict.fromkeys(without_row, stored)
        ends = checkpoint.end_ids
        if ends and not any(0 <= end < stored for end in ends):
            raise CheckpointError(
                f"{checkpoint.source}: eos_token_id: expected an id with a row in the embedding, which has {stored}, "
                f"got {list(ends)}. An answer of this model could not end."
            )
        unused = _unused_tokens(config, tokenizer, without_row, ends)
        config = replace(config, unused_tokens=unused, new_tokens=special.ids if lora_rank else ())
    config = config if mesh is None else padded(config)
    settings = checkpoint.hf_config.get("aspd") or {}
    adapter = adapter or checkpoint.adapter
    if adapter is not None:
        if adapters:
            raise CheckpointError(
                f"{path}: expected a base model without an adapter, got one with a merged adapter. Load its base."
            )
        opened = open_adapter(adapter)
        opened.check_tokens(known, special.ids if special else ())
        if config.tied and HEAD in {*opened.factors, *opened.rows}:
            raise CheckpointError(f"{adapter}: expected no {HEAD}, which is the embedding in {path}, got one")
        config, settings = replace(config, **opened.settings), {**settings, **opened.settings}
        tensors = opened.applied(tensors, checkpoint.source)
        if opened.tokens and opened.tokens[-1] >= known:  # the adapter has the rows of the special tokens
            new_rows, stored = {}, max(stored, opened.tokens[-1] + 1)
    heads, drafter = 0, dict[str, np.ndarray]()
    if draft_heads != 0:
        heads, drafter = read_draft_heads(Path(adapter or find_model(path)), config.hidden_size)
    if draft_heads:  # all heads share their parameters, so any number fits
        heads, drafter = draft_heads, drafter or fresh_draft_heads(config.hidden_size)
    config, tensors = replace(config, draft_heads=heads), chain(tensors, drafter.items())
    model = Transformer(config)
    return LanguageModel(
        model=model,
        params=load_parameters(checkpoint.source, tensors, model, mesh, stored, new_rows),
        tokenizer=tokenizer,
        special_tokens=special,
        config=config,
        hf_config=checkpoint.hf_config,
        end_ids=checkpoint.end_ids,
        context_length=context_length(checkpoint.hf),
        mesh=mesh,
        generation=checkpoint.generation,
        tagged="positions" in settings,
    )


def _unused_tokens(
    config: ModelConfig, tokenizer: Any, without_row: list[int], ends: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of ids that have no name in the tokenizer or no row in the checkpoint.

    Ends of text are not unused; unused tokens that the checkpoint declares are.
    """
    named = np.zeros(config.vocab_size, bool)
    named[[i for i in (*tokenizer.get_vocab().values(), *ends) if 0 <= i < config.vocab_size]] = True
    named[without_row] = False
    for first, end in config.unused_tokens:
        named[first:end] = False
    edges = np.flatnonzero(np.diff(np.pad(~named, 1).astype(np.int8)))
    return tuple((int(first), int(end)) for first, end in edges.reshape(-1, 2))


def put_adapter(lm: LanguageModel, number: int, adapter: Adapter | None) -> None:
    """Replace the adapter at index `number` of a model that was loaded with `adapters`.

    Shapes are unchanged, so nothing recompiles, and holders of the old tree stay valid.

    Args:
        lm: the model; its `params` are replaced.
        number: index of the adapter.
        adapter: the new adapter; None: clear the index.

    Raises:
        CheckpointError: the adapter is for another model, position scheme, mask or form of titles; the model is
            unchanged.
    """
    if adapter is not None:
        tags = () if lm.special_tokens is None else lm.special_tokens.ids
        if any(rows.tokens != tags for rows in adapter.rows.values()):
            raise CheckpointError(
                f"{adapter.source}: trainable_token_indices: expected the ids of the six tags, {list(tags)}, "
                f"got {adapter.tokens}. Merge the adapter into its base."
            )
        for name, value in adapter.settings.items():
            if getattr(lm.config, name) != value:
                raise CheckpointError(f"{adapter.source}: {name}: expected {getattr(lm.config, name)!r}, got {value!r}")
    lm.params = adapter_parameters(lm.config, lm.params, adapter, number)


def save_model(lm: LanguageModel, path: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Write a Hugging Face folder, atomically; adapters are merged into their kernels.

    `transformers` and `load_model` load it. Draft heads are a file of the folder.

    Args:
        lm: the model.
        path: path of the folder.
        dtype: dtype of the tensors, `float32` or `bfloat16`; default: the dtype of the parameters.

    Raises:
        CheckpointError: `path` exists already, or the model has several adapters.
    """
    if lm.config.adapters:
        raise CheckpointError(
            "save: expected at most one adapter, got several. Load the model with the adapter to merge."
        )
    aspd: dict[str, Any] = _settings(lm) if lm.tagged else {}
    hf_config = {**lm.hf_config, "vocab_size": lm.config.vocab_size, "aspd": aspd}
    kept = dtype or str(lm.params["embedding"]["embedding"].dtype)
    params = {name: value for name, value in lm.params.items() if name != DRAFT_HEADS}
    tensors = tensors_from(lm.config, merge_adapters(lm.config, params), dtype)
    named = () if lm.tokenizer is None else sorted(lm.tokenizer.get_vocab().values())
    if unused := [[token, token + 1] for token in named if lm.config.is_unused(token)]:
        hf_config["aspd"] = aspd | {"unused_tokens": unused}
    with write_folder(Path(path)) as folder:
        write_settings(folder, hf_config, kept, lm.end_ids, lm.tokenizer, lm.generation)
        write_tensors(folder, tensors)
        if lm.config.draft_heads:
            save_draft_heads(lm, folder / FILE)


def _settings(lm: LanguageModel) -> dict[str, Any]:
    """Return what a checkpoint stores of the protocol that it was trained with."""
    return {name: getattr(lm.config, name) for name in SETTINGS}


def save_adapter(lm: LanguageModel, path: str | os.PathLike[str], base: str) -> None:
    """Write the trained parameters of a model that was loaded with `lora_rank`, as an adapter folder in PEFT's format.

    The folder is written atomically. Its tensors are bfloat16.

    Args:
        lm: the model.
        path: path of the folder.
        base: name of the base model, for the adapter's configuration.

    Raises:
        CheckpointError: `path` exists already.
    """
    settings = _settings(lm) if lm.tagged else {}
    adapter = replace(trained_adapter(lm.config, lm.params, str(path)), settings=settings)
    write_adapter(adapter, path, base, lm.config.lora_alpha, jnp.bfloat16, lm.tokenizer)


def save_draft_heads(lm: LanguageModel, file: str | os.PathLike[str]) -> None:
    """Write the draft heads of a model to a file, in bfloat16. Models and adapters read it from their folders."""
    heads = {f"{DRAFT_HEADS}.{name}": np.array(value, jnp.bfloat16) for name, value in lm.params[DRAFT_HEADS].items()}
    write_draft_heads(Path(file), lm.config.draft_heads, heads)


def as_int8(lm: LanguageModel) -> LanguageModel:
    """Return a model with the kernels of its layers rounded to int8, as `load_model(weights="int8")` does."""
    config = replace(lm.config, weights="int8")
    return replace(lm, config=config, model=Transformer(config), params=quantise_layers(lm.params))


def random_model(
    config: ModelConfig, tokenizer: Any, hf_config: dict[str, Any], seed: int = 0, end_ids: tuple[int, ...] = ()
) -> LanguageModel:
    """Return a model with random weights.

    Args:
        config: configuration; `vocab_size` must hold the tokenizer with the six special tokens.
        tokenizer: a `transformers` tokenizer, or None.
        hf_config: contents of config.json, for export; `max_position_embeddings` gives the context length.
        seed: seed of the weights.
        end_ids: ids that end an answer.

    Raises:
        CheckpointError: the tokenizer does not fit the vocabulary.
    """
    special = None if tokenizer is None else add_special_tokens(tokenizer)
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise CheckpointError(f"vocab_size: expected at least {len(tokenizer)}, got {config.vocab_size}")
    model = Transformer(config)
    zero = np.zeros((1, 1), np.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(seed), zero, Layout(zero, zero, zero, zero))["params"])
    length = int(hf_config.get("max_position_embeddings", 2048))
    return LanguageModel(model, params, tokenizer, special, config, hf_config, end_ids, length)
