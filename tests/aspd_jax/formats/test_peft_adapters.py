"""Adapters in PEFT's format: written after training, merged on loading, the same logits as `peft` computes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

import aspd
from aspd_jax import LanguageModel, build_layout, load_model, save_model
from aspd_jax.errors import CheckpointError
from aspd_jax.formats.adapter import CONFIG, WEIGHTS, open_adapter
from aspd_jax.language_model import put_adapter, save_adapter
from aspd_jax.model.adapter import Rows
from aspd_jax.model.lora import merge_adapters
from aspd_jax.model.weights import ADAPTERS
from tests.aspd_jax.model.test_model import SPECIAL
from tests.aspd_jax.test_tokens import byte_level
from tests.conftest import tiny_config, write_checkpoint
from tests.helpers.make_parity import GEMMA3, QWEN2

RANK, ALPHA = 3, 12.0
CASES = {
    "tied": tiny_config(tie_word_embeddings=True),
    "untied": tiny_config(),
    "qwen2": tiny_config(**QWEN2, tie_word_embeddings=True),
    "gemma3": tiny_config(**GEMMA3),
}


def base_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A tiny model with a tokenizer, without the six tokens."""
    tokenizer = byte_level()
    whole = config | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    write_checkpoint(folder, whole)
    tokenizer.save_pretrained(folder)
    return folder


def as_if_trained(folder: Path) -> LanguageModel:
    """A model with adapters and rows of new tokens that are no longer what they were at first."""
    lm = load_model(folder, lora_rank=RANK, lora_alpha=ALPHA)
    random = np.random.default_rng(3)
    leaves = {
        path: jnp.asarray(random.standard_normal(leaf.shape) * 0.3, leaf.dtype).astype(jnp.bfloat16).astype(leaf.dtype)
        if path[-1] in ADAPTERS or path[0] == "new_tokens"
        else leaf
        for path, leaf in flatten_dict(lm.params).items()
    }
    lm.params = unflatten_dict(leaves)
    return lm


def logits(lm: LanguageModel) -> np.ndarray:
    assert lm.special_tokens is not None
    tokens = np.array([[*range(40, 60), *lm.special_tokens.ids]])
    return np.asarray(lm.model.apply({"params": lm.params}, tokens, build_layout(tokens, SPECIAL)))


@pytest.mark.parametrize("name", CASES)
def test_a_written_adapter_merges_into_what_was_trained(name: str, tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "base", CASES[name])
    trained = as_if_trained(folder)
    save_adapter(trained, tmp_path / "adapter", "tiny")
    merged = load_model(folder, adapter=tmp_path / "adapter")
    assert merged.config.lora_rank == 0 and merged.special_tokens == trained.special_tokens
    np.testing.assert_allclose(logits(merged), logits(trained), atol=2e-4)
    assert np.abs(logits(load_model(folder)) - logits(trained)).max() > 0.1
    save_model(trained, tmp_path / "exported")
    np.testing.assert_allclose(logits(load_model(tmp_path / "exported")), logits(trained), atol=2e-4)
    converted = ["--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "converted")]
    assert aspd.main(["convert", str(folder), *converted]) == 0
    np.testing.assert_allclose(logits(load_model(tmp_path / "converted")), logits(trained), atol=2e-4)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} >= {CONFIG, WEIGHTS, "aspd.json", "tokenizer.json"}


@pytest.mark.parametrize("name", CASES)
def test_peft_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = base_folder(tmp_path / "base", CASES[name])
    trained = as_if_trained(folder)
    save_adapter(trained, tmp_path / "adapter", "tiny")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    base.resize_token_embeddings(trained.config.vocab_size)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert trained.special_tokens is not None
    with torch.no_grad():
        theirs = model(torch.tensor([[*range(40, 60), *trained.special_tokens.ids]])).logits.numpy()
    tokens = np.array([[*range(40, 60), *trained.special_tokens.ids]])
    # One sequence without structure for `transformers`, whatever its tokens are called.
    layout = build_layout(tokens, type(SPECIAL)(-1, -2, -3, -4, -5, -6))
    ours = np.asarray(trained.model.apply({"params": trained.params}, tokens, layout))
    known = np.isin(np.arange(ours.shape[-1]), [*range(base_rows(folder)), *trained.special_tokens.ids])
    np.testing.assert_allclose(ours[..., known], theirs[..., known], atol=1e-3)


