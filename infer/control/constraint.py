"""Controller of answers whose serial text or branches follow a schema or another grammar.

W words of 32 tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aspd_jax.grammar_limits import limit_error
from aspd_jax.tokens import ItemIds, SerialIds
from infer.answers.answer import RequestOutput
from infer.control.controller import Controller
from infer.control.masks import known_limit, next_mask, permitted_drafts
from infer.control.schemas import Matcher, Schemas
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, STOP, EngineConfig
from infer.request import Request

RESERVE = 4  # tokens reserved after known tokens, so that a budget ends the answer at the same token


class Constraint(Controller):
    """Decisions for answers whose serial text or branches follow a schema or another grammar.

    Args:
        inner: controller of the answer otherwise.
        request: request with a schema or another grammar.
        schemas: compiled schemas.
        config: configuration of the engine.

    Raises:
        RequestError: a schema is malformed, or the model has no fast tokenizer.
    """

    def __init__(self, inner: Controller, request: Request, schemas: Schemas, config: EngineConfig) -> None:
        params = request.params
        branch = None if params.branch_schema is None else schemas.matcher("branch_schema", str(params.branch_schema))
        serial = None if params.answer_grammar is None else schemas.matcher(*params.answer_grammar)
        self._serial, self._branch, self._words, self._config = serial, branch, schemas.words, config
        self._inner, self._params, self._budget = inner, params, request.budget
        self._ends = frozenset((*config.end, *config.special.ids))
        self._matchers: dict[tuple[int, int], Matcher] = {}  # (item, branch)
        self._followed: dict[tuple[int, int], int] = {}  # number of tokens

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return the answer; it ends with `LENGTH` if a grammar does not accept the end of its text."""
        if output.finish != STOP or self._accepts(output.items):
            return output
        return replace(output, finish=LENGTH)

    def _accepts(self, items: Sequence[ItemIds]) -> bool:
        """Return whether the grammars accept the end of the serial text and of every branch."""
        serial = [token for item in items if isinstance(item, SerialIds) for token in item.ids]
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

    def start(self) -> RowGuidance | None:
        """Return the token mask of the first token."""
        return RowGuidance({0: [next_mask(self._serial, self._words)]}) if self._serial else None

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return token masks, known tokens and draft tokens of the constrained segments."""
        if output.opening:
            return self._opened(self._inner.follow(output))
        if not output.items:
            return self._inner.follow(output)
        number, last = len(output.items) - 1, output.items[-1]
        grown: dict[tuple[int, int], list[int]] = {}
        masks: dict[int, Sequence[np.ndarray]] = {}
        if isinstance(last, SerialIds):
            grown = {(number, 0): last.ids} if self._serial else {}
        elif self._branch:
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
        return RowGuidance(finish=LENGTH) if self.error else RowGuidance(masks, drafts=drafts, known_tokens=known)

    def _opened(self, guidance: RowGuidance) -> RowGuidance:
        """Return decisions with the token masks of the branches that they open."""
        if not (self._branch and guidance.branches):
            return guidance
        mask = self._branch_mask(self._branch)
        return replace(guidance, masks={**guidance.masks, **{k: [mask] for k in range(1, guidance.branches + 1)}})

    def _known_limit(self, output: RequestOutput, length: int) -> int:
        """Return how many known tokens may be fed with the pending token of a segment that has `length` tokens."""
        left = min(self._budget, self._params.max_content_tokens or self._budget) - output.size
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

    def _grown(self, key: tuple[int, int], ids: list[int], limit: int) -> list[int]:
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
