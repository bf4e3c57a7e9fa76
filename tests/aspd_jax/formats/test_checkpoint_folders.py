"""Checkpoint folders with odd fields, heads, vocabularies, shards and side files."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aspd_jax import load_model, save_model
from aspd_jax.errors import CheckpointError, RequestError
from aspd_jax.formats import open_tokenizer
from aspd_jax.formats.hf_config import check_fields, make_config
from aspd_jax.formats.shards import find_tensors, read_stored
from aspd_jax.layout import HIDDEN
from aspd_jax.model.config import ModelConfig, from_hugging_face
from infer import Engine, SamplingParams
from tests.aspd_jax.model.test_model import logits_of
from tests.aspd_jax.test_tokens import byte_level
from tests.conftest import seeded_tensors, tiny_config, write_checkpoint
from tests.helpers.make_parity import CASES, GEMMA3, QWEN2

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def with_tokenizer(folder: Path, extra: int = 0, rows: int = 0, **changes: Any) -> Path:
    """A checkpoint whose tokenizer has `extra` tokens without a row, and `rows` rows that no token names."""
    tokenizer = byte_level()
    size = len(tokenizer) + rows
    config = tiny_config(vocab_size=size, eos_token_id=tokenizer.eos_token_id, **changes)
    write_checkpoint(folder, config)
    tokenizer.add_tokens([f"[PAD{number}]" for number in range(extra)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_a_checkpoint_never_runs(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `auto_map` of known classes is ignored, and that the field is named if its code is needed."""
    folder = with_tokenizer(tmp_path)
    for module in ("configuration_x", "tokenization_x"):
        (folder / f"{module}.py").write_text(CODE)
    values = json.loads((folder / file).read_text())
    values["auto_map"] = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoTokenizer": ["tokenization_x.XTokenizer", "tokenization_x.XTokenizer"],
    }
    (folder / file).write_text(json.dumps(values))

    def no_question(*_: Any) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr(builtins, "input", no_question)
    lm = load_model(folder)
    assert "auto_map" not in lm.hf_config
    open_tokenizer(folder)
    unknown = {"config.json": {"model_type": "x"}, "tokenizer_config.json": {"tokenizer_class": "XTokenizer"}}
    (folder / file).write_text(json.dumps(values | unknown[file]))
    with pytest.raises(CheckpointError, match=f"{file}.*auto_map.* never run"):
        load_model(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", CASES)
def test_real_fields_that_change_nothing(name: str, tmp_path: Path) -> None:
    """Check that further fields of published checkpoints are accepted."""
    neutral = {
        "_attn_implementation_autoset": True,
        "_name_or_path": "x/y",
        "attention_dropout": 0.1,
        "cache_implementation": "hybrid",
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "id2label": {"0": "LABEL_0"},
        "initializer_range": 0.02,
        "is_decoder": True,
        "is_llama_config": True,
        "logits_scaling": 1.0,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": {"q4": 1}},
        "transformers_version": "4.51.0",
        "unknown_list": [],
        "unknown_value": None,
        "unsloth_fixed": True,
        "use_bidirectional_attention": False,
        "use_cache": True,
        "use_mrope": False,
    }
    plain, full = (
        load_model(write_checkpoint(tmp_path / f"{n}", CASES[name] | n_)) for n, n_ in enumerate(({}, neutral))
    )
    assert plain.config == full.config


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (tiny_config(attention_multiplier=0.5), "attention_multiplier: expected null, got 0.5"),
        (tiny_config(logits_scaling=8.0), "logits_scaling: expected 1, got 8.0"),
        (tiny_config(residual_multiplier=0.22), "residual_multiplier: expected 1, got 0.22"),
        (tiny_config(partial_rotary_factor=0.5), "partial_rotary_factor: expected 1, got 0.5"),
        (
            tiny_config(quantization_config={"quant_method": "fp8"}),
            "quantization_config: expected none, got quant_method 'fp8'",
        ),
        (tiny_config(num_experts=4), "num_experts: expected a llama model without it, got 4"),
        (tiny_config(something_new="x"), "something_new: expected a llama model without it, got 'x'"),
        (tiny_config(use_qk_norm=True), "use_qk_norm: expected false in llama models, got true"),
        (tiny_config(model_type="qwen3", use_qk_norm=False), "use_qk_norm: expected true in qwen3 models, got false"),
        (
            tiny_config(model_type="mistral", attention_bias=True),
            "attention_bias: expected a mistral model without it, got true",
        ),
        (tiny_config(**QWEN2, mlp_bias=True), "mlp_bias: expected a qwen2 model without it, got true"),
        (tiny_config(layer_types=["sliding_attention"] * 2), "layer_types"),
        (tiny_config(layer_types=["chunked_attention"] * 2), "layer_types"),
        (tiny_config(**QWEN2, layer_types=["sliding_attention"] * 2), "layer_types"),
        (tiny_config(**QWEN2, layer_types=["full_attention"]), "layer_types"),
        (
            tiny_config(**GEMMA3 | {"use_bidirectional_attention": True}),
            "use_bidirectional_attention: expected false, got true",
        ),
        (
            tiny_config(**GEMMA3 | {"final_logit_softcapping": 30.0}),
            "config.json: final_logit_softcapping: expected null, got 30.0",
        ),
        (
            tiny_config(**GEMMA3 | {"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}),
            "rope_scaling.full_attention: expected none in default scaling, got {'rope_type'",
        ),
        (
            tiny_config(rope_scaling={"rope_type": "linear", "factor": 2.0, "odd": 3}),
            "rope_scaling.odd: expected none in linear scaling, got 3",
        ),
        (
            tiny_config(rope_scaling={"rope_type": "llama3", "factor": 2.0}),
            "rope_scaling: expected low_freq_factor in llama3 scaling, got none",
        ),
        (tiny_config(rope_parameters={"rope_type": "longrope", "short_factor": [1.0]}), "'longrope'"),
        (
            tiny_config(**GEMMA3 | {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}),
            "rope_parameters: expected an object for each of full_attention, sliding_attention, got {'rope_type'",
        ),
        *(
            (
                tiny_config(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5, rope_parameters=other),
                "rope_parameters: expected the values of rope_scaling, got {",
            )
            for other in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6})
        ),
        (tiny_config(hidden_size="32"), "hidden_size: expected a whole number above 0, got '32'"),
        (tiny_config(hidden_size=2**40), "hidden_size: expected a whole number above 0, got 1099511627776"),
        (tiny_config(rms_norm_eps=float("inf")), "rms_norm_eps: expected a number above 0, got inf"),
        (tiny_config(tie_word_embeddings=0), "tie_word_embeddings: expected true or false"),
        (tiny_config(model_type="llama4"), "got 'llama4'"),
        (tiny_config(model_type=["llama"]), "model_type"),
    ],
)
def test_fields_that_change_results_are_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        checked(config)
    assert field in str(caught.value)


