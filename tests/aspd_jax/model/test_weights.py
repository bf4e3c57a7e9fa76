from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from aspd_jax import load_model, save_model
from aspd_jax.errors import CheckpointError, ConfigError
from aspd_jax.formats.folder import write_tensors
from aspd_jax.formats.shards import find_tensors, read_stored
from aspd_jax.language_model import save_adapter
from aspd_jax.layout import HIDDEN
from aspd_jax.model.weights import _with_new_rows, load_parameters, tensors_from
from aspd_jax.sharding import make_mesh, partition_spec
from aspd_jax.tokens import add_special_tokens
from tests.aspd_jax.model.test_model import logits_of
from tests.aspd_jax.test_tokens import byte_level
from tests.conftest import seeded_tensors, tiny_config, write_checkpoint
from tests.helpers.make_parity import CASES, torch_logits


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_export_gives_back_every_tensor(name: str, tmp_path: Path) -> None:
    lm = load_model(write_checkpoint(tmp_path / "in", CASES[name]))
    save_model(lm, tmp_path / "out")
    before, after = read_tensors(tmp_path / "in"), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for tensor in before:
        np.testing.assert_array_equal(before[tensor], after[tensor])
    assert load_model(tmp_path / "out").config == lm.config


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_the_export(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lm = load_model(write_checkpoint(tmp_path / "in", CASES[name]))
    save_model(lm, tmp_path / "out")
    np.testing.assert_array_equal(torch_logits(tmp_path / "in"), torch_logits(tmp_path / "out"))


def test_sharded_files_in_and_out(tmp_path: Path) -> None:
    lm = load_model(write_checkpoint(tmp_path / "in", tiny_config()))
    (tmp_path / "out").mkdir()
    write_tensors(tmp_path / "out", tensors_from(lm.config, lm.params), shard_bytes=8_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    again = load_parameters("out", read_stored(find_tensors(tmp_path / "out")), lm.model)
    jax.tree.map(np.testing.assert_array_equal, lm.params, again)
    next((tmp_path / "out").glob("model-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"expected model-00002-\S+ in the folder, got none"):
        load_parameters("out", read_stored(find_tensors(tmp_path / "out")), lm.model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [0, 3, 40])
def test_new_rows_are_the_mean_of_the_old(tied: bool, padding: int, tmp_path: Path) -> None:
    """The tokenizer has n tokens, the checkpoint n + padding rows; the six tags need rows n to n + 5."""
    tokenizer = byte_level()
    old = len(tokenizer)
    config = tiny_config(vocab_size=old + padding, tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id)
    write_checkpoint(tmp_path / "in", config)
    tokenizer.save_pretrained(tmp_path / "in")
    lm = load_model(tmp_path / "in")
    assert lm.special_tokens is not None
    assert lm.special_tokens.ids == tuple(range(old, old + 6))
    assert lm.config.vocab_size == max(old + 6, old + padding)
    save_model(lm, tmp_path / "out")
    before, after = read_tensors(tmp_path / "in"), read_tensors(tmp_path / "out")
    names = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    for name in names:
        np.testing.assert_array_equal(after[name][:old], before[name][:old])
        mean = before[name][:old].mean(axis=0)
        for row in range(old, old + 6):
            np.testing.assert_allclose(after[name][row], mean, atol=1e-6)
        np.testing.assert_array_equal(after[name][old + 6 :], before[name][old + 6 :])
    for name in set(before) - set(names):
        np.testing.assert_array_equal(before[name], after[name])
    # A second round adds nothing, and the tags are in the exported tokenizer.
    again = load_model(tmp_path / "out")
    assert again.special_tokens == lm.special_tokens
    assert again.config == lm.config
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == lm.tokenizer.get_vocab()


@pytest.mark.parametrize("padding", [0, 40])
def test_tags_without_a_row_get_one_although_the_tokenizer_has_them(padding: int, tmp_path: Path) -> None:
    tokenizer = byte_level()
    old = len(tokenizer)
    write_checkpoint(tmp_path, tiny_config(vocab_size=old, eos_token_id=tokenizer.eos_token_id))
    add_special_tokens(tokenizer)
    tokenizer.add_tokens([f"[PAD{number}]" for number in range(padding)])
    tokenizer.save_pretrained(tmp_path)
    lm = load_model(tmp_path)
    rows = np.asarray(lm.params["embedding"]["embedding"])
    assert lm.special_tokens is not None and lm.special_tokens.ids == tuple(range(old, old + 6))
    np.testing.assert_allclose(rows[old : old + 6], np.tile(rows[:old].mean(axis=0), (6, 1)), atol=1e-6)
    np.testing.assert_array_equal(rows[:old], read_tensors(tmp_path)["model.embed_tokens.weight"])
    save_adapter(load_model(tmp_path, lora_rank=2), tmp_path / "adapter", "tiny")
    merged = np.asarray(load_model(tmp_path, adapter=tmp_path / "adapter").params["embedding"]["embedding"])
    np.testing.assert_allclose(merged[old : old + 6], rows[old : old + 6], atol=1e-2)


def test_the_mean_of_the_old_rows_takes_no_copy_of_them() -> None:
    """Check bfloat16, whose sums need float32."""
    rows = np.random.default_rng(0).standard_normal((40000, 8)).astype(ml_dtypes.bfloat16) + ml_dtypes.bfloat16(1)
    tracemalloc.start()
    grown = _with_new_rows(rows, 40001, {40000: 40000})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grown.dtype == rows.dtype and peak < 1.5 * rows.nbytes
    np.testing.assert_allclose(grown[40000].astype(float), rows.astype(float).mean(axis=0), atol=5e-3)


def test_bfloat16_round_trip(tmp_path: Path) -> None:
    lm = load_model(write_checkpoint(tmp_path / "in", tiny_config()), dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(lm.params)} == {"bfloat16"}
    save_model(lm, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = load_model(tmp_path / "out", dtype="bfloat16")
    again.params["embedding"]["embedding"] = again.params["embedding"]["embedding"].astype("float32")  # as if trained
    save_model(again, tmp_path / "trained")
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["torch_dtype"] == "float32"
    again = load_model(tmp_path / "out", dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)


def edited(folder: Path, edit: Any) -> Path:
    tensors = seeded_tensors(tiny_config())
    edit(tensors)
    write_checkpoint(folder, tiny_config())
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "configuration, got no model.norm.weight$"),
        (lambda t: t.update({"model.extra": np.zeros(1)}), "configuration, got unknown model.extra$"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(5)}),
            r"model.norm.weight: expected the shape \[32\], got \[5\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((9, 32))}),
            r"lm_head.weight: expected the shape \[64, 32\], got \[9, 32\]",
        ),
    ],
)
def test_wrong_tensors_are_named(edit: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(edited(tmp_path, edit))


def test_derived_and_tied_tensors_may_be_stored(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    write_checkpoint(tmp_path, config)
    tensors = seeded_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(tmp_path).config.tied


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "expected a Hugging Face folder, a .gguf file or one of demo.*, got no such file"),
        (lambda folder: folder.mkdir(), "expected config.json, got none"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")), "config.json: "),
        (
            lambda folder: (
                write_checkpoint(folder, tiny_config()),
                (folder / "model.safetensors").rename(folder / "x.bin"),
            ),
            "expected model.safetensors, got none; convert its .bin files",
        ),
    ],
)
def test_folders_that_are_no_checkpoints(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "model")


