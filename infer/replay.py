"""Driving the stepwise engine through a given linearisation: the proof that what was trained is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.errors import StructureError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout, build_layout
from aspd_jax.model.cache import Group
from aspd_jax.tokens import BlockIds, ItemIds, SerialIds, split
from infer.advance import advance
from infer.feed import Feed, only, plan, width
from infer.prefill import start
from infer.programs import width_bucket
from infer.request import Job, SamplingParams
from infer.state import FORK, RUNNING, DecodeState, Protocol
from infer.step import count_pass, forward


@dataclass(frozen=True)
class Trace:
    """A replay.

    Attributes:
        logits: float32 [T, V]; row i stands after feeding answer token i, in the order of the linearisation.
        passes: forward passes after prefill until the last answer token was due. The pass that feeds this
            token, and gives its row, is not counted: no generation runs it.
        widths: tokens fed in each of these passes.
    """

    logits: np.ndarray
    passes: int
    widths: tuple[int, ...]


LEAST_SIZE = 8  # places of the narrowest pass: programs for fewer take longer to compile than they save


class _Script:
    """The tokens that sampling has to give, by stretch: serial (titles and `<|para|>` included), and each branch."""

    def __init__(self, items: Sequence[ItemIds], protocol: Protocol, end: Sequence[int]) -> None:
        special = protocol.special
        serial: list[int] = []
        self._branches: list[list[list[int]]] = []
        for item in items:
            if isinstance(item, SerialIds):
                serial.extend(item.ids)
                continue
            for title in item.titles:
                serial.extend((special.title_start, *title, special.title_end))
            serial.append(special.parallel_start)
            heads = [len(title) + len(protocol.separator) for title in _own_titles(item)]
            block = zip(heads, item.branches, strict=True)
            self._branches.append([[*branch[head:], special.branch_end][::-1] for head, branch in block])
        self._serial = [*serial, *end][::-1]

    def next(self, block: int, lane: int) -> int:
        """The next token of a lane; unused lanes get 0."""
        if lane < 0:
            return 0
        return int((self._branches[block][lane - 1] if lane else self._serial).pop())

    @property
    def done(self) -> bool:
        return not self._serial and not any(branch for block in self._branches for branch in block)


@partial(jax.jit, static_argnames=("protocol", "size"), donate_argnames="state")
def replay_pass(params: Any, state: DecodeState, protocol: Protocol, size: int) -> tuple[jax.Array, Feed, DecodeState]:
    """One pass without sampling: logits of every fed token, float32 [B, F, V], the feed, and the state."""
    feed = only(plan(state, protocol, size), state.finish == RUNNING)
    (logits,), after = forward(params, state, protocol, [Group(feed.tokens, feed.layout)])
    return logits, feed, count_pass(after, width(state, protocol))


@partial(jax.jit, static_argnames="protocol", donate_argnames="state")
def replay_advance(state: DecodeState, protocol: Protocol, feed: Feed, sampled: jax.Array) -> DecodeState:
    """Take scripted tokens, one per lane, in place of sampled ones."""
    return advance(state, protocol, feed.lane, sampled, jnp.zeros_like(feed.lane, bool))


def replay(lm: LanguageModel, protocol: Protocol, prompt: Sequence[int], answer: Sequence[int]) -> Trace:
    """See `Engine.replay`; the protocol's limits are widened to what the answer has."""
    if not answer:
        raise StructureError("the answer is empty")
    ended = answer[-1] in protocol.end
    items = split(answer[:-1] if ended else answer, protocol.special, paired=False)
    blocks = [item for item in items if isinstance(item, BlockIds)]
    protocol = replace(
        protocol,
        separator=_separator(blocks, protocol.separator),
        max_branches=_room(protocol.max_branches, *(len(block.branches) for block in blocks)),
        distinct_titles=False,
        max_title_tokens=_room(protocol.max_title_tokens, *(len(t) for block in blocks for t in block.titles)),
    )
    script = _Script(items, protocol, answer[-1:] if ended else ())
    layout = build_layout(np.asarray([[*prompt, *answer]]), protocol.special, lm.config.positions)
    place = {key: index - len(prompt) for index, key in enumerate(_keys(layout))}

    # A budget of one token more than the answer has, so that its last token does not end the sequence.
    job = Job(tuple(prompt), SamplingParams(), "adaptive", len(answer) + 1, seed=0)
    state = start(lm, protocol, [job], scripted=True)
    logits = np.full((len(answer), lm.config.vocabulary), np.nan, np.float32)
    lanes, block, widths = [0], -1, []
    feed = plan(state, protocol, 1)  # its lane is the one that the prompt's last token left
    while True:
        sampled = [script.next(block, lane) for lane in lanes]
        state = replay_advance(state, protocol, feed, jnp.asarray([sampled], jnp.int32))
        if int(state.phase[0]) == FORK:
            block += 1
            state = _set_branches(state, blocks[block])
        last = script.done
        state = state._replace(finish=jnp.full_like(state.finish, RUNNING))
        size = max(LEAST_SIZE, width_bucket(int(width(state, protocol)[0])))
        all_logits, feed, state = replay_pass(lm.params, state, protocol, size)
        lanes = np.asarray(feed.lane)[0].tolist()
        fed = np.asarray(feed.layout.sequence)[0] > 0
        rows = [place[key] for key, is_fed in zip(_keys(feed.layout), fed, strict=True) if is_fed]
        logits[rows] = np.asarray(all_logits)[0, fed]
        widths.append(len(rows))
        if last:
            return Trace(logits, len(widths) - 1, tuple(widths[:-1]))


