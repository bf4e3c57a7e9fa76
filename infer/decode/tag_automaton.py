"""Recognition of tags: single tokens of a fine-tuned model, or strings in the plain text of any model.

S states, V vocabulary.

A state of the automaton is the partial tag at the end of a segment; in state 0 there is none. Every token leads from a
state to another, or completes a tag. Tags are therefore recognised on the device, by one table look-up per token,
however the tokenizer cuts them. A token that contains the end of a tag and further characters is never allowed: the
text after a tag begins with a new token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from aspd_jax.errors import ConfigError, TokenizerError
from aspd_jax.tokens import BlockIds, ItemIds, SerialIds, TextCodec, TitleForm

TEXT, TITLE_START, TITLE_END, PARALLEL_START, PARALLEL_END, BRANCH_START, BRANCH_END, END, OTHER = range(9)
CLASSES = 9
PROGRESS = 8  # bit 8 + class: the token is part of a tag of that class
CONTINUES = 15  # bit: the token continues the partial tag of the state
NO_NUMBER, SLASH = -1, -2  # values of `TagAutomaton.number`


class TagAutomaton(NamedTuple):
    """The transitions and properties of tokens.

    Attributes:
        next: state after a token in a state, uint8 [S, V]; S + class if the token completes a tag of the class, or is
            text of it.
        bits: allowed classes of a token in a state, uint16 [S, V]: bit c for class c; see `PROGRESS` and `CONTINUES`.
        marker: whether a token has no letters, bool [V]: digits, blanks and punctuation, as in "3/5 " and "2. ".
        number: number that a token spells, int16 [V]; SLASH; otherwise NO_NUMBER.
        scale: 10 to the power of the number of digits of a token that has nothing else, int16 [V]; otherwise 1.
        line_break: whether a token contains a line break, bool [V].
    """

    next: np.ndarray
    bits: np.ndarray
    marker: np.ndarray
    number: np.ndarray
    scale: np.ndarray
    line_break: np.ndarray


def token_automaton(
    vocabulary: int, tags: Sequence[int], end: Sequence[int], other: Sequence[int], codec: TextCodec | None = None
) -> TagAutomaton:
    """Return the automaton of tags that are single tokens.

    Args:
        vocabulary: V.
        tags: ids in the order of `TAGS`; negative: no such tag.
        end: ids that end an answer.
        other: further ids that may occur in serial text only.
        codec: codec that gives the texts of tokens; None: no token is a marker, a number or a line break.
    """
    kind = np.full(vocabulary, TEXT, np.uint8)
    kind[[token for token in other if token < vocabulary]] = OTHER
    for token, tag in zip(tags, range(TITLE_START, BRANCH_END + 1), strict=True):
        if token >= 0:
            kind[token] = tag
    kind[list(end)] = END
    following = np.where(kind == TEXT, 0, 1 + kind).astype(np.uint8)
    marker, number = np.zeros(vocabulary, bool), np.full(vocabulary, NO_NUMBER, np.int16)
    line_break, scale = np.zeros(vocabulary, bool), np.ones(vocabulary, np.int16)
    if codec is not None:
        # A token that is a part of a character may be a part of a letter.
        texts = token_texts(codec, vocabulary)
        marker[:] = [bool(text) and not any(char.isalpha() or char == "\ufffd" for char in text) for text in texts]
        number[:] = [number_of(text.strip()) for text in texts]
        scale[:] = [10 ** len(text) if number_of(text) >= 0 else 1 for text in texts]
        line_break = breaks_line(texts)
    return TagAutomaton(following[None], (1 << kind.astype(np.uint16))[None], marker, number, scale, line_break)


def breaks_line(texts: Sequence[str]) -> np.ndarray:
    """Return whether each text contains a line break, bool."""
    return np.asarray([len(f"{text}.".splitlines()) > 1 for text in texts])


def number_of(text: str) -> int:
    """Return the number that a text spells, SLASH, or NO_NUMBER."""
    if text == "/":
        return SLASH
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else NO_NUMBER


@dataclass(frozen=True)
class TextTags:
    """Tags as strings, for models that have no tokens for them.

    Raises:
        ConfigError: a tag is empty or not ASCII, or part of another.
    """

    title_start: str = "<title>"
    title_end: str = "</title>"
    parallel_start: str = "<parts>"
    parallel_end: str = "</parts>"
    branch_start: str = "<part>"
    branch_end: str = "</part>"

    def __post_init__(self) -> None:
        for field, tag in zip(fields(self), self.strings, strict=True):
            if not tag or not tag.isascii():
                raise ConfigError(f"{field.name}: expected ASCII text, got {tag!r}.")
            for other_field, other in zip(fields(self), self.strings, strict=True):
                if other_field.name != field.name and tag in other:
                    raise ConfigError(f"{field.name}: expected no part of {other_field.name} {other!r}, got {tag!r}.")
        if sum(map(len, self.strings)) > 110:
            raise ConfigError(f"tags: expected at most 110 characters together, got {sum(map(len, self.strings))}.")

    @property
    def strings(self) -> tuple[str, ...]:
        """Return the six tags in the order of `aspd_jax.tokens.TAGS`."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def states(self) -> list[tuple[str, bool]]:
        """Return the parts of tags that a segment may end with, and whether each begins with a token.

        `</title>` has to begin with a token.
        """
        heads = sorted({tag[:length] for tag in self.strings for length in range(1, len(tag))})
        return [("", True), *((head, aligned) for head in heads for aligned in (True, False))]

    @property
    def instruction(self) -> str:
        """Return the instruction that asks a model for these tags."""
        t, T, p, P, b, B = self.strings
        return (
            "If your answer has several parts that do not depend on each other, such as list items or options, first "
            f"write only their titles, each between {t} and {T}, one right after the other, and then {p}. After that, "
            f"write every part as {b}, its title, a colon, its text, and {B}. Close the parts with {P}, and go on. "
            f"For example: {t}Apples{T}{t}Pears{T}{p}{b}Apples: They keep for months.{B}{b}Pears: They ripen fast.{B}"
            f"{P} Both are fruits. If parts depend on each other, write plain text without these tags."
        )


