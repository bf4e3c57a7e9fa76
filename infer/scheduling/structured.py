"""Structured output: the tokens that a JSON schema or another grammar permits next in each segment of an answer.

llguidance follows a grammar token by token. It needs neither torch nor a precomputed table of states, supports nearly
all of JSON Schema, and computes the mask of a 50,000-token vocabulary in 0.02 to 1.3 ms.

W: number of 32-bit words of a token mask.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.json_schema import BLANKS, json_grammar, read_schema
from aspd_jax.language_model import LanguageModel
from aspd_jax.tokens import ItemIds, SerialIds
from infer.answers.answer import RequestOutput
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, STOP, EngineConfig
from infer.request import SamplingParams

MAX_COMPILED = 256  # maximum compiled schemas in memory
MAX_KNOWN = 64  # known tokens that are fed with a pending one
RESERVE = 4  # tokens reserved after known tokens, so that a budget ends the answer at the same token
# Fields of a request, and the names of their formats in llguidance.
FORMATS: Mapping[str, Literal["json_schema", "regex", "grammar"]] = {
    "json_schema": "json_schema",
    "branch_schema": "json_schema",
    "regex": "regex",
    "choices": "regex",
    "grammar": "grammar",
}


class Schemas:
    """Schemas compiled for a model's tokenizer, each once. Methods may be called from any thread.

    Args:
        lm: the model; its tokenizer is read when the first schema is compiled.
        config: configuration of the engine.
    """

    def __init__(self, lm: LanguageModel, config: EngineConfig) -> None:
        self._lm, self._config = lm, config
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, params: SamplingParams, budget: int) -> Constraint:
        """Return the constraint of a request at the beginning of its answer.

        Args:
            params: sampling parameters.
            budget: maximum tokens of the answer.

        Raises:
            RequestError: a schema is malformed, or the model has no fast tokenizer.
        """
        branch = None if params.branch_schema is None else self.matcher("branch_schema", str(params.branch_schema))
        serial = None if params.answer_grammar is None else self.matcher(*params.answer_grammar)
        return Constraint(serial, branch, self.words, self._config, params, budget)

    @property
    def words(self) -> int:
        """Return W."""
        return -(-self._lm.config.padded_vocab_size // 32)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        backend = getattr(self._lm.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("json_schema: expected a model with a fast tokenizer, got another.")
        return LLTokenizer(
            backend.to_str(),
            n_vocab=self._lm.config.padded_vocab_size,
            eos_token=[int(token) for token in self._lm.end_ids],
            slices=LLTokenizer.json_slices(),
        )

    def matcher(self, name: str, text: str) -> Matcher:
        """Return a matcher at the beginning of a value.

        Args:
            name: field of the request, which determines the format of the text.
            text: schema, or another grammar.

        Raises:
            RequestError: the text is malformed.
        """
        from llguidance import LLMatcher, grammar_from

        key = FORMATS[name], text
        with self._lock:
            made = self._compiled.get(key)
        if made is None:  # compiled without the lock, so that the engine's thread does not wait for it
            try:
                if FORMATS[name] == "json_schema":
                    grammar = json_grammar(read_schema(text).schema)
                else:
                    grammar = grammar_from(*key)
            except Exception as error:  # GBNF is translated in Python
                raise RequestError(f"{name}: {error}") from None
            made = LLMatcher(self._tokenizer, grammar, log_level=0)
            if made.is_error():
                raise RequestError(f"{name}: {made.get_error().strip().splitlines()[0]}")
            made.compute_bitmask()  # builds the lexer, which takes up to a second, before the engine's thread needs it
        with self._lock:
            self._compiled[key] = made
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return Matcher(made.deep_copy(), self.words)


class Matcher:
    """Position in a grammar.

    Args:
        matcher: `LLMatcher` at this position.
        words: W.
    """

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    def copy(self) -> Matcher:
        """Return a matcher at the same position."""
        return Matcher(self._matcher.deep_copy(), self._words)

    def take(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Move over tokens."""
        self._matcher.consume_tokens([int(token) for token in tokens])

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next, uint32 [W]."""
        bits: np.ndarray = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        bits = bits[: self._words]  # the matcher's mask may have one word more
        return bits

    def accepted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, the grammar accepts; the position stays."""
        return int(self._matcher.deep_copy().try_consume_tokens(list(tokens)))

    def known_tokens(self) -> list[int]:
        """Return the tokens that have to come next, as far as the grammar determines the text."""
        return list(self._matcher.compute_ff_tokens())

    def accepts(self, tokens: Sequence[int] | np.ndarray) -> bool:
        """Return whether the text may end after these tokens; the position stays."""
        after = self.copy()
        after.take(tokens)
        return after.accepting

    @property
    def accepting(self) -> bool:
        """Return whether the text may end here."""
        return bool(self._matcher.is_accepting())


