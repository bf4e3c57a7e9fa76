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

from aspd_jax.byte_tokens import GrammarTokens
from aspd_jax.errors import CheckpointError, RequestError, TokenizerError
from aspd_jax.grammar_limits import first_line, limit_error, parser_limits
from aspd_jax.json_schema import BLANKS, json_grammar, read_schema
from aspd_jax.language_model import LanguageModel
from aspd_jax.tokens import ItemIds, SerialIds, TextCodec
from infer.answers.answer import RequestOutput
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, STOP, EngineConfig
from infer.request import SamplingParams

MAX_READY = 256  # maximum matchers in memory that no answer has yet
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
    """Matchers of the schemas of requests, over a model's tokens. Methods may be called from any thread.

    Answers share no matcher, because copies of a matcher share the lexer: where one exceeds a limit, all fail.

    Args:
        lm: the model; its tokenizer is read when the first schema is compiled.
        config: configuration of the engine.
    """

    def __init__(self, lm: LanguageModel, config: EngineConfig) -> None:
        self._lm, self._config = lm, config
        self._ready: OrderedDict[tuple[str, str], list[Any]] = OrderedDict()  # matchers that no answer has yet
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
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = [int(token) for token in self._lm.end_ids]
        tokens = GrammarTokens(self._codec.byte_tokens, self._lm.config.padded_vocab_size, ends[0] if ends else None)
        return LLTokenizer(TokenizerWrapper(tokens), eos_token=ends or None, slices=LLTokenizer.json_slices())

    @property
    def _codec(self) -> TextCodec:
        return self._lm.codec.text

    def check_all(self, params: SamplingParams) -> None:
        """Check the schemas of a request (`check`)."""
        if params.branch_schema is not None:
            self.check("branch_schema", str(params.branch_schema))
        if params.answer_grammar is not None:
            self.check(*params.answer_grammar)

    def check(self, name: str, text: str) -> None:
        """Check a schema, and make the matcher of an answer, so that the engine's thread need not make it.

        Args:
            name: field of the request, which determines the format of the text.
            text: schema, or another grammar.

        Raises:
            RequestError: the text is malformed, or the model has no fast tokenizer.
        """
        made = self._compile(name, text)
        with self._lock:
            self._ready.setdefault((name, text), []).append(made)
            self._ready.move_to_end((name, text))
            while sum(map(len, self._ready.values())) > MAX_READY:
                self._pop(next(iter(self._ready)))

    def matcher(self, name: str, text: str) -> Matcher:
        """Return a matcher at the beginning of a value, which nothing else has.

        Args:
            name: field of the request, which determines the format of the text.
            text: schema, or another grammar.

        Raises:
            RequestError: see `check`.
        """
        with self._lock:
            made = self._pop((name, text)) if (name, text) in self._ready else None
        return Matcher(made or self._compile(name, text), self.words)

    def _pop(self, key: tuple[str, str]) -> Any:
        made = self._ready[key].pop()
        if not self._ready[key]:
            del self._ready[key]
        return made

    def _compile(self, name: str, text: str) -> Any:
        """Return a new `LLMatcher`. Nothing waits for it: it may take seconds."""
        from llguidance import LLMatcher, grammar_from

        try:
            if FORMATS[name] == "json_schema":
                grammar = json_grammar(read_schema(text).schema)
            else:
                grammar = grammar_from(FORMATS[name], text)
        except Exception as error:  # GBNF is translated in Python
            raise RequestError(f"{name}: {error}") from None
        try:
            tokenizer, drops_space = self._tokenizer, self._codec.drops_space
        except (CheckpointError, TokenizerError) as error:
            raise RequestError(f"{name}: {error}") from None
        if drops_space and FORMATS[name] != "grammar":
            grammar = after_space(grammar)
        made = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        if not made.is_error():
            made.compute_bitmask()  # builds the lexer
        if made.is_error():
            raise RequestError(f"{name}: {first_line(made.get_error())}")
        if drops_space and made.compute_ff_bytes().startswith(b" ") and FORMATS[name] == "grammar":
            raise RequestError(
                f"{name}: expected text without a space at its beginning, which this tokenizer drops, got one."
            )
        return made


class Matcher:
    """Position in a grammar.

    Args:
        matcher: `LLMatcher` at this position.
        words: W.
    """

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    @property
    def error(self) -> str:
        """Return why the matcher can follow no further tokens; empty: it can. Only the end may follow then."""
        return first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

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
        """Return the answer; it ends with `LENGTH` if a grammar does not accept the end of its text."""
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

    @property
    def error(self) -> str:
        """Return why the answer cannot follow a schema, which is named; empty: it can."""
        for key, matcher in (((0, 0), self._serial), ((0, 1), self._branch), *self._matchers.items()):
            if matcher is not None and (reason := matcher.error):
                answer = self._params.answer_grammar or ("", "")
                return limit_error(*(("branch_schema", str(self._params.branch_schema)) if key[1] else answer), reason)
        return ""

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
        return RowGuidance(finish=LENGTH) if self.error else RowGuidance(masks, drafts, known)

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


def after_space(grammar: str) -> str:
    """Return a grammar of the same texts after a space, which tokenizers of SentencePiece drop on decoding.

    Args:
        grammar: grammar in llguidance's JSON.
    """
    (inner,) = json.loads(grammar)["grammars"]
    outer = {"name": "spaced", "lark_grammar": 'start: " " @text'}
    return json.dumps({"grammars": [outer, inner | {"name": "text"}]})


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