def base_rows(folder: Path) -> int:
    """Rows that the base has; a Qwen tokenizer may have a token more, which no row stands for."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def test_an_adapter_of_peft_is_merged(tmp_path: Path) -> None:
    """Check an adapter with separate down factors for query, key and value, which share one here."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = base_folder(tmp_path / "base", CASES["untied"])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    names = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        theirs = model(torch.tensor([list(range(40, 60))])).logits.numpy()
    lm = load_model(folder, adapter=tmp_path / "adapter")
    tokens = np.array([list(range(40, 60))])
    ours = np.asarray(lm.model.apply({"params": lm.params}, tokens, build_layout(tokens, SPECIAL)))
    np.testing.assert_allclose(ours[..., : theirs.shape[-1]], theirs, atol=1e-3)


def test_only_adapters_and_new_rows_get_gradients(tmp_path: Path) -> None:
    """Check the parameters that `train.setup` trains; rows of other tokens do not change in training or merging."""
    from train.step import is_trained

    lm = as_if_trained(base_folder(tmp_path / "base", CASES["tied"]))
    trained = {path for path in flatten_dict(lm.params) if is_trained(path, lm.config)}
    assert {path[-1] for path in trained} == {*ADAPTERS, "embedding"}
    assert ("new_tokens", "embedding") in trained and ("embedding", "embedding") not in trained
    merged = merge_adapters(lm.config, lm.params)["embedding"]["embedding"]
    same = (np.asarray(merged) == np.asarray(lm.params["embedding"]["embedding"])).all(axis=1)
    assert np.flatnonzero(~same).tolist() == list(lm.config.new_tokens)


def test_layers_without_an_adapter_are_not_copied(tmp_path: Path) -> None:
    lm = load_model(base_folder(tmp_path, CASES["tied"]))
    params = jax.tree.map(np.asarray, lm.params)
    merged = merge_adapters(lm.config, params)
    assert jax.tree.all(jax.tree.map(np.shares_memory, params, merged))


def test_an_adapter_for_another_base_is_refused(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "base", CASES["tied"])
    save_adapter(as_if_trained(folder), tmp_path / "adapter", "tiny")
    wider = base_folder(tmp_path / "wider", CASES["tied"] | {"intermediate_size": 64})
    with pytest.raises(CheckpointError, match=r": expected the shape \[32, 64\] of \S+wider, got \[32, 48\]"):
        load_model(wider, adapter=tmp_path / "adapter")
    deeper = base_folder(tmp_path / "shallow", CASES["tied"] | {"num_hidden_layers": 1})
    with pytest.raises(
        CheckpointError, match=r"expected a base with model\.layers\.1\.mlp\.down_proj, got none in \S+shallow"
    ):
        load_model(deeper, adapter=tmp_path / "adapter")
    bare = write_checkpoint(tmp_path / "bare", CASES["tied"])
    with pytest.raises(CheckpointError, match=r"expected a base with the tokens \["):
        load_model(bare, adapter=tmp_path / "adapter")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), f"expected an adapter folder with .*, got no {WEIGHTS}"),
        (lambda folder: (folder / CONFIG).write_text("{"), "Expecting property name"),
        (lambda folder: changed(folder, peft_type="IA3"), "peft_type: expected LORA, got 'IA3'"),
        (lambda folder: changed(folder, use_dora=True), "use_dora: expected None or False or .*, got True"),
        (lambda folder: changed(folder, trainable_token_indices=None), r"trainable_token_indices: expected token ids"),
        (lambda folder: without(folder, "lora_B"), "lora_A.weight: expected a lora_B beside it, got none"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"0" * 100), f"{WEIGHTS}: expected safetensors, got a broken"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), f"{WEIGHTS}: expected safetensors, got an empty file"),
        (lambda folder: (folder / CONFIG).write_text("version https://git-lfs.github.com/spec/v1"), "Git LFS pointer"),
        (lambda folder: (folder / "aspd.json").write_text("[]"), "aspd.json: expected a JSON object, got list"),
        (lambda folder: (folder / "aspd.json").write_text('{"layers": 3}'), "aspd.json: expected .*, got layers 3"),
        (lambda folder: changed(folder, use_rslora="false"), "use_rslora: expected true or false, got 'false'"),
        (
            lambda folder: changed(folder, lora_alpha=float("nan")),
            "lora_alpha of .*: expected a number above 0, got nan",
        ),
        (lambda folder: changed(folder, r=0), "r of .*: expected a number above 0, got 0"),
        (lambda folder: stored_as(folder, ml_dtypes.float8_e4m3fn), "expected one of .*, got F8_E4M3"),
        (lambda folder: stored_as(folder, np.int8), "expected one of .*, got I8"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(edit: Any, message: str, tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "base", CASES["tied"])
    save_adapter(as_if_trained(folder), tmp_path / "adapter", "tiny")
    edit(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, adapter=tmp_path / "adapter")


def changed(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


def stored_as(folder: Path, dtype: Any) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, folder / WEIGHTS)


def without(folder: Path, part: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor for name, tensor in tensors.items() if part not in name}, folder / WEIGHTS)


