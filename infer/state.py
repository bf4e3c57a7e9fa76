"""The decoding state: a pytree of one sequence per row, and what each of its phases feeds next.

B sequences, M some of them, N branches at most, T title tokens at most, F tokens fed in a pass, W lanes (tokens
that get logits in a pass), C cache slots.

A token is *pending* from when it is sampled (or due, for tokens that the engine feeds by itself) until a
pass feeds it. `plan` says which tokens are pending and where they stand; `advance` takes what was sampled
from them. Nothing is ever fed twice, and special tokens need no passes of their own (spec, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.layout import Layout
from aspd_jax.model.cache import Cache
from aspd_jax.model.transformer import Transformer
from aspd_jax.tokens import SpecialTokens

# Phases: what the pending tokens of a sequence are, and with that which grammar rule the next sample obeys.
SERIAL = 0  # a serial token; the next is free text, a title or the end
TITLE = 1  # `<|title|>` or a token of a title
TITLED = 2  # `<|/title|>`
FORK = 3  # `<|para|>` and the heads of all branches
PARALLEL = 4  # one token of every live branch
MERGE = 5  # the closing tags of all branches, and `<|/para|>`

RUNNING, STOP, LENGTH = 0, 1, 2  # values of `DecodeState.finish`
MOST_BRANCHES = 1 << 12  # that an engine can be made for; blocks and branches share one number in random streams


@dataclass(frozen=True)
class Protocol:
    """What is fixed while an engine lives; hashable, so that programs are compiled once for it.

    Attributes:
        model: the decoder.
        special: ids of the special tokens.
        separator: ids that follow the title at the head of a branch.
        end: ids that end an answer.
        forbidden: further ids that may not occur inside titles and branches.
        max_branches: N.
        max_title_tokens: T.
    """

    model: Transformer
    special: SpecialTokens
    separator: tuple[int, ...]
    end: tuple[int, ...]
    forbidden: tuple[int, ...]
    max_branches: int
    max_title_tokens: int


class Request(NamedTuple):
    """Per sequence, what was asked for; [B] each (keys: [B] typed PRNG keys)."""

    adaptive: jax.Array
    key: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    max_branch_tokens: jax.Array
    branch_cap: jax.Array


class DecodeState(NamedTuple):
    """Everything that changes while decoding.

    Attributes:
        cache: all tokens fed so far, prompt included.
        request: what was asked for; `branch_cap` alone may change under way.
        prompt_length: int32 [B].
        phase: int32 [B].
        finish: int32 [B], RUNNING, STOP or LENGTH. Rows without a request are finished.
        token: int32 [B], the pending serial token.
        position: int32 [B], of the pending serial token (in PARALLEL and MERGE: of `<|para|>`).
        block: int32 [B], blocks opened so far, those of the prompt included.
        titles: int32 [B], complete titles of the current block.
        title_length: int32 [B, N].
        title_tokens: int32 [B, N, T].
        branch_token: int32 [B, N], the pending token of each branch.
        branch_offset: int32 [B, N], tokens of the branch fed so far: the pending token's place in it.
        branch_sampled: int32 [B, N].
        branch_live: bool [B, N].
        branch_closing: bool [B, N], the next sample of the branch must be its closing tag.
        stride: int32 [B], positions between the starts of sibling branches in scheme `predict`.
        remaining: int32 [B], tokens the answer may still grow by; due heads and `<|/para|>` are taken off already.
        block_budget: int32 [B], `remaining` when the current block forked.
        sampled: int32 [B], serial tokens sampled.
        passes: int32 [B], forward passes after prefill.
        parallel_passes: int32 [B], those that forked, fed branches or merged.
        critical_path: int32 [B], of the answer so far, finished blocks only (spec, section 8).
        blocks: int32 [B], blocks of the answer merged or merging.
        branches: int32 [B], branches of these.
    """

    cache: Cache
    request: Request
    prompt_length: jax.Array
    phase: jax.Array
    finish: jax.Array
    token: jax.Array
    position: jax.Array
    block: jax.Array
    titles: jax.Array
    title_length: jax.Array
    title_tokens: jax.Array
    branch_token: jax.Array
    branch_offset: jax.Array
    branch_sampled: jax.Array
    branch_live: jax.Array
    branch_closing: jax.Array
    stride: jax.Array
    remaining: jax.Array
    block_budget: jax.Array
    sampled: jax.Array
    passes: jax.Array
    parallel_passes: jax.Array
    critical_path: jax.Array
    blocks: jax.Array
    branches: jax.Array


class Feed(NamedTuple):
    """The tokens of one pass.

    Attributes:
        tokens: int32 [B, F].
        layout: int32 [B, F] each; `sequence` is 0 where nothing is fed.
        rows: int32 [B, W], which fed token each lane samples from.
        lane: int32 [B, W], what a lane continues: 0 the serial stretch, k branch k, -1 nothing.
    """

    tokens: jax.Array
    layout: Layout
    rows: jax.Array
    lane: jax.Array


class Lanes(NamedTuple):
    """Stretches that get a next token, of whatever sequences; [L] each.

    Attributes:
        row: the sequence.
        lane: as in `Feed`.
        layout: of the token that the next one follows.
    """

    row: jax.Array
    lane: jax.Array
    layout: Layout


def lanes_of(feed: Feed, rows: jax.Array | None) -> Lanes:
    """The lanes of a feed of some rows (None: of all), [M * W]; rows past the end stand for none."""
    of_rows = jnp.arange(feed.lane.shape[0]) if rows is None else rows
    row = jnp.broadcast_to(of_rows[:, None], feed.lane.shape)
    layout = Layout(*(jnp.take_along_axis(field, feed.rows, axis=1).reshape(-1) for field in feed.layout))
    return Lanes(row.reshape(-1), feed.lane.reshape(-1), layout)


def empty_state(protocol: Protocol, cache: Cache, request: Request) -> DecodeState:
    """A state in which no sequence is active."""
    batch = cache.tokens.shape[0]
    shape = (batch, protocol.max_branches)

    def zeros() -> jax.Array:
        return jnp.zeros((batch,), jnp.int32)

    def per_branch(dtype: type = jnp.int32) -> jax.Array:
        return jnp.zeros(shape, dtype)

    return DecodeState(
        cache=cache,
        request=request,
        prompt_length=zeros(),
        phase=zeros(),
        finish=zeros() + STOP,
        token=zeros(),
        position=zeros(),
        block=zeros(),
        titles=zeros(),
        title_length=per_branch(),
        title_tokens=jnp.zeros((*shape, protocol.max_title_tokens), jnp.int32),
        branch_token=per_branch(),
        branch_offset=per_branch(),
        branch_sampled=per_branch(),
        branch_live=per_branch(bool),
        branch_closing=per_branch(bool),
        stride=zeros(),
        remaining=zeros(),
        block_budget=zeros(),
        sampled=zeros(),
        passes=zeros(),
        parallel_passes=zeros(),
        critical_path=zeros(),
        blocks=zeros(),
        branches=zeros(),
    )


def head_lengths(state: DecodeState, protocol: Protocol) -> jax.Array:
    """int32 [B, N]: tokens of each branch's head, `<|branch|>` + title + separator; 0 beyond the titles."""
    number = jnp.arange(protocol.max_branches)[None]
    return jnp.where(number < state.titles[:, None], 1 + state.title_length + len(protocol.separator), 0)


