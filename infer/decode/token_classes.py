"""Classes and properties of the tokens of a vocabulary, by which the grammar allows or forbids them.

V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aspd_jax.lists import begins_item
from aspd_jax.tokens import TextCodec

TEXT, TITLE_START, TITLE_END, PARALLEL_START, PARALLEL_END, BRANCH_START, BRANCH_END, END, OTHER = range(9)
LINE, MARK, OPENER, LINE_OPENER = range(9, 13)
# Of `Segments.stops` only: text that may begin a list item, LINE_OPENER or OPENER at the beginning of a line; and any
# text without a line break at the beginning of a line.
ITEM, LINE_START = 13, 14
IN_LINE = 1 << TEXT | 1 << MARK | 1 << OPENER  # rule of plain text within a line: bit c permits class c
LINES = 1 << LINE | 1 << LINE_OPENER
ANY_TEXT = IN_LINE | LINES  # rule of plain text
_MARKS = re.compile(r"[*:.!?,;()–—-]|[：。！？，；、（]")  # what may end the lead of a list item
NO_NUMBER, SLASH = -1, -2  # values of `TokenClasses.number`


class TokenClasses(NamedTuple):
    """The class and the properties of every token.

    Attributes:
        kind: class, uint8 [V]; LINE: text with a line break; MARK: text with a punctuation mark; OPENER: text that may
            begin a list item at the beginning of a line; LINE_OPENER: LINE, and what follows the break may do so.
        marker: whether a token has no letters, bool [V]: digits, blanks and punctuation, as in "3/5 " and "2. ".
        number: number that a token spells, int16 [V]; SLASH; otherwise NO_NUMBER.
        scale: 10 to the power of the number of digits of a token that has nothing else, int16 [V]; otherwise 1.
    """

    kind: np.ndarray
    marker: np.ndarray
    number: np.ndarray
    scale: np.ndarray


def token_classes(
    vocabulary: int, tags: Sequence[int], end: Sequence[int], other: Sequence[int], codec: TextCodec | None = None
) -> TokenClasses:
    """Return the classes of the tokens of a vocabulary.

    Args:
        vocabulary: V.
        tags: ids in the order of `TAGS`; negative: no such tag.
        end: ids that end an answer.
        other: further ids that may occur in serial text only.
        codec: codec that gives the texts of tokens; None: no token is a marker, a number or has a line break.
    """
    kind = np.full(vocabulary, TEXT, np.uint8)
    kind[[token for token in other if token < vocabulary]] = OTHER
    for token, tag in zip(tags, range(TITLE_START, BRANCH_END + 1), strict=True):
        if token >= 0:
            kind[token] = tag
    kind[list(end)] = END
    marker, number = np.zeros(vocabulary, bool), np.full(vocabulary, NO_NUMBER, np.int16)
    scale = np.ones(vocabulary, np.int16)
    if codec is not None:
        # A token that is a part of a character may be a part of a letter.
        texts = token_texts(codec, vocabulary)
        marker[:] = [bool(text) and not any(char.isalpha() or char == "\ufffd" for char in text) for text in texts]
        number[:] = [number_of(text.strip()) for text in texts]
        scale[:] = [10 ** len(text) if number_of(text) >= 0 else 1 for text in texts]
        marked = np.asarray([bool(_MARKS.search(text)) for text in texts])
        breaks = np.asarray([len(f"{text}.".splitlines()) > 1 for text in texts])
        opens = np.asarray([_may_open(text) for text in texts])
        text = np.select([breaks & opens, breaks, opens, marked], [LINE_OPENER, LINE, OPENER, MARK], TEXT)
        kind = np.where(kind == TEXT, text, kind).astype(np.uint8)
    return TokenClasses(kind, marker, number, scale)


def _may_open(text: str) -> bool:
    """Return whether the last line of a token may begin a list item; a part of a character may.

    Some tokenizers begin a text with a blank that is none of its characters.
    """
    line = text.rpartition("\n")[2].removeprefix(" ")
    return bool(line) and ("\ufffd" in line or begins_item(line) is not False)


def number_of(text: str) -> int:
    """Return the number that a text spells, SLASH, or NO_NUMBER."""
    if text == "/":
        return SLASH
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else NO_NUMBER


def token_texts(codec: TextCodec, vocabulary: int) -> list[str]:
    """Return the text that each token adds to a segment."""
    before = codec.encode("a")
    known = codec.decode(before)
    found = []
    for token in range(vocabulary):
        whole = codec.decode([*before, token])
        found.append(whole[len(known) :] if whole.startswith(known) else "\ufffd")
    return found
