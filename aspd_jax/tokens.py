"""Conversion of structured answers to token ids and back (protocol, section 2).

Every segment between tags (serial text, title, text of a branch behind its head) is encoded separately. The ids that
the engine samples and those that training reads are therefore equal, and every segment decodes to its exact text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import AddedToken, Tokenizer

from aspd_jax.byte_tokens import ByteTokens
from aspd_jax.errors import StructureError, TokenizerError
from aspd_jax.layout import TAGS, SpecialTokens, Titles
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, canonical

SEPARATOR = ": "
SPACE = "▁"  # replaces spaces in SentencePiece vocabularies
INVALID = "\ufffd"  # replaces bytes that are no character
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")  # the first bytes of half a surrogate pair, which no text has


@dataclass(frozen=True)
class TitleForm:
    """Form of the titles of a block (protocol, section 2). Every checkpoint has one.

    Attributes:
        leads: titles are the beginnings of their branches' texts, and their number is stated before them. Otherwise
            they are names, which are no part of the text.
        separator: ids that follow the title in the head of a branch.
    """

    leads: bool = False
    separator: tuple[int, ...] = ()

    def text_of(self, title: list[int], branch: list[int]) -> SerialIds:
        """Return the text of a branch, whose ids begin with its head."""
        body = branch[len(title) + len(self.separator) :]
        return SerialIds(body, title if self.leads else ())


NAMES = TitleForm()


def add_special_tokens(tokenizer: Any) -> SpecialTokens:
    """Add the six tokens to a Hugging Face tokenizer, in place, and return their ids.

    Tokens that exist already keep their ids; no token is removed or renumbered.
    """
    vocabulary = tokenizer.get_vocab()
    missing = [tag for tag in TAGS.values() if tag not in vocabulary]
    if missing:
        tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in missing], special_tokens=True)
    return SpecialTokens(*(int(tokenizer.convert_tokens_to_ids(tag)) for tag in TAGS.values()))


def copy_backend(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the same model, steps and added tokens, whose settings change independently.

    The vocabulary is shared. Copying it, as JSON, takes a second for 262,144 tokens.
    """
    copy = Tokenizer(backend.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, step)) is not None:
            setattr(copy, step, value)
    copy.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    return copy