class Constraint:
    """Follower of the schemas of a request through its answer.

    Args:
        serial: matcher of the whole answer; None: not constrained.
        branch: matcher of the text of a branch; None: not constrained.
        words: W.
        config: configuration of the engine.
        params: sampling parameters.
        budget: maximum tokens of the answer.
    """

    def __init__(
        self,
        serial: Matcher | None,
        branch: Matcher | None,
        words: int,
        config: EngineConfig,
        params: SamplingParams,
        budget: int,
    ) -> None:
        self._serial, self._branch, self._words, self._config = serial, branch, words, config
        self._params, self._budget = params, budget
        self._ends = frozenset((*config.end, *config.special.ids))
        self._matchers: dict[tuple[int, int], Matcher] = {}  # (item, branch)
        self._followed: dict[tuple[int, int], int] = {}  # number of tokens
        self._in_block = False

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return the answer; it ends with `LENGTH` if a grammar does not accept the end of its text.

        This happens where a grammar exceeds llguidance's limits: only the end may follow then.
        """
        if output.finish != STOP or self._accepts(output.items):
            return output
        return replace(output, finish=LENGTH)

    def _accepts(self, items: Sequence[ItemIds]) -> bool:
        """Return whether the grammars accept the end of the serial text and of every branch."""
        serial = [int(token) for item in items if isinstance(item, SerialIds) for token in item.ids]
        branches = [text.ids for item in items if not isinstance(item, SerialIds) for text in item.texts]
        return (self._serial is None or self._serial.accepts(serial)) and (
            self._branch is None or all(map(self._branch.accepts, branches))
        )

    def start(self) -> RowGuidance:
        """Return the token masks before the answer begins."""
        serial = {0: [next_mask(self._serial, self._words)]} if self._serial else {}
        return RowGuidance({**serial, **self._fresh()})

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return token masks, known tokens and draft tokens of the constrained segments."""
        if not output.items:
            return RowGuidance()
        number, last = len(output.items) - 1, output.items[-1]
        grown: dict[tuple[int, int], np.ndarray] = {}
        masks: dict[int, Sequence[np.ndarray]] = {}
        if isinstance(last, SerialIds):
            masks = self._fresh() if self._in_block else {}
            self._in_block = False
            grown = {(number, 0): last.ids} if self._serial else {}
        elif self._branch:
            self._in_block = True
            texts = enumerate(last.texts, 1)
            grown = {(number, branch): text.ids for branch, text in texts if branch in output.open_branches}
        known: dict[int, list[int]] = {}
        drafts: dict[int, list[int]] = {}
        for key, ids in grown.items():
            segment = key[1]
            if len(ids) > self._followed.get(key, 0):
                known[segment] = self._grown(key, ids, self._known_limit(output, len(ids)))
            elif not output.drafts_of(segment):
                continue
            unchecked = [] if known.get(segment) else output.drafts_of(segment)
            drafts[segment], masks[segment] = self._draft_masks(key, unchecked)
        return RowGuidance(masks, drafts, known)

    def _fresh(self) -> dict[int, Sequence[np.ndarray]]:
        """Return the token masks of branches that have not begun."""
        if not self._branch:
            return {}
        mask = self._branch_mask(self._branch)
        return {number: [mask] for number in range(1, self._config.max_branches + 1)}

    def _known_limit(self, output: RequestOutput, length: int) -> int:
        """Return how many known tokens may be fed with the pending token of a segment that has `length` tokens."""
        size = output.token_ids.size
        left = min(self._budget, self._params.max_content_tokens or self._budget) - size
        open_branches = max(1, len(output.open_branches))
        within = self._params.max_branch_tokens - length if output.open_branches else left
        return known_limit(min(left // open_branches, within) - RESERVE, self._config)

    def _matcher(self, key: tuple[int, int]) -> Matcher:
        """Return the matcher of a segment."""
        fresh = self._branch if key[1] else self._serial
        assert fresh is not None
        if key not in self._matchers:
            self._matchers[key] = fresh.copy()
        return self._matchers[key]

    def _grown(self, key: tuple[int, int], ids: np.ndarray, limit: int) -> list[int]:
        """Follow a segment; return its known tokens, which count as followed."""
        matcher = self._matcher(key)
        matcher.take(ids[self._followed.get(key, 0) :])
        queued = matcher.known_tokens()[:limit]
        if queued:
            matcher.take(queued)
        self._followed[key] = len(ids) + len(queued)
        return queued

    def _draft_masks(self, key: tuple[int, int], drafts: Sequence[int]) -> tuple[list[int], list[np.ndarray]]:
        """Return the draft tokens of a segment that its grammar permits, and the token masks before and after each."""

        def mask(matcher: Matcher | None) -> np.ndarray:
            return self._branch_mask(matcher) if key[1] and matcher else next_mask(matcher, self._words)

        return permitted_drafts(self._matcher(key), drafts, mask, lambda tokens: tokens[-1] in self._ends)

    def _branch_mask(self, matcher: Matcher) -> np.ndarray:
        bits = next_mask(matcher, self._words)
        if matcher.accepting:
            bits = bits.copy()
            word, bit = divmod(self._config.special.branch_end, 32)
            bits[word] |= np.uint32(1 << bit)
        return bits


def known_limit(tokens_left: int, config: EngineConfig) -> int:
    """Return how many known tokens are fed with a pending one; `tokens_left`: tokens that the budgets leave."""
    return max(0, min(tokens_left, config.longest_head - 1, MAX_KNOWN))


def json_rule(schema: str | Mapping[str, Any]) -> str:
    """Return the right side of a Lark rule for a JSON value of a schema.

    Raises:
        RequestError: the schema is malformed or not supported.
    """
    return f"%json {json.dumps({**read_schema(schema).schema, 'x-guidance': {'whitespace_pattern': BLANKS}})}"


def permits(mask: np.ndarray, token: int) -> bool:
    """Return whether a token mask, uint32 [W], has a token."""
    return bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def permitted_drafts(
    matcher: Matcher | None,
    drafts: Sequence[int],
    mask: Callable[[Matcher | None], np.ndarray],
    ends: Callable[[Sequence[int]], bool],
) -> tuple[list[int], list[np.ndarray]]:
    """Return the draft tokens that may follow, and the token masks before and after each, uint32 [W].

    Args:
        matcher: position before the draft tokens; None: any token may follow.
        drafts: draft tokens.
        mask: function from a position to the tokens that may come next.
        ends: whether the last of these draft tokens ends the segment; it is not among those that follow.
    """
    permitted, masks = list[int](), [mask(matcher)]
    matcher = matcher.copy() if matcher and drafts else matcher
    for token in drafts:
        if not permits(masks[-1], token) or ends([*permitted, token]):
            break
        permitted.append(token)
        if matcher is not None:
            matcher.take([token])
        masks.append(mask(matcher))
    return permitted, masks


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
