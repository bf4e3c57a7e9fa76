"""Written GGUF files: equal when read, and with the keys of a file of llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

import aspd
from aspd_jax import LanguageModel, load_model, save_model
from aspd_jax.errors import CheckpointError
from aspd_jax.formats import find_model, open_checkpoint
from aspd_jax.formats.gguf_tokenizer import SPLITTINGS, pre_tokenizer
from aspd_jax.formats.gguf_writer import PROBE
from tests.aspd_jax.formats.test_gguf import with_keys
from tests.aspd_jax.formats.test_peft_adapters import as_if_trained, base_folder, logits
from tests.aspd_jax.test_tokens import byte_level, sentencepiece_like
from tests.conftest import tiny_config, write_checkpoint
from tests.helpers.make_parity import QWEN2

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
CASES: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "tied": tiny_config(tie_word_embeddings=True),
    "qwen2": tiny_config(**QWEN2, tie_word_embeddings=True),
    "qwen3": tiny_config(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=8),
    "linear": tiny_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "yarn": tiny_config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    "llama3": tiny_config(rope_scaling=LLAMA3, rope_theta=500000.0, max_position_embeddings=65536),
}


def gguf_ready(name: str = "qwen2") -> PreTrainedTokenizerFast:
    """A tokenizer that cuts as a known one does."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(SPLITTINGS[name])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