def checked(config: dict[str, Any]) -> ModelConfig:
    """Return the configuration of a model after all checks of its fields."""
    check_fields("config.json", config)
    return from_hugging_face(make_config(config, "config.json"), "float32")


@pytest.mark.parametrize(
    ("family", "types", "windows"),
    [
        ({"model_type": "mistral"}, ["sliding_attention"] * 2, (4096, 4096)),
        (QWEN2 | {"use_sliding_window": True}, ["full_attention", "sliding_attention"], (None, 4096)),
        (QWEN2, ["full_attention"] * 2, ()),
    ],
)
def test_a_family_has_a_window_where_the_file_states_none(
    family: dict[str, Any], types: list[str], windows: tuple[int | None, ...]
) -> None:
    config = tiny_config(**family, layer_types=types)
    assert "sliding_window" not in config and checked(config).windows == windows
    if windows:  # negative control
        with pytest.raises(CheckpointError, match="expected full_attention without a sliding window"):
            checked(config | {"sliding_window": None})


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_a_tied_model_keeps_a_head_of_its_own(weights: Any, tmp_path: Path) -> None:
    """Check that the head of the file is used and exported, as in `transformers` 5."""
    config = tiny_config()
    folder = write_checkpoint(tmp_path / "in", config | {"tie_word_embeddings": False})
    expected = logits_of(load_model(folder, weights=weights))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    lm = load_model(folder, weights=weights)
    np.testing.assert_array_equal(logits_of(lm), expected)
    save_model(lm, tmp_path / "out")
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    np.testing.assert_allclose(logits_of(load_model(tmp_path / "out")), expected, atol=1e-4)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert load_model(folder).config.tied
    assert np.abs(logits_of(load_model(folder, weights=weights)) - expected).max() > 1, "negative control"