def take(state: DecodeState, rows: jax.Array) -> DecodeState:
    """Some sequences, [M], without the layers of their cache."""
    whole = state._replace(cache=state.cache._replace(layers=()))
    some: DecodeState = jax.tree.map(lambda field: jnp.take(field, rows, axis=0, mode="clip"), whole)
    return some


class BranchBudget(NamedTuple):
    """Whether each branch may take another free token, and whether that is known yet; bool [B, N] each."""

    affordable: jax.Array
    known: jax.Array


def branch_budget(state: DecodeState) -> BranchBudget:
    """The budget of a block, spent in lockstep order whatever order its branches are really decoded in.

    Branches that wait (`branch_cap`) or run ahead must not change an answer. So whether a branch may take its s-th
    token freely is decided as if every branch took one token per pass: all of them have taken s - 1, as far as they
    are that long, those that are long enough take one now, and each of these still needs its closing tag. Branches
    behind are taken to be long enough; where that decides, it is not known yet, and the branch has to wait.
    """
    exists = jnp.arange(state.branch_live.shape[1])[None] < state.titles[:, None]
    taken = state.branch_sampled[:, :, None]  # of the branch whose token it is
    others = state.branch_sampled[:, None, :]
    still = (state.branch_live & exists)[:, None, :]
    before = jnp.where(still, taken, jnp.minimum(others, taken))
    now = still | (others > taken)
    spent = jnp.sum(jnp.where(exists[:, None, :], before, 0), axis=2)
    needed = 2 * jnp.sum(now & exists[:, None, :], axis=2)
    affordable = state.block_budget[:, None] - spent >= needed
    behind = jnp.any(still & (others < taken), axis=2)
    return BranchBudget(affordable, affordable | ~behind)


