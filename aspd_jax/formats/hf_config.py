"""Reader of config.json of a Hugging Face folder, based on a list of known fields.

A field is read, known to have no effect, or refused by name. Code from a checkpoint is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoConfig, GenerationConfig

from aspd_jax.errors import CheckpointError
from aspd_jax.formats.side_files import read_object
from aspd_jax.model.config import ACTIVATIONS, FAMILIES, OWN_FIELDS, rope_kind

LARGEST_SIZE = 2**31 - 1  # sizes are int32 in programs
LARGEST = float(np.finfo(np.float32).max)
COMPOSITE = {"gemma3": "gemma3_text"}  # families with an image part, with the family of their text part


class Kind(NamedTuple):
    """Type of a field: a description for messages, and a function that checks a value."""

    expected: str
    accepts: Any


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1


SIZE = Kind(
    "a whole number, 0 or more", lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= LARGEST_SIZE
)
COUNT = Kind("a whole number above 0", lambda v: SIZE.accepts(v) and v > 0)
POSITIVE = Kind("a number above 0", lambda v: _is_number(v) and v > 0)
NOT_NEGATIVE = Kind("a number, 0 or more", lambda v: _is_number(v) and v >= 0)
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
TEXT = Kind("a string", lambda v: isinstance(v, str))
OBJECT = Kind("an object", lambda v: isinstance(v, Mapping))
ID = Kind("a token id", _is_id)
IDS = Kind("a token id or a list of them", lambda v: _is_id(v) or (isinstance(v, list) and all(map(_is_id, v))))
RANGES = Kind(
    "a list of ranges [first id, last id + 1]",
    lambda v: isinstance(v, list) and all(isinstance(r, list) and len(r) == 2 and all(map(SIZE.accepts, r)) for r in v),
)
ACTIVATION = Kind(f"one of {', '.join(ACTIVATIONS)}", lambda v: v in ACTIVATIONS)
LAYER_TYPES = ("full_attention", "sliding_attention")
LAYERS = Kind(
    f"a list of {' and '.join(LAYER_TYPES)}", lambda v: isinstance(v, list) and all(kind in LAYER_TYPES for kind in v)
)

# Fields that are read: those of all families, and those of each family.
COMMON = {
    "model_type": TEXT,
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "max_position_embeddings": COUNT,
    "rms_norm_eps": POSITIVE,
    "rope_theta": POSITIVE,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "layer_types": LAYERS,
    "tie_word_embeddings": FLAG,
    "bos_token_id": IDS,
    "eos_token_id": IDS,
    "pad_token_id": ID,
    "aspd": OBJECT,
}
QWEN = {"hidden_act": ACTIVATION, "use_sliding_window": FLAG, "sliding_window": SIZE, "max_window_layers": SIZE}
READ: dict[str, dict[str, Kind]] = {
    "llama": {"hidden_act": ACTIVATION, "attention_bias": FLAG, "mlp_bias": FLAG},
    "mistral": {"hidden_act": ACTIVATION, "sliding_window": COUNT},
    "qwen2": QWEN,
    "qwen3": QWEN | {"attention_bias": FLAG},
    "gemma3_text": {
        "hidden_activation": ACTIVATION,
        "attention_bias": FLAG,
        "query_pre_attn_scalar": POSITIVE,
        "sliding_window": COUNT,
        "sliding_window_pattern": COUNT,
        "rope_local_base_freq": POSITIVE,
    },
}
# Fields that may be missing, which means a default of the family, but not null.
NEEDED = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "hidden_activation"),
)

# Fields without an effect on results of these families: they concern loading, training and sampling.
NEUTRAL = frozenset(
    [
        "architectures",
        "aspd_oracle",  # ids of the tags, written by the paper's code
        "attention_dropout",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "base_model",
        "base_model_name_or_path",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dropout",
        "dtype",
        "embd_pdrop",
        "finetuning_task",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "license",
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "model_max_length",
        "model_name",
        "name_or_path",
        "num_labels",
        "output_router_logits",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "seq_length",
        "task_specific_params",
        "tokenizer_class",
        "tokenizer_model_max_length",
        "tokenizer_padding_side",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_weights",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_flash_attention",
        "use_flash_attention_2",
        "use_flash_attn",
    ]
) | frozenset(vars(GenerationConfig()))  # older versions of transformers write these into config.json
NEUTRAL_ENDINGS = ("_token_id", "_token_index")
NEUTRAL_IN_FAMILY = {
    "llama": {"sliding_window", "max_window_layers"},
    "mistral": {"max_window_layers"},
    "qwen2": {"attention_bias"},  # queries, keys and values always have a bias
    "gemma3_text": {"hidden_act", "max_window_layers"},
}
# Fields with one value that has no effect.
NEUTRAL_VALUES: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "attention_multiplier": None,
    "attention_scale": None,
    "causal": True,
    "is_causal": True,
    "embedding_multiplier": 1,
    "logit_scale": 1,
    "logits_scaling": 1,
    "lm_head_multiplier": 1,
    "residual_multiplier": 1,
    "scale_emb": 1,
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "rotary_emb_base": None,
    "rms_norm": True,
    "use_rms_norm": True,
    "use_rope": True,
    "use_rotary": True,
}
QUERY_NORM = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_query_key_norm")
WITH_QUERY_NORM = ("qwen3", "gemma3_text")

# Required and optional fields of RoPE scalings.
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ),
    ),
}
# Ignored in scalings that do not read them. `transformers` does not read `attn_factor`, which Qwen3 distillations have.
ROPE_NEUTRAL = ("finetuned", "original_max_position_embeddings", "attn_factor")
ROPE_NEUTRAL_VALUES = {"partial_rotary_factor": 1, "factor": 1, "extrapolation_factor": 1}


def read_config(file: Path) -> tuple[dict[str, Any], bool]:
    """Return the fields of a config.json, and whether they belong to the text part of a model with an image part.

    Raises:
        CheckpointError: the file cannot be read, or has a field or a value that is not supported.
    """
    config = read_object(file)
    composite = isinstance(config.get("model_type"), str) and config["model_type"] in COMPOSITE
    if composite:
        config = _text_part(file, config)
    check_fields(str(file), config)
    return {name: value for name, value in config.items() if name != "auto_map"}, composite


def make_config(config: Mapping[str, Any], source: str) -> Any:
    """Return a `transformers` configuration object of the fields that are read.

    Raises:
        CheckpointError: `transformers` refuses a value, or key and value heads are not shared equally.
    """
    known = COMMON | READ[config["model_type"]]
    fields = {name: deepcopy(value) for name, value in config.items() if name in known}  # `transformers` modifies them
    if scaling := fields.get("rope_scaling"):
        scaling["rope_type"] = rope_kind(scaling)  # `transformers` 5 does not read `type` of Gemma 3
    try:
        hf = AutoConfig.for_model(**fields)
    except Exception as error:  # validation raises various types
        raise CheckpointError(f"{source}: {' '.join(str(error).split())}") from None
    _check_layers(source, config, hf)
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    if kv_heads and heads % kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads: expected a multiple of num_key_value_heads ({kv_heads}), got {heads}"
        )
    return hf


def _text_part(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text part of a model with an image part as that of a text model."""
    family = COMPOSITE[config["model_type"]]
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{file}: text_config: expected an object, got {text!r}")
    if text.get("model_type", family) != family:
        raise CheckpointError(f"{file}: text_config.model_type: expected {family!r}, got {text['model_type']!r}")
    # Some fields of the text part may be on the level above, where they take precedence.
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "aspd")
    outer = {name: config[name] for name in (*shared, "quantization_config") if config.get(name) is not None}
    return {**text, **outer, "model_type": family, "architectures": [FAMILIES[family]]}


