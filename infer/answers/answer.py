"""Answers from the decoding state: tokens in the order of the linearisation, structure, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from aspd_jax.structure import Structure, beginning, plain_text
from aspd_jax.tokens import BlockIds, Codec, ItemIds, SerialIds, join, split
from infer.answers.filled import Filled
from infer.answers.stop import first_match
from infer.decode.decode_step import StepSummary, TokenLog
from infer.decode.guidance import RowGuidance
from infer.decode.state import LENGTH, RUNNING, SERIAL, STOP, EngineConfig
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
            block or are similar to it, and leads without end; they took steps, too.
        drafted_tokens, accepted_tokens: number of draft tokens, and of accepted ones.
        drafted_fields: number of fields that were decoded in parallel as a draft (exact fields); 0: the answer was
            decoded serially, because a draft would have taken longer, or the schema has none.
        scored_tokens: number of tokens of known branches.
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
    drafted_fields: int = 0
    scored_tokens: int = 0
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

    def first(self, count: int) -> TokenLogprob:
        """Return this token with the first `count` tokens of `top`."""
        return self._replace(top=self.top[:count], top_texts=self.top_texts[:count])


class Option(NamedTuple):
    """A value that a schema lists, as JSON text, and its probability among the listed values."""

    text: str
    probability: float


class Value(NamedTuple):
    """A leaf of a JSON answer.

    Attributes:
        pointer: its JSON pointer.
        text: the value as JSON text.
        logprob: sum of the log probabilities of its tokens, those that it shares with punctuation included.
        options: where the schema lists the values (`enum`, booleans), those whose probability is known (protocol,
            section 5), the likeliest first; what they lack to 1 is that of the others.
    """

    pointer: str
    text: str
    logprob: float
    options: tuple[Option, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**self._asdict(), "options": [option._asdict() for option in self.options]}


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
            a stop string; of templates and parallel fields, those of the branches, leads included; None:
            `SamplingParams.logprobs` is None, or the answer still grows.
        values: leaves of an answer that follows a JSON schema, with their log probabilities; None: see `logprobs`.
        others: the further answers to the prompt (`SamplingParams.n`), in order.
        error: why the answer ended with `error`; empty: it did not.
        scores: log probabilities of `Request.scored`, those of each branch in the order of its places.
        branch_sizes: tokens of each branch of each block of a template, which are those of `token_ids` in this order;
            empty: no template.
    """

    text: str
    structure: Structure
    token_ids: list[int]
    finish_reason: str | None
    stats: Statistics
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    values: list[Value] | None = None
    others: tuple[Result, ...] = ()
    error: str = ""
    scores: tuple[tuple[float, ...], ...] = ()
    branch_sizes: tuple[tuple[int, ...], ...] = ()

    @property
    def outputs(self) -> tuple[Result, ...]:
        """Return all answers to the prompt, this one first."""
        return self, *self.others


NO_DRAFTS = np.zeros((0, 0), np.int32)


