"""Tokens as bytes: text that is known beforehand keeps its characters, whatever the tokenizer does to text."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aspd_jax.byte_tokens import ByteTokens
from aspd_jax.errors import TokenizerError
from aspd_jax.tokens import TextCodec
from tests.aspd_jax.test_tokens import byte_level, sentencepiece_like

ADDED = ("<think>", "</think>", "plain", "   ")


def changed(tokenizer: PreTrainedTokenizerFast, normalizer: Any = None, pre_tokenizer: Any = None) -> TextCodec:
    """Return the codec of a tokenizer with another normaliser or pre-tokenizer, and with `ADDED`."""
    backend = tokenizer.backend_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return TextCodec(tokenizer)


def gemma_like() -> PreTrainedTokenizerFast:
    """A tokenizer that spells spaces, and drops none."""
    made = sentencepiece_like("first")
    backend = made.backend_tokenizer
    backend.pre_tokenizer, backend.normalizer = None, normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def folded() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])


CODECS = {
    "byte_level": changed(byte_level()),
    "nfc": changed(byte_level(), normalizers.NFC()),
    "folded": changed(byte_level(), folded()),
    "space_before": changed(byte_level(), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama_like": changed(sentencepiece_like("prepend")),
    "mistral_like": changed(sentencepiece_like("first")),
    "gemma_like": changed(gemma_like()),
    "gemma_folded": changed(gemma_like(), normalizers.Sequence([folded(), normalizers.Replace(" ", "▁")])),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
OTHERS = ("10 k\u2126", "cafe\u0301", "\u095c", "ﬁ", "É", "</s>", "<|end|>", "<s>", "▁", " ", "<0x0A>", "\n", "🙂")
AWKWARD = (*OTHERS, *ADDED)
texts = st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=3))).map("".join))


@every_codec
@settings(max_examples=100)
@given(text=texts)
def test_known_text_keeps_its_characters(codec: TextCodec, text: str) -> None:
    ids = codec.encode_exactly(text)
    assert codec.decode(ids) == text
    assert not set(ids) & {*codec.special_ids, *codec.byte_tokens.markers.values()}, "text never becomes a marker"
    assert b"".join(codec.token_bytes(ids)).decode() == text


@every_codec
def test_ordinary_text_has_the_tokens_of_the_tokenizer(codec: TextCodec) -> None:
    """Check text that the tokenizer does not change: a known token is the one that the model has learned."""
    for text in ("some words, in a list: 7.", "one two three.\n- four\n", "a"):
        if codec is not CODECS["space_before"]:
            assert codec.encode_exactly(text) == codec.encode(text)
    assert codec.encode_exactly("") == []


def test_the_tokenizer_changes_these_texts() -> None:
    """Check that the tokenizers do what the tests are about (negative control)."""
    for name in ("nfc", "folded"):
        with pytest.raises(TokenizerError, match="lossless"):
            CODECS[name].encode("cafe\u0301")
    assert CODECS["gemma_folded"].encode_normalised("cafe\u0301") != CODECS["gemma_folded"].encode("cafe\u0301")
    assert unicodedata.normalize("NFC", "cafe\u0301") != "cafe\u0301"
    marker = CODECS["byte_level"].byte_tokens.markers["<think>"]
    assert CODECS["byte_level"].encode("<think>") == [marker]


def test_added_tokens_that_are_text_keep_their_ids() -> None:
    """Check added tokens behind the vocabulary, whose ids have gaps where markers are."""
    codec = CODECS["byte_level"]
    ids = [codec.encode(text)[0] for text in ("plain", "   ")]
    assert codec.encode_exactly("plain   ") == ids and set(ids).isdisjoint(codec.byte_tokens.markers.values())


@every_codec
def test_every_byte_has_a_token(codec: TextCodec) -> None:
    """The token of 0xFF, too, for which llguidance has no bytes: its own tokens begin with this byte."""
    tokens = codec.byte_tokens.tokens
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)
    last = tokens.index(b"\xff")
    assert codec.token_bytes([last]) == [b"\xff"] and codec.stream().decode([last]) == codec.decode([last]) == "\ufffd"


def test_text_without_tokens_is_refused() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert codec.encode_exactly("ab") == [0, 1]
    with pytest.raises(TokenizerError, match="expected tokens for 'acb', got those of 'ab'"):
        codec.encode_exactly("acb")
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="expected byte-level BPE, or SentencePiece with byte fallback"):
        ByteTokens(backend)