def ready_branches(state: DecodeState) -> jax.Array:
    """Bool [B, N]: the live branches that the next pass may feed: the first `branch_cap` that need not wait."""
    able = state.branch_live & branch_budget(state).known
    return able & (jnp.cumsum(able, axis=1) <= state.request.branch_cap[:, None])


def width(state: DecodeState, protocol: Protocol) -> jax.Array:
    """int32 [B]: how many tokens each sequence feeds in its next pass; 0 if it is finished."""
    fork = 1 + jnp.sum(head_lengths(state, protocol), axis=1)
    parallel = jnp.sum(ready_branches(state), axis=1)
    pending = jnp.select(
        [state.phase == FORK, state.phase == PARALLEL, state.phase == MERGE], [fork, parallel, state.titles + 1], 1
    )
    return jnp.where(state.finish == RUNNING, pending, 0)


def widest_feed(protocol: Protocol) -> int:
    """The largest number of tokens that one sequence can feed in a pass: a fork with the longest titles."""
    head = 1 + protocol.max_title_tokens + len(protocol.separator)
    return 1 + protocol.max_branches * head


def merge_position(state: DecodeState, protocol: Protocol) -> jax.Array:
    """int32 [B]: position of `<|/para|>` (spec, section 4)."""
    number = jnp.arange(protocol.max_branches)[None]
    length = jnp.where(number < state.titles[:, None], state.branch_offset + 1, 0)
    scheme = protocol.model.config.positions
    if scheme == "sequential":
        span = jnp.sum(length, axis=1)
    elif scheme == "max":
        span = jnp.max(length, axis=1)
    else:
        span = state.titles * state.stride
    return state.position + 1 + span


