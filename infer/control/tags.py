"""Decisions of the host while a model opens a block with tags: number of leads, titles, and the fork (section 5).

The device samples serial text until a tag, or until `SerialRule.left` tokens are sampled. `Tags.follow` reads the
tokens since the first `<|title|>` of the block and says what may come next. Nothing else is remembered but the first
tokens of repetitions, which the lead under way may not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aspd_jax.blocks.checks import similar
from aspd_jax.errors import RequestError
from aspd_jax.lists import MAX_TRIES
from aspd_jax.tokens import SpecialTokens, TextCodec
from infer.answers.answer import RequestOutput
from infer.control.controller import Controller
from infer.control.masks import only_token, token_bits
from infer.decode.guidance import RowGuidance, SerialRule
from infer.decode.state import A_NUMBER, A_TITLE, LENGTH, NO_LIMIT, EngineConfig
from infer.decode.token_classes import (
    ANY_TEXT,
    END,
    IN_LINE,
    NO_NUMBER,
    OTHER,
    PARALLEL_START,
    SLASH,
    TITLE_END,
    TITLE_START,
    TokenClasses,
)

CLOSED = 1 << TITLE_END  # rule that permits `<|/title|>` only


def text_rule(forks: bool) -> SerialRule:
    """Return the rule of plain serial text, which may open a block or not."""
    return SerialRule(ANY_TEXT | 1 << OTHER | 1 << END | text_stops(forks))


def text_stops(forks: bool) -> int:
    """Return the classes of tokens after which plain serial text waits."""
    return 1 << TITLE_START if forks else 0


@dataclass(frozen=True)
class OpenBlock:
    """A block whose titles the model writes.

    Attributes:
        number: tokens of the number of leads; with names: none.
        titles: complete titles.
        current: tokens of the title or number under way; None: its `<|/title|>` is the last token.
        last: last token.
        size: tokens since the first `<|title|>`, which is included.
    """

    number: list[int]
    titles: list[list[int]]
    current: list[int] | None
    last: int
    size: int


class Tags(Controller):
    """Decisions for requests in adaptive mode.

    Args:
        config: configuration of the engine.
        classes: classes and properties of the tokens.
        codec: codec of the tokenizer, by which leads are compared; None: only equal tokens are a repetition.
    """

    def __init__(self, config: EngineConfig, classes: TokenClasses, codec: TextCodec | None = None) -> None:
        self._config, self._classes, self._codec = config, classes, codec
        self._barred: list[int] = []  # first tokens of repetitions that were taken back
        self._special, self._leads = config.special, config.form.leads
        self._words = -(-classes.kind.size // 32)
        self._title = ANY_TEXT if self._leads else IN_LINE  # a name has no line break

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return what follows the last token of a sequence that waits (`RequestOutput.opening`)."""
        if not output.opening:
            return RowGuidance()
        block = self._read(output.opening)
        if block.size == 1:
            return self._open(block, output)
        if block.last == self._special.parallel_start:
            return self._fork(block.titles)
        if block.current is None and self._leads and not block.titles:
            return self._stated(block, output)
        if block.current is None:
            return self._closed(block, output)
        if self._leads and not block.number:
            return self._count(block.current)
        if block.current:
            return self._within(block, output)
        fits = len(block.titles) < 2 or output.tokens_left + 1 >= self._another + self._close_cost(block.titles)
        return self._next_title(block, output) if fits else RowGuidance(finish=LENGTH)

    def _read(self, ids: Sequence[int]) -> OpenBlock:
        parts: list[list[int]] = []
        current: list[int] | None = None
        for token in ids:
            if token == self._special.title_start:
                current = []
            elif token == self._special.title_end:
                parts, current = [*parts, current or []], None
            elif current is not None:
                current.append(token)
        number = parts[0] if self._leads and parts else []
        return OpenBlock(number, parts[1:] if self._leads else parts, current, ids[-1], len(ids))

    @property
    def _another(self) -> int:
        """Return the tokens of a further title of one token, with its tags, head and closing tag."""
        return 3 + 3 + len(self._config.form.separator)

    def _fed_cost(self, titles: int, tokens: int) -> int:
        """Return the tokens that the engine feeds for a block by itself: all heads and `<|/para|>`."""
        return titles * (1 + len(self._config.form.separator)) + tokens + 1

    def _close_cost(self, titles: Sequence[Sequence[int]], further: int = 0) -> int:
        """Return the tokens of a block after its titles if all its branches stay empty.

        Args:
            titles: complete titles.
            further: number of further titles of one token.
        """
        count = len(titles) + further
        return 1 + self._fed_cost(count, sum(map(len, titles)) + further) + count

    def _open(self, block: OpenBlock, output: RequestOutput) -> RowGuidance:
        """Return what follows the first `<|title|>`; a block that does not fit ends the answer before it."""
        smallest = 3 * self._leads + 2 * 3 + self._close_cost((), 2)
        if output.tokens_left + 1 < smallest or output.content_left < 1:
            return RowGuidance(finish=LENGTH)
        self._barred = []
        return self._count([]) if self._leads else self._next_title(block, output)

    def _count(self, digits: Sequence[int]) -> RowGuidance:
        """Return what follows digits of the number of leads: further ones or, from 2 on, `<|/title|>`."""
        number = self._number(digits)
        mask = token_bits(number_tokens(number, self._config.max_branches, self._classes), self._words)
        closed = CLOSED if number > 1 else 0
        if closed:
            mask |= only_token(self._special.title_end, self._words)
        rule = SerialRule(ANY_TEXT | closed, A_NUMBER)
        return RowGuidance({0: [mask]}, stops={0: 0}, serial=rule)

    def _number(self, digits: Sequence[int]) -> int:
        number = 0
        for token in digits:
            number = number * int(self._classes.scale[token]) + int(self._classes.number[token])
        return number

    def _stated(self, block: OpenBlock, output: RequestOutput) -> RowGuidance:
        """Return what follows `<|/title|>` after the number of leads: the known `<|title|>` of the first."""
        stated = self._number(block.number)
        if output.tokens_left + 1 < 1 + 3 * stated + self._close_cost((), stated):
            return RowGuidance(finish=LENGTH)
        return self._next_title(block, output)

    def _closed(self, block: OpenBlock, output: RequestOutput) -> RowGuidance:
        """Return what follows the `<|/title|>` of a title."""
        *earlier, title = block.titles
        if self._is_similar(title, earlier) and (again := self._again(title, replace(block, titles=earlier), output)):
            return again
        if len(earlier) >= 2 and self._repeats(title, earlier):
            return self._discard(earlier, len(title), output)
        count, self._barred = len(block.titles), []
        if self._leads:
            if count >= self._number(block.number):
                return self._fork(block.titles, known=True)
            return self._next_title(block, output)
        more = count < self._config.max_branches and (count < 2 or not completes_plan(title, self._classes))
        rule = (1 << TITLE_START if more else 0) | (1 << PARALLEL_START if count >= 2 else 0)
        return RowGuidance({0: ()}, {0: 1}, {0: 0}, serial=SerialRule(rule, A_NUMBER))

    def _next_title(self, block: OpenBlock, output: RequestOutput) -> RowGuidance:
        """Return the beginning of a title; with leads, its `<|title|>` is known."""
        known = [self._special.title_start] if self._leads else []
        return self._title_goes_on(replace(block, current=[]), known, output.tokens_left - len(known))

    def _within(self, block: OpenBlock, output: RequestOutput) -> RowGuidance:
        """Return what follows a token inside a title."""
        assert block.current
        before, count = block.current[:-1], len(block.titles)
        endless = self._leads and len(before) >= self._config.max_title_tokens
        repeats = count >= 2 and self._leads and self._repeats(before, block.titles)
        if repeats and (again := self._again(before, block, output)):
            return again
        if repeats or (endless and count >= 2):
            return self._discard(block.titles, len(before), output)
        if endless:
            return self._take_back([*block.titles, before][0], block, output)
        if before and output.tokens_left + 1 < self._token_cost(block, len(before)):
            return RowGuidance(finish=LENGTH)
        return self._title_goes_on(block, [], output.tokens_left)

    def _token_cost(self, block: OpenBlock, length: int) -> int:
        """Return the tokens that a further token of a title of this length takes until the block is closed."""
        count = len(block.titles)
        least = self._number(block.number) if self._leads else 2
        missing = max(least - (count + 1), 0) * self._another
        return 2 + self._close_cost([*block.titles, [0] * (length + 1)]) + missing

    def _title_goes_on(self, block: OpenBlock, known: Sequence[int], tokens_left: int) -> RowGuidance:
        """Return the rule of the title under way, and the number of tokens after which the host has to look again."""
        assert block.current is not None
        size, limit, count = len(block.current), self._config.max_title_tokens, len(block.titles)
        left = limit + self._leads - size
        while left > 1 and tokens_left - left + 1 < self._token_cost(block, size + left - 1):
            left -= 1
        barred = [] if size else [self._special.title_end]  # a title has at least one token
        if count == 1:  # the second title cannot be discarded, so it may not repeat the first
            distance = self._distance(block.current, block.titles)
            if distance == 1:
                barred.append(self._name(block.titles[0])[-1])
            left = min(left, max(1, distance - 1))
        elif count >= 2 and self._leads:
            left = min(left, self._distance(block.current, block.titles) + 1)
        rule = self._title | CLOSED
        if not self._leads and size >= limit:
            rule, left = CLOSED, 1
        bits = [only_token(token, self._words) for token in barred]
        return RowGuidance(
            {0: [~np.bitwise_or.reduce(bits)] if bits else ()},
            {0: max(1, left)},
            {0: CLOSED},
            known_tokens={0: known},
            counted=False,
            serial=SerialRule(rule, A_TITLE),
            spent=len(known),
        )

    def _name(self, title: Sequence[int]) -> list[int]:
        """Return a title without leading markers; one that consists of markers keeps them."""
        marked = [bool(self._classes.marker[token]) for token in title]
        return list(title[marked.index(False) :]) if False in marked else list(title)

    def _repeats(self, title: Sequence[int], titles: Sequence[Sequence[int]]) -> bool:
        """Return whether a title equals one of others, leading markers aside."""
        return self._name(title) in [self._name(other) for other in titles]

    def _is_similar(self, lead: Sequence[int], leads: Sequence[Sequence[int]]) -> bool:
        """Return whether a lead is similar to one of others, or equal; names are not compared by their words."""
        if not self._leads or self._codec is None:
            return self._leads and self._repeats(lead, leads)
        text, *texts = (self._codec.decode(self._name(title)) for title in (lead, *leads))
        return self._repeats(lead, leads) or any(similar(text, other) for other in texts)

    def _distance(self, current: Sequence[int], titles: Sequence[Sequence[int]]) -> int:
        """Return the least number of further tokens with which a title can repeat one of others."""
        distance, has_name = NO_LIMIT, any(not self._classes.marker[token] for token in current)
        name = self._name(current) if has_name else []
        for other in map(self._name, titles):
            if all(self._classes.marker[token] for token in other):  # it is compared with all markers
                if not has_name and other[: len(current)] == list(current):
                    distance = min(distance, len(other) - len(current))
            elif other[: len(name)] == name:
                distance = min(distance, len(other) - len(name))
        return distance

    def _again(self, lead: Sequence[int], block: OpenBlock, output: RequestOutput) -> RowGuidance | None:
        """Take a repetition back to its markers, and bar its first token; None: it has no further try.

        Args:
            lead: tokens of the lead; another token or `<|/title|>` follows it.
            block: the block with the complete leads before it.
            output: the answer.
        """
        name = self._name(lead)
        markers = list(lead[: len(lead) - len(name)])
        if len(self._barred) == MAX_TRIES or output.tokens_left < self._token_cost(block, len(markers)):
            return None
        self._barred.append(name[0])
        guidance = self._title_goes_on(replace(block, current=markers), [], output.tokens_left)
        allowed = np.ones(self._classes.kind.size, bool)
        allowed[[*self._barred, self._special.title_end]] = False
        mask = token_bits(allowed, self._words)
        return replace(
            guidance,
            masks={0: [np.bitwise_and.reduce([mask, *guidance.masks[0]])]},
            known_tokens={0: markers[-1:] or [self._special.title_start]},  # fed again: what is sampled follows it
            resume_at=output.position - 1 - len(name),
            discarded=len(name) + 1,
        )

    def _discard(self, titles: Sequence[list[int]], length: int, output: RequestOutput) -> RowGuidance:
        """End the list: `<|para|>` stands where the title of this length began, and hides it."""
        sampled = length + (not self._leads)
        return self._fork(titles, resume_at=output.position - 1 - length, discarded=sampled)

    def _take_back(self, lead: Sequence[int], block: OpenBlock, output: RequestOutput) -> RowGuidance:
        """Take the block back: its first lead becomes serial text, and the answer does not fork again."""
        spent = min(output.tokens_left, output.content_left) <= len(lead)
        return RowGuidance(
            {0: ()},
            stops={0: text_stops(forks=False)},
            known_tokens={0: lead},
            counted=False,
            serial=text_rule(forks=False),
            resume_at=output.position + 1 - block.size,
            spent=len(lead),
            content=len(lead),
            discarded=block.size - 1 - len(block.titles) - len(lead),
            finish=LENGTH if spent else 0,
        )

    def _fork(
        self, titles: Sequence[list[int]], known: bool = False, resume_at: int = -1, discarded: int = 0
    ) -> RowGuidance:
        """Open the block.

        Args:
            titles: titles of the branches.
            known: whether `<|para|>` follows the pending token.
            resume_at, discarded: see `RowGuidance`; `<|para|>` replaces what is taken back.
        """
        form, special = self._config.form, self._special
        serial = [special.parallel_start] if known or resume_at >= 0 else []
        heads = {number: [special.branch_start, *title, *form.separator] for number, title in enumerate(titles, 1)}
        return RowGuidance(
            {0: ()},
            stops={0: text_stops(forks=True)},
            known_tokens={0: serial, **heads},
            counted=False,
            leads=[len(title) * self._leads for title in titles],
            serial=text_rule(forks=True),
            branches=len(titles),
            spent=known + self._fed_cost(len(titles), sum(map(len, titles))),
            resume_at=resume_at,
            discarded=discarded,
        )


