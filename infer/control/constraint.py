"""Controller of answers that follow a grammar, or have a draft text."""

from __future__ import annotations

from dataclasses import replace

from aspd_jax.grammar_limits import limit_error
from aspd_jax.tokens import SerialIds
from infer.answers.answer import RequestOutput
from infer.control.controller import Controller
from infer.control.draft_text import DraftText
from infer.control.masks import drafted, known_limit, next_mask, permitted_drafts
from infer.control.schemas import Schemas
from infer.decode.checking import Check
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, RUNNING, STOP, EngineConfig
from infer.request import Request

MAX_CHECKED = 64  # maximum tokens of a check: those of a program for prompts beside answers
LOOK = 4  # tokens after which an answer without a grammar is compared with its draft text again
RESERVE = 4  # tokens reserved after known tokens, so that a budget ends the answer at the same token


class Constraint(Controller):
    """Decisions for answers that follow a grammar, or have a draft text.

    Args:
        request: request with a schema, another grammar or a prediction.
        schemas: compiled schemas.
        config: configuration of the engine.

    Raises:
        RequestError: a schema is malformed, or the model has no fast tokenizer.
    """

    def __init__(self, request: Request, schemas: Schemas, config: EngineConfig) -> None:
        params = request.params
        self._params, self._budget = params, min(request.budget, request.content_budget)
        self._schemas, self._config = schemas, config
        self._matcher = None if params.answer_grammar is None else schemas.matcher(*params.answer_grammar)
        self._followed = 0  # number of tokens, known ones that are fed included
        self._ends = config.ends
        self._draft = None if params.prediction is None else DraftText(params.prediction, schemas.codec)

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return the answer; it ends with `LENGTH` if the grammar does not accept the end of its text."""
        if output.finish != STOP or self._matcher is None:
            return output
        ids = [token for item in output.items if isinstance(item, SerialIds) for token in item.ids]
        return output if self._matcher.accepts(ids) else replace(output, finish=LENGTH)

    @property
    def error(self) -> str:
        """Return why the answer cannot follow its grammar, which is named; empty: it can."""
        reason = "" if self._matcher is None else self._matcher.error
        return reason and limit_error(*(self._params.answer_grammar or ("", "")), reason)

    def start(self) -> RowGuidance | None:
        """Return the token mask of the first token, or let the sequence wait behind it."""
        if self._matcher:
            return RowGuidance({0: [next_mask(self._matcher, self._schemas.words)]})
        return RowGuidance(left={0: 1}) if self._draft else None

    def begin(self, draft: DraftText, last: int) -> Check:
        """Return the first check of a draft text of the answer; `last`: last token of the prompt."""
        self._draft = draft
        check = self._check(last, self._limit(0))
        return check._replace(known=[False, *check.known[1:]])  # in serial mode, this token is sampled

    def _limit(self, size: int) -> int:
        """Return the tokens of a check that the budgets have room for, behind `size` tokens."""
        return self._budget - size

    def _check(self, last: int, limit: int) -> Check:
        """Return the last token and draft tokens behind it, and what the grammar permits after each.

        Args:
            last: last token of the answer, or of the prompt.
            limit: maximum number of tokens.
        """
        assert self._draft is not None
        matcher, words = None if self._matcher is None else self._matcher.copy(), self._schemas.words
        most = min(limit, MAX_CHECKED) - 1
        tokens, masks, known = drafted(matcher, self._draft.copy(), most, self._ends, words)
        if matcher is not None and matcher.error:  # the draft exceeds a limit, which the answer may not
            self._draft = None
            return Check([last], [next_mask(self._matcher, words)], [False])
        return Check([last, *tokens], masks, known)

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return the token mask, the known tokens and the draft tokens of the answer, or a check."""
        if not output.items:
            return RowGuidance()
        last = output.items[-1]
        assert isinstance(last, SerialIds)
        ids, unchecked = last.ids, output.drafts_of(0)
        moved = self._draft is not None or len(ids) > self._followed
        if self._draft is not None:
            self._advance(ids)
            check = self._check(ids[-1], self._limit(output.size))
            if not all(check.known[: len(check.tokens) - 1]):
                return RowGuidance(check=check)
        if self._matcher is None:
            return RowGuidance(left={0: LOOK} if self._draft and not self._draft.ended else {})
        known = list[int]()
        if moved:
            self._advance(ids)
            limit = known_limit(self._limit(output.size) - RESERVE, self._config)
            known = self._matcher.known_tokens()[:limit]
            self._advance([*ids, *known])
        elif not unchecked:
            return RowGuidance(finish=LENGTH if self.error else RUNNING)
        drafts, masks = permitted_drafts(
            self._matcher, [] if known else unchecked, self._schemas.words, lambda tokens: tokens[-1] in self._ends
        )
        if self.error:
            return RowGuidance(finish=LENGTH)
        return RowGuidance({0: masks}, drafts={0: drafts}, known_tokens={0: known})

    def _advance(self, ids: list[int]) -> None:
        """Follow the new tokens of the answer."""
        new, self._followed = ids[self._followed :], len(ids)
        if new and self._matcher is not None:
            self._matcher.take(new)
        if self._draft is not None:
            self._draft.follow(new)
