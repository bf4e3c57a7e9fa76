"""Exported folders, compared field by field with their sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import aspd
from aspd_jax import load_model, save_model
from tests.aspd_jax.formats.test_gguf_tokenizer import known_tokenizer
from tests.aspd_jax.test_tokens import sentencepiece_like
from tests.conftest import tiny_config, write_checkpoint
from tests.helpers.make_parity import LLAMA3

GENERATION = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "pad_token_id": 0, "bos_token_id": 1}
GENERATION |= {"eos_token_id": [2, 3]}
ATTRIBUTES = {"padding_side": "left", "model_max_length": 777, "clean_up_tokenization_spaces": False}
ATTRIBUTES |= {"additional_special_tokens": ["<|x|>", "<|y|>"], "add_bos_token": False, "custom_note": "kept"}
# The class that a source names, and the one in its export: names that `transformers` 4.57 and 5 know.
CLASSES = {
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "LlamaTokenizerFast": "LlamaTokenizer",
}


def source(folder: Path, name: str) -> Path:
    tokenizer: Any = sentencepiece_like("first") if name.startswith("Llama") else known_tokenizer()
    config = tiny_config(vocab_size=len(tokenizer) + 10, rope_scaling=LLAMA3, tie_word_embeddings=True)
    write_checkpoint(folder, config)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ATTRIBUTES | {"tokenizer_class": name}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("way", ["save", "convert"])
def test_an_export_keeps_every_field(name: str, way: str, tmp_path: Path) -> None:
    before, after = source(tmp_path / "source", name), tmp_path / "export"
    if way == "save":
        save_model(load_model(before), after)
    else:
        assert aspd.main(["convert", str(before), "--output", str(after)]) == 0
    assert read(after, "generation_config.json") == GENERATION
    config = read(after, "config.json")
    assert {key: config.get(key) for key in read(before, "config.json")} == read(before, "config.json")
    old, new = read(before, "tokenizer_config.json"), read(after, "tokenizer_config.json")
    assert new.pop("tokenizer_class") == CLASSES[name]
    assert not {"backend", "is_local", "local_files_only"} & new.keys()
    kept = old.keys() - {"backend", "tokenizer_class", "is_local", "local_files_only", "extra_special_tokens"}
    assert {key: new.get(key) for key in kept} == {key: old[key] for key in kept}
    theirs, ours = AutoTokenizer.from_pretrained(before), AutoTokenizer.from_pretrained(after)
    assert ours.chat_template == theirs.chat_template == "{{ messages }}"
    for text in ("Some <|x|> words: 3.", "a\n\nb"):
        assert ours.encode(text) == theirs.encode(text)


def test_named_special_tokens_and_an_empty_template_come_back(tmp_path: Path) -> None:
    file = source(tmp_path / "source", "TokenizersBackend") / "tokenizer_config.json"
    (file.parent / "chat_template.jinja").unlink()
    own = {"extra_special_tokens": {"image_token": "<|x|>"}, "chat_template": ""}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    save_model(load_model(file.parent), tmp_path / "export")
    assert read(tmp_path / "export", file.name)["extra_special_tokens"] == own["extra_special_tokens"]
    back = load_model(tmp_path / "export").tokenizer
    assert back.image_token == "<|x|>" and not back.chat_template