def token_texts(codec: TextCodec, vocabulary: int) -> list[str]:
    """Return the text that each token adds to a segment."""
    before = codec.encode("a")
    known = codec.decode(before)
    found = []
    for token in range(vocabulary):
        whole = codec.decode([*before, token])
        found.append(whole[len(known) :] if whole.startswith(known) else "\ufffd")
    return found


def text_automaton(
    codec: TextCodec, vocabulary: int, tags: TextTags, end: Sequence[int], other: Sequence[int]
) -> TagAutomaton:
    """Return the automaton of tags that are strings; see `token_automaton`.

    Raises:
        TokenizerError: no tokens of the tokenizer spell a tag.
    """
    alone = token_automaton(vocabulary, (-1,) * 6, end, other)
    texts = token_texts(codec, vocabulary)
    ordinary = [token for token in range(vocabulary) if alone.bits[0, token] == 1 << TEXT and texts[token]]
    by_text = sorted((texts[token], token) for token in ordinary)
    states = tags.states
    number = {state: place for place, state in enumerate(states)}
    size = len(states)
    following = np.where(alone.next > 0, alone.next.astype(np.int32) - 1 + size, 0).repeat(size, axis=0)
    bits = alone.bits.repeat(size, axis=0)
    begins = {tag[0] for tag in tags.strings}
    starting = [token for token in ordinary if begins & set(texts[token])]
    for place, (head, aligned) in enumerate(states):
        candidates = set(starting)
        for start in range(len(head)):
            for tag in tags.strings:
                if tag.startswith(head[start:]):
                    candidates.update(_beginning_alike(by_text, tag[len(head) - start :]))
        for token in candidates:
            following[place, token], bits[place, token] = _transition(tags, number, head, aligned, texts[token])
        for kind, tag in enumerate(tags.strings, TITLE_START):
            if tag.startswith(head) and (aligned or kind != TITLE_END):
                leads = (1 << kind) | (1 << (PROGRESS + kind))
                if not (bits[place] & leads).any():
                    raise TokenizerError(f"tag {tag!r}: expected a token that continues it after {head!r}, got none.")
    return alone._replace(next=following.astype(np.uint8), bits=bits, line_break=breaks_line(texts))


def _beginning_alike(by_text: list[tuple[str, int]], rest: str) -> list[int]:
    """Return the tokens that are a prefix of `rest`, or have it as a prefix."""
    found = []
    for length in range(1, len(rest) + 1):
        start, whole = rest[:length], length == len(rest)
        at = bisect_left(by_text, (start, -1))
        while at < len(by_text) and (by_text[at][0] == start or (whole and by_text[at][0].startswith(start))):
            found.append(by_text[at][1])
            at += 1
    return found


