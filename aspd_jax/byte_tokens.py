"""Bytes of the tokens of a tokenizer, and tokens of exactly the bytes of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from aspd_jax.errors import TokenizerError

# Fields of pre-tokenizers that put a space before a text, and their values for none.
NO_SPACES: Mapping[str, Any] = {"add_prefix_space": False, "prepend_scheme": "never"}
LAST_BYTE = ("ÿ", "<0xFF>")  # spellings of the byte 0xFF in byte-level BPE, and with byte fallback


class ByteTokens:
    """Tokens as bytes.

    A tokenizer may normalise text, put a space before it, and read special tokens where text spells them. `encode` does
    none of these. Where the tokenizer does none of them either, the tokens are the same.

    Args:
        backend: tokenizer of the library `tokenizers`.

    Attributes:
        tokens: bytes of each token; of a marker, its spelling.
        markers: ids of tokens that stand for no text, by spelling: special tokens, and other added tokens with a
            spelling such as `<tool_call>`. Grammars name them by id.

    Raises:
        TokenizerError: tokens of this tokenizer have no bytes of their own.
    """

    def __init__(self, backend: Tokenizer) -> None:
        from llguidance import LLTokenizer

        try:
            self._library = LLTokenizer(backend.to_str(), slices=[])
        except ValueError as error:
            raise TokenizerError(
                f"tokenizer: expected byte-level BPE, or SentencePiece with byte fallback, got another: {error}"
            ) from None
        self._backend = backend
        self.tokens: list[bytes] = [self._library.decode_bytes([id]) for id in range(self._library.vocab_size)]
        for spelling in LAST_BYTE:  # llguidance marks its own tokens with this byte, and has no bytes for the token
            if (id := backend.token_to_id(spelling)) is not None:
                self.tokens[id] = self.tokens[id] or b"\xff"
        added = backend.get_added_tokens_decoder().items()
        self.markers = {t.content: int(id) for id, t in added if self._library.is_special_token(id)}
        self._marker_ids = frozenset(self.markers.values())

    def encode(self, text: str) -> list[int]:
        """Return tokens of exactly the UTF-8 of a text, without markers, as far as the vocabulary has them."""
        encoder, ids = self._encoder
        tokens = [ids.get(token, token) for token in encoder.encode(text, add_special_tokens=False).ids]
        if self._marker_ids.isdisjoint(tokens) and b"".join(self.tokens[token] for token in tokens) == text.encode():
            return tokens
        greedy: list[int] = self._library.greedy_tokenize(text)
        return greedy

    @cached_property
    def _encoder(self) -> tuple[Tokenizer, Mapping[int, int]]:
        """Return the tokenizer without normalisation, spaces before texts and markers, and its ids that differ."""
        encoder = Tokenizer(self._backend.model)
        encoder.normalizer, encoder.pre_tokenizer = _exact_parts(self._backend)
        added = sorted(self._backend.get_added_tokens_decoder().items())
        texts = {id: token for id, token in added if id not in self._marker_ids}
        encoder.add_tokens([AddedToken(token.content, normalized=token.normalized) for token in texts.values()])
        return encoder, {encoder.token_to_id(token.content) or 0: id for id, token in texts.items()}


class GrammarTokens:
    """Tokens of a model as llguidance reads them (`llguidance.TokenizerWrapper`): a grammar describes their bytes.

    Args:
        byte_tokens: tokens of the tokenizer.
        size: size of the model's vocabulary.
        end_id: token that ends a text.
    """

    def __init__(self, byte_tokens: ByteTokens, size: int, end_id: int | None) -> None:
        self._byte_tokens = byte_tokens
        self.eos_token_id, self.bos_token_id = end_id, None
        tokens = byte_tokens.tokens[:size]
        self.tokens = [*tokens, *[b""] * (size - len(tokens))]
        self.special_token_ids: Sequence[int] = sorted(byte_tokens.markers.values())

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that a grammar determines."""
        return self._byte_tokens.encode(text.decode())


def _exact_parts(backend: Tokenizer) -> tuple[Any, Any]:
    """Return the normaliser of a tokenizer, reduced to spaces, and its pre-tokenizer, which adds none."""
    normalizer, pre_tokenizer = (_state(part) for part in (backend.normalizer, backend.pre_tokenizer))
    spaces = [part for part in _parts(normalizer) if part.get("pattern") == {"String": " "}]
    for part in _parts(pre_tokenizer):
        part |= {name: value for name, value in NO_SPACES.items() if name in part}
    state = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
        "decoder": None, "model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": pre_tokenizer,
        "normalizer": {"type": "Sequence", "normalizers": spaces} if spaces else None,
    }  # fmt: skip
    exact = Tokenizer.from_str(json.dumps(state))
    return exact.normalizer, exact.pre_tokenizer


def _state(part: Any) -> Any:
    """Return a part of a tokenizer as in its JSON; None: there is none."""
    return None if part is None else json.loads(part.__getstate__())


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a part of a tokenizer."""
    if isinstance(state, dict):
        yield state
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _parts(value)
