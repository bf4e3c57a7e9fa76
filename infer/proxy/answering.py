"""Decoding of one answer on an upstream server: serial segments and concurrent branches."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from aspd_jax.structure import Branch, Item, Parallel, Serial, beginning, canonical, plain_text
from aspd_jax.tokens import TAGS, Codec
from infer.answers.events import Event
from infer.answers.stop import first_match, undecided
from infer.proxy.upstream import Upstream
from infer.request import MAX_TITLE_TOKENS, SamplingParams
from infer.server.deltas import merged
from infer.server.forms import token_usage

TITLE_START, TITLE_END = TAGS["title_start"], TAGS["title_end"]
FORK, BRANCH_END = TAGS["parallel_start"], TAGS["branch_end"]
MAX_BRANCHES = 16  # of a block; further titles are dropped
_ANY_TAG = re.compile("|".join(map(re.escape, TAGS.values())))
_PLAN = re.compile(r"(\d+)/(\d+) ")  # prefix of a title: its number and the number of titles


@dataclass
class Proxied:
    """An answer on an upstream server, and its state.

    Attributes:
        upstream: the server.
        codec: codec of the checkpoint's tokenizer.
        prompt: token ids.
        limit: maximum tokens of the answer, in reading order.
        sampling: sampling parameters.
        items: structure so far.
        finish_reason: `stop` or `length`; empty until the answer has ended.
        requests: number of requests sent to the upstream.
        tokens: tokens of the leads and values of a template; None: those of the text.
    """

    upstream: Upstream
    codec: Codec
    prompt: Sequence[int]
    limit: int
    sampling: SamplingParams
    items: list[Item] = field(default_factory=list)
    finish_reason: str = ""
    requests: int = 0
    tokens: int | None = None

    @property
    def text(self) -> str:
        """Plain text."""
        return plain_text(canonical(self.items))

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens of the prompt and of the answer, under OpenAI's names."""
        return token_usage(len(self.prompt), self.count(self.text) if self.tokens is None else self.tokens)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text of the answer."""
        return self.codec.text.encode_normalised(text) if text else []

    def count(self, text: str) -> int:
        """Return the number of tokens of a text. The sum over pieces never decreases, unlike that of whole texts."""
        return len(self.encode(text))

    def ask(
        self,
        prompt: Sequence[int],
        limit: int,
        stop: Sequence[str] = (),
        forbidden: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        number: int | None = None,
        more: Mapping[str, object] | None = None,
    ) -> AsyncGenerator[tuple[str, str | None], None]:
        """Count and send a request (`Upstream.complete`), by default with the answer's sampling and the next number."""
        self.requests += 1
        number = self.requests - 1 if number is None else number
        return self.upstream.complete(prompt, limit, stop, forbidden, sampling or self.sampling, number, more or {})

    def end_before_stop(self) -> None:
        """Truncate the answer before its first stop string, if it has one."""
        if (match := first_match(self.text, self.sampling.stop)) is not None:
            self.items, self.finish_reason = list(beginning(canonical(self.items), match.start)), "stop"
            self.tokens = None