def check_fields(source: str, config: Mapping[str, Any]) -> None:
    """Check all fields of a configuration.

    Args:
        source: path, for messages.
        config: fields of the configuration.

    Raises:
        CheckpointError: a field is unknown, or its value is not supported.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        supported = ", ".join([*FAMILIES, *COMPOSITE])
        code = ""
        if config.get("auto_map"):
            code = " Its auto_map names code in the checkpoint, which is never run."
        raise CheckpointError(f"{source}: model_type: expected one of {supported}, got {family!r}.{code}")
    known = COMMON | READ[family]
    for name, value in config.items():
        if name in known:
            if value is not None and not known[name].accepts(value):
                raise CheckpointError(f"{source}: {name}: expected {known[name].expected}, got {_shown(value)}")
        elif refusal := _refusal(name, value, family):
            raise CheckpointError(f"{source}: {refusal}")
    for name in NEEDED:
        if name in known and name in config and config[name] is None:
            raise CheckpointError(f"{source}: {name}: expected {known[name].expected}, got null")
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types is not None and layers is not None and len(types) != layers:
        raise CheckpointError(f"{source}: layer_types: expected {layers} of them (num_hidden_layers), got {len(types)}")
    _check_ropes(source, config)
    for name, value in (config.get("aspd") or {}).items():
        if name not in OWN_FIELDS:
            raise CheckpointError(f"{source}: aspd: expected fields of {', '.join(OWN_FIELDS)}, got {name!r}")
        if name == "unused_tokens" and not RANGES.accepts(value):
            raise CheckpointError(f"{source}: aspd.{name}: expected {RANGES.expected}, got {_shown(value)}")


def _refusal(name: str, value: Any, family: str) -> str | None:
    """Return why a field that is not read is refused; None: it has no effect."""
    if name in NEUTRAL_VALUES or name in QUERY_NORM:
        expected = family in WITH_QUERY_NORM if name in QUERY_NORM else NEUTRAL_VALUES[name]
        if value is None or ((_is_number(value) or isinstance(value, bool)) and value == expected):
            return None
        models = f" in {family} models" if name in QUERY_NORM else ""
        return f"{name}: expected {_shown(expected)}{models}, got {_shown(value)}"
    if name in NEUTRAL or name in NEUTRAL_IN_FAMILY.get(family, ()) or name.endswith(NEUTRAL_ENDINGS):
        return None
    if name.startswith("_") or not value:  # private to transformers, or null, false, 0 or empty
        return None
    if name == "quantization_config":
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        return f"{name}: expected none, got quant_method {method!r}. Use a checkpoint in float32 or bfloat16."
    return f"{name}: expected a {family} model without it, got {_shown(value)}"


def _shown(value: Any) -> str:
    """Return a value in JSON's notation, truncated."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _check_layers(source: str, config: Mapping[str, Any], hf: Any) -> None:
    """Check that the model has the kinds of layers that `layer_types` names."""
    types, window = config.get("layer_types") or (), getattr(hf, "sliding_window", None)
    if "sliding_attention" in types and window is None:
        raise CheckpointError(
            f"{source}: layer_types: expected full_attention without a sliding window, got sliding_attention"
        )
    if config["model_type"] == "mistral" and window is not None and "full_attention" in types:
        raise CheckpointError(f"{source}: layer_types: expected sliding_attention in all layers, got full_attention")


