"""Answers from the decoding state: tokens in the order of the linearisation, structure, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from aspd_jax.layout import Layout
from aspd_jax.sizes import next_power
from aspd_jax.structure import Branch, Item, Parallel, Serial, Structure, beginning, plain_text
from aspd_jax.tokens import EMPTY_IDS, BlockIds, Codec, ItemIds, SerialIds, join, split
from infer.answers.filled import Filled
from infer.answers.stop import first_match
from infer.decode.packed import Packed
from infer.decode.slots import OutputSnapshot, snapshot
from infer.decode.state import FORK, LENGTH, MERGE, PARALLEL, RUNNING, SERIAL, STOP, DecodeState, EngineConfig
from infer.request import Request


@dataclass(frozen=True)
class Statistics:
    """Cost of an answer (protocol, section 8).

    Attributes:
        prompt_tokens: number of tokens of the prompt.
        reused_tokens: number of prompt tokens that the cache held.
        generated_tokens: number of tokens of the answer, those of branches, tags and heads included.
        content_tokens: number of tokens of the plain text; of a template: of all branches, leads included.
        steps: steps after prefill.
        critical_path: steps that had to follow one another, plus one.
        blocks, branches: number of blocks and of branches.
        discarded_tokens: number of sampled tokens that are no part of the answer: titles that repeat another of their
            block, and leads without end; they took steps, too.
        drafted_tokens, accepted_tokens: number of draft tokens, and of accepted ones.
        decisions: times that the sequence waited for a decision of the host.
        seconds: wall time since submission by phase: queued, prefill, serial, parallel (fork and merge included),
            total; first_token: time to the first token; deciding: time of the decisions. A step of a batch counts in
            full for every sequence in it.
    """

    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    content_tokens: int
    steps: int
    critical_path: int
    blocks: int
    branches: int
    discarded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    decisions: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ideal_speedup(self) -> float:
        """Return the content tokens per token of the critical path."""
        return self.content_tokens / max(1, self.critical_path)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the ideal speed-up included."""
        return asdict(self) | {"ideal_speedup": self.ideal_speedup}


