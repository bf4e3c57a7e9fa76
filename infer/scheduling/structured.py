"""Structured output: which tokens a JSON schema or another grammar permits next, for each segment of an answer.

The library llguidance follows a grammar token by token. It needs neither torch nor a table of states that is built
beforehand, takes nearly all of JSON Schema, and finds the tokens of a 50,000-token vocabulary in 0.02 to 1.3 ms.

W words of 32 tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.tokens import BlockIds, SerialIds
from infer.answers.answer import Answer
from infer.request import SamplingParams

KNOWN_SCHEMAS = 256  # that are kept compiled
# Between the parts of a value. With more, a small model at a high temperature would go on with blanks for ever.
BLANKS = " ?"
# Fields of a request, and what llguidance calls what they hold.
FORMATS: Mapping[str, Literal["json_schema", "regex", "choice", "grammar"]] = {
    "json_schema": "json_schema",
    "branch_schema": "json_schema",
    "regex": "regex",
    "choices": "choice",
    "grammar": "grammar",
}


class Schemas:
    """Schemas compiled for a model's tokenizer, each once; from any thread.

    Args:
        tokenizer: of the Hugging Face library, a fast one.
        vocabulary: logits of the model.
        end: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        self.words = -(-vocabulary // 32)
        spelled = tokenizer.backend_tokenizer.to_str()
        self._tokenizer = LLTokenizer(
            spelled, n_vocab=vocabulary, eos_token=list(end), slices=LLTokenizer.json_slices()
        )
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, name: str, text: str) -> Any:
        """An `LLMatcher` at the beginning of a value.

        Args:
            name: field of the request; it says what kind of grammar the text is.

        Raises:
            RequestError: why the text is no such grammar.
        """
        from llguidance import LLMatcher, grammar_from

        key = FORMATS[name], text
        with self._lock:
            if key not in self._known:
                try:
                    if FORMATS[name] == "json_schema":
                        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": BLANKS})
                    else:
                        grammar = grammar_from(*key)
                except Exception as error:  # GBNF is translated in Python
                    raise RequestError(f"{name}: {error}") from None
                made = LLMatcher(self._tokenizer, grammar, log_level=0)
                if made.is_error():
                    raise RequestError(f"{name}: {made.get_error().strip().splitlines()[0]}")
                self._known[key] = made
                if len(self._known) > KNOWN_SCHEMAS:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key].deep_copy()


def schemas_of(lm: LanguageModel) -> Schemas:
    """Those of a model, none compiled yet.

    Raises:
        RequestError: it has no tokenizer, or none that tells how it cuts text.
    """
    if getattr(lm.tokenizer, "backend_tokenizer", None) is None:
        raise RequestError("a JSON schema needs a model with a (fast) tokenizer")
    return Schemas(lm.tokenizer, lm.config.padded_vocab_size, [int(i) for i in lm.end_ids])


class Constraint:
    """Follows the schemas of a request through its answer.

    Args:
        branches: N.
        branch_end: token that ends a branch.
        head: tokens between a title and the text of its branch.
    """

    def __init__(self, schemas: Schemas, params: SamplingParams, branches: int, branch_end: int, head: int) -> None:
        of_branch = ("branch_schema", str(params.branch_schema)) if params.branch_schema else None
        self._whole, self._branch = (
            None if given is None else schemas.matcher(*given) for given in (params.answer_grammar, of_branch)
        )
        self._words, self._count, self._branch_end, self._head = schemas.words, branches, branch_end, head
        self._matchers: dict[tuple[int, int], Any] = {}  # (item, branch)
        self._followed: dict[tuple[int, int], int] = {}  # tokens
        self._block: int | None = None  # number of the item that is an open block

    def start(self) -> dict[int, np.ndarray]:
        """Bits uint32 [W] of every segment before the answer begins: 0 the serial one, k branch k."""
        everything = np.full(self._words, ~np.uint32(0))
        serial = self._bits(self._whole, False) if self._whole else everything
        return {0: serial, **self._fresh()}

    def follow(self, answer: Answer) -> dict[int, np.ndarray]:
        """Bits of the segments in which the answer has grown."""
        if not answer.items:
            return {}
        number, last = len(answer.items) - 1, answer.items[-1]
        if isinstance(last, SerialIds):
            ended, self._block = self._block is not None, None
            found = self._fresh() if ended else {}
            return found | (self._grown((number, 0), last.ids, self._whole, False) if self._whole else {})
        assert isinstance(last, BlockIds)
        self._block = number
        found = {}
        for branch, text in enumerate(last.texts(self._head), 1):
            if self._branch and branch in answer.open_branches:
                found |= self._grown((number, branch), text.ids, self._branch, True)
        return found

    def _fresh(self) -> dict[int, np.ndarray]:
        """Bits of branches that have not begun."""
        if not self._branch:
            return {}
        return dict.fromkeys(range(1, self._count + 1), self._bits(self._branch, True))

    def _grown(self, key: tuple[int, int], ids: np.ndarray, fresh: Any, in_branch: bool) -> dict[int, np.ndarray]:
        followed = self._followed.get(key, 0)
        if len(ids) <= followed:
            return {}
        if key not in self._matchers:
            self._matchers[key] = fresh.deep_copy()
        matcher = self._matchers[key]
        matcher.consume_tokens([int(token) for token in ids[followed:]])
        self._followed[key] = len(ids)
        return {key[1]: self._bits(matcher, in_branch)}

    def _bits(self, matcher: Any, in_branch: bool) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self._words]  # there may be one more
        if in_branch and matcher.is_accepting():
            bits = bits.copy()
            bits[self._branch_end // 32] |= np.uint32(1 << self._branch_end % 32)
        return bits


def rows_of(news: Mapping[int, Mapping[int, np.ndarray]], nowhere: int, size: int) -> tuple[np.ndarray, ...]:
    """News of rows as `slots.set_token_mask` takes them: rows and segments int32 [P], bits uint32 [P, W].

    Args:
        news: bits by row and segment; at least one.
        nowhere: a row past the end, for what is behind them.
        size: P.
    """
    every = [(row, segment, bits) for row, of_row in news.items() for segment, bits in of_row.items()]
    row, segment = np.full(size, nowhere, np.int32), np.zeros(size, np.int32)
    bits = np.zeros((size, every[0][2].size), np.uint32)
    for number, (own, which, words) in enumerate(every):
        row[number], segment[number], bits[number] = own, which, words
    return row, segment, bits
