"""The one pure decoding step, and the programs built from it.

B sequences, M some of them, F tokens fed, W lanes, S prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.layout import Layout
from aspd_jax.model.cache import OTHER, PLAIN_TEXT, TITLE_TEXT, Group, find_place
from aspd_jax.model.lowering import argmax
from infer.advance import advance, recognise
from infer.feed import Feed, Lanes, lanes_of, only, plan, width
from infer.grammar import lane_node, legal_tokens
from infer.packed import Packed
from infer.recogniser import END
from infer.sampling import sample
from infer.speculation import add_drafts, goes_on, hide_rejected, look_up
from infer.state import FORK, MERGE, NOTHING, PARALLEL, RUNNING, SERIAL, TITLE, DecodeState, Protocol, in_place
from infer.workspace import Workspace, put_back, work_on

# Tokens that some rows of the state feed: the rows (None: all, in place), and what they feed.
Part: TypeAlias = tuple[jax.Array | None, Feed]


class Extent(NamedTuple):
    """How large a pass may be.

    A pass feeds up to `few` tokens to each narrow sequence and up to `size` tokens to each wide one.

    Attributes:
        narrow: sequences that feed at most `few` tokens.
        few: 0 where there are no narrow ones.
        wide: sequences that feed more.
        size: F, most tokens that a sequence feeds.
        slots: slots of the cache that are in use after the pass.
    """

    narrow: int
    few: int
    wide: int
    size: int
    slots: int

    @property
    def rows(self) -> int:
        """Sequences that it takes. Where it has narrow places, these are enough for all."""
        return max(self.narrow, self.wide)

    @property
    def places(self) -> int:
        """For tokens, used or not."""
        return self.narrow * self.few + self.wide * self.size

    def holds(self, widths: Any, slots: Any) -> Any:
        """Whether sequences that feed so many tokens, [B], to so many slots find room in it; NumPy or JAX."""
        wide, fed = widths > self.few, widths > 0
        enough = (wide.sum() <= self.wide) & ((fed & ~wide).sum() <= self.narrow) & (fed.sum() <= self.rows)
        return enough & (widths.max() <= self.size) & (slots <= self.slots)


def forward(
    params: Any, state: DecodeState, protocol: Protocol, groups: Sequence[Group], used: int | None = None
) -> tuple[list[jax.Array], DecodeState]:
    """One forward pass over groups of tokens (`Transformer.decode`); logits of each, and the state with its cache."""
    logits, cache = cast(Any, protocol.model.apply)({"params": params}, groups, state.cache, used, method="decode")
    return logits, state._replace(cache=cache)


class Script(NamedTuple):
    """Tokens to take in place of those that were sampled, for benchmarks and tests; negative: the sampled one.

    Attributes:
        serial: int32 [B, S], by place among the serial tokens that are sampled (titles and tags included).
        branch: int32 [B, N, S], by branch and place in it; every block of a sequence has the same.
    """

    serial: jax.Array
    branch: jax.Array


def choose(
    logits: jax.Array,
    state: DecodeState,
    protocol: Protocol,
    lanes: Lanes,
    greedy: bool = False,
    script: Script | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The next token of every lane, int32 [L], under the grammar.

    In a branch, end of text becomes the first token of a closing tag; second result: where it has, bool [L].

    Args:
        greedy: the likeliest token, whatever was asked for: a program without sampling compiles twice as fast.
        script: see `Script`.
    """
    logits = jnp.where(legal_tokens(state, protocol, lanes), logits, -jnp.inf)
    token = argmax(logits) if greedy else sample(logits, state, protocol, lanes)
    if script is not None:
        branch = jnp.maximum(lanes.lane - 1, 0)
        serial = script.serial[lanes.row, state.sampled[lanes.row]]
        in_branch = script.branch[lanes.row, branch, state.branch_sampled[lanes.row, branch]]
        scripted = jnp.where(lanes.lane > 0, in_branch, serial)
        token = jnp.where(scripted >= 0, scripted, token)
    kind, _, _ = recognise(state, lane_node(state, lanes), token)
    ends_branch = (lanes.lane > 0) & (kind == END)
    return jnp.where(ends_branch, protocol.tags.branch_end, token), ends_branch


def slots_after(state: DecodeState, widths: jax.Array) -> jax.Array:
    """How many slots are in use after a pass in which sequences feed so many tokens, [B]; a scalar."""
    return jnp.max(jnp.where(widths > 0, state.cache.length + widths, 0))


