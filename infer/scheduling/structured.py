"""Structured output: the tokens that a JSON schema or another grammar permits next in each segment of an answer.

llguidance follows a grammar token by token. It needs neither torch nor a precomputed table of states, supports nearly
all of JSON Schema, and computes the mask of a 50,000-token vocabulary in 0.02 to 1.3 ms.

W: number of 32-bit words of a token mask.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.sizes import next_power
from aspd_jax.tokens import BlockIds, SerialIds
from infer.answers.answer import RequestOutput
from infer.decode.state import EngineConfig
from infer.request import SamplingParams

MAX_COMPILED = 256  # compiled schemas that are kept
# White space between the parts of a value. With more, a small model at a high temperature may never stop repeating it.
BLANKS = " ?"
# Fields of a request, and the names of their formats in llguidance.
FORMATS: Mapping[str, Literal["json_schema", "regex", "choice", "grammar"]] = {
    "json_schema": "json_schema",
    "branch_schema": "json_schema",
    "regex": "regex",
    "choices": "choice",
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

    def constraint(self, params: SamplingParams) -> Constraint:
        """Return the constraint of a request at the beginning of its answer.

        Raises:
            RequestError: a schema is malformed, or the model has no fast tokenizer.
        """
        branch = ("branch_schema", str(params.branch_schema)) if params.branch_schema else None
        serial, branches = (None if s is None else self._matcher(*s) for s in (params.answer_grammar, branch))
        return Constraint(serial, branches, -(-self._lm.config.padded_vocab_size // 32), self._config)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        backend = getattr(self._lm.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("a JSON schema needs a model with a (fast) tokenizer")
        return LLTokenizer(
            backend.to_str(),
            n_vocab=self._lm.config.padded_vocab_size,
            eos_token=[int(token) for token in self._lm.end_ids],
            slices=LLTokenizer.json_slices(),
        )

    def _matcher(self, name: str, text: str) -> Any:
        """Return an `LLMatcher` at the beginning of a value.

        Args:
            name: field of the request, which determines the format of the text.
            text: schema, or another grammar.

        Raises:
            RequestError: the text is malformed.
        """
        from llguidance import LLMatcher, grammar_from

        key = FORMATS[name], text
        with self._lock:
            if key not in self._compiled:
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
                self._compiled[key] = made
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return self._compiled[key].deep_copy()


class Constraint:
    """Follows the schemas of a request through its answer.

    Args:
        serial: `LLMatcher` of the whole answer; None: not constrained.
        branch: `LLMatcher` of the text of a branch; None: not constrained.
        words: W.
        config: configuration of the engine.
    """

    def __init__(self, serial: Any, branch: Any, words: int, config: EngineConfig) -> None:
        self._serial, self._branch, self._words, self._config = serial, branch, words, config
        self._matchers: dict[tuple[int, int], Any] = {}  # (item, branch)
        self._followed: dict[tuple[int, int], int] = {}  # number of tokens
        self._in_block = False

    def start(self) -> dict[int, np.ndarray]:
        """Return the token masks, uint32 [W], before the answer begins, by segment: 0 is serial, k is branch k."""
        everything = np.full(self._words, ~np.uint32(0))
        serial = self._mask(self._serial, False) if self._serial else everything
        return {0: serial, **self._fresh()}

    def follow(self, output: RequestOutput) -> dict[int, np.ndarray]:
        """Return the token masks of the segments that have grown."""
        if not output.items:
            return {}
        number, last = len(output.items) - 1, output.items[-1]
        if isinstance(last, SerialIds):
            masks = self._fresh() if self._in_block else {}
            self._in_block = False
            return masks | (self._grown((number, 0), last.ids, self._serial, False) if self._serial else {})
        assert isinstance(last, BlockIds)
        self._in_block, masks = True, {}
        for branch, text in enumerate(last.texts(len(self._config.separator)), 1):
            if self._branch and branch in output.open_branches:
                masks |= self._grown((number, branch), text.ids, self._branch, True)
        return masks

    def _fresh(self) -> dict[int, np.ndarray]:
        """Return the token masks of branches that have not begun."""
        if not self._branch:
            return {}
        return dict.fromkeys(range(1, self._config.max_branches + 1), self._mask(self._branch, True))

    def _grown(self, key: tuple[int, int], ids: np.ndarray, fresh: Any, in_branch: bool) -> dict[int, np.ndarray]:
        followed = self._followed.get(key, 0)
        if len(ids) <= followed:
            return {}
        if key not in self._matchers:
            self._matchers[key] = fresh.deep_copy()
        matcher = self._matchers[key]
        matcher.consume_tokens([int(token) for token in ids[followed:]])
        self._followed[key] = len(ids)
        return {key[1]: self._mask(matcher, in_branch)}

    def _mask(self, matcher: Any, in_branch: bool) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self._words]  # there may be one more
        if in_branch and matcher.is_accepting():
            bits = bits.copy()
            word, bit = divmod(self._config.tags.branch_end, 32)
            bits[word] |= np.uint32(1 << bit)
        return bits


def mask_arrays(masks: Mapping[int, Mapping[int, np.ndarray]], batch: int) -> tuple[np.ndarray, ...]:
    """Return token masks as `slots.set_token_mask` takes them.

    Args:
        masks: token masks by row and segment; at least one.
        batch: number of rows of the cache.

    Returns:
        Rows and segments int32 [P], masks uint32 [P, W]; P is the number of masks, rounded up to a power of two.
    """
    entries = [(row, segment, mask) for row, by_segment in masks.items() for segment, mask in by_segment.items()]
    size = next_power(len(entries))
    rows, segments = np.full(size, batch, np.int32), np.zeros(size, np.int32)  # a row past the end: none
    bits = np.zeros((size, entries[0][2].size), np.uint32)
    for number, entry in enumerate(entries):
        rows[number], segments[number], bits[number] = entry
    return rows, segments, bits
