"""Controller of answers whose serial text or branches follow a grammar, or whose serial text has a draft text.

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
from infer.control.draft_text import DraftText
from infer.control.masks import drafted, known_limit, next_mask, permitted_drafts
from infer.control.schemas import Matcher, Schemas
from infer.decode.checking import Check
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, STOP, EngineConfig
from infer.request import Request

MAX_CHECKED = 64  # maximum tokens of a check: those of a program for prompts beside answers
LOOK = 4  # tokens after which an answer without a grammar is compared with its draft text again
RESERVE = 4  # tokens reserved after known tokens, so that a budget ends the answer at the same token


class Constraint(Controller):
    """Decisions for answers whose serial text or branches follow a grammar, or whose serial text has a draft text.

    Args:
        inner: controller of the answer otherwise.
        request: request with a schema, another grammar or a prediction.
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
        self._inner, self._params, self._budget, self._schemas = inner, params, request.budget, schemas
        self._ends = frozenset((*config.end, *config.special.ids))
        self._matchers: dict[tuple[int, int], Matcher] = {}  # (item, branch)
        self._followed: dict[tuple[int, int], int] = {}  # number of tokens
        self._draft: DraftText | None = None  # draft text of the serial segment
        if params.prediction is not None:
            self._draft = DraftText(params.prediction, schemas.codec)

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
        """Return the token mask of the first token, or let the sequence wait behind it."""
        if self._serial:
            return RowGuidance({0: [next_mask(self._serial, self._words)]})
        return RowGuidance(left={0: 1}) if self._draft else None

    def begin(self, draft: DraftText, last: int) -> Check:
        """Return the first check of a draft text of the answer; `last`: last token of the prompt."""
        self._draft = draft
        check = self._check([], last, self._limit(0))
        return check._replace(known=[False, *check.known[1:]])  # in serial mode, this token is sampled

    def _limit(self, size: int) -> int:
        """Return the tokens of a check that the budgets have room for, behind `size` tokens."""
        return min(self._budget, self._params.max_content_tokens or self._budget) - size

    def _check(self, ids: list[int], last: int, limit: int) -> Check:
        """Return the last token and draft tokens behind it, and what the grammar permits after each.

        Args:
            ids: tokens of the answer.
            last: the last of them, or of the prompt.
            limit: maximum number of tokens.
        """
        assert self._draft is not None
        matcher = None if self._serial is None else self._matcher((0, 0)).copy()
        most = min(limit, MAX_CHECKED) - 1
        tokens, masks, known = drafted(matcher, self._draft.copy(), most, self._ends, self._words)
        if matcher is not None and matcher.error:
            # The draft exceeds a limit, which the answer may not. Copies of a matcher fail together.
            grammar = self._params.answer_grammar or ("", "")
            self._serial, fresh = self._schemas.matcher(*grammar), self._schemas.matcher(*grammar)
            fresh.take(ids)
            self._draft, self._matchers[0, 0] = None, fresh
            return Check([last], [next_mask(fresh, self._words)], [False])
        return Check([last, *tokens], masks, known)

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
        if self._draft is not None and isinstance(last, SerialIds):
            self._advance((0, 0), last.ids)
            check = self._check(last.ids, last.ids[-1], self._limit(output.size))
            if not all(check.known[: len(check.tokens) - 1]):
                return RowGuidance(check=check)
            if self._serial is None:
                return RowGuidance(left={} if self._draft.ended else {0: LOOK})
        known: dict[int, list[int]] = {}
        drafts: dict[int, list[int]] = {}
        for key, ids in grown.items():
            segment = key[1]
            if self._draft is not None or len(ids) > self._followed.get(key, 0):
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
        self._advance(key, ids)
        queued = self._matcher(key).known_tokens()[:limit]
        self._advance(key, [*ids, *queued])
        return queued

    def _advance(self, key: tuple[int, int], ids: list[int]) -> None:
        """Follow the new tokens of a segment."""
        new = ids[self._followed.get(key, 0) :]
        if new and (self._serial is not None or key[1]):
            self._matcher(key).take(new)
        if self._draft is not None:
            self._draft.follow(new)
        self._followed[key] = len(ids)

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