def test_heads_and_embeddings_that_are_missing(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path, config)
    expected = logits_of(load_model(folder))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(logits_of(load_model(folder)), expected)
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    del config["tie_word_embeddings"]  # false in a llama
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"expected lm_head.weight, because tie_word_embeddings is false, got none"
    ):
        load_model(folder)


@pytest.mark.parametrize(("extra", "rows"), [(3, 0), (0, 40)])
def test_tokens_without_a_row_or_a_name_are_never_sampled(extra: int, rows: int, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "in", extra, rows)
    lm = load_model(folder)
    size = len(byte_level())
    unused = (size, size + 3) if extra else (size + 6, size + 40)
    assert lm.config.unused_tokens == (unused,)
    logits = logits_of(lm, np.arange(8)[None])
    assert (logits[..., unused[0] : unused[1]] == HIDDEN).all()
    assert (np.asarray(jax.nn.softmax(logits))[..., unused[0] : unused[1]] == 0).all()
    free = replace(lm.model, config=replace(lm.config, unused_tokens=()))
    assert (logits_of(replace(lm, model=free), np.arange(8)[None]) > HIDDEN).all(), "negative control"
    save_model(lm, tmp_path / "out")
    assert load_model(tmp_path / "out").config == lm.config
    if extra:
        with pytest.raises(RequestError, match=f"got the unused id {size}"):
            Engine(lm, max_length=64, max_batch=1).generate([[size]], SamplingParams(max_new_tokens=1))


def test_an_end_of_text_without_a_row_is_refused(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path, extra=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": config["vocab_size"]}))
    with pytest.raises(CheckpointError, match="expected an id with a row in the embedding"):
        load_model(folder)


def in_two_shards(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_single_file_goes_before_a_stale_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), seed=3)
    in_two_shards(tmp_path)
    write_checkpoint(tmp_path, tiny_config(), seed=4)
    for name, tensor in read_stored(find_tensors(tmp_path)):
        np.testing.assert_array_equal(tensor, seeded_tensors(tiny_config(), 4)[name])


def test_a_shard_holds_what_the_index_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config())
    weight_map = in_two_shards(tmp_path)
    first, second = sorted(set(weight_map.values()))
    norm = "model.norm.weight"
    other = second if weight_map[norm] == first else first
    stale = load_file(tmp_path / other) | {norm: np.full(32, 9, np.float32)}
    save_file(stale, tmp_path / other)
    np.testing.assert_array_equal(dict(read_stored(find_tensors(tmp_path)))[norm], seeded_tensors(tiny_config())[norm])
    for wrong, message in (
        (weight_map | {"model.lost": first}, "expected model.lost in .*, got a file without it"),
        (weight_map | {"model.lost": "../x.safetensors"}, "weight_map: expected names"),
        (weight_map | {"model.lost": "x.safetensors"}, "expected x.safetensors in the folder, got none"),
        ([], "weight_map: expected names"),
    ):
        write_index(tmp_path, wrong)
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)


def test_a_folder_with_a_model_and_an_adapter_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config())
    (tmp_path / "adapter_config.json").write_text("{}")
    load_model(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match="expected a model or an adapter, got both"):
        load_model(tmp_path)


def test_a_yarn_field_that_transformers_does_not_read_changes_nothing() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    configs = [tiny_config(rope_scaling=values) for values in (scaling, scaling | {"attn_factor": 0.878})]
    for config in configs:
        check_fields("config.json", config)
    plain, other = (from_hugging_face(make_config(config, "config.json"), "float32") for config in configs)
    assert plain == other


def test_a_rotary_embedding_may_be_in_the_fields_of_two_versions() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}
    configs = [tiny_config(**fields) for fields in (old, {"rope_theta": None} | new, old | new)]
    for config in configs:
        check_fields("config.json", config)
    first, *others = (from_hugging_face(make_config(config, "config.json"), "float32") for config in configs)
    assert others == [first, first] and (first.rope.theta, first.rope.factor) == (5e5, 2.0)