def step(
    params: Any,
    state: DecodeState,
    protocol: Protocol,
    within: Extent,
    greedy: bool = False,
    script: Script | None = None,
    drafting: bool = False,
) -> DecodeState:
    """Feed all pending tokens of every running sequence, and sample what follows.

    Args:
        within: has room for what `width` says. Where `narrow` or `wide` is the number of all sequences, the pass
            takes them in place; else it gathers those it needs.
        greedy, script: see `choose`.
        drafting: feed the drafts of the state, too, and look up those of the next pass; else there must be none.
    """
    batch = state.finish.shape[0]
    widths = width(state, protocol)
    whole = plan(state, protocol, within.size)
    feeds: list[Part] = []
    if within.narrow:
        first: Feed = jax.tree.map(lambda field: field[:, : within.few], whole)
        feeds.append(_some(first, (widths > 0) & (widths <= within.few), within.narrow))
    if within.wide:
        whole = add_drafts(whole, state) if drafting else whole
        feeds.append(_some(whole, widths > within.few, within.wide))
    groups = [_group(state, protocol, part, drafting) for part in feeds]
    logits, after = forward(params, state, protocol, groups, within.slots)
    after = count_pass(after, widths)
    if not drafting:
        lanes = _all_lanes(feeds)
        every = jnp.concatenate([part.reshape(-1, part.shape[-1]) for part in logits])
        chosen = choose(every, after, protocol, lanes, greedy, script)
        return hide_discarded(advance(after, protocol, *_by_row(batch, feeds, lanes.lane, *chosen)))
    after, taken = _verify(after, protocol, feeds, logits, greedy, script)
    for (rows, feed), group, of_part in zip(feeds, groups, _by_part(feeds, taken), strict=True):
        if feed.drafts is not None:
            slots = find_place(state.cache, group, within.slots).slots
            after = hide_rejected(after, rows, slots, feed, of_part)
    after = hide_discarded(after)
    return after._replace(draft=look_up(after, protocol, within.slots))


def hide_discarded(state: DecodeState) -> DecodeState:
    """The state with titles hidden in its cache that were discarded: nothing else stands at or after their position."""
    layout = state.cache.layout
    kept = jnp.where(layout.position >= state.hide_from[:, None], 0, layout.sequence)
    cache = state.cache._replace(layout=layout._replace(sequence=kept))
    return state._replace(cache=cache, hide_from=jnp.full_like(state.hide_from, NOTHING))


def _group(state: DecodeState, protocol: Protocol, part: Part, drafting: bool) -> Group:
    rows, feed = part
    floor = None
    if drafting:
        floor = state.prompt_length if rows is None else jnp.take(state.prompt_length, rows, mode="clip")
    phase = state.phase if rows is None else jnp.take(state.phase, rows, mode="clip")
    of_phase = jnp.select([(phase == SERIAL) | (phase == PARALLEL), phase == TITLE], [PLAIN_TEXT, TITLE_TEXT], OTHER)
    kind = jnp.where(feed.tokens == protocol.special.title_start, OTHER, of_phase[:, None])
    return Group(feed.tokens, feed.layout, rows, feed.asked, floor, kind)


