"""Draft texts: texts that an answer may have, as sources of draft tokens (protocol, section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

from aspd_jax.tokens import TextCodec

ANCHOR = 16  # bytes by which an answer finds its place in the text again: a few words
NAME_END = b'":'  # end of a name of a JSON object, by which it does, too


class DraftText:
    """A text that an answer may have, and the place in it up to which the answer has been read.

    Where the answer differs, there are no draft tokens. It finds its place again when its bytes since the difference
    end with a name of a JSON object, or with `ANCHOR` bytes, that the text has behind the difference.

    Args:
        text: the text.
        codec: codec of the tokenizer, whose tokens have bytes of their own.
    """

    def __init__(self, text: str, codec: TextCodec) -> None:
        self._codec, self._bytes = codec.byte_tokens, (" " * codec.drops_space + text).encode()
        self._place, self._differs = 0, False
        self._since = b""  # the answer since it differs
        self._next: dict[int, int] = {}  # draft token at each place where one begins

    def copy(self) -> DraftText:
        """Return a text at the same place."""
        return copy(self)

    def follow(self, tokens: Sequence[int]) -> None:
        """Read further tokens of the answer."""
        for token in tokens:
            new = self._codec.tokens[token]
            if not self._differs and self._bytes.startswith(new, self._place):
                self._place += len(new)
                continue
            self._differs, self._since = True, self._since + new
            for anchor in self._anchors():
                if (at := self._bytes.find(anchor, self._place)) >= 0:
                    self._place, self._differs, self._since = at + len(anchor), False, b""
                    break

    def _anchors(self) -> Iterator[bytes]:
        """Yield what the text may have behind the difference: the last name and what follows it, and the last bytes."""
        end = self._since.rfind(NAME_END)
        if end >= 0 and (begin := self._since.rfind(b'"', 0, end)) >= 0:
            yield self._since[begin:]
        if len(self._since) >= ANCHOR:
            yield self._since[-ANCHOR:]

    @property
    def ended(self) -> bool:
        """Return whether no draft token can follow."""
        left = self._bytes[self._place :]
        return not left or (self._differs and len(left) <= ANCHOR and NAME_END not in left)

    def next(self) -> int | None:
        """Return the next draft token; None: the answer differs, or the text ends."""
        if self._differs or self._place >= len(self._bytes):
            return None
        if self._place not in self._next:
            self._next, at = {}, self._place
            try:
                rest = self._bytes[at:].decode()
            except UnicodeDecodeError:  # within a character
                return None
            for token in self._codec.encode(rest):
                self._next[at] = token
                at += len(self._codec.tokens[token])
        return self._next[self._place]