def base(folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Path:
    whole = config | {"vocab_size": len(tokenizer) + 3, "eos_token_id": tokenizer.eos_token_id}  # three rows of padding
    write_checkpoint(folder, whole)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    lm = load_model(base(tmp_path / "base", CASES[name], gguf_ready()))
    save_model(lm, tmp_path / "model.gguf")
    back = load_model(tmp_path / "model.gguf")
    assert back.config == lm.config and back.end_ids == lm.end_ids and back.special_tokens == lm.special_tokens
    np.testing.assert_allclose(logits(back), logits(lm), atol=1e-5)
    assert back.tokenizer.chat_template == lm.tokenizer.chat_template
    for text in ("Some words, in a list: 3.\n- four\n", "<|title|>It's é 🙂<|/title|> <|end|>"):
        assert back.tokenizer.encode(text) == lm.tokenizer.encode(text)
    with pytest.raises(CheckpointError, match="expected a new file, got one that exists"):
        save_model(lm, tmp_path / "model.gguf")


def test_named_chat_templates_are_read_back(tmp_path: Path) -> None:
    tokenizer = gguf_ready()
    plain = str(tokenizer.chat_template)
    for number, templates in enumerate([{"default": plain, "tool_use": "{{ tools }}" + plain}, {"rag": plain}]):
        tokenizer.chat_template = templates
        save_model(load_model(base(tmp_path / f"{number}", CASES["tied"], tokenizer)), tmp_path / f"{number}.gguf")
        assert open_checkpoint(tmp_path / f"{number}.gguf").tokenizer.chat_template == templates
    keys = GGUFReader(tmp_path / "0.gguf").fields
    assert keys["tokenizer.chat_template"].contents() == plain, "llama.cpp uses the default one"


def test_positions_mask_and_titles_are_kept(tmp_path: Path) -> None:
    config = CASES["tied"] | {"aspd": {"positions": "max", "siblings": "shared", "titles": "leads"}}
    save_model(load_model(base(tmp_path / "base", config, gguf_ready())), tmp_path / "model.gguf")
    back = load_model(tmp_path / "model.gguf").config
    assert (back.positions, back.siblings, back.titles) == ("max", "shared", "leads")


def test_bfloat16_and_adapters(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "base", CASES["tied"])
    gguf_ready().save_pretrained(folder)
    trained = as_if_trained(folder)
    save_model(trained, tmp_path / "model.gguf", "bfloat16")
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == "BF16" and types["blk.0.attn_norm.weight"] == "F32"
    save_model(trained, tmp_path / "folder", "bfloat16")
    as_folder = logits(load_model(tmp_path / "folder"))
    np.testing.assert_allclose(logits(load_model(tmp_path / "model.gguf")), as_folder, atol=1e-5)
    assert np.abs(as_folder - logits(trained)).max() > 1e-3  # rounded


@pytest.mark.parametrize("name", SPLITTINGS)
def test_known_cuts_have_their_name(name: str, tmp_path: Path) -> None:
    save_model(load_model(base(tmp_path / "base", CASES["tied"], gguf_ready(name))), tmp_path / "model.gguf")
    assert GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.pre"].contents() == name


def test_a_splitting_may_have_another_name(tmp_path: Path) -> None:
    save_model(load_model(base(tmp_path / "base", CASES["tied"], gguf_ready("qwen2"))), tmp_path / "model.gguf")
    file = with_keys(tmp_path / "model.gguf", tmp_path / "other.gguf", **{"tokenizer.ggml.pre": "deepseek-r1-qwen"})
    known, other = (open_checkpoint(path).tokenizer for path in (tmp_path / "model.gguf", file))
    assert known(PROBE)["input_ids"] == other(PROBE)["input_ids"]


@pytest.mark.parametrize(
    ("name", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_a_text_begins_with_bos_as_in_llama_cpp(name: str, begins: bool, tmp_path: Path) -> None:
    tokenizer = gguf_ready(name)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    save_model(load_model(base(tmp_path / "base", CASES["tied"], tokenizer)), tmp_path / "model.gguf")
    for value, expected in ((None, begins), (True, True), (False, False)):
        file = with_keys(tmp_path / "model.gguf", tmp_path / "other.gguf", **{"tokenizer.ggml.add_bos_token": value})
        ids = open_checkpoint(file).tokenizer("one two")["input_ids"]
        assert (ids[0] == tokenizer.bos_token_id) == expected
        assert ids[expected:] == tokenizer("one two", add_special_tokens=False)["input_ids"]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    def refused(config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, message: str) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        lm = load_model(base(folder, config, tokenizer))
        with pytest.raises(CheckpointError, match=message):
            save_model(lm, tmp_path / "model.gguf")
        assert not list(tmp_path.glob("*gguf*"))  # not even a part of it

    refused(CASES["tied"], sentencepiece_like("first"), "expected a byte-level BPE tokenizer, got another")
    odd = gguf_ready()
    cuts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    odd.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    refused(CASES["tied"], odd, "expected a pre-tokenizer like one of")
    window = tiny_config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16)
    refused(window, gguf_ready(), "expected a model without a sliding window, got 16")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, LanguageModel]:
    try:
        return find_model("smollm2"), load_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


def test_it_says_what_llama_cpps_converter_says(smollm2: tuple[Path, LanguageModel], tmp_path: Path) -> None:
    """Check that `aspd convert` writes SmolLM2 with the keys, values and tensors of its source."""
    source, _ = smollm2
    assert aspd.main(["convert", "smollm2", "--output", str(tmp_path / "model.gguf")]) == 0
    theirs, ours = GGUFReader(source), GGUFReader(tmp_path / "model.gguf")
    other = ("general.", "GGUF.", "tokenizer.ggml.add_space_prefix")  # names, licence, quantisation; SentencePiece's
    for key, field in theirs.fields.items():
        if not key.startswith(other):
            expected, found = field.contents(), ours.fields[key].contents()
            if isinstance(expected, list):  # ours go on with the six tags
                assert found[: len(expected)] == expected and len(found) - len(expected) in (0, 6), key
            elif key.endswith("vocab_size"):
                assert found == expected + 6
            else:
                assert found == expected, key
    shapes = {t.name: t.shape.tolist() for t in theirs.tensors}
    found_shapes = {t.name: t.shape.tolist() for t in ours.tensors}
    assert found_shapes.pop("token_embd.weight")[1] == shapes.pop("token_embd.weight")[1] + 6
    assert found_shapes == shapes


def test_all_ends_are_kept(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", CASES["tied"], gguf_ready())
    for ends in ((5, 3, 8, 9), (4,)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
        lm = load_model(folder)
        save_model(lm, tmp_path / f"{len(ends)}.gguf")
        assert lm.end_ids == load_model(tmp_path / f"{len(ends)}.gguf").end_ids == ends