def test_a_kind_of_scaling_may_have_its_older_name() -> None:
    gemma = {name: value for name, value in tiny_config(**GEMMA3).items() if name != "rope_parameters"}
    for name in ("type", "rope_type"):
        config = gemma | {"rope_scaling": {name: "linear", "factor": 8.0}}
        check_fields("config.json", config)
        rope = from_hugging_face(make_config(config, "config.json"), "float32").rope
        assert (rope.scaling, rope.factor) == ("linear", 8.0)


def test_tensors_may_have_different_dtypes(tmp_path: Path) -> None:
    """Check tensors of different dtypes that are joined to one parameter (query, key and value)."""
    config = tiny_config()
    kinds = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
    tensors = {name: t.astype(kinds[n % 4]) for n, (name, t) in enumerate(seeded_tensors(config).items())}
    mixed = load_model(write_checkpoint(tmp_path / "mixed", config, tensors=tensors))
    rounded = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    plain = load_model(write_checkpoint(tmp_path / "plain", config, tensors=rounded))
    assert jax.tree.all(jax.tree.map(np.array_equal, mixed.params, plain.params))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8])
def test_tensors_of_quantised_checkpoints_are_refused(dtype: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config())
    save_file(load_file(tmp_path / "model.safetensors") | {"x": np.zeros(2, dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: x: expected one of .*, got [UI]\d+"):
        load_model(tmp_path)


SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "model.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("file", SIDE_FILES)
def test_broken_side_files_are_named(file: str, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path)
    wrong = {"empty": b"", "Git LFS pointer": LFS.encode(), "byte": b"\xff\xfe{"}
    if file.endswith(".json"):
        wrong |= {"invalid JSON": b"{", "list": b"[1]", "nested too deeply": b"[" * 100_000}
    if file == "chat_template.jinja":
        wrong["Jinja"] = b"{% if %}"
    if file == "model.safetensors":
        wrong["broken file"] = wrong.pop("byte")
    for reason, content in wrong.items():
        (folder / file).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            load_model(folder)
        message = str(caught.value)
        assert f"{file}: expected " in message, message
        assert reason in message, message
        assert "\n" not in message


def test_a_tokenizer_needs_its_vocabulary(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: expected a tokenizer, got a broken one"):
        load_model(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a tokenizer, got none of tokenizer.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("chat_template", 3, "got int"),
        ("chat_template", [{"name": "default"}], "got list"),
        ("model_max_length", "long", "got 'long'"),
        ("tokenizer_class", 3, "got 3"),
    ],
)
def test_settings_of_a_tokenizer_are_checked(name: str, value: Any, got: str, tmp_path: Path) -> None:
    file = with_tokenizer(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {name}: expected .*{got}"):
        load_model(tmp_path)


@pytest.mark.parametrize("prefixes", [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_the_text_part_of_a_model_that_reads_images(
    prefixes: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the tensor names of older and newer versions of `transformers`."""
    text = {name: value for name, value in tiny_config(**GEMMA3).items() if value is not None}
    alone = load_model(write_checkpoint(tmp_path / "alone", text))
    folder = tmp_path / "whole"
    folder.mkdir()
    beside = {"model_type": "gemma3", "eos_token_id": [1, 5], "vision_config": {"hidden_size": 8}, "boi_token_index": 3}
    (folder / "config.json").write_text(json.dumps(beside | {"text_config": text}))
    inside, image = prefixes
    tensors = {inside + name.removeprefix("model."): tensor for name, tensor in seeded_tensors(text).items()}
    tensors[f"{image}vision_tower.x.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors")
    lm = load_model(folder)
    assert "1 tensors of its image part are left out" in caplog.text
    assert (lm.config, lm.end_ids) == (alone.config, (1, 5))
    np.testing.assert_array_equal(logits_of(lm), logits_of(alone))
    save_model(lm, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gemma3_text"
    np.testing.assert_array_equal(logits_of(load_model(tmp_path / "out")), logits_of(alone))
