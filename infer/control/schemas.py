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
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import numpy as np

from aspd_jax.byte_tokens import GrammarTokens
from aspd_jax.errors import CheckpointError, RequestError, TokenizerError
from aspd_jax.grammar_limits import first_line, parser_limits
from aspd_jax.json_schema import json_grammar, read_schema
from aspd_jax.tokens import TextCodec
from infer.request import SamplingParams

Answer = TypeVar("Answer")
MAX_READY = 256  # maximum matchers in memory that no answer has yet
# Fields of a request, and the names of their formats in llguidance.
FORMATS: Mapping[str, Literal["json_schema", "regex", "grammar"]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "choices": "regex",
    "grammar": "grammar",
    "template": "grammar",  # the serial form of a template
    "hole": "grammar",  # the text behind the lead of a hole
}


class Schemas:
    """Matchers of the schemas of requests, over a model's tokens. Methods may be called from any thread.

    Answers share no matcher, because copies of a matcher share the lexer: where one exceeds a limit, all fail.

    Args:
        codec: function that returns the codec of the model's tokenizer; called when the first schema is compiled.
        end_ids: ids of the tokens that end an answer.
        vocab_size: size of the vocabulary, padding included.
    """

    def __init__(self, codec: Callable[[], TextCodec], end_ids: Sequence[int], vocab_size: int) -> None:
        self._codec, self._end_ids, self._vocab_size = codec, [int(token) for token in end_ids], vocab_size
        self._ready: OrderedDict[tuple[str, str], list[Any]] = OrderedDict()  # matchers that no answer has yet
        self._lock = threading.Lock()

    @property
    def words(self) -> int:
        """Return W."""
        return -(-self._vocab_size // 32)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = self._end_ids
        tokens = GrammarTokens(self.codec.byte_tokens, self._vocab_size, ends[0] if ends else None)
        return LLTokenizer(TokenizerWrapper(tokens), eos_token=ends or None, slices=LLTokenizer.json_slices())

    @property
    def codec(self) -> TextCodec:
        """Return the codec of the model's tokenizer."""
        return self._codec()

    def check_all(self, params: SamplingParams) -> None:
        """Check the schemas of a request (`check`)."""
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
        make = partial(self._compile, name, text)
        return Matcher(made or make(), self.words, make)

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
            tokenizer, drops_space = self._tokenizer, self.codec.drops_space
        except (CheckpointError, TokenizerError) as error:
            raise RequestError(f"{name}: {error}") from None
        spaced = drops_space and FORMATS[name] != "grammar"
        if spaced:
            grammar = after_space(grammar)
        made = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        if not made.is_error():
            made.compute_bitmask()  # builds the lexer
        if made.is_error():
            raise RequestError(f"{name}: {first_line(made.get_error())}")
        if drops_space and not spaced and name != "hole" and made.compute_ff_bytes().startswith(b" "):
            raise RequestError(
                f"{name}: expected text without a space at its beginning, which this tokenizer drops, got one."
            )
        return made


class Matcher:
    """Position in a grammar.

    Copies share the lexer. Where tokens that were tried on a copy exceed a limit, it fails for all of them, so a
    matcher that has copies is made again, and fails only if it exceeds a limit by itself.

    Args:
        matcher: `LLMatcher` at this position.
        words: W.
        make: function that returns an `LLMatcher` at the beginning.
        tokens: tokens up to this position.
    """

    def __init__(self, matcher: Any, words: int, make: Callable[[], Any], tokens: Sequence[int] = ()) -> None:
        self._matcher, self._words, self._make, self._tokens = matcher, words, make, list(tokens)
        self._shares = False  # whether copies share the lexer

    def _ask(self, question: Callable[[Any], Answer]) -> Answer:
        """Return the answer of the `LLMatcher`."""
        answer = question(self._matcher)
        if self._shares and self._matcher.is_error():
            self._matcher, self._shares = self._make(), False
            for token in self._tokens:  # masks count, too
                self._matcher.consume_tokens([token])
                self._matcher.compute_bitmask()
            answer = question(self._matcher)
        return answer

    @property
    def error(self) -> str:
        """Return why the matcher can follow no further tokens; empty: it can. Only the end may follow then."""
        return first_line(self._ask(lambda own: own.get_error() if own.is_error() else ""))

    def copy(self) -> Matcher:
        """Return a matcher at the same position."""
        copy = Matcher(self._ask(lambda own: own.deep_copy()), self._words, self._make, self._tokens)
        self._shares = copy._shares = True
        return copy

    def take(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Move over tokens."""
        new = [int(token) for token in tokens]
        self._tokens += new
        self._matcher.consume_tokens(new)

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next, uint32 [W]."""
        bits: np.ndarray = np.frombuffer(self._ask(lambda own: own.compute_bitmask()), np.uint32)
        bits = bits[: self._words]  # the matcher's mask may have one word more
        return bits

    def known_tokens(self) -> list[int]:
        """Return the tokens that have to come next, as far as the grammar determines the text."""
        return self._ask(lambda own: list(own.compute_ff_tokens()))

    def accepts(self, tokens: Sequence[int] | np.ndarray) -> bool:
        """Return whether these tokens, from the beginning, are a whole text of the grammar; the position stays."""
        whole = self.copy()
        whole._matcher.reset()
        whole._tokens = []
        whole.take(tokens)
        return whole._ask(lambda own: bool(own.is_accepting()))


def after_space(grammar: str) -> str:
    """Return a grammar of the same texts after a space, which tokenizers of SentencePiece drop on decoding.

    Args:
        grammar: grammar in llguidance's JSON.
    """
    (inner,) = json.loads(grammar)["grammars"]
    outer = {"name": "spaced", "lark_grammar": 'start: " " @text'}
    return json.dumps({"grammars": [outer, inner | {"name": "text"}]})