def _verify(
    state: DecodeState,
    protocol: Protocol,
    feeds: Sequence[Part],
    logits: Sequence[jax.Array],
    greedy: bool,
    script: Script | None,
) -> tuple[DecodeState, jax.Array]:
    """Let every lane take tokens as long as they are what was drafted, and one more.

    Returns:
        The state, and how many tokens each lane took, int32 [L].
    """
    batch, length = state.finish.shape[0], protocol.draft_tokens
    lanes = _all_lanes(feeds)
    of_lanes, drafted = [], []
    for (_, feed), part in zip(feeds, logits, strict=True):
        M, W = feed.lane.shape
        if feed.drafts is None:
            of_lanes.append(part.reshape(1, M * W, -1))
            drafted.append(jnp.full((M * W, length + 1), -1))
        else:
            of_lanes.append(jnp.moveaxis(part.reshape(M, 1 + length, W, -1), 1, 0).reshape(1 + length, M * W, -1))
            drafted.append(jnp.pad(feed.drafts.tokens.reshape(M * W, length), ((0, 0), (0, 1)), constant_values=-1))
    drafts = jnp.concatenate(drafted)
    cache, nothing = state.cache, cast(Any, ())  # no round changes it, so it stays out of the loop

    def more(carry: tuple[Any, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(carry[2])

    def body(carry: tuple[Any, jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
        state, nth, active, taken = carry
        state = state._replace(cache=cache)
        at = jnp.concatenate([part[jnp.minimum(nth, part.shape[0] - 1)] for part in of_lanes])
        here = lanes._replace(layout=lanes.layout._replace(position=lanes.layout.position + nth))
        token, closing = choose(at, state, protocol, here, greedy, script)
        own = jnp.where(active, lanes.lane, -1)
        state = advance(state, protocol, *_by_row(batch, feeds, own, token, closing))
        taken = taken + active
        active = active & (token == drafts[:, nth]) & goes_on(state, protocol, lanes)
        return state._replace(cache=nothing), nth + 1, active, taken

    began = lanes.lane >= 0
    start = (state._replace(cache=nothing), jnp.int32(0), began, jnp.zeros(began.shape, jnp.int32))
    state, _, _, taken = jax.lax.while_loop(more, body, start)
    stretches = state.stretches.at[lanes.row].add(began, mode="drop")
    return state._replace(cache=cache, stretches=stretches), taken


def _some(feed: Feed, mine: jax.Array, count: int) -> Part:
    """The part of a feed that at most so many sequences feed, `mine` [B], and their rows (None: all, in place)."""
    batch = mine.shape[0]
    if count == batch:
        return None, only(feed, mine)
    rows = jnp.nonzero(mine, size=count, fill_value=batch)[0].astype(jnp.int32)
    part: Feed = jax.tree.map(lambda field: jnp.take(field, rows, axis=0, mode="clip"), feed)
    return rows, only(part, rows < batch)


def _all_lanes(feeds: Sequence[Part]) -> Lanes:
    """The lanes of all parts, one part after another; [L] each."""
    lanes: Lanes = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(lanes_of(feed, rows) for rows, feed in feeds))
    return lanes


def _by_part(feeds: Sequence[Part], values: jax.Array) -> list[jax.Array]:
    """Values of all lanes, [L], as [M, W] for each part."""
    ends = np.cumsum([feed.lane.size for _, feed in feeds])[:-1]
    pieces = jnp.split(values, ends)
    return [piece.reshape(feed.lane.shape) for piece, (_, feed) in zip(pieces, feeds, strict=True)]


def _by_row(batch: int, feeds: Sequence[Part], lanes: jax.Array, *chosen: jax.Array) -> list[jax.Array]:
    """Lanes, and what was chosen in each, [B, W], from those of groups of rows, [L]."""
    most = max(feed.lane.shape[1] for _, feed in feeds)
    filled = [jnp.full((batch, most), -1, jnp.int32), *(jnp.zeros((batch, most), field.dtype) for field in chosen)]
    for (rows, feed), *own in zip(feeds, *(_by_part(feeds, field) for field in (lanes, *chosen)), strict=True):
        at = jnp.arange(batch) if rows is None else rows
        used = jnp.where(jnp.any(own[0] >= 0, axis=1), at, batch)[:, None]
        places = jnp.arange(feed.lane.shape[1])[None]
        filled = [whole.at[used, places].set(field, mode="drop") for whole, field in zip(filled, own, strict=True)]
    return filled


def count_pass(state: DecodeState, widths: jax.Array) -> DecodeState:
    """Count a pass for every sequence that feeds something, by what it feeds."""
    fed = widths > 0
    in_block = (state.phase == FORK) | (state.phase == PARALLEL) | (state.phase == MERGE)
    return state._replace(passes=state.passes + fed, parallel_passes=state.parallel_passes + (fed & in_block))


class Least(NamedTuple):
    """How little a pass may need while its program is left for a smaller one; int32 scalars, negative for never.

    Attributes:
        wide: so many sequences that feed more than one token.
        size: so many tokens of a sequence.
    """

    wide: Any
    size: Any


class Limits(NamedTuple):
    """When `run` gives control back to the host; int32 scalars, `join` bool.

    Attributes:
        steps: after so many steps.
        least: when a pass would need no more than this of either.
        join: as soon as a sequence finishes, because another waits for its place.
    """

    steps: Any
    least: Least
    join: Any


class Report(NamedTuple):
    """What the host has to know between chunks of passes.

    Attributes:
        widths: as `width` has it, of the next pass, [B].
        slots: in use after it; a scalar.
        left: how many of `Limits.steps` are left; a scalar.
        finish, passes, parallel_passes, stretches, accepted: as in the state, [B].
    """

    widths: Any
    slots: Any
    left: Any
    finish: Any
    passes: Any
    parallel_passes: Any
    stretches: Any
    accepted: Any


@partial(jax.jit, static_argnames="protocol")
def report(state: DecodeState, protocol: Protocol, left: jax.Array | int = 0) -> Packed[Report]:
    """What the host has to know of a state."""
    widths = width(state, protocol)
    counts = (state.finish, state.passes, state.parallel_passes, state.stretches, state.accepted)
    return Packed.of(Report(widths, slots_after(state, widths), jnp.int32(left), *counts))


@partial(jax.jit, static_argnames=("protocol", "within", "greedy", "drafting"), donate_argnames=("state", "workspace"))
def run(
    params: Any,
    state: DecodeState,
    workspace: Workspace | None,
    limits: Limits,
    protocol: Protocol,
    within: Extent,
    greedy: bool,
    script: Script | None,
    drafting: bool,
) -> tuple[DecodeState, Workspace | None, Packed[Report]]:
    """Steps on the device, as long as `within` holds what they need; `workspace`: see `Desk.take`."""
    if not drafting:
        state = state._replace(draft=jnp.full_like(state.draft, -1))
    whole, state = state, work_on(state, workspace)
    if workspace is not None:
        script = jax.tree.map(workspace.pick, script)
    first = state.prompt_length if drafting else state.cache.length  # accepted drafts fill the gaps of rejected ones
    running = jnp.sum(state.finish == RUNNING)

    def more(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
        state, left = carry
        widths = width(state, protocol)
        size = jnp.max(widths)
        smaller = (jnp.sum(widths > 1) <= limits.least.wide) | (size <= limits.least.size)
        finished = jnp.sum(state.finish == RUNNING) < running
        fits = within.holds(widths, slots_after(state, widths))
        return (left > 0) & (size > 0) & fits & ~smaller & ~(limits.join & finished)

    def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, left = carry
        return step(params, state, protocol, within, greedy, script, drafting), left - 1

    state, left = jax.lax.while_loop(more, body, (state, jnp.int32(limits.steps)))
    state, workspace = put_back(whole, workspace, state, first)
    state = in_place(state, protocol.mesh)
    return state, workspace, report(state, protocol, left)


@partial(jax.jit, static_argnames=("protocol", "used"), donate_argnames="state")
def prefill(
    params: Any,
    state: DecodeState,
    rows: jax.Array | None,
    tokens: jax.Array,
    layout: Layout,
    last: jax.Array,
    protocol: Protocol,
    used: int | None,
) -> tuple[jax.Array, DecodeState]:
    """Feed prompts, or a chunk of them.

    Args:
        rows: int32 [M], where they go; None: to all rows.
        tokens: int32 [M, S], padded.
        layout: of the tokens.
        last: int32 [M], place of the last prompt token in this chunk, or -1.
        used: slots of the cache that are in use afterwards, or more; None: all.

    Returns:
        Logits after the last tokens of prompts, float32 [M, V], and the state, in which these sequences are running.
    """
    group = Group(tokens, layout, rows, jnp.maximum(last, 0)[:, None])
    (logits,), state = forward(params, state, protocol, [group], used)
    batch = state.finish.shape[0]
    at = jnp.arange(batch) if rows is None else rows
    finish = state.finish.at[jnp.where(last >= 0, at, batch)].set(RUNNING, mode="drop")
    return logits[:, 0], in_place(state._replace(finish=finish), protocol.mesh)


@partial(jax.jit, static_argnames=("protocol", "greedy"), donate_argnames="state")
def first_tokens(
    state: DecodeState,
    logits: jax.Array,
    rows: jax.Array,
    ended: jax.Array,
    layout: Layout,
    protocol: Protocol,
    greedy: bool,
    script: Script | None,
) -> DecodeState:
    """Sample the first token of sequences whose prompt is there: a program of its own, for prompts of any length.

    Args:
        logits: as `prefill` returns them.
        rows: int32 [M], the sequences.
        ended: bool [M], whose prompt is there.
        layout: of the last tokens of prompts, [M].
        greedy, script: see `choose`.
    """
    lane = jnp.where(ended, 0, -1)[:, None]
    place = jnp.zeros_like(lane)
    feed = Feed(place, Layout(*(field[:, None] for field in layout)), place, lane)  # its tokens have been fed
    chosen = choose(logits, state, protocol, lanes_of(feed, rows), greedy, script)
    after = advance(state, protocol, *_by_row(state.finish.shape[0], [(rows, feed)], lane[:, 0], *chosen))
    return in_place(after, protocol.mesh)
