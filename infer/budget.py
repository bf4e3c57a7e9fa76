"""The budget of a block: which branches may take another token, whatever order they are decoded in.

B sequences, N branches at most.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from infer.state import DecodeState, Protocol


class BranchBudget(NamedTuple):
    """Whether each branch may take another free token, and whether that is known yet; bool [B, N] each."""

    affordable: jax.Array
    known: jax.Array


def branch_budget(state: DecodeState, protocol: Protocol) -> BranchBudget:
    """The budget of a block, spent in lockstep order whatever order its branches are really decoded in.

    Branches that wait (`branch_cap`) or run ahead must not change an answer. So whether a branch may take its s-th
    token freely is decided as if every branch took one token per pass: all of them have taken s - 1, as far as they
    are that long, those that are long enough take one now, and each of these still needs its closing tag. Branches
    behind are taken to be long enough; where that decides, it is not known yet, and the branch has to wait. The same
    holds for the budget of plain text, which closing tags are no part of.
    """
    exists = jnp.arange(state.branch_live.shape[1])[None] < state.titles[:, None]
    taken = state.branch_sampled[:, :, None]  # of the branch whose token it is
    others = state.branch_sampled[:, None, :]
    still = (state.branch_live & exists)[:, None, :]

    def enough(budget: jax.Array, others: jax.Array, each: int) -> jax.Array:
        """Whether a budget holds what all have taken, and `each` for every branch that takes one now."""
        before = jnp.where(still, taken, jnp.minimum(others, taken))
        now = (still | (others > taken)) & exists[:, None, :]
        spent = jnp.sum(jnp.where(exists[:, None, :], before, 0), axis=2)
        return budget[:, None] - spent >= each * jnp.sum(now, axis=2)

    affordable = enough(state.block_budget, others, 1 + protocol.tags.branch_end_cost)
    affordable &= enough(state.block_content, others - 1, 1)  # what has closed took its tag last, which is no content
    behind = jnp.any(still & (others < taken), axis=2)
    return BranchBudget(affordable, affordable | ~behind)


def ready_branches(state: DecodeState, protocol: Protocol) -> jax.Array:
    """Bool [B, N]: the live branches that the next pass may feed: the first `branch_cap` that need not wait."""
    able = state.branch_live & branch_budget(state, protocol).known
    return able & (jnp.cumsum(able, axis=1) <= state.request.branch_cap[:, None])