class TextCodec:
    """Exact conversion between the text and the token ids of one segment.

    Strings that look like special tokens are ordinary text here: an answer that contains `<|title|>` or `</s>`
    literally is encoded as those characters.

    Attributes:
        special: regular expression that matches the spelling of every special token.
        special_ids: ids of all special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"tokenizer: expected one with tokenizer.json, got {type(tokenizer).__name__}. "
                "Save it once from AutoTokenizer.from_pretrained(..., use_fast=True)."
            )
        self._backend = copy_backend(backend)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        special = {i: t.content for i, t in self._backend.get_added_tokens_decoder().items() if t.special}
        self.special_ids = frozenset(special)
        self.special = re.compile("|".join(map(re.escape, sorted(special.values(), key=len, reverse=True))) or r"(?!)")
        byte_ids = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self._byte_ids = [i for i in byte_ids if i is not None]
        self._space_id = self._backend.token_to_id(SPACE)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a segment.

        Raises:
            TokenizerError: the tokenizer has no ids that decode to exactly this text.
        """
        try:
            for candidate in (text, " " + text):  # some tokenizers drop one leading space on decoding
                ids = self._backend.encode(candidate, add_special_tokens=False).ids
                if self.decode(ids) == text:
                    return ids
            if self._space_id is not None and len(self._byte_ids) == 256:
                # Characters with a special meaning in the vocabulary (such as U+2581) are exact only as bytes.
                ids = [*[self._space_id] * self.drops_space, *(self._byte_ids[byte] for byte in text.encode())]
                if self.decode(ids) == text:
                    return ids
        except (UnicodeEncodeError, TypeError):
            raise TokenizerError(f"text: expected Unicode text, got {text[:60]!r}") from None
        raise TokenizerError(
            f"tokenizer: expected {text[:60]!r} back from its token ids, got {self.decode(ids)[:60]!r}. "
            "Use a lossless tokenizer (byte-level BPE, or SentencePiece with byte fallback)."
        )

    def encode_normalised(self, text: str) -> list[int]:
        """Return the ids of a segment whose characters the tokenizer's normaliser may change, as in `transformers`.

        All Qwen tokenizers compose characters (NFC), for example. Text that the normaliser keeps is encoded exactly.

        Raises:
            TokenizerError: see `encode`; what a normaliser changes is no error.
        """
        normaliser = self._backend.normalizer
        for candidate in (text, " " + text) if normaliser is not None else ():
            try:
                ids = self._backend.encode(candidate, add_special_tokens=False).ids
            except (UnicodeEncodeError, TypeError):
                break  # `encode` refuses it
            if (decoded := self.decode(ids)) in (text, text.replace(SPACE, " ")):
                break
            if normaliser.normalize_str(decoded) == normaliser.normalize_str(text):
                return list(ids)
        return self.encode(text)

    def encode_exactly(self, text: str) -> list[int]:
        """Return the ids of a segment whose text is known beforehand; it is not normalised.

        They are those of `encode` where the tokenizer does not normalise the text.

        Raises:
            TokenizerError: the tokenizer has no ids that decode to exactly this text.
        """
        ids = self.byte_tokens.encode(" " * self.drops_space + text) if text else []
        if (decoded := self.decode(ids)) == text:
            return ids
        raise TokenizerError(
            f"tokenizer: expected tokens for {text[:60]!r}, got those of {decoded[:60]!r}. "
            "Use other text, or a tokenizer with a token for every byte."
        )

    @cached_property
    def byte_tokens(self) -> ByteTokens:
        """Return the tokens as bytes."""
        return ByteTokens(self._backend)

    @cached_property
    def has_byte_spellings(self) -> bool:
        """Return whether every token stands for bytes of its own (`ByteTokens`)."""
        try:
            return bool(self.byte_tokens.tokens)
        except TokenizerError:
            return False

    @cached_property
    def drops_space(self) -> bool:
        """Return whether decoding drops a space at the beginning of a segment."""
        return self._space_id is not None and not self.decode([self._space_id])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a segment; special tokens are skipped, and bytes that are no character are U+FFFD."""
        tokens = [int(i) for i in ids]
        text = str(self._backend.decode(tokens, skip_special_tokens=True))
        if INVALID in text and self._byte_ids and self.has_byte_spellings:
            # Of a run of byte tokens that is not UTF-8, `tokenizers` replaces the valid characters, too.
            text = self.bytes_of(tokens).decode(errors="replace")
            text = text.removeprefix(" ") if self.drops_space else text
        return text

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of tokens; special tokens have none."""
        tokens = self.byte_tokens.tokens
        return b"".join(tokens[i] for i in ids if i < len(tokens) and int(i) not in self.special_ids)

    def text_of(self, segment: SerialIds) -> str:
        """Return the text of a segment, its lead included."""
        return (self.decode(segment.lead) if segment.lead else "") + self.decode(segment.ids)

    def token_bytes(self, ids: Sequence[int], first: Sequence[int] = ()) -> list[bytes]:
        """Return the bytes of each token.

        Args:
            ids: tokens of a segment, or alternatives to its first token.
            first: the segment itself, if `ids` are alternatives to its first token.

        Returns:
            The bytes of each token. Concatenated, those of a segment are the UTF-8 of its text.
        """
        pieces = [self.byte_tokens.tokens[token] for token in ids]
        segment = first or ids
        joined = b"".join(self.byte_tokens.tokens[token] for token in segment)
        # Some tokenizers drop the space at the beginning of a segment.
        if joined.startswith(b" ") and joined.decode(errors="replace") != self.decode(segment):
            pieces = [part.removeprefix(b" ") if first or not place else part for place, part in enumerate(pieces)]
        return pieces

    def split_markers(self, text: str) -> list[str | int]:
        """Return the parts of a text: plain text, and the ids of the added tokens that grammars name by id.

        These are the special tokens, and others with a spelling such as `<tool_call>`.
        """
        markers = self.byte_tokens.markers
        spellings = "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)"
        parts = re.split(f"({spellings})", text)
        return [markers[part] if n % 2 else part for n, part in enumerate(parts) if part]

    def stream(self) -> TextStream:
        """Return a decoder for a growing segment."""
        return TextStream(self)

    def shown(self, ids: Iterable[int]) -> str:
        """Return the text of a segment, or the spelling of its ids in the vocabulary if they decode to no text."""
        return self.decode(ids) or "".join(self._backend.id_to_token(int(i)) or f"<{int(i)}>" for i in ids)