def _check_ropes(source: str, config: Mapping[str, Any]) -> None:
    """Check the fields of the rotary embedding of `transformers` 5 (`rope_parameters`) and of earlier versions.

    Values that `transformers` ignores are refused: one object in `rope_parameters` for the two kinds of layers of
    Gemma 3, two objects in its `rope_scaling`, and, in other families, `rope_parameters` that differ from a
    `rope_scaling` beside them.
    """
    nested = config["model_type"] == "gemma3_text"
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if scaling:
        _check_rope(f"{source}: rope_scaling", scaling)
    if parameters and nested:
        where, expected = f"{source}: rope_parameters", f"an object for each of {', '.join(LAYER_TYPES)}"
        if not any(kind in parameters for kind in LAYER_TYPES):
            raise CheckpointError(f"{where}: expected {expected}, got {_shown(parameters)}")
        for kind, inside in parameters.items():
            if kind not in LAYER_TYPES or not isinstance(inside, (Mapping, type(None))):
                raise CheckpointError(f"{where}.{kind}: expected {expected}, got {_shown(inside)}")
            _check_rope(f"{where}.{kind}", inside or {})
    elif parameters:
        _check_rope(f"{source}: rope_parameters", parameters)
    if not nested and scaling and parameters and _normal(scaling, config) != _normal(parameters, config):
        raise CheckpointError(
            f"{source}: rope_parameters: expected the values of rope_scaling, got {_shown(parameters)}. "
            "Remove one of the two fields."
        )


def _normal(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rotary embedding with its kind under `rope_type` and with the base of the frequencies."""
    others = {name: value for name, value in values.items() if name != "type" and value is not None}
    return {"rope_theta": config.get("rope_theta"), **others, "rope_type": rope_kind(values)}


def _check_rope(where: str, values: Mapping[str, Any]) -> None:
    """Check the fields of a rotary embedding; `where` is their path, for messages."""
    kind = rope_kind(values)
    if kind not in list(ROPE_FIELDS):
        raise CheckpointError(f"{where}: rope_type: expected one of {', '.join(ROPE_FIELDS)}, got {kind!r}")
    if values.get("type") not in (None, kind):
        raise CheckpointError(
            f"{where}: type: expected {kind!r}, as rope_type, got {values['type']!r}. Remove one of them."
        )
    needed, optional = ROPE_FIELDS[kind]
    for name in needed:
        if values.get(name) is None:
            raise CheckpointError(f"{where}: expected {name} in {kind} scaling, got none")
    for name, value in values.items():
        if name in ("rope_type", "type") or value is None:
            continue
        if name in (*needed, *optional, "rope_theta"):
            if name != "truncate" and not POSITIVE.accepts(value):
                raise CheckpointError(f"{where}.{name}: expected {POSITIVE.expected}, got {_shown(value)}")
        elif name in ROPE_NEUTRAL_VALUES:
            if value != ROPE_NEUTRAL_VALUES[name]:
                neutral = ROPE_NEUTRAL_VALUES[name]
                raise CheckpointError(f"{where}.{name}: expected {neutral} in {kind} scaling, got {_shown(value)}")
        elif name not in ROPE_NEUTRAL and value not in (False, 0, [], {}, ""):
            raise CheckpointError(f"{where}.{name}: expected none in {kind} scaling, got {_shown(value)}")
