"""Byte-level tokenizers of GGUF files, written with the `gguf` library in the form of llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerFast

from aspd_jax.formats import open_checkpoint
from aspd_jax.formats.gguf_tokenizer import SPLITTINGS, pre_tokenizer
from tests.aspd_jax.formats.test_gguf import CASES, with_keys, write_gguf
from tests.aspd_jax.test_tokens import byte_level

PROBE = (  # text that all known tokenizers split differently
    "It's 12345 o'clock, WE'LL see:  a_b\t c\n\n d\r\n 3,141.59!!! Ünïcödé naïve 你好，世界 "
    "x²+y₃ camelCase a/b!!/\n don't CAN'T \n  ... (a) [b] 'tis 10% — “q” 🙂🙂 end  "
)


def known_tokenizer(name: str = "qwen2") -> PreTrainedTokenizerFast:
    """A tokenizer that cuts as a known one does."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(SPLITTINGS[name])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


def with_tokenizer(file: Path, tokenizer: PreTrainedTokenizerFast, name: str = "qwen2") -> Path:
    """A GGUF file of the tiny model with this tokenizer, whose splitting has this name."""

    def write(writer: GGUFWriter) -> None:
        state, special = json.loads(tokenizer.backend_tokenizer.to_str()), set(tokenizer.all_special_ids)
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        writer.add_token_types([TokenType.CONTROL if n in special else TokenType.NORMAL for n in range(len(tokens))])
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
        if tokenizer.bos_token_id is not None:
            writer.add_bos_token_id(tokenizer.bos_token_id)
        template = tokenizer.chat_template
        named = [{"name": key, "template": text} for key, text in template.items()] if isinstance(template, dict) else 0
        writer.add_chat_template(named or template)

    return write_gguf(file, CASES["llama"] | {"vocab_size": len(tokenizer)}, write=write)


@pytest.mark.parametrize("name", SPLITTINGS)
def test_texts_are_cut_as_the_name_says(name: str, tmp_path: Path) -> None:
    tokenizer = known_tokenizer(name)
    found = open_checkpoint(with_tokenizer(tmp_path / "a.gguf", tokenizer, name)).tokenizer
    for text in (PROBE, "Some words, in a list: 3.\n- four\n", "It's é 🙂 <|end|>"):
        assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert found.chat_template == tokenizer.chat_template


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    tokenizer = known_tokenizer()
    plain = str(tokenizer.chat_template)
    for number, templates in enumerate([{"default": plain, "tool_use": "{{ tools }}" + plain}, {"rag": plain}]):
        tokenizer.chat_template = templates
        assert (
            open_checkpoint(with_tokenizer(tmp_path / f"{number}.gguf", tokenizer)).tokenizer.chat_template == templates
        )


def test_a_splitting_may_have_another_name(tmp_path: Path) -> None:
    files = [with_tokenizer(tmp_path / f"{n}.gguf", known_tokenizer(), n) for n in ("qwen2", "deepseek-r1-qwen")]
    known, other = (open_checkpoint(file).tokenizer for file in files)
    assert known(PROBE)["input_ids"] == other(PROBE)["input_ids"]


@pytest.mark.parametrize(
    ("name", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_a_text_begins_with_bos_as_in_llama_cpp(name: str, begins: bool, tmp_path: Path) -> None:
    tokenizer = known_tokenizer(name)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    made = with_tokenizer(tmp_path / "model.gguf", tokenizer, name)
    for value, expected in ((None, begins), (True, True), (False, False)):
        file = with_keys(made, tmp_path / "other.gguf", **{"tokenizer.ggml.add_bos_token": value})
        ids = open_checkpoint(file).tokenizer("one two")["input_ids"]
        assert (ids[0] == tokenizer.bos_token_id) == expected
        assert ids[expected:] == tokenizer("one two", add_special_tokens=False)["input_ids"]