def _room(limit: int, *needed: int) -> int:
    """A limit, or a power of two that holds what is needed: few programs for many answers."""
    most = max(needed, default=0)
    return limit if most <= limit else width_bucket(most)


def _keys(layout: Layout) -> list[tuple[int, ...]]:
    """What tells the tokens of one sequence apart, whatever their order: (block, branch, position)."""
    fields = (layout.block, layout.branch, layout.position)
    return list(zip(*(np.asarray(field)[0].tolist() for field in fields), strict=True))


def _separator(blocks: Sequence[BlockIds], known: tuple[int, ...]) -> tuple[int, ...]:
    """The separator of an answer: the known one if all heads have it, else what follows the title in every branch."""
    rests = [
        branch[len(title) :].tolist()
        for block in blocks
        for title, branch in zip(_own_titles(block), block.branches, strict=True)
    ]
    if all(tuple(rest[: len(known)]) == known for rest in rests) and (known or not rests):
        return known
    common = 0
    while all(len(rest) > common for rest in rests) and len({rest[common] for rest in rests}) == 1:
        common += 1
    return tuple(rests[0][:common])


def _own_titles(block: BlockIds) -> list[np.ndarray]:
    """The title that each branch starts with; some titles may have no branch.

    Raises:
        StructureError: a branch starts with none of the titles.
    """
    own = []
    for number, branch in enumerate(block.branches, 1):
        fitting = [title for title in block.titles if branch[: len(title)].tolist() == title.tolist()]
        if not fitting:
            raise StructureError(f"branch {number} of a block starts with none of its titles")
        own.append(max(fitting, key=len))
    return own


def _set_branches(state: DecodeState, block: BlockIds) -> DecodeState:
    """A state about to fork, with just the branches that the answer has."""
    lengths, tokens = np.zeros(state.title_length.shape, np.int32), np.zeros(state.title_tokens.shape, np.int32)
    for number, title in enumerate(_own_titles(block)):
        lengths[:, number] = len(title)
        tokens[:, number, : len(title)] = title
    count = len(block.branches)
    longest = max(len(branch) for branch in block.branches) + 2  # with its tags
    return state._replace(
        titles=jnp.full_like(state.titles, count),
        title_length=jnp.asarray(lengths),
        title_tokens=jnp.asarray(tokens),
        branch_live=jnp.broadcast_to(jnp.arange(lengths.shape[1]) < count, lengths.shape),
        stride=jnp.full_like(state.stride, longest),
    )