class TextStream:
    """Incremental decoder of a growing segment; the cost per token does not depend on the length of the segment."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec, self._ids = codec, list[int]()
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = codec.drops_space

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the next tokens of the segment; the bytes of an unfinished character are held back."""
        if not self._codec.has_byte_spellings:
            before = self._codec.decode(self._ids)
            self._ids += ids
            return self._codec.decode(self._ids)[len(before) :]
        text = self._bytes.decode(self._codec.bytes_of(ids))
        if _SURROGATE.fullmatch(self._bytes.getstate()[0]):  # Python would wait for more bytes of what is no character
            text += self._bytes.decode(b"", True)
        if text and self._drops_space:
            text, self._drops_space = text.removeprefix(" "), False
        return text


class SerialIds(NamedTuple):
    """Token ids of a segment of plain text.

    Attributes:
        ids: token ids.
        lead: ids of the lead that precedes the text, encoded on its own; of a branch only.
    """

    ids: list[int]
    lead: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Return the number of tokens of plain text."""
        return len(self.lead) + len(self.ids)

    def first(self, size: int) -> SerialIds:
        """Return the first tokens of the segment."""
        if size >= self.size:
            return self
        return SerialIds(self.ids[: max(0, size - len(self.lead))], self.lead[: max(0, size)])


class BlockIds(NamedTuple):
    """Token ids of a block.

    Attributes:
        titles: ids of each title as announced before the block.
        branches: ids of each branch, with its head and without its tags.
        texts: text of each branch.
        number: ids of the stated number of leads; empty for names.
    """

    titles: tuple[list[int], ...]
    branches: tuple[list[int], ...]
    texts: tuple[SerialIds, ...]
    number: Sequence[int] = ()

    @property
    def announced(self) -> tuple[Sequence[int], ...]:
        """Return what stands between the tags of titles before the block: the number of leads, and the titles."""
        return (self.number, *self.titles) if self.number else self.titles


ItemIds: TypeAlias = SerialIds | BlockIds


class Linearisation(NamedTuple):
    """A structured answer as one token sequence.

    Attributes:
        tokens: int32 [T].
        fed: bool [T], true if the engine feeds the token instead of sampling it (branch heads and `<|/para|>`). These
            tokens have no loss by default (protocol, section 9).
    """

    tokens: np.ndarray
    fed: np.ndarray


def split(
    tokens: Sequence[int] | np.ndarray, special: SpecialTokens, form: TitleForm = NAMES, paired: bool = True
) -> tuple[ItemIds, ...]:
    """Parse the structure of a linearisation from its tags; no tokenizer is needed.

    Args:
        tokens: token ids [T].
        special: ids of the tags.
        form: form of the titles.
        paired: whether a block must have two or more branches, and equal numbers of branches and titles. Other engines
            drop branches with a repeated title.

    Returns:
        The items of the answer.

    Raises:
        StructureError: a tag is not allowed at its place; the message names the first one.
    """
    ids = np.asarray(tokens).tolist()
    tags = [(place, token) for place, token in enumerate(ids) if token in special.ids]
    names = dict(zip(special.ids, TAGS.values(), strict=True))
    items: list[ItemIds] = []
    cursor = 0  # index of the first token that is not parsed yet
    at = 0  # index into tags

    def peek() -> tuple[int, int | None]:
        return tags[at] if at < len(tags) else (len(ids), None)

    def take(expected: int, after_text: bool = False) -> list[int]:
        """Move behind the next tag, and return the tokens before it."""
        nonlocal at, cursor
        place, tag = peek()
        if tag != expected:
            found = "the end of the answer" if tag is None else names[tag]
            raise StructureError(f"token {place}: expected {names[expected]}, got {found}")
        if place != cursor and not after_text:
            raise StructureError(f"token {cursor}: expected {names[expected]}, got text")
        text, at, cursor = ids[cursor:place], at + 1, place + 1
        return text

    def take_segment(start: int, end: int) -> list[int]:
        take(start)
        return take(end, after_text=True)

    while at < len(tags):
        if tags[at][0] > cursor:
            items.append(SerialIds(ids[cursor : tags[at][0]]))
            cursor = tags[at][0]
        titles: list[list[int]] = []
        branches: list[list[int]] = []
        number = take_segment(special.title_start, special.title_end) if form.leads else []
        while not titles or peek()[1] == special.title_start:
            titles.append(take_segment(special.title_start, special.title_end))
            if not titles[-1]:
                raise StructureError(f"token {cursor - 1}: expected a title, got none")
        take(special.parallel_start)
        while peek()[1] == special.branch_start:
            branches.append(take_segment(special.branch_start, special.branch_end))
        take(special.parallel_end)
        if not branches or (paired and (len(titles) < 2 or len(titles) != len(branches))):
            raise StructureError(
                f"token {cursor - 1}: expected two or more titles and as many branches, "
                f"got {len(titles)} titles and {len(branches)} branches"
            )
        texts = tuple(form.text_of(title, branch) for title, branch in zip(titles, branches, strict=False))
        items.append(BlockIds(tuple(titles), tuple(branches), texts, number))
    if cursor < len(ids):
        items.append(SerialIds(ids[cursor:]))
    return tuple(items)


def join(items: Sequence[ItemIds], special: SpecialTokens, open_branches: Collection[int] = ()) -> list[int]:
    """Return the linearisation of items: the inverse of `split`.

    Args:
        items: items of an answer.
        special: ids of the tags.
        open_branches: numbers, from 1, of the branches of the last block that still grow; they have no closing tag.
    """
    tokens: list[int] = []
    for place, item in enumerate(items, 1):
        if isinstance(item, SerialIds):
            tokens.extend(item.ids)
            continue
        for title in item.announced:
            tokens += (special.title_start, *title, special.title_end)
        tokens.append(special.parallel_start)
        growing = open_branches if place == len(items) else ()
        for number, branch in enumerate(item.branches, 1):
            tokens += (special.branch_start, *branch)
            tokens += [special.branch_end] * (number not in growing)
        tokens += [special.parallel_end] * (not growing)
    return tokens


class Codec:
    """Conversion of structured answers to token ids and back, for one tokenizer.

    Args:
        tokenizer: a `transformers` tokenizer.
        special: ids of the tags; None: they are added to the tokenizer.
        titles: form of the titles.
    """

    def __init__(self, tokenizer: Any, special: SpecialTokens | None = None, titles: Titles = "names") -> None:
        self.special = special or add_special_tokens(tokenizer)
        self.text = TextCodec(tokenizer)
        leads = titles == "leads"
        self.form = TitleForm(leads, () if leads else tuple(self.text.encode(SEPARATOR)))

    def linearise(self, items: Iterable[Item]) -> Linearisation:
        """Return the linearisation of a structured answer, without an end of text (protocol, section 2).

        Raises:
            StructureError: titles are leads, and the text of a branch does not begin with its own.
        """
        special, encode = self.special, self.text.encode_normalised
        pieces: list[tuple[list[int], bool]] = []  # token ids, and whether the engine feeds them
        for item in canonical(items):
            if isinstance(item, Serial):
                pieces.append((encode(item.text), False))
                continue
            titles = [encode(branch.title) for branch in item.branches]
            for title in [encode(str(len(titles))), *titles] if self.form.leads else titles:
                pieces.append(([special.title_start, *title, special.title_end], False))
            pieces.append(([special.parallel_start], False))
            for title, branch in zip(titles, item.branches, strict=True):
                pieces.append(([special.branch_start, *title, *self.form.separator], True))
                pieces.append(([*encode(self._body(branch)), special.branch_end], False))
            pieces.append(([special.parallel_end], True))
        tokens = [token for ids, _ in pieces for token in ids]
        fed = [is_fed for ids, is_fed in pieces for _ in ids]
        return Linearisation(np.asarray(tokens, np.int32), np.asarray(fed, bool))

    def _body(self, branch: Branch) -> str:
        """Return the text of a branch behind its head."""
        if not self.form.leads:
            return branch.text
        if not branch.text.startswith(branch.title):
            raise StructureError(
                f"branch: expected text that begins with its title {branch.title[:60]!r}, because titles are leads, "
                f"got {branch.text[:60]!r}. A checkpoint with model.titles: names reads such records."
            )
        return branch.text[len(branch.title) :]

    def parse(self, tokens: Sequence[int] | np.ndarray) -> Structure:
        """Return the structured answer of a linearisation without an end of text.

        Raises:
            StructureError: the tags are not well formed, or a branch does not start with its title.
        """
        items = split(tokens, self.special, self.form)
        for block in (item for item in items if isinstance(item, BlockIds)):
            for number, (title, branch) in enumerate(zip(block.titles, block.branches, strict=True), 1):
                head = [*title, *self.form.separator]
                if branch[: len(head)] != head:
                    raise StructureError(f"branch {number}: expected its title and separator first, got other tokens")
        return self.structure(items)

    def structure(self, items: Iterable[ItemIds]) -> Structure:
        """Return the structured answer of token ids."""
        show, text_of = self.text.shown, self.text.text_of
        return tuple(
            Serial(text_of(item))
            if isinstance(item, SerialIds)
            else Parallel(
                Branch(show(title), text_of(text)) for title, text in zip(item.titles, item.texts, strict=True)
            )
            for item in items
        )
