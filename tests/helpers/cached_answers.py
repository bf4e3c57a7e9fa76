"""Answers as the cache and the pending tokens hold them, sorted and split: what the engine logs token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.layout import Layout
from aspd_jax.tokens import split
from infer.answers.answer import RequestOutput, count_content
from infer.decode.decode_step import summarise
from infer.decode.derived import derive
from infer.decode.inputs import due_tokens, widest
from infer.decode.state import FORK, MERGE, PARALLEL, PROMPT, STOP, DecodeState, EngineConfig


def linear_order(layout: Layout) -> np.ndarray:
    """Return the indices that sort the tokens of one sequence [T] into the order of the linearisation."""
    anchor = np.array(layout.position)
    for block in np.unique(layout.block[layout.block > 0]):
        inside = layout.block == block
        anchor[inside] = anchor[inside].min()
    return np.lexsort((layout.position, layout.branch, anchor))


def cached_tokens(state: DecodeState, config: EngineConfig, row: int) -> tuple[np.ndarray, Layout]:
    """Return the fed and pending tokens of an answer, int32 [T], and their layout, as linearised.

    Text that the host appended is pending until it is fed.
    """
    rows = jax.tree.map(lambda field: np.asarray(field[row]), (state.cache.tokens, state.cache.layout))
    cursor = jax.tree.map(lambda field: int(field[row]), state.sequence.cursor)
    slots, start = int(state.cache.length[row]), cursor.prompt_length
    slots = cursor.known_length if cursor.phase == PROMPT else slots
    derived = derive(state.sequence, config)
    everything = derived._replace(due=state.sequence.segments.queued, grows=jnp.zeros_like(derived.grows))
    place = jnp.arange(widest(config))
    due = jax.device_get(due_tokens(state, everything, config, jnp.full_like(place, row), place))
    fed, pending = np.zeros(slots, bool), due.layout.sequence > 0
    fed[start:] = rows[1].sequence[start:slots] > 0
    tokens = np.concatenate([rows[0][:slots][fed], due.tokens[pending]])
    layout = Layout(*(np.concatenate([a[:slots][fed], b[pending]]) for a, b in zip(rows[1], due.layout, strict=True)))
    order = linear_order(layout)
    return tokens[order], Layout(*(field[order] for field in layout))


def cached_segments(state: DecodeState, config: EngineConfig, row: int) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of the serial text and of the branches of the open block, of an answer without tags."""
    ids, layout = cached_tokens(state, config, row)
    in_block = int(state.sequence.cursor.phase[row]) in (FORK, PARALLEL)
    count, block = int(state.sequence.branches.number[row]) * in_block, int(state.sequence.cursor.block[row])
    of_block = layout.block == block
    branches = [ids[of_block & (layout.branch == number)].tolist() for number in range(1, 1 + count)]
    return ids[layout.branch == 0].tolist(), branches


def cached_answer(state: DecodeState, config: EngineConfig, row: int) -> RequestOutput:
    """Return the answer of a row without a template, its budgets left aside."""
    s, special = state.sequence, config.special
    ids, layout = cached_tokens(state, config, row)
    phase, finish = int(s.cursor.phase[row]), int(s.cursor.finish[row])
    whole, end, opening = ids, ids[:0], ids[:0]
    if finish == STOP and ids.size and int(ids[-1]) in config.end:
        whole, end = ids[:-1], ids[-1:]
    if phase not in (FORK, PARALLEL, MERGE):
        closed = np.flatnonzero(ids == special.parallel_end)
        after = int(closed[-1]) if closed.size else 0
        if (starts := np.flatnonzero(ids[after:] == special.title_start)).size:
            whole, opening = ids[: after + starts[0]], ids[after + starts[0] :]
    elif not end.size and phase in (FORK, PARALLEL):
        ends = np.flatnonzero((layout.branch > 0) & (np.append(layout.branch[1:], 0) != layout.branch))
        unclosed = ends[ids[ends] != special.branch_end]
        whole = np.append(np.insert(ids, unclosed + 1, special.branch_end), special.parallel_end)
    in_block = phase in (FORK, PARALLEL)
    live = np.flatnonzero(np.asarray(s.branches.live[row])) + 1 if in_block else []
    items = list(split(whole, special, config.form))
    output = RequestOutput(
        items=items,
        content=count_content(items),
        open_branches=frozenset(map(int, live)),
        opening=opening.tolist(),
        end=end.tolist(),
        size=ids.size,
    )
    output.update(summarise(state, config).read(), row)
    return output