class TokenLogprob(NamedTuple):
    """A token and its log probability.

    Attributes:
        token: token id.
        logprob: log probability; None for the first token of the sequence.
        top: ids and log probabilities of the likeliest tokens in its place, in descending order.
        text: bytes of the token; those of an answer join to the UTF-8 of its text. Empty without a tokenizer.
        top_texts: bytes of the tokens of `top`.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    text: bytes = b""
    top_texts: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Result:
    """An answer.

    Attributes:
        text: the plain text, up to the first stop string.
        structure: serial segments and blocks of this text.
        token_ids: the linearisation, end of text included if it was sampled; up to the token that completes a stop
            string.
        finish_reason: `stop` (end of text or a stop string), `length` (the budget ended it, or one of its branches),
            `cancelled`, `error`, or None while it grows.
        stats: its cost.
        prompt_token_ids: tokens of the prompt.
        logprobs: log probabilities of the tokens of `text` in reading order, up to the end of the token that completes
            a stop string; None: `SamplingParams.logprobs` is None, or the answer still grows.
        others: the further answers to the prompt (`SamplingParams.n`), in order.
        error: why the answer ended with `error`; empty: it did not.
    """

    text: str
    structure: Structure
    token_ids: list[int]
    finish_reason: str | None
    stats: Statistics
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    others: tuple[Result, ...] = ()
    error: str = ""

    @property
    def outputs(self) -> tuple[Result, ...]:
        """Return all answers to the prompt, this one first."""
        return self, *self.others


NO_DRAFTS = np.zeros((0, 0), np.int32)
EMPTY_LAYOUT = Layout(*[EMPTY_IDS] * len(Layout._fields))


@dataclass(frozen=True)
class RequestOutput:
    """Answer of a request as far as it is decoded, without tokens that exceed its budgets in reading order.

    Attributes:
        finish: `RUNNING`, `STOP` or `LENGTH`.
        token_ids: tokens in the order of the linearisation; open branches have no closing tag while the answer grows.
        items: segments and blocks, an open block as if it were closed now; without incomplete titles and end of text.
        open_branches: numbers, from 1, of the branches of the open block that still grow.
        steps: steps after prefill.
        critical_path: critical path so far (`Statistics.critical_path`).
        cached_tokens, cached_layout: tokens in the cache, prompt included, and their layout, [T] by slot.
        drafted, accepted: number of draft tokens, and of accepted ones.
        discarded: `Statistics.discarded_tokens`.
        cut: whether `max_branch_tokens` ended a branch.
        exhausted: numbers, from 1, of the branches of the current or last block that the budget of the answer ended.
        serial_ids: tokens of the serial text (answers without tags only).
        branch_ids: tokens of each branch of the current block, leads included (answers without tags only).
        drafts: draft tokens of each branch, [N, D]; the first are those of the serial segment outside blocks; -1: none.
        block_ready: whether the next block may begin (templates only).
        opening: tokens of a block whose titles are under way, from its first `<|title|>` on; none outside one.
        tokens_left, content_left: what is left of the budgets of all tokens and of plain text, outside of blocks.
        position: position of the next serial token to be fed, as `Cursor.position`.
        template: state of the filled template; None: none.
    """

    finish: int
    token_ids: np.ndarray = field(default_factory=lambda: EMPTY_IDS)
    items: tuple[ItemIds, ...] = ()
    open_branches: frozenset[int] = frozenset()
    steps: int = 0
    critical_path: int = 0
    cached_tokens: np.ndarray = field(default_factory=lambda: EMPTY_IDS)
    cached_layout: Layout = EMPTY_LAYOUT
    drafted: int = 0
    accepted: int = 0
    discarded: int = 0
    cut: bool = False
    exhausted: frozenset[int] = frozenset()
    serial_ids: np.ndarray = field(default_factory=lambda: EMPTY_IDS)
    branch_ids: tuple[np.ndarray, ...] = ()
    drafts: np.ndarray = field(default_factory=lambda: NO_DRAFTS)
    block_ready: bool = False
    opening: np.ndarray = field(default_factory=lambda: EMPTY_IDS)
    tokens_left: int = 0
    content_left: int = 0
    position: int = 0
    template: Filled | None = None

    def drafts_of(self, segment: int) -> list[int]:
        """Return the draft tokens of a segment: 0 is serial, k is branch k."""
        drafts = self.drafts[max(segment - 1, 0)].tolist() if len(self.drafts) else []
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def linearised_cache(self) -> tuple[np.ndarray, int]:
        """Return the tokens in the cache in the order of the linearisation.

        Returns:
            The tokens, int32, and the number of first slots that hold the first tokens in this order.
        """
        written = _written(self.cached_layout)
        order = written[linear_order(Layout(*(field[written] for field in self.cached_layout)))]
        elsewhere = np.flatnonzero(order != np.arange(order.size))
        return self.cached_tokens[order], int(elsewhere[0]) if elsewhere.size else order.size


def _written(layout: Layout) -> np.ndarray:
    """Return the slots that hold a token; slots of rejected draft tokens hold none."""
    return np.flatnonzero(layout.sequence > 0)


def linear_order(layout: Layout) -> np.ndarray:
    """Return the indices that sort the tokens of one sequence [T] into the order of the linearisation."""
    anchor = np.array(layout.position)
    for block in np.unique(layout.block[layout.block > 0]):
        inside = layout.block == block
        anchor[inside] = anchor[inside].min()
    return np.lexsort((layout.position, layout.branch, anchor))


def copy_outputs(state: DecodeState, config: EngineConfig, rows: Sequence[int]) -> Packed[OutputSnapshot]:
    """Copy on the device what `fetch_outputs` reads of rows, so that the state can be donated to the next steps."""
    size = next_power(len(rows))
    return snapshot(state, np.asarray([*rows, *[rows[0]] * (size - len(rows))], np.int32), config)


def fetch_outputs(
    copy: Packed[OutputSnapshot],
    requests: Sequence[Request | None],
    config: EngineConfig,
) -> list[RequestOutput]:
    """Return the outputs of the first rows of a copy, one for each request, from fed and pending tokens.

    Args:
        copy: rows that `copy_outputs` copied.
        requests: request of each row; None: one without limits.
    """
    host = copy.read()
    return [_output(host, index, request, config) for index, request in enumerate(requests)]


def _output(shot: OutputSnapshot, index: int, request: Request | None, config: EngineConfig) -> RequestOutput:
    s, due, slots = shot.sequence, shot.pending, int(shot.length[index])
    phase, start = int(s.cursor.phase[index]), int(s.cursor.prompt_length[index])
    tokens = np.asarray(shot.tokens)[index, :slots]
    layout = Layout(*(field[index, :slots] for field in shot.layout))
    written = _written(layout)
    fed = written[written >= start]
    pending = np.flatnonzero(due.layout.sequence[index] > 0)
    ids = np.concatenate([tokens[fed], due.tokens[index, pending]])
    own = Layout(*(np.concatenate([a[fed], b[index, pending]]) for a, b in zip(layout, due.layout, strict=True)))
    order = linear_order(own)
    in_block = phase in (FORK, PARALLEL)
    still_open = frozenset((np.flatnonzero(s.branches.live[index]) + 1).tolist()) if in_block else frozenset()
    finish = int(s.cursor.finish[index])
    ids, own = ids[order], Layout(*(field[order] for field in own))
    token_ids = opening = ids
    items: tuple[ItemIds, ...] = ()
    branch_ids: tuple[np.ndarray, ...] = ()
    serial_ids = ids[:0]
    if request is not None and request.untagged:
        current = own.block == s.cursor.block[index]
        serial_ids = ids[own.branch == 0]
        branch_ids = tuple(ids[current & (own.branch == k)] for k in range(1, 1 + int(s.branches.number[index])))
    else:
        token_ids, items, opening = _items(ids, own.branch, phase, finish, config)
    longest = int(s.segments.sampled[index, 1:].max()) if in_block else 0
    output = RequestOutput(
        finish=finish,
        token_ids=token_ids,
        items=items,
        open_branches=still_open,
        steps=int(s.counters.steps[index]),
        critical_path=int(s.counters.critical_path[index]) + longest,
        cached_tokens=tokens,
        cached_layout=layout,
        drafted=int(s.counters.drafted[index]),
        accepted=int(s.counters.accepted[index]),
        discarded=int(s.counters.discarded[index]),
        cut=bool(s.budget.cut[index]),
        exhausted=frozenset((np.flatnonzero(s.budget.exhausted[index]) + 1).tolist()),
        serial_ids=serial_ids,
        branch_ids=branch_ids,
        drafts=np.asarray(s.draft[index]),
        block_ready=phase == SERIAL and not s.cursor.rule[index],
        opening=opening,
        tokens_left=int(s.budget.tokens[index]),
        content_left=int(s.budget.content[index]),
        position=int(s.cursor.position[index]),
    )
    return _limited_output(output, config, None if request is None else request.params.max_content_tokens)


def _items(
    ids: np.ndarray, branch: np.ndarray, phase: int, finish: int, config: EngineConfig
) -> tuple[np.ndarray, tuple[ItemIds, ...], np.ndarray]:
    """Return `token_ids`, `items` and `opening` of `RequestOutput` of tokens in the order of the linearisation."""
    special, opening = config.special, ids[:0]
    whole, end = ids, ids[:0]
    if finish == STOP and ids.size and int(ids[-1]) in config.end:
        whole, end = ids[:-1], ids[-1:]
    if phase not in (FORK, PARALLEL, MERGE):
        closed = np.flatnonzero(ids == special.parallel_end)
        after = int(closed[-1]) if closed.size else 0
        if (starts := np.flatnonzero(ids[after:] == special.title_start)).size:
            whole, opening = ids[: after + starts[0]], ids[after + starts[0] :]
    elif not end.size and phase in (FORK, PARALLEL):
        ends = np.flatnonzero((branch > 0) & (np.append(branch[1:], 0) != branch))
        unclosed = ends[ids[ends] != special.branch_end]
        whole = np.append(np.insert(ids, unclosed + 1, special.branch_end), special.parallel_end)
    if finish != RUNNING:
        ids = np.concatenate([whole, end])
    return ids, split(whole, special, config.form), opening


def shortened(items: Sequence[ItemIds], limit: int, last_branch: int = 0) -> tuple[ItemIds, ...]:
    """Return the items up to a number of tokens of plain text in reading order; what follows them is left out.

    Later branches of the last block are kept with empty text and whole heads.

    Args:
        limit: tokens of plain text.
        last_branch: number, from 1, of a branch of the last block whose text is the last; 0: none.
    """
    shortened_items: list[ItemIds] = []
    last = max((place for place, item in enumerate(items) if isinstance(item, BlockIds)), default=-1)
    for place, item in enumerate(items):
        if limit <= 0:
            break
        if isinstance(item, SerialIds):
            shortened_items.append(item.first(limit))
            limit -= item.size
            continue
        branches, texts = [], []
        for number, (branch, text) in enumerate(zip(item.branches, item.texts, strict=True), 1):
            texts.append(text.first(max(0, limit)))
            branches.append(branch[: len(branch) - len(text.ids) + len(texts[-1].ids)])
            limit = 0 if place == last and number == last_branch else limit - text.size
        shortened_items.append(item._replace(branches=tuple(branches), texts=tuple(texts)))
    return tuple(shortened_items)


def _limited_output(output: RequestOutput, config: EngineConfig, limit: int | None) -> RequestOutput:
    """Return an output without the tokens that exceed the budgets of plain text and of all tokens."""
    items = output.items
    content = count_content(items)
    last_branch = min(output.exhausted, default=0)
    if not last_branch and (limit is None or limit > content):
        return output
    shortened_items = shortened(items, content + 1 if limit is None else limit, last_branch)
    if count_content(shortened_items) == content and len(shortened_items) == len(items):
        return output
    return replace(output, items=shortened_items, token_ids=join(shortened_items, config.special))


def count_content(items: Sequence[ItemIds]) -> int:
    """Return the tokens of the plain text of items."""
    return sum(segment.size for segment in segments(items))


def segments(items: Sequence[ItemIds]) -> Iterator[SerialIds]:
    """Yield serial texts and texts of branches in reading order."""
    for item in items:
        if isinstance(item, SerialIds):
            yield item
        else:
            yield from item.texts


def _structure(items: Sequence[ItemIds], codec: Codec) -> Structure:
    decode = codec.text.decode
    structure: list[Item] = []
    for item in items:
        if isinstance(item, SerialIds):
            structure.append(Serial(codec.text.text_of(item)))
        else:
            branches = zip(item.titles, item.texts, strict=True)
            structure.append(
                Parallel(Branch(decode(t) or codec.text.spell(t), codec.text.text_of(text)) for t, text in branches)
            )
    return tuple(structure)


def _tokens_until(items: Sequence[ItemIds], codec: Codec, end: int) -> int:
    """Return the tokens of the plain text up to the one that completes its first `end` characters."""
    count = 0
    for segment in segments(items):
        size = len(codec.text.text_of(segment))
        if size < end:
            count, end = count + segment.size, end - size
            continue
        for part in (segment.lead, segment.ids):
            stream = codec.text.stream()
            for place in range(1, len(part) + 1):
                stream.extend(part[:place])
                if len(stream.text) >= end:
                    return count + place
            count, end = count + len(part), end - len(stream.text)
        return count
    return count


def make_result(
    output: RequestOutput,
    request: Request,
    codec: Codec | None,
    config: EngineConfig,
    reused: int,
    seconds: dict[str, float],
    decisions: int,
) -> Result:
    """Return an answer as the user gets it; without a tokenizer, texts are empty."""
    items, token_ids = output.items, output.token_ids
    filled = output.template
    plain = () if codec is None else _structure(items, codec)
    structure = plain if filled is None else filled.structure
    reason = {RUNNING: None, STOP: "length" if output.cut else "stop", LENGTH: "length"}[output.finish]
    match = first_match(plain_text(structure), request.params.stop)
    if match is not None:
        assert codec is not None
        items = shortened(items, _tokens_until(items, codec, match.end))
        structure = beginning(structure, match.start)
        token_ids = token_ids if filled else join(items, config.special)
        reason = "stop"
    text = plain_text(structure)
    if filled is not None:
        widths, content = filled.widths, len(token_ids)
    else:
        widths = tuple(len(item.branches) for item in items if isinstance(item, BlockIds))
        content = count_content(items)
    stats = Statistics(
        prompt_tokens=len(request.prompt),
        reused_tokens=reused,
        generated_tokens=len(token_ids),
        content_tokens=content,
        steps=output.steps,
        critical_path=filled.critical_path if filled else output.critical_path,
        blocks=len(widths),
        branches=sum(widths),
        discarded_tokens=output.discarded,
        drafted_tokens=output.drafted,
        accepted_tokens=output.accepted,
        decisions=decisions,
        seconds=dict(seconds),
    )
    tokens = [int(token) for token in token_ids]
    return Result(text, structure, tokens, reason, stats, list(request.prompt))


def content_segments(config: EngineConfig, ids: list[int]) -> list[range]:
    """Return the places of the plain text in a linearisation, a range for each segment.

    Tags, titles, heads and end of text are excluded; leads in heads are included.
    """
    whole = ids[:-1] if ids and ids[-1] in config.end else ids
    places: list[range] = []
    at = 0
    for item in split(whole, config.special, config.form):
        if isinstance(item, SerialIds):
            places.append(range(at, at + len(item.ids)))
            at += len(item.ids)
            continue
        at += 1 + sum(2 + len(title) for title in item.announced)
        for branch, text in zip(item.branches, item.texts, strict=True):
            at += 1 + len(branch)
            places.append(range(at - text.size, at))
            at += 1
        at += 1
    return places


def content_places(config: EngineConfig, ids: list[int]) -> list[int]:
    """Return the places of the plain text in a linearisation (`content_segments`)."""
    return [place for segment in content_segments(config, ids) for place in segment]


def content_ids(config: EngineConfig, result: Result) -> list[int]:
    """Return the tokens of an answer's plain text, and its end of text if it has one."""
    ids = result.token_ids
    content = [ids[place] for place in content_places(config, ids)]
    return content + ids[-1:] * (bool(ids) and ids[-1] in config.end)