@dataclass
class RequestOutput:
    """Answer of a request as far as it is decoded: `take` and `apply` add tokens, `update` reads the rest of a state.

    Attributes:
        finish: `RUNNING`, `STOP` or `LENGTH`.
        items: segments and blocks, an open block as if it were closed now; without incomplete titles and end of text.
            Of answers without tags, blocks only, until a controller reads them.
        open_branches: numbers, from 1, of the branches of the open block that still grow.
        opening: tokens of a block whose titles are under way, from its first `<|title|>` on; empty outside one.
        end: the end of text, once it is sampled.
        size: number of tokens.
        content: number of tokens of the plain text; of answers without tags 0.
        sampled: number of tokens sampled in each branch of the current or last block.
        path: critical path without the current or last block.
        discarded: `Statistics.discarded_tokens`.
        steps: steps after prefill.
        drafted, accepted: number of draft tokens, and of accepted ones.
        cut: whether `max_branch_tokens` ended a branch.
        exhausted: numbers, from 1, of the branches of the current or last block that the budget of the answer ended.
        untagged: see `Request`. The blocks have branches only, which end where the host closes them.
        serial_ids: tokens of the serial text (answers without tags only).
        branch_ids: tokens of each branch of the last block, leads included (answers without tags only).
        drafts: draft tokens of each branch, [N, D]; the first are those of the serial segment outside blocks; -1: none.
        block_ready: whether the next block may begin (templates only).
        tokens_left, content_left: what is left of the budgets of all tokens and of plain text, outside of blocks.
        position: position of the next serial token to be fed, as `Cursor.position`.
        template: state of the filled template; None: none.
        shortened: whether tokens that exceed the budget of plain text are left out (`limited`).
        drafted_fields: see `Statistics`.
        scored_tokens: number of tokens of known branches that are fed.
        scores: log probabilities read in them, by step.
    """

    finish: int = RUNNING
    items: list[ItemIds] = field(default_factory=list)
    open_branches: frozenset[int] = frozenset()
    opening: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    size: int = 0
    content: int = 0
    sampled: list[int] = field(default_factory=list)
    path: int = 0
    discarded: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    cut: bool = False
    exhausted: frozenset[int] = frozenset()
    untagged: bool = False
    serial_ids: list[int] = field(default_factory=list)
    branch_ids: tuple[list[int], ...] = ()
    drafts: np.ndarray = field(default_factory=lambda: NO_DRAFTS)
    block_ready: bool = False
    tokens_left: int = 0
    content_left: int = 0
    position: int = 0
    template: Filled | None = None
    shortened: bool = False
    drafted_fields: int = 0
    scored_tokens: int = 0
    scores: list[list[float]] = field(default_factory=list)

    @property
    def critical_path(self) -> int:
        """Return the critical path so far (`Statistics.critical_path`)."""
        return self.path + max(self.sampled, default=0)

    @property
    def block(self) -> BlockIds:
        """Return the last block, which is the last item."""
        assert isinstance(self.items[-1], BlockIds)
        return self.items[-1]

    def drafts_of(self, segment: int) -> list[int]:
        """Return the draft tokens of a segment: 0 is serial, k is branch k."""
        drafts = self.drafts[max(segment - 1, 0)].tolist() if len(self.drafts) else []
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def take(self, segment: int, tokens: list[int], config: EngineConfig) -> None:
        """Take sampled tokens of a segment: 0 is serial, k is branch k."""
        self.size += len(tokens)
        if not segment:
            self.path += len(tokens)
            self._add_serial(tokens, config)
            return
        self.sampled[segment - 1] += len(tokens)
        if self.block.texts and tokens[-1] == config.special.branch_end:
            tokens = tokens[:-1]
            self.open_branches -= {segment}
            self.size += not self.open_branches  # `<|/para|>`
        self._add(segment, tokens)

    def apply(self, guidance: RowGuidance, config: EngineConfig) -> None:
        """Apply decisions of the host: tokens that it takes back, feeds or drops, and blocks and branches.

        The sequence waits, and `update` has read the state in which it does.
        """
        known = guidance.known_tokens
        if guidance.restarts:
            self._restart()
        elif guidance.resume_at >= 0:
            self._take_back(guidance.resume_at)
        self.size += sum(map(len, known.values())) + len(guidance.text) - len(guidance.emptied)
        self.path -= guidance.discarded
        self.discarded += guidance.discarded
        self.serial_ids += guidance.text
        if guidance.branches:
            self.opening += known.get(0, ())
            heads = [list(known.get(number, ())) for number in range(1, 1 + guidance.branches)]
            self._open_block(heads, config)
            return
        for segment, tokens in known.items():
            if segment:
                self._add(segment, tokens)
            else:
                self._add_serial(tokens, config)
        for number in guidance.emptied:
            self.block.branches[number - 1].pop()
        self.open_branches -= guidance.closed

    def update(self, summary: StepSummary, row: int) -> None:
        """Read what else a summary says about a row."""
        counters, budget, self.position = summary.counters, summary.budget, int(summary.position[row])
        self.finish, self.block_ready = int(summary.finish[row]), int(summary.phase[row]) == SERIAL
        self.steps, self.drafts = int(counters.steps[row]), np.asarray(summary.draft[row])
        self.drafted, self.accepted = int(counters.drafted[row]), int(counters.accepted[row])
        self.tokens_left, self.content_left = int(budget.tokens[row]), int(budget.content[row])
        self.cut = bool(budget.cut[row])
        self.exhausted = frozenset((np.flatnonzero(budget.exhausted[row]) + 1).tolist())

    def limited(self, limit: int | None) -> RequestOutput:
        """Return the answer without the tokens that exceed a limit of plain text in reading order; None: no limit."""
        if limit is None or not self.content or limit > self.content:
            return self
        items = shortened(self.items, limit)
        if count_content(items) == self.content and len(items) == len(self.items):
            return self
        return replace(self, items=items, shortened=True)

    def token_ids(self, config: EngineConfig) -> list[int]:
        """Return the tokens in the order of the linearisation.

        While the answer grows, open branches have no closing tag, and the titles of a block that has not begun are
        included.
        """
        if self.untagged:
            parts = [[item.ids] if isinstance(item, SerialIds) else item.branches for item in self.items]
            return [token for part in parts for ids in part for token in ids] + self.end
        if self.shortened:
            return join(self.items, config.special)
        if self.finish != RUNNING:
            return join(self.items, config.special) + self.end
        return join(self.items, config.special, self.open_branches) + self.opening

    def _restart(self) -> None:
        """Drop all tokens; what follows is serial text."""
        self.items, self.branch_ids, self.open_branches, self.sampled = [], (), frozenset(), []
        self.size, self.path, self.serial_ids, self.untagged = 0, 0, [], False

    def _take_back(self, position: int) -> None:
        """Drop the tokens from a position on: the end of serial text or of titles, and the block of lists after it."""
        if self.branch_ids:
            self.size -= sum(map(len, self.branch_ids))
            self.branch_ids, self.open_branches = (), frozenset()
            self.items.pop()
        ids = self.serial_ids if self.untagged else self.opening
        rest = len(ids) - (self.position + 1 - position)
        self.size -= len(ids) - rest
        del ids[rest:]

    def _add(self, segment: int, tokens: Sequence[int]) -> None:
        """Add tokens to a branch."""
        block = self.block
        block.branches[segment - 1].extend(tokens)
        if block.texts:
            block.texts[segment - 1].ids.extend(tokens)
            self.content += len(tokens)

    def _add_serial(self, tokens: Sequence[int], config: EngineConfig) -> None:
        """Add tokens to serial text, or to the titles of a block."""
        if self.untagged or self.opening or not tokens:
            (self.serial_ids if self.untagged else self.opening).extend(tokens)
            return
        if tokens[-1] == config.special.title_start:
            tokens, self.opening = tokens[:-1], [tokens[-1]]
        elif tokens[-1] in config.end:
            tokens, self.end = tokens[:-1], [tokens[-1]]
        if not tokens:
            return
        if not self.items or isinstance(last := self.items[-1], BlockIds):
            self.items.append(last := SerialIds([]))
        last.ids.extend(tokens)
        self.content += len(tokens)

    def _open_block(self, heads: list[list[int]], config: EngineConfig) -> None:
        """Open a block with the titles of `opening`, or one without tags, which has none."""
        special, titles = config.special, list[list[int]]()
        for token in self.opening:
            if token == special.title_start:
                titles.append([])
            elif token not in (special.title_end, special.parallel_start):
                titles[-1].append(token)
        number = titles.pop(0) if config.form.leads and titles else []
        texts = tuple(SerialIds([], title if config.form.leads else ()) for title in titles)
        branches = tuple(head[1:] if titles else head for head in heads)
        self.items.append(BlockIds(tuple(titles), branches, texts, number))
        self.branch_ids = branches if self.untagged else ()
        self.content += sum(len(text.lead) for text in texts)
        self.path, self.sampled, self.opening = self.critical_path, [0] * len(heads), []
        self.open_branches = frozenset(range(1, 1 + len(heads)))