def check_tags(script: Sequence[Sequence[int]], special: SpecialTokens, leads: bool) -> None:
    """Check that the tags of a script (`SamplingParams.script`) can be those of an answer.

    Raises:
        RequestError: a tag stands where no answer has it.
    """
    serial, *branches = script
    before, title_start, opened = -1, -1, False
    titles: list[Sequence[int]] = []
    for place, token in enumerate(serial):
        fits = token not in special.ids
        if token == special.title_start:
            fits, title_start, titles = before != token, place, titles if before == special.title_end else []
            opened = True
        elif token == special.title_end:
            fits = opened and before not in (special.title_start, special.title_end)
            titles = [*titles, serial[title_start + 1 : place]]
            opened = leads
        elif token == special.parallel_start:
            fits = not leads and before == special.title_end and len(titles) >= 2
        if not fits or (not leads and len(titles) == 2 and titles[0] == titles[1]):
            raise RequestError(f"script: serial segment, token {place}: expected no such tag here, got {token}.")
        before = token
    for number, branch in enumerate(branches, 1):
        if inside := [token for token in branch[:-1] if token in special.ids]:
            raise RequestError(f"script: branch {number}: expected tags at its end only, got {inside[0]}.")


def number_tokens(number: int, limit: int, classes: TokenClasses) -> np.ndarray:
    """Return the tokens that continue the digits of a number of leads, bool [V]: to 2 or more, and at most `limit`."""
    extended = number * classes.scale.astype(np.int64) + classes.number
    # A number begins without 0. 1 has to continue.
    fits = (extended <= limit) & ((extended > 1) | ((extended == 1) & (limit >= 10)))
    first = 10 * classes.number.astype(np.int64) >= classes.scale
    found: np.ndarray = (classes.scale > 1) & fits & (first | (number > 0))
    return found


def completes_plan(title: Sequence[int], classes: TokenClasses) -> bool:
    """Return whether a title says that it is the last, as `5/5 Rest` does (`pipeline.titles`)."""
    numbers = [int(classes.number[token]) for token in title] + [NO_NUMBER] * (len(title) + 2)
    size = next(place for place, number in enumerate(numbers) if number < 0)
    same = numbers[:size] == numbers[size + 1 : 2 * size + 1]
    ends = numbers[2 * size + 1] < 0  # 1/1 is not the beginning of 1/10
    return size > 0 and numbers[size] == SLASH and same and ends