def test_export_does_not_overwrite(tmp_path: Path) -> None:
    lm = load_model(write_checkpoint(tmp_path, tiny_config()))
    with pytest.raises(CheckpointError, match="expected a new or empty folder"):
        save_model(lm, tmp_path)


MESHES = [{"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.several
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_parameters_land_in_their_shardings(shape: dict[str, int], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    mesh = make_mesh(shape)
    lm, alone = load_model(folder, mesh=mesh), load_model(folder)
    leaves = flatten_dict(lm.params)
    fsdp, tensor = ("fsdp" if shape.get("fsdp", 1) > 1 else None), ("tensor" if shape.get("tensor", 1) > 1 else None)
    expected = {
        ("embedding", "embedding"): (tensor, fsdp),
        ("layer_0", "attention", "query_key_value", "kernel"): (tensor, None, None, fsdp),
        ("layer_0", "feed_forward", "gate_up", "kernel"): (None, tensor, fsdp),
        ("layer_1", "attention", "output", "kernel"): (fsdp, tensor, None),
        ("layer_0", "feed_forward", "down", "kernel"): (fsdp, tensor),
        ("layer_0", "attention_norm", "scale"): (None,),
    }
    for path, spec in expected.items():
        assert tuple(leaves[path].sharding.spec) == spec, path
        assert leaves[path].sharding.mesh.shape == mesh.shape
    one, many = (logits_of(of) for of in (alone, lm))
    np.testing.assert_allclose(one, many[..., : alone.config.vocab_size], atol=1e-3)


@pytest.mark.several
def test_heads_are_split_where_they_are_too_few(tmp_path: Path) -> None:
    """Check two kv heads on four devices: all kernels are sharded, and logits are equal."""
    folder = write_checkpoint(tmp_path, tiny_config())
    lm, alone = load_model(folder, mesh=make_mesh({"tensor": 4})), load_model(folder)
    assert lm.config.kv_heads == 2
    kernel = lm.params["layer_0"]["attention"]["query_key_value"]["kernel"]
    assert tuple(kernel.sharding.spec) == (None, None, "tensor", None)
    one, many = (logits_of(of) for of in (alone, lm))
    np.testing.assert_allclose(one, many[..., : alone.config.vocab_size], atol=1e-3)


@pytest.mark.several
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_is_padded_for_a_mesh_and_cut_on_export(tied: bool, tmp_path: Path) -> None:
    """Check 263 tokens on eight devices: padding is sharded, is never sampled, and is not exported."""
    config = tiny_config(vocab_size=263, tie_word_embeddings=tied)
    folder = write_checkpoint(tmp_path / "in", config)
    mesh = make_mesh({"tensor": 8})
    lm, alone = load_model(folder, mesh=mesh), load_model(folder)
    assert (lm.config.vocab_size, lm.config.padded_vocab_size, alone.config.padded_vocab_size) == (263, 1024, 263)
    for name in ("embedding",) if tied else ("embedding", "head"):
        (leaf,) = jax.tree.leaves(lm.params[name])
        assert leaf.sharding.shard_shape(leaf.shape) == (128, lm.config.hidden_size)
    one, many = logits_of(alone), logits_of(lm)
    np.testing.assert_allclose(one, many[..., :263], atol=1e-3)
    assert (many[..., 263:] == HIDDEN).all()
    save_model(lm, tmp_path / "out")
    before, after = read_tensors(folder), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])
    assert load_model(tmp_path / "out").config == alone.config
    # Negative control: as it is stored, it cannot be split.
    assert tuple(partition_spec(("vocabulary", "embed"), (263, 64), mesh)) == (None, None)


@pytest.mark.several
def test_an_axis_that_does_not_divide_is_replicated() -> None:
    mesh = make_mesh({"tensor": 8})
    assert tuple(partition_spec(("kv_heads", "head"), (2, 60), mesh)) == (None, None)
    assert tuple(partition_spec(("kv_heads", "head"), (2, 64), mesh)) == (None, "tensor")
    assert tuple(partition_spec(("kv_heads", "head"), (16, 64), mesh)) == ("tensor", None)
    with pytest.raises(ConfigError, match=r"logical axis: expected one of .*, got 'mlp'"):
        partition_spec(("mlp",), (8,), mesh)
    with pytest.raises(ConfigError, match="mesh: expected the axes data, fsdp, tensor, got model"):
        make_mesh({"model": 8})
    with pytest.raises(ConfigError, match="expected 16 devices, got 8"):
        make_mesh({"tensor": 16})