def plan(state: DecodeState, protocol: Protocol, size: int, everything: bool = False) -> Feed:
    """The tokens that every sequence feeds next, whether it is finished or not.

    Args:
        size: F. Sequences that have more than F tokens to feed get a meaningless feed; see `width`.
        everything: the pending tokens of branches that have to wait, too.
    """
    special, limit = protocol.special, protocol.max_branches
    predict = protocol.model.config.positions == "predict"
    lanes = min(size, limit)
    place = jnp.arange(size)[None]
    lane_place = jnp.arange(lanes)[None]
    zero = jnp.zeros_like(state.phase)[:, None] + jnp.zeros_like(place)
    zero_lanes = zero[:, :lanes]
    column = {name: getattr(state, name)[:, None] for name in ("phase", "position", "block", "titles", "stride")}
    phase, titles, start = column["phase"], column["titles"], column["position"] + 1

    def branch_position(branch: jax.Array, offset: jax.Array) -> jax.Array:
        """Of a token `offset` tokens into branch number `branch` (from 0)."""
        return start + offset + (branch * column["stride"] if predict else 0)

    # One token: a serial stretch or a title.
    tokens = zero + state.token[:, None]
    position, branch, count = zero + column["position"], zero, zero[:, :1] + 1
    rows, lane = zero_lanes, jnp.where(lane_place == 0, 0, -1) + zero_lanes

    if size >= 7:  # the smallest fork: `<|para|>` and two heads of three tokens
        heads = head_lengths(state, protocol)
        ends = jnp.cumsum(heads, axis=1)
        own = jnp.sum(place[..., None] - 1 >= ends[:, None], axis=-1)  # branch each place belongs to
        own = jnp.minimum(own, limit - 1)
        offset = place - 1 - jnp.take_along_axis(ends - heads, own, axis=1)
        length = jnp.take_along_axis(state.title_length, own, axis=1)
        in_title = jnp.clip(offset - 1, 0, protocol.max_title_tokens - 1)
        flat = own * protocol.max_title_tokens + in_title
        title = jnp.take_along_axis(state.title_tokens.reshape(flat.shape[0], -1), flat, axis=1)
        separator = jnp.asarray(protocol.separator or (0,), jnp.int32)
        separated = separator[jnp.clip(offset - 1 - length, 0, separator.size - 1)]
        text = jnp.where(offset == 0, special.branch_start, jnp.where(offset <= length, title, separated))
        is_fork, is_para = phase == FORK, place == 0
        tokens = jnp.where(is_fork, jnp.where(is_para, special.parallel_start, text), tokens)
        position = jnp.where(is_fork & ~is_para, branch_position(own, offset), position)
        branch = jnp.where(is_fork & ~is_para, own + 1, branch)
        count = jnp.where(is_fork, 1 + ends[:, -1:], count)
        rows = jnp.where(is_fork, ends[:, :lanes], rows)
        lane = jnp.where(is_fork, jnp.where(lane_place < titles, lane_place + 1, -1), lane)

    is_parallel = phase == PARALLEL
    ready = state.branch_live if everything else ready_branches(state)
    order = jnp.argsort(~ready, axis=1, stable=True)[:, :lanes]  # ready branches first
    live = jnp.sum(ready, axis=1, keepdims=True)

    def widen(values: jax.Array) -> jax.Array:
        return jnp.pad(values, ((0, 0), (0, size - lanes)))

    pending = widen(jnp.take_along_axis(state.branch_token, order, axis=1))
    offset = widen(jnp.take_along_axis(state.branch_offset, order, axis=1))
    tokens = jnp.where(is_parallel, pending, tokens)
    position = jnp.where(is_parallel, branch_position(widen(order), offset), position)
    branch = jnp.where(is_parallel, widen(order) + 1, branch)
    count = jnp.where(is_parallel, live, count)
    rows = jnp.where(is_parallel, lane_place, rows)
    lane = jnp.where(is_parallel, jnp.where(lane_place < live, order + 1, -1), lane)

    if size >= 3:  # the smallest merge: two closing tags and `<|/para|>`
        is_merge, is_last = phase == MERGE, place == titles
        own = jnp.minimum(place, limit - 1) + zero
        offset = jnp.take_along_axis(state.branch_offset, own, axis=1)
        last_position = merge_position(state, protocol)[:, None]
        tokens = jnp.where(is_merge, jnp.where(is_last, special.parallel_end, special.branch_end), tokens)
        position = jnp.where(is_merge, jnp.where(is_last, last_position, branch_position(own, offset)), position)
        branch = jnp.where(is_merge, jnp.where(is_last, 0, own + 1), branch)
        count = jnp.where(is_merge, titles + 1, count)
        rows = jnp.where(is_merge, titles, rows)

    fed = place < count
    layout = Layout(
        position=jnp.where(fed, position, 0),
        sequence=fed.astype(jnp.int32),
        block=jnp.where(fed & (branch > 0), column["block"], 0),
        branch=jnp.where(fed, branch, 0),
    )
    return Feed(jnp.where(fed, tokens, 0), layout, jnp.minimum(rows, size - 1), lane)


def only(feed: Feed, active: jax.Array) -> Feed:
    """The feed without the tokens and lanes of sequences that are not active, bool [B]."""
    sequence = jnp.where(active[:, None], feed.layout.sequence, 0)
    lane = jnp.where(active[:, None], feed.lane, -1)
    return feed._replace(layout=feed.layout._replace(sequence=sequence), lane=lane)


