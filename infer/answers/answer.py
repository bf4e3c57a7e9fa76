"""Reading answers off the decoding state: tokens in the order of the linearisation, structure, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from aspd_jax.layout import Layout
from aspd_jax.sizes import next_power
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, beginning, plain_text
from aspd_jax.tokens import BlockIds, Codec, ItemIds, SerialIds, join, split
from infer.answers.stop import first_match
from infer.decode.packed import Packed
from infer.decode.slots import Snapshot, snapshot
from infer.decode.state import (
    FORK,
    LENGTH,
    PARALLEL,
    RUNNING,
    STOP,
    TITLE,
    TITLED,
    DecodeState,
    EngineConfig,
)
from infer.decode.tag_automaton import TextReader
from infer.request import Job


@dataclass(frozen=True)
class Statistics:
    """What an answer cost (protocol, section 8).

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: of these, so many were in the cache already.
        generated_tokens: tokens of the answer: all branches, tags and heads included.
        content_tokens: tokens of the plain text.
        passes: forward passes after prefill.
        critical_path: passes that had to follow one another, plus one.
        blocks, branches: of the answer.
        discarded_tokens: of titles that repeated another of their block; these took passes, too.
        drafted_tokens, accepted_tokens: guesses fed, and those of them that were right.
        seconds: wall time since the request by phase: queued, prefill, serial, parallel (fork and merge included),
            and total; and first_token, when the first token was there. In a batch, a pass counts in full for every
            sequence in it.
    """

    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    content_tokens: int
    passes: int
    critical_path: int
    blocks: int
    branches: int
    discarded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ideal_speedup(self) -> float:
        """Content tokens per token of the critical path."""
        return self.content_tokens / max(1, self.critical_path)

    def to_json(self) -> dict[str, Any]:
        """Plain values, the ideal speed-up among them."""
        return asdict(self) | {"ideal_speedup": self.ideal_speedup}


@dataclass(frozen=True)
class Result:
    """An answer.

    Attributes:
        text: the plain text, up to the first stop string.
        structure: serial segments and blocks of this text.
        token_ids: the linearisation, end of text included if it was sampled; up to the token that completes a stop
            string.
        finish_reason: `stop` (end of text or a stop string), `length` (the budget ended it, or one of its branches),
            `cancelled`, or None while it grows.
        stats: what it cost.
        prompt_token_ids: the prompt.
    """

    text: str
    structure: Structure
    token_ids: list[int]
    finish_reason: str | None
    stats: Statistics
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """An answer as far as it is, without tokens that its budgets have no room for in reading order.

    Attributes:
        token_ids: in the order of the linearisation; while it grows, open branches have no closing tag.
        items: segments and blocks, the open block as if it were closed now; titles under way and end of text left out.
        phase: of the sequence.
        finish: of the sequence.
        open_branches: numbers, from 1, of the branches of the open block that still grow.
    """

    token_ids: np.ndarray
    items: tuple[ItemIds, ...]
    phase: int
    finish: int
    open_branches: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Reading:
    """What the host read of a sequence.

    Attributes:
        answer: as far as it is.
        passes: forward passes after prefill.
        critical_path: of the answer as far as it is.
        tokens, layout: what is in the cache, prompt included, [T], by slot.
        slots: of the cache that are in use.
        drafted, accepted: guesses fed, and those of them that were right.
        discarded: tokens of titles that repeated another.
        cut: whether the budget ended a branch.
    """

    answer: Answer
    passes: int
    critical_path: int
    tokens: np.ndarray
    layout: Layout
    slots: int
    drafted: int
    accepted: int
    discarded: int = 0
    cut: bool = False

    def cached(self) -> tuple[np.ndarray, int]:
        """Tokens in the cache in the order of the linearisation; so many slots hold the first ones in this order."""
        written = _written(self.layout)
        order = written[linear_order(Layout(*(field[written] for field in self.layout)))]
        elsewhere = np.flatnonzero(order != np.arange(order.size))
        return self.tokens[order], int(elsewhere[0]) if elsewhere.size else order.size


def _written(layout: Layout) -> np.ndarray:
    """Slots that hold a token; those of rejected guesses do not."""
    return np.flatnonzero(layout.sequence > 0)


def linear_order(layout: Layout) -> np.ndarray:
    """Indices that bring the tokens of one sequence [T] into the order of the linearisation."""
    anchor = np.array(layout.position)
    for block in np.unique(layout.block[layout.block > 0]):
        inside = layout.block == block
        anchor[inside] = anchor[inside].min()
    return np.lexsort((layout.position, layout.branch, anchor))


def read(
    state: DecodeState,
    config: EngineConfig,
    rows: Sequence[int],
    limits: Sequence[int | None],
    reader: TextReader | None = None,
) -> list[Reading]:
    """Return sequences as far as they are, from what was fed and what is pending; see `readings`."""
    return readings(look_at(state, config, rows), limits, config, reader)


def look_at(state: DecodeState, config: EngineConfig, rows: Sequence[int]) -> Packed[Snapshot]:
    """A copy on the device of all that `readings` needs; the state may be given away then."""
    size = next_power(len(rows))
    return snapshot(state, np.asarray([*rows, *[rows[0]] * (size - len(rows))], np.int32), config)


def readings(
    shot: Packed[Snapshot], limits: Sequence[int | None], config: EngineConfig, reader: TextReader | None = None
) -> list[Reading]:
    """Return the first sequences of a copy, one for each limit.

    Args:
        limits: most tokens of the plain text of each; None: no limit.
        reader: of tags that are text.
    """
    host = shot.read()
    return [_reading(host, index, limit, config, reader) for index, limit in enumerate(limits)]


def _reading(shot: Snapshot, index: int, limit: int | None, config: EngineConfig, reader: TextReader | None) -> Reading:
    s, due, slots = shot.sequence, shot.pending, int(shot.length[index])
    phase, start = int(s.cursor.phase[index]), int(s.cursor.prompt_length[index])
    tokens = np.asarray(shot.tokens)[index, :slots]
    layout = Layout(*(field[index, :slots] for field in shot.layout))
    written = _written(layout)
    fed = written[written >= start]
    there = np.flatnonzero(due.layout.sequence[index] > 0)
    ids = np.concatenate([tokens[fed], due.tokens[index, there]])
    own = Layout(*(np.concatenate([a[fed], b[index, there]]) for a, b in zip(layout, due.layout, strict=True)))
    order = linear_order(own)
    in_block = phase in (FORK, PARALLEL)
    still_open = frozenset((np.flatnonzero(s.branches.live[index]) + 1).tolist()) if in_block else frozenset()
    finish = int(s.cursor.finish[index])
    whole = _answer(ids[order], own.branch[order], phase, finish, config, still_open, reader)
    return Reading(
        answer=_within(whole, config, limit, int(s.budget.cut_branch[index]), reader is None),
        passes=int(s.counters.steps[index]),
        critical_path=int(s.counters.critical_path[index])
        + (int(s.segments.sampled[index, 1:].max()) if in_block else 0),
        tokens=tokens,
        layout=layout,
        slots=slots,
        drafted=int(s.counters.drafted[index]),
        accepted=int(s.counters.accepted[index]),
        discarded=int(s.counters.discarded[index]),
        cut=bool(s.budget.cut[index]),
    )


def _answer(
    ids: np.ndarray,
    branch: np.ndarray,
    phase: int,
    finish: int,
    config: EngineConfig,
    still_open: frozenset[int],
    reader: TextReader | None,
) -> Answer:
    special = config.special
    whole, end = ids, ids[:0]
    if finish == STOP and ids.size and int(ids[-1]) in config.end:
        whole, end = ids[:-1], ids[-1:]
    if reader is not None:
        items = reader.items(whole, branch[: whole.size], len(config.separator), finish == RUNNING)
        return Answer(ids, items, phase, finish, still_open)
    if not end.size and phase in (TITLE, TITLED):
        closed = np.flatnonzero(ids == special.parallel_end)
        after = int(closed[-1]) if closed.size else 0
        whole = ids[: after + int(np.argmax(ids[after:] == special.title_start))]
    elif not end.size and phase in (FORK, PARALLEL):
        ends = np.flatnonzero((branch > 0) & (np.append(branch[1:], 0) != branch))
        unclosed = ends[ids[ends] != special.branch_end]
        whole = np.append(np.insert(ids, unclosed + 1, special.branch_end), special.parallel_end)
    if finish != RUNNING:
        ids = np.concatenate([whole, end])
    return Answer(ids, split(whole, special), phase, finish, still_open)


def shortened(items: Sequence[ItemIds], head: int, limit: int, cut_branch: int = 0) -> tuple[ItemIds, ...]:
    """Return the items up to a number of tokens of plain text in reading order; what follows them is left out.

    Later branches of the block in which they end stay, without text.

    Args:
        head: tokens of the separator.
        limit: tokens of plain text.
        cut_branch: number, from 1, of a branch of the last block whose text is the last; 0: none.
    """
    kept: list[ItemIds] = []
    last = max((place for place, item in enumerate(items) if isinstance(item, BlockIds)), default=-1)
    for place, item in enumerate(items):
        if limit <= 0:
            break
        if isinstance(item, SerialIds):
            size = len(item.ids)
            kept.append(item if size <= limit else SerialIds(item.ids[:limit]))
            limit -= size
            continue
        branches, drops = [], []
        for number, (title, branch, text) in enumerate(
            zip(item.titles, item.branches, item.texts(head), strict=True), 1
        ):
            size = min(len(text.ids), max(0, limit))
            branches.append(branch[: len(title) + head + size])
            drops.append(text.drop if size == len(text.ids) else 0)
            limit = 0 if place == last and number == cut_branch else limit - len(text.ids)
        kept.append(BlockIds(item.titles, tuple(branches), tuple(drops) if any(drops) else ()))
    return tuple(kept)


def _within(answer: Answer, config: EngineConfig, limit: int | None, cut_branch: int, tags_are_tokens: bool) -> Answer:
    """Return an answer without what the budgets of text and of all tokens have no room for."""
    items, head = answer.items, len(config.separator)
    content = count_content(items, head)
    if not cut_branch and (limit is None or limit > content):
        return answer
    kept = shortened(items, head, content + 1 if limit is None else limit, cut_branch)
    if count_content(kept, head) == content and len(kept) == len(items):
        return answer
    ids = join(kept, config.special) if tags_are_tokens else answer.token_ids
    return replace(answer, items=kept, token_ids=ids)


def count_content(items: Sequence[ItemIds], head: int) -> int:
    """Return the tokens of the plain text of items."""
    return sum(len(segment.ids) for segment in segments(items, head))


def segments(items: Sequence[ItemIds], head: int) -> Iterator[SerialIds]:
    """Yield serial texts and texts of branches in reading order; `head`: tokens of the separator."""
    for item in items:
        if isinstance(item, SerialIds):
            yield item
        else:
            yield from item.texts(head)


def _structure(items: Sequence[ItemIds], head: int, codec: Codec) -> Structure:
    decode = codec.text.decode
    structure: list[Item] = []
    for item in items:
        if isinstance(item, SerialIds):
            structure.append(Serial(codec.text.text_of(item)))
        else:
            branches = zip(item.titles, item.texts(head), strict=True)
            structure.append(
                Parallel(Branch(decode(t) or codec.text.spell(t), codec.text.text_of(text)) for t, text in branches)
            )
    return tuple(structure)


def _tokens_until(items: Sequence[ItemIds], head: int, codec: Codec, end: int) -> int:
    """Return the tokens of the plain text up to the one that completes its first `end` characters."""
    count = 0
    for segment in segments(items, head):
        size = len(codec.text.text_of(segment))
        if size < end:
            count, end = count + len(segment.ids), end - size
            continue
        stream = codec.text.stream()
        for place in range(1, len(segment.ids)):
            stream.extend(segment.ids[:place])
            if len(stream.text) >= end:
                return count + place
        return count + len(segment.ids)
    return count


def result(
    reading: Reading, job: Job, codec: Codec | None, config: EngineConfig, reused: int, seconds: dict[str, float]
) -> Result:
    """Return an answer as the user gets it; without a tokenizer, texts are empty."""
    answer, head = reading.answer, len(config.separator)
    items, token_ids = answer.items, answer.token_ids
    structure = () if codec is None else _structure(items, head, codec)
    reason = {RUNNING: None, STOP: "length" if reading.cut else "stop", LENGTH: "length"}[answer.finish]
    match = first_match(plain_text(structure), job.params.stop)
    if match is not None:
        assert codec is not None
        items = shortened(items, head, _tokens_until(items, head, codec, match.end))
        structure = beginning(structure, match.start)
        token_ids = token_ids if config.text_tags else join(items, config.special)
        reason = "stop"
    blocks = [item for item in items if isinstance(item, BlockIds)]
    stats = Statistics(
        prompt_tokens=len(job.prompt),
        reused_tokens=reused,
        generated_tokens=len(token_ids),
        content_tokens=count_content(items, head),
        passes=reading.passes,
        critical_path=reading.critical_path,
        blocks=len(blocks),
        branches=sum(len(block.branches) for block in blocks),
        discarded_tokens=reading.discarded,
        drafted_tokens=reading.drafted,
        accepted_tokens=reading.accepted,
        seconds=dict(seconds),
    )
    tokens = [int(token) for token in token_ids]
    return Result(plain_text(structure), structure, tokens, reason, stats, list(job.prompt))


def content_segments(config: EngineConfig, ids: list[int]) -> list[range]:
    """Return the places of the plain text in a linearisation, a range for each segment.

    Tags, titles, heads and end of text are none of it.
    """
    special, head = config.special, len(config.separator)
    whole = ids[:-1] if ids and ids[-1] in config.end else ids
    places: list[range] = []
    at = 0
    for item in split(whole, special):
        if isinstance(item, SerialIds):
            places.append(range(at, at + len(item.ids)))
            at += len(item.ids)
            continue
        at += 1 + sum(2 + len(title) for title in item.titles)
        for branch, text in zip(item.branches, item.texts(head), strict=True):
            at += 1 + len(branch)
            places.append(range(at - len(text.ids), at))
            at += 1
        at += 1
    return places


def content_places(config: EngineConfig, ids: list[int]) -> list[int]:
    """Return the places of the plain text in a linearisation (`content_segments`)."""
    return [place for segment in content_segments(config, ids) for place in segment]


def content_ids(config: EngineConfig, result: Result) -> list[int]:
    """Tokens of an answer's plain text, and the end of text if it had one."""
    ids = result.token_ids
    content = [ids[place] for place in content_places(config, ids)]
    return content + ids[-1:] * (bool(ids) and ids[-1] in config.end)
