"""One answer by way of an upstream: its serial segments, its branches side by side, and what is made of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from aspd_jax.structure import Branch, Item, Parallel, Serial, beginning, canonical, plain_text
from aspd_jax.tokens import TAGS, Codec
from infer.answers.events import Event
from infer.answers.stop import first_match
from infer.proxy.upstream import Upstream
from infer.request import SamplingParams

TITLE_START, TITLE_END = TAGS["title_start"], TAGS["title_end"]
FORK, BRANCH_END = TAGS["parallel_start"], TAGS["branch_end"]
MAX_TITLE_TOKENS = 32
_ANY_TAG = re.compile("|".join(map(re.escape, TAGS.values())))
_PLAN = re.compile(r"(\d+)/(\d+) ")  # of a title: which of how many it is


@dataclass
class Proxied:
    """An answer, as far as it is.

    Attributes:
        items: its structure.
        finish_reason: `stop` or `length`, once it has ended.
        requests: that the upstream was asked for it.
    """

    items: list[Item] = field(default_factory=list)
    finish_reason: str = ""
    requests: int = 0

    @property
    def text(self) -> str:
        """Its plain text."""
        return plain_text(canonical(self.items))

    def end_before(self, stop: Sequence[str]) -> None:
        """End it before the first stop string."""
        if (match := first_match(self.text, stop)) is not None:
            self.items, self.finish_reason = list(beginning(canonical(self.items), match.start)), "stop"


class Answering:
    """Drives a model that announces its branches.

    Where a block is due, the titles that the model has written become requests, one for each branch, behind the prefix
    that they share; what comes back is put together, and the answer goes on behind it. In contrast to the engine, that
    reads the branches again after the block, one after the other (protocol, section 5).

    Args:
        upstream: serves the checkpoint, with its special tokens.
        codec: of the checkpoint's tokenizer.
        ends: how the tokens that end an answer are spelt.
        max_branches: of a block; titles beyond are left out.
    """

    def __init__(self, upstream: Upstream, codec: Codec, ends: Sequence[str], max_branches: int = 16) -> None:
        self._upstream, self._codec, self._ends, self._max_branches = upstream, codec, ends, max_branches
        self._tags = codec.special.ids

    async def events(
        self,
        prompt: Sequence[int],
        most: int,
        sampling: SamplingParams,
        adaptive: bool,
        answer: Proxied,
        in_order: bool,
    ) -> AsyncGenerator[Event, None]:
        """Yield events of `infer.answers.events`, without `done`; `answer` is filled meanwhile.

        Args:
            prompt: token ids.
            most: tokens of the text, in reading order.
            adaptive: whether the model may fork.
            in_order: yield the text of blocks in reading order, as far as it is final.

        Raises:
            UpstreamError: the upstream refuses, or fails.
        """
        special, encode = self._codec.special, self._codec.text.encode
        prefix, left = list(prompt), most
        may_fork, block = adaptive, 0
        while True:
            written, shown, announces = "", 0, False
            answer.items.append(Serial(""))
            ended: str | None = None
            forbidden = [tag for tag in self._tags if tag != special.title_start or not may_fork]
            async with aclosing(self._ask(answer, prefix, left, [], forbidden, sampling)) as pieces:
                async for piece, reason in pieces:
                    written, ended = written + piece, reason or ended
                    safe = _before(TITLE_START, written)
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
            titles = await self._titles(answer, prefix, sampling)
            if len(titles) < 2:
                may_fork = False  # it announced what is no block; the rest is serial
                continue
            block += 1
            yield Event("fork", block=block, titles=tuple(titles))
            announced = [i for t in titles for i in (special.title_start, *encode(t), special.title_end)]
            prefix = [*prefix, *announced, special.parallel_start]
            answer.items.append(Parallel([Branch(title, "") for title in titles]))
            pieces_of: list[list[str]] = [[] for _ in titles]
            final, shown = set[int](), 0
            async with aclosing(self._branches(prefix, titles, left, sampling, answer, pieces_of, final)) as events:
                async for event in events:
                    first = next((n for n in range(1, len(titles)) if n not in final), len(titles))
                    readable, left_behind = self._within(pieces_of[:first], left)
                    branches = zip(titles, [*readable, *[""] * (len(titles) - first)], strict=True)
                    answer.items[-1] = Parallel([Branch(title, text) for title, text in branches])
                    if not in_order:
                        yield Event(event.kind, block, event.branch, event.text)
                    elif new := "".join(readable)[shown:]:
                        yield Event("token", block, first, new)
                        shown += len(new)
            yield Event("merge", block=block)
            for title, parts in zip(titles, pieces_of, strict=True):
                text = encode("".join(parts))
                prefix += [special.branch_start, *encode(title), *self._codec.separator_ids, *text, special.branch_end]
            prefix.append(special.parallel_end)
            left = left_behind
            if left <= 0 or len(final) < len(titles):
                answer.finish_reason = "length"
                return

    def _ask(
        self,
        answer: Proxied,
        prompt: Sequence[int],
        most: int,
        stop: Sequence[str],
        forbidden: Sequence[int],
        sampling: SamplingParams,
    ) -> AsyncGenerator[tuple[str, str | None], None]:
        """Count a request of an answer, and make it."""
        answer.requests += 1
        return self._upstream.complete(prompt, most, [*stop, *self._ends], forbidden, sampling, answer.requests - 1)

    async def _titles(self, answer: Proxied, prefix: Sequence[int], sampling: SamplingParams) -> list[str]:
        """The titles that the model announces.

        A repetition penalty would be one on the tags between them, too, and end the list before its time. No title has
        a line break: a model that misses the end of one would go on with the text of the item.
        """
        special = self._codec.special
        forbidden = [special.parallel_end, special.branch_start, special.branch_end]
        free, most = replace(sampling, repetition_penalty=1.0), MAX_TITLE_TOKENS * self._max_branches
        written, titles = "", list[str]()
        pieces = self._ask(answer, [*prefix, special.title_start], most, [FORK, "\n"], forbidden, free)
        async with aclosing(pieces):
            async for piece, _ in pieces:
                written += piece
                titles, more = _read_titles(written)
                begun = self._codec.text.encode(written.rpartition(TITLE_END)[2])
                if not more or len(titles) == self._max_branches or len(begun) > MAX_TITLE_TOKENS:
                    break
        return titles

    def _within(self, texts: Sequence[Sequence[str]], left: int) -> tuple[list[str], int]:
        """Return texts, which came in pieces, up to `left` tokens; and how many tokens are left behind them."""
        kept = []
        for pieces in texts:
            kept.append("")
            for piece in pieces:
                left -= self._count(piece)
                kept[-1] += piece if left >= 0 else ""
        return kept, left

    def _count(self, piece: str) -> int:
        """Return the tokens of a piece. Counted by pieces, a text that grows never has fewer than before."""
        return len(self._codec.text.encode(piece))

    async def _branches(
        self,
        prefix: Sequence[int],
        titles: Sequence[str],
        left: int,
        sampling: SamplingParams,
        answer: Proxied,
        pieces_of: list[list[str]],
        final: set[int],
    ) -> AsyncGenerator[Event, None]:
        """Yield tokens and ends of all branches, as they come; fills `pieces_of` each, and numbers of those that are
        `final`.

        A branch ends where its text and the texts of the branches before it, as far as they are, have `left` tokens.
        """
        special, encode = self._codec.special, self._codec.text.encode
        news: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        forbidden = [tag for tag in self._tags if tag != special.branch_end]
        sizes = [0] * len(titles)

        async def grow(number: int, title: str) -> None:
            head, within = [special.branch_start, *encode(title), *self._codec.separator_ids], True
            pieces = self._ask(answer, [*prefix, *head], left, [BRANCH_END], forbidden, sampling)
            async with aclosing(pieces):
                async for piece, reason in pieces:
                    within = reason != "length"
                    if piece := _ANY_TAG.sub("", piece):
                        pieces_of[number].append(piece)
                        sizes[number] += self._count(piece)
                        news.put_nowait(Event("token", 1, number + 1, piece))
                        if sum(sizes[: number + 1]) >= left:
                            break
            if within:
                final.add(number + 1)
            news.put_nowait(Event("branch", 1, number + 1, "".join(pieces_of[number])))

        async def guarded(number: int, title: str) -> None:
            try:
                await grow(number, title)
            except BaseException as error:
                news.put_nowait(error)
                raise

        tasks = [asyncio.create_task(guarded(*one)) for one in enumerate(titles)]
        try:
            growing = len(tasks)
            while growing:
                one = await news.get()
                if isinstance(one, BaseException):
                    raise one
                growing -= one.kind == "branch"
                yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _read_titles(written: str) -> tuple[list[str], bool]:
    """The titles of an announcement behind its first tag, as far as it is, and whether there may be more.

    There are no more where the plan is complete, where one says nothing or what another said, and where something else
    than a title follows.
    """
    titles: list[str] = []
    said = {""}
    *ended, rest = f"{TITLE_START}{written}".split(TITLE_END)
    for one in ended:
        title = one.removeprefix(TITLE_START)
        plain = _PLAN.sub("", title).strip()
        if not one.startswith(TITLE_START) or _ANY_TAG.search(title) or plain in said:
            return titles, False
        titles.append(title)
        said.add(plain)
        if (plan := _PLAN.match(title)) and plan[1] == plan[2]:
            return titles, False
    return titles, rest.startswith(TITLE_START) or TITLE_START.startswith(rest)


def _before(tag: str, written: str) -> int:
    """How much of what was written is text for sure: up to the tag, or to what may become it."""
    if (found := written.find(tag)) >= 0:
        return found
    for at in range(max(0, len(written) - len(tag) + 1), len(written)):
        if tag.startswith(written[at:]):
            return at
    return len(written)


def usage(prompt: Sequence[int], answer: Proxied, codec: Codec) -> dict[str, Any]:
    """Tokens of the prompt, and of the text that the client gets."""
    generated = len(codec.text.encode(answer.text)) if answer.text else 0
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": generated,
        "total_tokens": len(prompt) + generated,
    }