def advance(state: DecodeState, protocol: Protocol, lane: jax.Array, sampled: jax.Array) -> DecodeState:
    """Take what was sampled from a feed (already in the cache); sequences without a lane stand still.

    Args:
        lane: int32 [B, W], as in `Feed`.
        sampled: int32 [B, W], one token per lane; end of text in a branch has become its closing tag.
    """
    fed = (state.finish == RUNNING) & jnp.any(lane >= 0, axis=1)
    in_block = (state.phase == FORK) | (state.phase == PARALLEL)
    after_serial = _advance_serial(state, protocol, sampled[:, 0])
    after_block = _advance_block(state, protocol, lane, sampled)

    def choose(old: jax.Array, serial: jax.Array, block: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (old.ndim - 1)
        new = jnp.where(in_block.reshape(shape), block, serial)
        return jnp.where(fed.reshape(shape), new, old)

    fixed = {"cache", "request"}
    changed: dict[str, Any] = {
        name: choose(getattr(state, name), getattr(after_serial, name), getattr(after_block, name))
        for name in state._fields
        if name not in fixed
    }
    return state._replace(**changed)


def _advance_serial(state: DecodeState, protocol: Protocol, token: jax.Array) -> DecodeState:
    special = protocol.special
    merging = state.phase == MERGE
    rule = jnp.where(merging, SERIAL, state.phase)
    position = jnp.where(merging, merge_position(state, protocol), state.position) + 1
    opens_title = token == special.title_start
    closes_title = (rule == TITLE) & (token == special.title_end)
    forks = (rule == TITLED) & (token == special.parallel_start)
    extends_title = (rule == TITLE) & ~closes_title
    ends = (rule == SERIAL) & jnp.isin(token, jnp.asarray(protocol.end or (-1,)))

    opens_block = opens_title & (rule == SERIAL)
    titles = jnp.where(opens_block, 0, state.titles) + closes_title
    number = jnp.arange(protocol.max_branches)[None]
    title_length = jnp.where(
        (opens_block[:, None]) | (number >= titles[:, None]) & opens_title[:, None], 0, state.title_length
    )
    current = (number == state.titles[:, None]) & extends_title[:, None]
    place = jnp.arange(protocol.max_title_tokens)
    writes = current[..., None] & (place == title_length[..., None])
    title_tokens = jnp.where(writes, token[:, None, None], state.title_tokens)
    title_length = title_length + current

    after = state._replace(titles=titles, title_length=title_length)
    due = jnp.sum(head_lengths(after, protocol), axis=1) + 1  # heads and `<|/para|>`
    remaining = state.remaining - 1 - jnp.where(forks, due, 0)
    out_of_budget = (remaining <= 0) & ~ends & ~forks
    phase = jnp.select([opens_title | extends_title, closes_title, forks], [TITLE, TITLED, FORK], SERIAL)
    none_yet = jnp.zeros_like(state.branch_offset)
    return after._replace(
        phase=phase,
        finish=jnp.select([ends, out_of_budget], [STOP, LENGTH], RUNNING),
        token=token,
        position=position,
        block=state.block + forks,
        title_tokens=title_tokens,
        branch_offset=none_yet,
        branch_sampled=none_yet,
        branch_live=(number < titles[:, None]) & forks[:, None],
        branch_closing=none_yet.astype(bool),
        remaining=remaining,
        block_budget=jnp.where(forks, remaining, state.block_budget),
        sampled=state.sampled + 1,
        critical_path=state.critical_path + 1,
        blocks=state.blocks + forks,
        branches=state.branches + jnp.where(forks, titles, 0),
    )


def _advance_block(state: DecodeState, protocol: Protocol, lane: jax.Array, sampled: jax.Array) -> DecodeState:
    limit = protocol.max_branches
    # By branch instead of by lane: what it sampled, and whether it did.
    lane_of = lane[:, None] == jnp.arange(1, limit + 1)[None, :, None]
    did = jnp.any(lane_of, axis=2)
    token = jnp.sum(jnp.where(lane_of, sampled[:, None], 0), axis=2)
    closes = did & (token == protocol.special.branch_end)
    fed = jnp.where((state.phase == FORK)[:, None], head_lengths(state, protocol), did.astype(jnp.int32))
    live = state.branch_live & ~closes
    branch_sampled = state.branch_sampled + did
    done = ~jnp.any(live, axis=1)
    remaining = state.remaining - jnp.sum(did, axis=1)
    return state._replace(
        phase=jnp.where(done, MERGE, PARALLEL),
        finish=jnp.where(done & (remaining <= 0), LENGTH, RUNNING),
        branch_token=jnp.where(did, token, state.branch_token),
        branch_offset=state.branch_offset + fed,
        branch_sampled=branch_sampled,
        branch_live=live,
        remaining=remaining,
        critical_path=state.critical_path + jnp.where(done, jnp.max(branch_sampled, axis=1), 0),
    )


def width_bucket(tokens: int) -> int:
    """The smallest power of two that holds so many tokens."""
    return 1 << max(0, int(np.ceil(np.log2(max(tokens, 1)))))
