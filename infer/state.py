"""The decoding state: a pytree of one sequence per row.

B sequences, M some of them, N branches at most, T title tokens at most, F tokens fed in a pass, W lanes (stretches
that get a next token in a pass), D draft tokens of a stretch, C cache slots.

A token is *pending* from when it is sampled (or due, for tokens that the engine feeds by itself) until a
pass feeds it. `plan` says which tokens are pending and where they stand; `advance` takes what was sampled
from them. Nothing is ever fed twice, and special tokens need no passes of their own (spec, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aspd_jax.model.cache import Cache, layer_sharding
from aspd_jax.model.transformer import Transformer
from aspd_jax.tokens import SpecialTokens
from infer.recogniser import Recogniser

# Phases: what the pending tokens of a sequence are, and with that which grammar rule the next sample obeys.
SERIAL = 0  # a serial token; the next is free text, a title or the end
TITLE = 1  # `<|title|>` or a token of a title
TITLED = 2  # `<|/title|>`
FORK = 3  # `<|para|>` and the heads of all branches
PARALLEL = 4  # one token of every live branch
MERGE = 5  # the closing tags of all branches, and `<|/para|>`

RUNNING, STOP, LENGTH = 0, 1, 2  # values of `DecodeState.finish`
NOTHING = 1 << 30  # `DecodeState.hide_from` where nothing is hidden
MOST_BRANCHES = 1 << 12  # that an engine can be made for; blocks and branches share one number in random streams


@dataclass(frozen=True)
class Tags:
    """What the engine feeds by itself, and what sampled tags may cost.

    Attributes:
        branch_start, parallel_end: ids.
        branch_end: the first id of a closing tag, which takes the place of an end of text; the rest is sampled.
        title_start_cost, title_end_cost, parallel_start_cost, branch_end_cost: most tokens of each.
    """

    branch_start: tuple[int, ...]
    parallel_end: tuple[int, ...]
    branch_end: int
    title_start_cost: int = 1
    title_end_cost: int = 1
    parallel_start_cost: int = 1
    branch_end_cost: int = 1


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
        draft_tokens: D, guessed tokens that a stretch may be fed with its pending one; 0: no speculation.
        distinct_titles: a title that repeats an earlier one of its block ends the list, and is discarded.
        text_tags: of a model whose tags are strings; None: they are the special tokens.
        mesh: that parameters and cache are spread over.
    """

    model: Transformer
    special: SpecialTokens
    separator: tuple[int, ...]
    end: tuple[int, ...]
    forbidden: tuple[int, ...]
    max_branches: int
    max_title_tokens: int
    draft_tokens: int = 0
    distinct_titles: bool = True
    text_tags: Tags | None = None
    mesh: Mesh | None = None

    @property
    def tags(self) -> Tags:
        """Tags as they are written."""
        special = self.special
        return self.text_tags or Tags((special.branch_start,), (special.parallel_end,), special.branch_end)


class Request(NamedTuple):
    """Per sequence, what was asked for; [B] each."""

    adaptive: jax.Array
    seed: jax.Array
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
        recogniser: of tags; it never changes.
        prompt_length: int32 [B].
        phase: int32 [B].
        finish: int32 [B], RUNNING, STOP or LENGTH. Rows without a request are finished.
        token: int32 [B], the pending serial token.
        node: int32 [B], how much of a tag the serial stretch ends with (`infer.recogniser`).
        chain: int32 [B], tokens of this beginning of a tag.
        branch_node: int32 [B, N], as `node`.
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
        content: int32 [B], tokens that the plain text may still grow by.
        block_budget, block_content: int32 [B], `remaining` and `content` when the current block forked.
        cut: bool [B], a branch was closed because it had no budget left.
        hide_from: int32 [B], position from which on the tokens of a title that was discarded are to be hidden.
        discarded: int32 [B], tokens of such titles.
        sampled: int32 [B], serial tokens sampled.
        passes: int32 [B], forward passes after prefill.
        parallel_passes: int32 [B], those that forked, fed branches or merged.
        critical_path: int32 [B], of the answer so far, finished blocks only (spec, section 8).
        blocks: int32 [B], blocks of the answer merged or merging.
        branches: int32 [B], branches of these.
        draft: int32 [B, N, D], guesses of what follows the pending token of each stretch (serial: the first); -1: none.
        drafted: int32 [B], draft tokens fed.
        accepted: int32 [B], those that were taken.
        stretches: int32 [B], stretches that took tokens, counted in every pass.
    """

    cache: Cache
    request: Request
    recogniser: Recogniser
    prompt_length: jax.Array
    phase: jax.Array
    finish: jax.Array
    token: jax.Array
    node: jax.Array
    chain: jax.Array
    branch_node: jax.Array
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
    content: jax.Array
    block_budget: jax.Array
    block_content: jax.Array
    cut: jax.Array
    hide_from: jax.Array
    discarded: jax.Array
    sampled: jax.Array
    passes: jax.Array
    parallel_passes: jax.Array
    critical_path: jax.Array
    blocks: jax.Array
    branches: jax.Array
    draft: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    stretches: jax.Array


def empty_state(protocol: Protocol, cache: Cache, request: Request, recogniser: Recogniser) -> DecodeState:
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
        recogniser=recogniser,
        prompt_length=zeros(),
        phase=zeros(),
        finish=zeros() + STOP,
        token=zeros(),
        node=zeros(),
        chain=zeros(),
        branch_node=per_branch(),
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
        content=zeros(),
        block_budget=zeros(),
        block_content=zeros(),
        cut=zeros().astype(bool),
        hide_from=zeros() + NOTHING,
        discarded=zeros(),
        sampled=zeros(),
        passes=zeros(),
        parallel_passes=zeros(),
        critical_path=zeros(),
        blocks=zeros(),
        branches=zeros(),
        draft=jnp.full((*shape, protocol.draft_tokens), -1, jnp.int32),
        drafted=zeros(),
        accepted=zeros(),
        stretches=zeros(),
    )


def in_place(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """A state with its cache split over the mesh, and all the rest whole on every device: any process can read it."""
    if mesh is None:
        return state
    everywhere = NamedSharding(mesh, PartitionSpec())
    places = jax.tree.map(lambda _: everywhere, state)
    layers = jax.tree.map(lambda array: layer_sharding(array.shape, mesh), state.cache.layers)
    places = places._replace(cache=places.cache._replace(layers=layers))
    placed: DecodeState = jax.lax.with_sharding_constraint(state, places)
    return placed


@partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def settle(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """`in_place`, for the host."""
    return in_place(state, mesh)


def head_lengths(state: DecodeState, protocol: Protocol) -> jax.Array:
    """int32 [B, N]: tokens of each branch's head, `<|branch|>` + title + separator; 0 beyond the titles."""
    number = jnp.arange(protocol.max_branches)[None]
    rest = len(protocol.tags.branch_start) + len(protocol.separator)
    return jnp.where(number < state.titles[:, None], state.title_length + rest, 0)


def take(state: DecodeState, rows: jax.Array) -> DecodeState:
    """Some sequences, [M], without the layers of their cache."""
    nothing: Any = ()
    whole = state._replace(cache=state.cache._replace(layers=()), recogniser=nothing)
    some: DecodeState = jax.tree.map(lambda field: jnp.take(field, rows, axis=0, mode="clip"), whole)
    return some._replace(recogniser=state.recogniser)


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
