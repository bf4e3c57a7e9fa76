"""Reading answers off the decoding state: tokens in the order of the linearisation, structure, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from aspd_jax.layout import Layout
from aspd_jax.sizes import next_power
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, plain_text
from aspd_jax.tokens import BlockIds, Codec, ItemIds, SerialIds, split
from infer.decode.packed import Packed
from infer.decode.recogniser import TextReader
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
        text: the plain text.
        structure: serial stretches and blocks.
        token_ids: the linearisation, end of text included if it was sampled.
        finish_reason: `stop` (end of text or a stop string), `length` (the budget ended it, or one of its branches), or
            None while it grows.
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
    """An answer as far as it is.

    Attributes:
        token_ids: in the order of the linearisation; branches that are still open have no closing tag.
        items: stretches and blocks, the open block as if it were closed now; titles under way and end of text left out.
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
    state: DecodeState, config: EngineConfig, rows: Sequence[int], reader: TextReader | None = None
) -> list[Reading]:
    """Sequences as far as they are, from what was fed and what is pending; `reader`: of tags that are text."""
    return readings(look_at(state, config, rows), len(rows), config, reader)


def look_at(state: DecodeState, config: EngineConfig, rows: Sequence[int]) -> Packed[Snapshot]:
    """A copy on the device of all that `readings` needs; the state may be given away then."""
    size = next_power(len(rows))
    return snapshot(state, np.asarray([*rows, *[rows[0]] * (size - len(rows))], np.int32), config)


def readings(
    shot: Packed[Snapshot], count: int, config: EngineConfig, reader: TextReader | None = None
) -> list[Reading]:
    """The first so many sequences of a copy; see `read`."""
    there = shot.read()
    return [_reading(there, index, config, reader) for index in range(count)]


def _reading(shot: Snapshot, index: int, config: EngineConfig, reader: TextReader | None) -> Reading:
    s, due, slots = shot.sequence, shot.pending, int(shot.length[index])
    phase, start = int(s.phase[index]), int(s.prompt_length[index])
    tokens = np.asarray(shot.tokens)[index, :slots]
    layout = Layout(*(field[index, :slots] for field in shot.layout))
    written = _written(layout)
    fed = written[written >= start]
    there = np.flatnonzero(due.layout.sequence[index] > 0)
    ids = np.concatenate([tokens[fed], due.tokens[index, there]])
    own = Layout(*(np.concatenate([a[fed], b[index, there]]) for a, b in zip(layout, due.layout, strict=True)))
    order = linear_order(own)
    in_block = phase in (FORK, PARALLEL)
    still_open = frozenset((np.flatnonzero(s.branch_live[index]) + 1).tolist()) if in_block else frozenset()
    finish = int(s.finish[index])
    return Reading(
        answer=_answer(ids[order], own.branch[order], phase, finish, config, still_open, reader),
        passes=int(s.passes[index]),
        critical_path=int(s.critical_path[index]) + (int(s.branch_sampled[index].max()) if in_block else 0),
        tokens=tokens,
        layout=layout,
        slots=slots,
        drafted=int(s.drafted[index]),
        accepted=int(s.accepted[index]),
        discarded=int(s.discarded[index]),
        cut=bool(s.cut[index]),
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
    whole = ids
    if finish == STOP and ids.size and int(ids[-1]) in config.end:
        whole = ids[:-1]
    if reader is not None:
        items = reader.items(whole, branch[: whole.size], len(config.separator), finish == RUNNING)
        return Answer(ids, items, phase, finish, still_open)
    if whole.size == ids.size and phase in (TITLE, TITLED):
        closed = np.flatnonzero(ids == special.parallel_end)
        after = int(closed[-1]) if closed.size else 0
        whole = ids[: after + int(np.argmax(ids[after:] == special.title_start))]
    elif whole.size == ids.size and phase in (FORK, PARALLEL):
        ends = np.flatnonzero((branch > 0) & (np.append(branch[1:], 0) != branch))
        unclosed = ends[ids[ends] != special.branch_end]
        whole = np.append(np.insert(ids, unclosed + 1, special.branch_end), special.parallel_end)
    return Answer(ids, split(whole, special), phase, finish, still_open)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    places = [place for place in (text.find(string) for string in stop) if place >= 0]
    return text[: min(places)] if places else text


def result(
    reading: Reading, job: Job, codec: Codec | None, config: EngineConfig, reused: int, seconds: dict[str, float]
) -> Result:
    """An answer as the user gets it; without a tokenizer, texts are empty."""
    answer = reading.answer
    stop, head = job.params.stop, len(config.separator)
    structure: list[Item] = []
    content = 0
    for item in answer.items:
        if isinstance(item, SerialIds):
            content += len(item.ids)
        else:
            content += sum(len(text.ids) for text in item.texts(head))
        if codec is None:
            continue
        decode = codec.text.decode
        if isinstance(item, SerialIds):
            structure.append(Serial(cut(codec.text.text_of(item), stop)))
        else:
            structure.append(
                Parallel(
                    Branch(decode(title) or codec.text.spell(title), cut(codec.text.text_of(text), stop))
                    for title, text in zip(item.titles, item.texts(head), strict=True)
                )
            )
    blocks = [item for item in answer.items if isinstance(item, BlockIds)]
    stats = Statistics(
        prompt_tokens=len(job.prompt),
        reused_tokens=reused,
        generated_tokens=len(answer.token_ids),
        content_tokens=content,
        passes=reading.passes,
        critical_path=reading.critical_path,
        blocks=len(blocks),
        branches=sum(len(block.branches) for block in blocks),
        discarded_tokens=reading.discarded,
        drafted_tokens=reading.drafted,
        accepted_tokens=reading.accepted,
        seconds=dict(seconds),
    )
    reason = {RUNNING: None, STOP: "length" if reading.cut else "stop", LENGTH: "length"}[answer.finish]
    tokens = [int(token) for token in answer.token_ids]
    return Result(plain_text(structure), tuple(structure), tokens, reason, stats, list(job.prompt))


def content_places(config: EngineConfig, ids: list[int]) -> list[int]:
    """Which tokens of a linearisation are plain text: no tags, titles, heads, nor end of text."""
    special, head = config.special, len(config.separator)
    whole = ids[:-1] if ids and ids[-1] in config.end else ids
    places: list[int] = []
    at = 0
    for item in split(whole, special):
        if isinstance(item, SerialIds):
            places += range(at, at + len(item.ids))
            at += len(item.ids)
            continue
        at += 1 + sum(2 + len(title) for title in item.titles)
        for branch, text in zip(item.branches, item.texts(head), strict=True):
            at += 1 + len(branch)
            places += range(at - len(text.ids), at)
            at += 1
        at += 1
    return places


def content_ids(config: EngineConfig, result: Result) -> list[int]:
    """Tokens of an answer's plain text, and the end of text if it had one."""
    ids = result.token_ids
    content = [ids[place] for place in content_places(config, ids)]
    return content + ids[-1:] * (bool(ids) and ids[-1] in config.end)
