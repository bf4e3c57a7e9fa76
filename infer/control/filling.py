"""Templates while they are filled: leads and known tokens to feed, tokens that may come next, and where holes end.

W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from aspd_jax.errors import RequestError, TokenizerError
from aspd_jax.grammar_limits import limit_error
from aspd_jax.json_schema import json_rule
from aspd_jax.template import Template, check_literals
from aspd_jax.tokens import TextCodec
from infer.answers.answer import RequestOutput
from infer.answers.filled import END_TOKENS, Filled, HoleText, hole_text
from infer.control.controller import Controller
from infer.control.masks import known_limit, next_mask, only_token, permitted_drafts
from infer.control.schemas import Schemas
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, RUNNING, STOP, EngineConfig
from infer.decode.token_classes import END
from infer.request import Request

# After a value, the model continues as in a JSON object. The token that ends the value may contain the text after it,
# which is not part of the answer.
VALUE_GRAMMAR = r"""
start: BLANK value TAIL?
BLANK: "%s"
TAIL: /[ \t\r\n]*[,}\]](.|\n)*|[ \t\r\n]+/
value: """


BranchStart: TypeAlias = tuple[HoleText, list[int]]  # text around a hole, and the tokens of its lead


class HoleState:
    """A hole that is being filled, token by token.

    Args:
        text: text around the hole.
        lead: tokens before the value, in the model's context.
        schemas: compiled schemas.
        codec: codec of the tokenizer.
        ends: tokens that end free text.
        limit: maximum tokens of the branch.

    Attributes:
        length: tokens of the branch so far, lead and queued known tokens included.
        sampled: number of steps that sampled a token of it.
        value: text of the value; while the hole grows, the part that later tokens cannot change.
        growing: whether further tokens belong to the hole.
        complete: whether the value has ended by itself.
        emptied: whether the last token is not part of the text.
        cut: whether a budget ended the hole.
        exhausted: whether the budget of the answer ended it.
    """

    def __init__(
        self,
        text: HoleText,
        lead: Sequence[int],
        schemas: Schemas,
        codec: TextCodec,
        ends: frozenset[int],
        limit: int,
    ) -> None:
        self.hole, self._text, self._lead = text.hole, text, list(lead)
        self._ends, self._limit = ends, limit
        grammar = value_grammar(text)
        self._matcher = None if grammar is None else schemas.matcher("hole", grammar)
        self._ids: list[int] = []
        self._codec, self._stream, self._written = codec, codec.stream(), ""
        self.length, self.sampled = 0, 0
        self.value, self.growing, self.complete, self.emptied = "", True, False, False
        self.cut = self.exhausted = False

    @property
    def error(self) -> str:
        """Return why the value cannot follow its schema, which is named; empty: it can."""
        reason = "" if self._matcher is None else self._matcher.error
        return reason and limit_error(f"json_schema: {self.hole.name}", str(self.hole.schema), reason)

    def take(self, ids: Sequence[int] | np.ndarray) -> None:
        """Take the tokens of the branch so far, lead included."""
        new = [int(token) for token in ids[self.length :]]
        self.sampled += len(new)
        for token in new:
            self.length += 1
            if token in self._ends:
                self.emptied, self.growing = True, False
            elif self.growing:
                self._add([token])

    def end(self, exhausted: bool) -> None:
        """End the hole at the end of text, which a budget may have required.

        Args:
            exhausted: whether the budget of the answer permitted nothing else.
        """
        self._read(final=True)
        self.exhausted = exhausted
        self.cut = exhausted or not self.complete or self.length >= self._limit
        # A number may have been cut between two digits.
        self.complete &= not (exhausted or (self.cut and self.hole.schema is not None))

    def queue(self, limit: int) -> list[int]:
        """Return the known tokens that follow, at most `limit`, and take them."""
        queued: list[int] = []
        while self.growing and len(queued) < limit and (known := self._next_known()[: limit - len(queued)]):
            self.length += len(known)
            queued += known
            self._add(known)
        return queued

    def mask(self, words: int) -> np.ndarray:
        """Return the tokens that may come next, uint32 [W]: the next known token, if there is one."""
        return only_token(self._lead[0], words) if self._lead else next_mask(self._matcher, words)

    def draft_masks(self, drafts: Sequence[int], words: int) -> tuple[list[int], list[np.ndarray]]:
        """Return the draft tokens that may follow, and the token masks before and after each, uint32 [W].

        The token that completes the value is none of them, because nothing may follow it.
        """
        if self._lead:
            return [], [self.mask(words)]
        return permitted_drafts(self._matcher, drafts, words, self.completes)

    def completes(self, tokens: Sequence[int]) -> bool:
        """Return whether the value ends with further tokens."""
        if tokens[-1] in self._ends:
            return True
        return self._text.read(self._codec.stream().decode([*self._ids, *tokens]), False)[1]

    def _next_known(self) -> list[int]:
        return self._lead or ([] if self._matcher is None else self._matcher.known_tokens())

    def _add(self, tokens: list[int]) -> None:
        lead, value = tokens[: len(self._lead)], tokens[len(self._lead) :]
        self._lead = self._lead[len(lead) :]
        if value and self._matcher is not None:
            self._matcher.take(value)
        self._ids += value
        self._written += self._stream.decode(value)
        self._read(final=False)

    def _read(self, final: bool) -> None:
        """Read the value from the text so far."""
        self.value, self.complete = self._text.read(self._written, final)
        self.growing = not (self.complete or final)


class Filling(Controller):
    """A template that is being filled, block by block (protocol, section 5).

    Args:
        request: request with a template.
        schemas: compiled schemas.
        codec: codec of the tokenizer.
        config: configuration of the engine.
    """

    def __init__(self, request: Request, schemas: Schemas, codec: TextCodec, config: EngineConfig) -> None:
        template = request.template or request.draft
        assert template is not None
        self._request, self._template, self._schemas = request, template, schemas
        self._codec, self._config = codec, config
        self._ends = config.ends
        self._blocks = template_blocks(self._template, codec, config.max_branches)
        self._begun: list[list[HoleState]] = []
        self._merges, self._ended = 0, False

    @property
    def error(self) -> str:
        """Return why a value cannot follow its schema, which is named; empty: all can."""
        return next((state.error for block in self._begun for state in block if state.error), "")

    @property
    def sampled(self) -> int:
        """Return the number of sampled tokens of all holes."""
        return sum(state.sampled for block in self._begun for state in block)

    def lags(self, grace: int) -> bool:
        """Return whether a value takes twice as many steps as half of its block, and `grace` more."""
        states = self._begun[-1] if self._begun else []
        ended = sorted(state.sampled for state in states if not state.growing)
        half = (len(states) + 1) // 2
        longest = max((state.sampled for state in states if state.growing), default=0)
        return len(ended) >= half > 0 and longest > 2 * ended[half - 1] + grace

    def read(self, output: RequestOutput) -> RequestOutput:
        """Take the tokens of an answer; return it with the template as far as it is filled."""
        if output.open_branches:
            for number, (state, ids) in enumerate(zip(self._begun[-1], output.branch_ids, strict=False), 1):
                if state.growing:
                    state.take(ids)
                    if state.emptied and not state.complete:
                        state.end(number in output.exhausted)
        self._ended |= output.finish != RUNNING
        states = [state for block in self._begun for state in block]
        blocks = tuple(tuple(state.hole for state in block) for block in self._begun)
        growing = frozenset(state.hole.name for state in states if not state.complete)
        filled = Filled(self._template, {s.hole.name: s.value for s in states}, blocks, growing, self._ended)
        path = 1 + self._merges + sum(max(state.sampled for state in block) for block in self._begun)
        return replace(output, template=filled, path=path, sampled=[])

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return the decisions after the last `read`."""
        if output.block_ready:
            return self._begin_block()
        if not output.open_branches:
            return RowGuidance()
        states = {number: self._begun[-1][number - 1] for number in sorted(output.open_branches)}
        grown = {number: state for number, state in states.items() if state.growing}
        left = self._tokens_left(output) // max(1, len(grown)) - END_TOKENS
        known = {number: state.queue(self._known_limit(state, left)) for number, state in grown.items()}
        words, drafts, masks = self._schemas.words, dict[int, list[int]](), dict[int, list[np.ndarray]]()
        for number, state in grown.items():  # draft tokens follow the pending token, not known ones
            unchecked = [] if known[number] else output.drafts_of(number)
            drafts[number], masks[number] = state.draft_masks(unchecked, words)
        if self.error:
            return RowGuidance(finish=LENGTH)
        closed = frozenset(number for number, state in states.items() if not state.growing)
        emptied = frozenset(number for number in closed if states[number].emptied)
        finish = self._finish(output) if len(closed) == len(states) else RUNNING
        merges = len(closed) == len(states) and finish == RUNNING
        self._merges += merges and not all(state.emptied for state in self._begun[-1])
        return RowGuidance(
            masks,
            drafts=drafts,
            known_tokens=known,
            closed=closed,
            emptied=emptied,
            merges=merges,
            finish=finish,
        )

    def _begin_block(self) -> RowGuidance:
        limit = self._request.params.max_branch_tokens
        starts = self._blocks[len(self._begun)]
        states = [HoleState(*start, self._schemas, self._codec, self._ends, limit) for start in starts]
        self._begun.append(states)
        known = {number: state.queue(self._config.longest_head) for number, state in enumerate(states, 1)}
        masks = {number: [state.mask(self._schemas.words)] for number, state in enumerate(states, 1)}
        stops = dict.fromkeys(masks, 1 << END)
        return RowGuidance(masks, stops=stops, known_tokens=known, branches=len(states))

    def _finish(self, output: RequestOutput) -> int:
        """Return STOP or LENGTH if the answer ends after the current block, else RUNNING."""
        if any((s.hole.schema is not None and not s.complete) or s.exhausted for s in self._begun[-1]):
            return LENGTH
        if len(self._begun) == len(self._blocks):
            return LENGTH if self._cut else STOP
        return RUNNING if self._tokens_left(output) >= 0 else LENGTH

    @property
    def _cut(self) -> bool:
        """Return whether a budget ended free text."""
        return any(state.cut for block in self._begun for state in block)

    def _tokens_left(self, output: RequestOutput) -> int:
        """Return the tokens of the budget that later blocks do not need for leads and ends."""
        later = self._blocks[len(self._begun) :]
        return self._request.budget - output.size - needed_tokens(later)

    def _known_limit(self, state: HoleState, tokens_left: int) -> int:
        """Return how many known tokens may be fed with the pending token of a branch."""
        within = self._request.params.max_branch_tokens - state.length - END_TOKENS
        return known_limit(min(tokens_left, within), self._config)


