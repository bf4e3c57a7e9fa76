"""Token masks: the tokens that may come next in a segment.

W words of 32 tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from infer.control.draft_text import DraftText
from infer.control.schemas import Matcher
from infer.decode.state import EngineConfig

MAX_KNOWN = 64  # known tokens that are fed with a pending one


def known_limit(tokens_left: int, config: EngineConfig) -> int:
    """Return how many known tokens are fed with a pending one; `tokens_left`: tokens that the budgets leave."""
    return max(0, min(tokens_left, config.longest_head - 1, MAX_KNOWN))


def permits(mask: np.ndarray, token: int) -> bool:
    """Return whether a token mask, uint32 [W], has a token."""
    return bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def permitted_drafts(
    matcher: Matcher | None,
    drafts: Sequence[int],
    words: int,
    ends: Callable[[Sequence[int]], bool],
) -> tuple[list[int], list[np.ndarray]]:
    """Return the draft tokens that may follow, and the token masks before and after each, uint32 [W].

    Args:
        matcher: position before the draft tokens; None: any token may follow.
        drafts: draft tokens.
        words: W.
        ends: whether the last of these draft tokens ends the segment; it is not among those that follow.
    """
    permitted, masks = list[int](), [next_mask(matcher, words)]
    matcher = matcher.copy() if matcher and drafts else matcher
    for token in drafts:
        if not permits(masks[-1], token) or ends([*permitted, token]):
            break
        if matcher is not None:
            matcher.take([token])
        mask = next_mask(matcher, words)
        if matcher is not None and matcher.error:  # no token may follow it
            break
        permitted.append(token)
        masks.append(mask)
    return permitted, masks


def drafted(
    matcher: Matcher | None, draft: DraftText, limit: int, ends: Container[int], words: int
) -> tuple[list[int], list[np.ndarray], list[bool]]:
    """Return the known and draft tokens that an answer may go on with.

    Args:
        matcher: position of the answer in its grammar, which moves over the tokens; None: any token may follow.
        draft: draft text at the place of the answer, which moves over the tokens.
        limit: maximum number of tokens.
        ends: tokens that end the answer; they are not among the tokens.
        words: W.

    Returns:
        The tokens; the token masks before and after each, uint32 [W], none without a grammar; and whether what follows
        each of these places is known.
    """
    tokens, masks, known = list[int](), list[np.ndarray](), list[bool]()
    while True:
        determined = [] if matcher is None else matcher.known_tokens()
        if matcher is not None:
            masks.append(only_token(determined[0], words) if determined else matcher.mask())
        known.append(bool(determined))
        token = determined[0] if determined else draft.next()
        if token is None or token in ends or (masks and not permits(masks[-1], token)) or len(tokens) >= limit:
            return tokens, masks, known
        tokens.append(token)
        draft.follow([token])
        if matcher is not None:
            matcher.take([token])


def token_bits(tokens: np.ndarray, words: int) -> np.ndarray:
    """Return a token mask, uint32 [W], of tokens, bool [V]."""
    padded = np.zeros(words * 32, bool)
    padded[: tokens.size] = tokens
    return np.packbits(padded, bitorder="little").view(np.uint32)


def tokens_of(mask: np.ndarray) -> np.ndarray:
    """Return the tokens of a token mask, uint32 [W], in ascending order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def only_token(token: int, words: int) -> np.ndarray:
    """Return a token mask with one token, uint32 [W]."""
    bits = np.zeros(words, np.uint32)
    bits[token // 32] = np.uint32(1 << token % 32)
    return bits


def next_mask(matcher: Matcher | None, words: int) -> np.ndarray:
    """Return the tokens that may come next, uint32 [W]: the next known token, if there is one.

    None: any token may.
    """
    if matcher is None:
        return np.full(words, ~np.uint32(0))
    known = matcher.known_tokens()
    return only_token(known[0], words) if known else matcher.mask()