async def tagged_events(answer: Proxied, adaptive: bool, in_order: bool) -> AsyncGenerator[Event, None]:
    """Decode an answer with blocks and yield its events (`infer.answers.events`) without `done`.

    The titles that the model writes become one request per branch with a common prefix. After the block, the prompt of
    the next request contains the branches one after the other, so that the upstream reads them again; the engine does
    not (protocol, section 5).

    Args:
        answer: the answer, whose state is updated.
        adaptive: whether the model may fork.
        in_order: whether the text of blocks is yielded in reading order once it is final.

    Raises:
        UpstreamError: the upstream refuses a request or fails.
    """
    special, form, encode = answer.codec.special, answer.codec.form, answer.encode
    prefix, left = list(answer.prompt), answer.limit
    may_fork, block = adaptive and bool(answer.upstream.tags), 0
    while True:
        written, shown, announces = "", 0, False
        answer.items.append(Serial(""))
        ended: str | None = None
        forbidden = [tag for tag in answer.upstream.tags if tag != special.title_start or not may_fork]
        async with aclosing(answer.ask(prefix, left, (), forbidden)) as pieces:
            async for piece, reason in pieces:
                written, ended = written + piece, reason or ended
                safe = _text_length(TITLE_START, written)
                if safe > shown:
                    answer.items[-1] = Serial(written[:safe])
                    yield Event("token", text=written[shown:safe])
                    shown = safe
                if announces := may_fork and TITLE_START in written:
                    break
        serial = written[:shown] if announces else written
        answer.items[-1] = Serial(serial)
        if len(serial) > shown:
            yield Event("token", text=serial[shown:])
        if serial:
            ids = encode(serial)
            prefix, left = [*prefix, *ids], left - len(ids)
        if left <= 0 or not announces:
            answer.finish_reason = "length" if left <= 0 or ended == "length" else "stop"
            return
        number, titles = await _titles(answer, prefix)
        if len(titles) < 2:
            may_fork = False  # one title makes no block; the rest of the answer is serial
            continue
        block += 1
        yield Event("fork", block=block, titles=tuple(titles))
        written_titles = [number, *titles] if form.leads else titles
        announced = [i for t in written_titles for i in (special.title_start, *encode(t), special.title_end)]
        prefix = [*prefix, *announced, special.parallel_start]
        answer.items.append(Parallel([Branch(title, "") for title in titles]))
        # A lead is part of the text.
        branch_pieces = [[(title, answer.count(title))] * form.leads for title in titles]
        final, shown = set[int](), 0
        async with aclosing(_branches(answer, prefix, titles, left, branch_pieces, final)) as events:
            async for event in events:
                first = next((n for n in range(1, len(titles)) if n not in final), len(titles))
                readable, left_behind = _truncate(branch_pieces[:first], left)
                branches = zip(titles, [*readable, *[""] * (len(titles) - first)], strict=True)
                answer.items[-1] = Parallel([Branch(title, text) for title, text in branches])
                if not in_order:
                    yield Event(event.kind, block, event.branch, event.text)
                elif new := "".join(readable)[shown:]:
                    yield Event("token", block, first, new)
                    shown += len(new)
        yield Event("merge", block=block)
        for title, parts in zip(titles, branch_pieces, strict=True):
            text = encode("".join(piece for piece, _ in parts[form.leads :]))
            prefix += [special.branch_start, *encode(title), *form.separator, *text, special.branch_end]
        prefix.append(special.parallel_end)
        left = left_behind
        if left <= 0 or len(final) < len(titles):
            answer.finish_reason = "length"
            return


async def _titles(answer: Proxied, prefix: Sequence[int]) -> tuple[str, list[str]]:
    """Decode the titles of a block; return the stated number of leads, empty for names, and the titles.

    There is no repetition penalty, because it would also apply to the tags between titles and end the list early.
    A line break ends a list of names: without its closing tag, a name would run into the text of the item.
    """
    special, leads = answer.codec.special, answer.codec.form.leads
    forbidden = [special.parallel_end, special.branch_start, special.branch_end]
    # A title and its two tags, of each branch; the number of leads has fewer tokens than a title.
    free, limit = replace(answer.sampling, repetition_penalty=1.0), (MAX_TITLE_TOKENS + 2) * (MAX_BRANCHES + 1)
    written, number, titles = "", "", list[str]()
    stops = [FORK] if leads else [FORK, "\n"]
    pieces = answer.ask([*prefix, special.title_start], limit, stops, forbidden, free)
    async with aclosing(pieces):
        async for piece, _ in pieces:
            written += piece
            if leads:
                number, titles, more = read_leads(written, MAX_BRANCHES)
            else:
                titles, more = _read_titles(TITLE_START + written)
            begun = written.rpartition(TITLE_END)[2].removeprefix(TITLE_START)
            size = answer.count(begun[: _text_length(TITLE_END, begun)])
            if not more or len(titles) == MAX_BRANCHES or size > MAX_TITLE_TOKENS:
                break
    return number, titles


def _truncate(texts: Sequence[Sequence[tuple[str, int]]], left: int) -> tuple[list[str], int]:
    """Join the pieces of texts up to `left` tokens in all, and return the texts and the remaining tokens."""
    kept = []
    for pieces in texts:
        kept.append("")
        for piece, size in pieces:
            left -= size
            kept[-1] += piece if left >= 0 else ""
    return kept, left