def template_blocks(template: Template, codec: TextCodec, max_branches: int) -> list[list[BranchStart]]:
    """Return the branches of each block."""
    texts = [[hole_text(template, hole) for hole in block] for block in template.blocks(max_branches)]
    return [[(text, codec.encode_exactly(text.lead)) for text in block] for block in texts]


def needed_tokens(blocks: Sequence[Sequence[BranchStart]]) -> int:
    """Return the tokens that blocks need at least."""
    return sum(len(lead) + END_TOKENS for block in blocks for _, lead in block)


def check_template(
    template: Template, schemas: Schemas, codec: TextCodec, config: EngineConfig, budget: int, max_branch_tokens: int
) -> None:
    """Check that a template can be filled.

    Args:
        template: the template.
        schemas: compiled schemas.
        codec: codec of the tokenizer.
        config: configuration of the engine.
        budget: maximum tokens of the answer, leads included.
        max_branch_tokens: maximum tokens of a branch, its lead included.

    Raises:
        RequestError: the tokenizer has no tokens for the literal text, a schema is malformed, or the leads do not fit
            the budgets.
    """
    check_literals(template)
    try:
        blocks = template_blocks(template, codec, config.max_branches)
    except TokenizerError as error:
        raise RequestError(f"template: {error}") from None
    if (needed := needed_tokens(blocks)) > budget:
        raise RequestError(f"template: expected a budget of at least {needed} tokens, got {budget}.")
    text, lead = max((start for block in blocks for start in block), key=lambda start: len(start[1]))
    if len(lead) + END_TOKENS > max_branch_tokens:
        raise RequestError(
            f"hole {text.hole.name!r}: expected literal text of at most {max_branch_tokens - END_TOKENS} tokens "
            f"(max_branch_tokens), got {len(lead)}."
        )
    for hole in template.holes:  # as many as the budget has room for
        if (grammar := value_grammar(hole_text(template, hole))) is not None:
            try:
                schemas.check("hole", grammar)
            except RequestError as error:
                raise RequestError(f"json_schema: {hole.name}: {error}") from None


def value_grammar(text: HoleText) -> str | None:
    """Return the grammar of what follows the lead of a hole: a JSON value, and text after it; None: free text."""
    schema = text.hole.schema
    return None if schema is None else _value_grammar(schema, text.spaced)


@lru_cache(maxsize=256)
def _value_grammar(schema: str, spaced: bool) -> str:
    return f"{VALUE_GRAMMAR % (' ' * spaced)}{json_rule(schema)}\n"