def test_int8_and_a_mesh_take_adapters_too(tmp_path: Path) -> None:
    from aspd_jax.sharding import make_mesh

    folder = base_folder(tmp_path / "base", CASES["tied"])
    save_adapter(as_if_trained(folder), tmp_path / "adapter", "tiny")
    exact = logits(load_model(folder, adapter=tmp_path / "adapter"))
    rounded = logits(load_model(folder, weights="int8", adapter=tmp_path / "adapter"))
    assert 0 < np.abs(rounded - exact).mean() < 0.2 * np.abs(exact).mean()
    if jax.device_count() >= 2:
        spread = load_model(folder, mesh=make_mesh({"tensor": 2}), adapter=tmp_path / "adapter")
        np.testing.assert_allclose(logits(spread)[..., : exact.shape[-1]], exact, atol=1e-3)


REFUSED: dict[str, Any] = {
    **{"init_lora_weights": "pissa_niter_4", "alora_invocation_tokens": [5, 6], "lora_bias": True, "bias": "all"},
    **{"modules_to_save": ["lm_head"], "target_parameters": ["mlp.up_proj.weight"], "layer_replication": [[0, 2]]},
    **{"use_qalora": True, "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 3}, "megatron_config": {"a": 1}},
    **{"task_type": "SEQ_CLS", "fan_in_fan_out": True, "some_later_field": 3},
}
NEUTRAL: dict[str, Any] = {
    **{"init_lora_weights": "gaussian", "modules_to_save": [], "layers_to_transform": [0], "layers_pattern": "layers"},
    **{"revision": "main", "auto_mapping": {"base_model_class": "X"}, "peft_version": "9.9", "exclude_modules": ["x"]},
    **{"eva_config": {"rho": 2.0}, "loftq_config": {}, "qalora_group_size": 16, "megatron_core": "megatron.core"},
    **{"lora_dtype": "bfloat16", "lorap_emb_lr": 1e-6},
    **{"inference_mode": False, "lora_dropout": 0.1, "some_later_field": None, "another_one": False},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter for it that `peft` could have written."""
    folder = tmp_path_factory.mktemp("pair")
    base = base_folder(folder / "base", CASES["untied"])
    save_adapter(as_if_trained(base), folder / "adapter", "tiny")
    return base, folder / "adapter"


def with_fields(adapter: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(adapter, folder)
    changed(folder, **values)
    return folder


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_asks_for_more_is_refused(field: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = with_fields(pair[1], tmp_path / "adapter", **{field: REFUSED[field]})
    with pytest.raises(
        CheckpointError, match=re.escape(f"{field}: expected ") + ".*" + re.escape(repr(REFUSED[field]))
    ):
        open_adapter(folder)


def test_neutral_fields_change_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, other = open_adapter(pair[1]), open_adapter(with_fields(pair[1], tmp_path / "adapter", **NEUTRAL))
    assert plain.factors.keys() == other.factors.keys()
    assert all(a.scale == b.scale for a, b in zip(plain.factors.values(), other.factors.values(), strict=True))


def test_scales_are_those_of_peft(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Check that the first pattern that matches the end of a name applies, and alpha / rank or alpha / sqrt(rank)."""
    patterns = {"alpha_pattern": {r"layers\.1\.mlp\..*": 5, "up_proj": 7, "proj": 100}}
    plain = open_adapter(with_fields(pair[1], tmp_path / "plain", **patterns)).factors
    rooted = open_adapter(with_fields(pair[1], tmp_path / "rooted", **patterns, use_rslora=True)).factors
    for name, alpha in (("1.mlp.up_proj", 5), ("0.mlp.up_proj", 7), ("1.self_attn.q_proj", ALPHA)):
        assert plain[f"model.layers.{name}"].scale == pytest.approx(alpha / RANK)
        assert rooted[f"model.layers.{name}"].scale == pytest.approx(alpha / RANK**0.5)
    with pytest.raises(CheckpointError, match=r"q_proj: expected factors of rank 4 as in .*, got \["):
        open_adapter(with_fields(pair[1], tmp_path / "rank", rank_pattern={"q_proj": 4}))


def test_rows_of_ordinary_tokens_are_merged(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    folder = with_fields(adapter, tmp_path / "adapter", trainable_token_indices=[7, 5])
    tensors = {k: v for k, v in load_file(folder / WEIGHTS).items() if "token_adapter" not in k}
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    save_file(tensors | {name: rows}, folder / WEIGHTS)
    before, merged = load_model(base), load_model(base, adapter=folder)
    old, new = (np.asarray(lm.params["embedding"]["embedding"]) for lm in (before, merged))
    np.testing.assert_array_equal(new[[7, 5]], rows)
    assert np.flatnonzero((new != old).any(axis=1))[:2].tolist() == [5, 7]
    within_images = name.replace("model.embed", "model.language_model.embed")  # in Gemma3ForConditionalGeneration
    save_file(tensors | {within_images: rows}, folder / WEIGHTS)
    np.testing.assert_array_equal(open_adapter(folder).rows["model.embed_tokens"].values, rows)
    known = base_rows(base)
    changed(folder, trainable_token_indices=[7, known + 50])
    with pytest.raises(
        CheckpointError, match=rf"expected a base with the tokens \[7, {known + 50}\], got one with {known} "
    ):
        load_model(base, adapter=folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda a: replace(a, factors={**a.factors, "lm_head": next(iter(a.factors.values()))}),
            "expected a base with slots for factors of lm_head, got one without. Merge",
        ),
        (
            lambda a: replace(a, rows={**a.rows, "model.norm": next(iter(a.rows.values()))}),
            "expected a base with slots for rows of model.norm, got one without. Merge",
        ),
        (
            lambda a: replace(a, rows={"model.embed_tokens": Rows((5, 7), np.ones((2, 32), np.float32))}),
            r"trainable_token_indices: expected the ids of the six tags, \[\d.*, got \[5, 7\]. Merge",
        ),
    ],
)
def test_what_a_slot_does_not_hold_is_refused(edit: Any, message: str, pair: tuple[Path, Path]) -> None:
    lm = load_model(pair[0], adapters=1, lora_rank=RANK)
    before, adapter = lm.params, open_adapter(pair[1])
    with pytest.raises(CheckpointError, match=message):
        put_adapter(lm, 0, edit(adapter))
    assert lm.params is before
    put_adapter(lm, 0, adapter)


@pytest.mark.parametrize(
    "name", ["q_proj.lora_magnitude_vector", "q_proj.lora_embedding_A", "q_proj.lora_A.bias", "odd", "x.lora_B.weight"]
)
def test_a_tensor_that_no_field_explains_is_refused(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = with_fields(pair[1], tmp_path / "adapter")
    save_file(load_file(folder / WEIGHTS) | {f"base_model.model.{name}": np.ones((2, 2), np.float32)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        open_adapter(folder)