async def _branches(
    answer: Proxied,
    prefix: Sequence[int],
    titles: Sequence[str],
    left: int,
    branch_pieces: list[list[tuple[str, int]]],
    final: set[int],
) -> AsyncGenerator[Event, None]:
    """Decode all branches concurrently and yield their tokens and ends.

    A branch ends when its text and the texts of earlier branches so far have `left` tokens.

    Args:
        answer: the answer.
        prefix: token ids before the branches.
        titles: titles of the branches.
        left: remaining content tokens of the answer.
        branch_pieces: lists to which the pieces of each branch are appended, each with its number of tokens.
        final: set to which the numbers of branches that were not cut off are added.
    """
    special, form, encode = answer.codec.special, answer.codec.form, answer.encode
    forbidden = [tag for tag in answer.upstream.tags if tag != special.branch_end]
    sizes = [sum(size for _, size in pieces) for pieces in branch_pieces]

    async def grow(number: int, title: str) -> AsyncGenerator[Event, None]:
        head, within = [special.branch_start, *encode(title), *form.separator], True
        for piece, _ in branch_pieces[number]:
            yield Event("token", 1, number + 1, piece)
        pieces = answer.ask([*prefix, *head], left, [BRANCH_END], forbidden)
        async with aclosing(pieces):
            async for piece, reason in pieces:
                within = reason != "length"
                if piece := _ANY_TAG.sub("", piece):
                    branch_pieces[number].append((piece, answer.count(piece)))
                    sizes[number] += branch_pieces[number][-1][1]
                    yield Event("token", 1, number + 1, piece)
                    if sum(sizes[: number + 1]) >= left:
                        break
        if within:
            final.add(number + 1)
        yield Event("branch", 1, number + 1, "".join(piece for piece, _ in branch_pieces[number]))

    async with aclosing(merged([grow(number, title) for number, title in enumerate(titles)])) as events:
        async for event in events:
            yield event


async def exhaust(source: AsyncGenerator[Any, None]) -> None:
    """Run a generator to its end."""
    async with aclosing(source):
        async for _ in source:
            pass


def _read_titles(written: str, number: int = 0) -> tuple[list[str], bool]:
    """Parse the titles written so far, and return them with whether further titles may follow.

    The list ends when the announced number of titles is reached, at an empty or repeated title, and at any text that is
    not a title. Titles are compared without their markers; from the third on, a lead that only begins with an earlier
    one is repeated (protocol, section 5).

    Args:
        written: text from the first opening tag of a title on.
        number: number of leads; 0: titles are names, which may announce their number themselves.
    """
    titles: list[str] = []
    earlier: list[str] = []

    def begins_earlier(plain: str) -> bool:
        return bool(number) and len(titles) > 1 and any(_begins(plain, title) for title in earlier)

    *ended, rest = written.split(TITLE_END)
    for part in ended:
        title = part.removeprefix(TITLE_START)
        plain = _without_marker(title)
        repeated = plain in earlier or begins_earlier(plain)
        if not part.startswith(TITLE_START) or _ANY_TAG.search(title) or not plain or repeated:
            return titles, False
        titles.append(title)
        earlier.append(plain)
        plan = None if number else _PLAN.match(title)
        if len(titles) == number or (plan and plan[1] == plan[2]):
            return titles, False
    if rest.startswith(TITLE_START):
        return titles, not begins_earlier(_without_marker(rest.removeprefix(TITLE_START)))
    return titles, TITLE_START.startswith(rest)


def _without_marker(title: str) -> str:
    """Return a title from its first letter on, or without spaces if it has no letter."""
    first = next((at for at, character in enumerate(title) if character.isalpha()), 0)
    return title[first:].strip()


def _begins(title: str, earlier: str) -> bool:
    """Return whether a title begins with all words of an earlier one, and is not about to become another word."""
    after = title[len(earlier) :]
    return title.startswith(earlier) and not (earlier[-1].isalnum() and (not after or after[0].isalnum()))


def read_leads(written: str, limit: int) -> tuple[str, list[str], bool]:
    """Parse a number and the leads written so far, and return them with whether further leads may follow.

    Args:
        written: text after the first opening tag of a title.
        limit: maximum number of leads.
    """
    number, closed, rest = written.partition(TITLE_END)
    if not closed:
        digits = number[: _text_length(TITLE_END, number)]
        return digits, [], digits.isdecimal() or not digits
    if not number.isdecimal() or not 2 <= int(number) <= limit:
        return number, [], False
    return (number, *_read_titles(rest, int(number)))


def _text_length(tag: str, written: str) -> int:
    """Return the length of the text before a tag, or before an ending that may become the tag."""
    index = written.find(tag)
    return len(written) - undecided(written, [tag]) if index < 0 else index
