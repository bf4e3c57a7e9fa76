"""Quantities that follow from the state: which pending tokens are due, where they stand, and what budgets allow.

They are derived once for each step (`inputs.plan_step`), and once for each further token that a step with draft tokens
takes. `guidance` asks for `merge_position` of sequences whose merge has no tokens to feed.

B rows, one sequence each, N maximum branches, M = N + 1 segments.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from infer.decode.state import FORK, MERGE, PARALLEL, PROMPT, EngineConfig, SequenceState, waiting


class BranchBudget(NamedTuple):
    """Permission of each branch to take another token that is not its closing tag.

    Attributes:
        affordable: whether the token fits the budget of all tokens.
        readable: whether it fits the budget of plain text, in reading order.
        final: whether `affordable` is final, whatever the other branches take.
    """

    affordable: Bool[Array, "B N"]
    readable: Bool[Array, "B N"]
    final: Bool[Array, "B N"]


class Derived(NamedTuple):
    """Quantities that the next step takes from a state.

    Attributes:
        due: pending tokens that each segment may feed; 0 while a prompt is fed, or the sequence waits.
        samples: whether a segment gets a next token after those.
        grows: whether the segments of a sequence grow by one token in the step, so that draft tokens may follow.
        budget: permissions of the branches.
        merge_position: position of the first token after the current block (protocol, section 4).
    """

    due: Int32[Array, "B M"]
    samples: Bool[Array, "B M"]
    grows: Bool[Array, " B"]
    budget: BranchBudget
    merge_position: Int32[Array, " B"]


def derive(s: SequenceState, config: EngineConfig) -> Derived:
    """Return the quantities that the next step takes from the progress of the sequences."""
    phase = s.cursor.phase[:, None]
    budget = branch_budget(s, config)
    serial = jnp.zeros_like(phase, bool)
    ready = jnp.concatenate([serial, ready_branches(s, budget)], axis=1)
    due = jnp.where((phase != PARALLEL) | ready, s.segments.queued, 0)
    due = jnp.where((phase == PROMPT) | waiting(s)[:, None], 0, due)
    is_branch = jnp.arange(due.shape[1])[None] > 0
    in_block = (phase == FORK) | (phase == PARALLEL)
    return Derived(
        due=due,
        samples=(due > 0) & (is_branch == in_block) & (in_block | (s.cursor.rule != 0)[:, None]),
        grows=((phase != FORK) & (phase != MERGE) & (phase != PROMPT))[:, 0] & jnp.all(due <= 1, axis=1),
        budget=budget,
        merge_position=merge_position(s, config),
    )


def branch_budget(s: SequenceState, config: EngineConfig) -> BranchBudget:
    """Return which branches may go on within the budgets of their block (protocol, section 5).

    The order in which branches are decoded must not change an answer. The budget of all tokens is therefore spent in
    lockstep: whether a branch may take its s-th token is decided as if every branch took one token per step. Before the
    s-th token, each branch has taken min(length, s - 1) tokens. Each branch that is longer takes one, and needs its
    closing tag afterwards. The length of a branch that is behind is unknown: if it affects the decision, the branch
    waits.

    The budget of plain text is spent in reading order: a branch goes on while its text and the current texts of the
    earlier branches leave tokens. Tokens beyond the budget are dropped when the answer is read.
    """
    sampled, live = s.segments.sampled[:, 1:], s.branches.live
    exists = jnp.arange(live.shape[1])[None] < s.branches.number[:, None]
    own = sampled[:, :, None]  # tokens of the branch under test
    others = sampled[:, None, :]
    still = (live & exists)[:, None, :]

    before = jnp.where(still, own, jnp.minimum(others, own))
    now = (still | (others > own)) & exists[:, None, :]
    spent = jnp.sum(jnp.where(exists[:, None, :], before, 0), axis=2)
    affordable = s.budget.block_tokens[:, None] - spent >= 2 * jnp.sum(now, axis=2)
    behind = jnp.any(still & (others < own), axis=2)

    closed = exists & ~live & (sampled > 0)
    text = jnp.where(exists, s.branches.lead + sampled - closed, 0)
    readable = jnp.cumsum(text, axis=1) < s.budget.block_content[:, None]
    return BranchBudget(affordable, readable, affordable | ~behind)


def ready_branches(s: SequenceState, budget: BranchBudget) -> Bool[Array, "B N"]:
    """Return the live branches that the next step may feed: those that need not wait."""
    return s.branches.live & budget.final


def merge_position(s: SequenceState, config: EngineConfig) -> Int32[Array, " B"]:
    """Return the position after the block when all pending tokens of its branches are fed (protocol, section 4)."""
    exists = jnp.arange(config.max_branches)[None] < s.branches.number[:, None]
    length = jnp.where(exists, s.branches.offset + s.segments.queued[:, 1:], 0)
    span = jnp.max(length, axis=1) if config.model.config.positions == "max" else jnp.sum(length, axis=1)
    return s.cursor.position + 1 + span