def logged_tokens(log: TokenLog) -> Iterator[tuple[int, int, list[int]]]:
    """Yield row, segment and tokens of each segment in a log; of a row, the branches come before the serial segment."""
    entries = np.asarray(log.entries)[: int(log.size)]
    entries = entries[np.lexsort((entries[:, 1], entries[:, 1] == 0, entries[:, 0]))]
    ends = np.flatnonzero(np.diff(entries[:, :2], axis=0, append=-1).any(axis=1)) + 1
    for start, end in zip([0, *ends], ends, strict=False):
        row, segment = entries[start, :2].tolist()
        yield row, segment, entries[start:end, 2].tolist()


def shortened(items: Sequence[ItemIds], limit: int) -> list[ItemIds]:
    """Return the items up to a number of tokens of plain text in reading order; what follows them is left out.

    Later branches of the last block are kept with empty text and whole heads.
    """
    kept: list[ItemIds] = []
    for item in items:
        if limit <= 0:
            break
        if isinstance(item, SerialIds):
            kept.append(item.first(limit))
            limit -= item.size
            continue
        branches, texts = [], []
        for branch, text in zip(item.branches, item.texts, strict=True):
            texts.append(text.first(max(0, limit)))
            branches.append(branch[: len(branch) - len(text.ids) + len(texts[-1].ids)])
            limit -= text.size
        kept.append(item._replace(branches=tuple(branches), texts=tuple(texts)))
    return kept


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
            for token in part:
                count, end = count + 1, end - len(stream.decode([token]))
                if end <= 0:
                    return count
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
    items, token_ids, filled = output.items, output.token_ids(config), output.template
    structure = filled.structure if filled is not None else () if codec is None else codec.structure(items)
    reason = {RUNNING: None, STOP: "length" if output.cut else "stop", LENGTH: "length"}[output.finish]
    match = first_match(plain_text(structure), request.params.stop)
    if match is not None:
        assert codec is not None
        items = shortened(items, _tokens_until(items, codec, match.end))
        structure = beginning(structure, match.start)
        token_ids = token_ids if filled else replace(output, items=items, end=[], shortened=True).token_ids(config)
        reason = "stop"
    text = plain_text(structure)
    if filled is not None:
        widths, content = tuple(map(len, filled.blocks)), len(token_ids)
    else:
        widths = tuple(len(item.branches) for item in items if isinstance(item, BlockIds))
        content = count_content(items)
    stats = Statistics(
        prompt_tokens=len(request.prompt),
        reused_tokens=reused,
        generated_tokens=len(token_ids),
        content_tokens=content,
        steps=output.steps,
        critical_path=output.critical_path,
        blocks=len(widths),
        branches=sum(widths),
        discarded_tokens=output.discarded,
        drafted_tokens=output.drafted,
        accepted_tokens=output.accepted,
        drafted_fields=output.drafted_fields,
        scored_tokens=output.scored_tokens,
        decisions=decisions,
        seconds=dict(seconds),
    )
    read = iter([value for step in output.scores for value in step])
    scores = tuple(tuple(islice(read, len(branch.ids))) for branch in request.scored)
    sizes: tuple[tuple[int, ...], ...] = ()
    if filled is not None:
        sizes = tuple(tuple(map(len, item.branches)) for item in output.items if isinstance(item, BlockIds))
    prompt = list(request.prompt)
    return Result(text, structure, token_ids, reason, stats, prompt, scores=scores, branch_sizes=sizes)


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