def _transition(
    tags: TextTags, number: dict[tuple[str, bool], int], head: str, aligned: bool, piece: str
) -> tuple[int, int]:
    """Return the next state and the bits of a token in a state."""
    whole, size = head + piece, len(number)

    def begins_with_token(start: int) -> bool:
        return start == len(head) or (start == 0 and aligned)

    for stop in range(len(head) + 1, len(whole) + 1):
        for kind, tag in enumerate(tags.strings, TITLE_START):
            if whole[:stop].endswith(tag):
                good = stop == len(whole) and (kind != TITLE_END or begins_with_token(stop - len(tag)))
                return size + kind, (1 << kind) if good else 0
    for start in range(len(whole)):
        left = whole[start:]
        if (left, True) not in number:
            continue
        to = begins_with_token(start)
        continues = start == 0 and bool(head)
        bits = (1 << TEXT) | (continues << CONTINUES)
        for kind, tag in enumerate(tags.strings, TITLE_START):
            # If a tag is required, only tokens that continue it are legal. Between titles, two tags are possible.
            rivals = {TITLE_START, PARALLEL_START} if kind in (TITLE_START, PARALLEL_START) else {kind}
            usable = bool(head) and (aligned or kind != TITLE_END)
            under_way = usable and any(tags.strings[rival - TITLE_START].startswith(head) for rival in rivals)
            fresh = start == len(head) and not under_way
            if tag.startswith(left) and ((continues and usable) or fresh):
                bits |= 1 << (PROGRESS + kind)
        return number[left, to], bits
    return 0, 1 << TEXT


class TextReader:
    """Parser of answers with tags that are strings, on the host.

    Args:
        opening: tokens of the tag that opens a branch.
        ending: tokens of the tag that ends a block.

    Attributes:
        automaton: the automaton that the device uses.
    """

    def __init__(self, codec: TextCodec, tags: TextTags, automaton: TagAutomaton, opening: int, ending: int) -> None:
        self.automaton = automaton
        self._codec, self._tags, self._opening, self._ending = codec, tags, opening, ending
        self._depth = [len(head) for head, _ in tags.states]

    def items(self, ids: np.ndarray, branch: np.ndarray, form: TitleForm, growing: bool) -> tuple[ItemIds, ...]:
        """Return the segments and blocks of an answer in the order of the linearisation.

        Incomplete titles are left out, and in growing segments the characters that may begin a tag.

        Args:
            ids, branch: token ids and branches of all tokens, int32 [T].
            form: form of the titles.
            growing: whether the answer is not finished.
        """
        items: list[ItemIds] = []
        titles: list[np.ndarray] = []
        at = 0
        while at < ids.size:
            if branch[at] > 0:
                branches, texts = [], []
                for title in titles:
                    inside = branch[at]
                    end = at + int(np.argmax(np.append(branch[at:], 0) != inside))
                    own = ids[at + self._opening : end]
                    text = form.text_of(title, own).ids
                    kind, stop, state = self._first_tag(text)
                    kept, drop = self._without_tag(text[:stop], kind, state, growing)
                    branches.append(own[: len(own) - len(text) + kept])
                    texts.append(SerialIds(text[:kept], drop))
                    at = end
                items.append(BlockIds(tuple(titles), tuple(branches), tuple(texts)))
                titles, at = [], at + self._ending
                continue
            end = at + int(np.argmax(np.append(branch[at:], 1) > 0))
            kind, stop, state = self._first_tag(ids[at:end])
            kept, drop = self._without_tag(ids[at : at + stop], kind, state, growing)
            if not titles and kept and kind != TITLE_END:
                items.append(SerialIds(ids[at : at + kept], drop))
            at += stop
            while kind in (TITLE_START, TITLE_END) and at < end:
                started = kind == TITLE_START
                kind, stop, state = self._first_tag(ids[at:end])
                if started and kind == TITLE_END:
                    kept, _ = self._without_tag(ids[at : at + stop], kind, state, growing)
                    titles.append(ids[at : at + kept])
                at += stop
        return tuple(items)

    def _first_tag(self, ids: np.ndarray) -> tuple[int, int, int]:
        """Return the class of the first tag in a segment (TEXT: none), the tokens up to its end, and the next state."""
        states, state = self.automaton.next.shape[0], 0
        for place, token in enumerate(ids):
            following = int(self.automaton.next[state, token])
            if following >= states and TITLE_START <= following - states <= BRANCH_END:
                return following - states, place + 1, 0
            state = 0 if following >= states else following
        return TEXT, len(ids), state

    def _without_tag(self, ids: np.ndarray, kind: int, state: int, growing: bool) -> tuple[int, int]:
        """Return the number of tokens that contain text, and the characters of the last one that belong to a tag."""
        tag = len(self._tags.strings[kind - TITLE_START]) if kind != TEXT else self._depth[state] * growing
        if not tag:
            return len(ids), 0
        kept, length = len(ids), len(self._codec.decode(ids)) - tag
        while kept and len(self._codec.decode(ids[: kept - 1])) >= length:
            kept -= 1
        return kept, len(self._codec.decode(ids[:kept])) - length
