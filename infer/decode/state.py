"""The decoding state, by lifetime: of an engine, of a request, of a sequence; and the cache.

B rows, one sequence each, N branches at most, M = N + 1 segments, E title tokens at most, D draft tokens of a segment,
C cache slots, W words of 32 tokens of the vocabulary.

A token is *pending* from when it is sampled (or due, for tokens that the engine feeds by itself) until a pass feeds it.
`inputs` says which tokens are pending and where they stand; `transition` takes what was sampled after them. Nothing is
ever fed twice, and special tokens need no passes of their own (protocol, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float32, Int32, UInt32

from aspd_jax.model.cache import Cache, layer_sharding
from aspd_jax.model.transformer import Transformer
from aspd_jax.tokens import SpecialTokens
from aspd_jax.trees import zeros
from infer.decode.tag_automaton import TagAutomaton

# Phases: what the pending tokens of a sequence are, and with that which grammar rule the next sample obeys.
SERIAL = 0  # a serial token; the next is free text, a title or the end
TITLE = 1  # `<|title|>` or a token of a title
TITLED = 2  # `<|/title|>`
FORK = 3  # `<|para|>` and the heads of all branches
PARALLEL = 4  # one token of every live branch
MERGE = 5  # the closing tags of all branches, and `<|/para|>`
PROMPT = 6  # what is left of the prompt; the next sample is the first of the answer

RUNNING, STOP, LENGTH = 0, 1, 2  # values of `SequenceState.finish`
NOTHING = 1 << 30  # `SequenceState.hide_from` where nothing is hidden
MAX_BRANCHES = 1 << 12  # that an engine can be made for; blocks and branches share one number in random streams


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
class EngineConfig:
    """What is fixed while an engine lives; hashable, so that programs are compiled once for it.

    Attributes:
        model: the decoder.
        special: ids of the special tokens.
        separator: ids that follow the title at the head of a branch.
        end: ids that end an answer.
        forbidden: further ids that may not occur inside titles and branches.
        max_branches: N.
        max_title_tokens: E.
        draft_tokens: D, guessed tokens that a segment may be fed with its pending one; 0: no speculation.
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
    """What was asked for.

    Attributes:
        biased: `DecodeState.bias` is added to the logits.
        min_tokens: tokens of plain text before which the answer does not end.
        adapter: place among those of the parameters; negative: none.
        script: `SamplingParams.script`, its segments one after the other.
        script_end: where each segment ends there.
    """

    adaptive: Bool[Array, " B"]
    seed: UInt32[Array, " B"]
    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    repetition_penalty: Float32[Array, " B"]
    frequency_penalty: Float32[Array, " B"]
    presence_penalty: Float32[Array, " B"]
    biased: Bool[Array, " B"]
    min_tokens: Int32[Array, " B"]
    max_branch_tokens: Int32[Array, " B"]
    constrained: Bool[Array, " B"]
    adapter: Int32[Array, " B"]
    script: Int32[Array, "B C"]
    script_end: Int32[Array, "B M"]


class SequenceState(NamedTuple):
    """How far a sequence is. All but `branch_cap` changes in passes only.

    Attributes:
        prompt_length: slots that the prompt takes.
        phase: see above.
        finish: RUNNING, STOP or LENGTH. Rows without a request are finished.
        token: the pending serial token.
        node: how much of a tag the serial segment ends with (`infer.decode.tag_automaton`).
        chain: tokens of this beginning of a tag.
        branch_node: as `node`.
        position: of the pending serial token (in PARALLEL and MERGE: of `<|para|>`; in PROMPT: of its last token).
        block: blocks opened so far, those of the prompt included.
        titles: complete titles of the current block.
        title_length, title_tokens: of each title.
        branch_token: the pending token of each branch.
        branch_offset: tokens of the branch fed so far: the pending token's place in it.
        branch_sampled: tokens of the branch sampled so far.
        branch_live: whether it goes on.
        branch_closing: the next sample of the branch must be its closing tag.
        branch_cap: branches that may be fed in a pass.
        stride: positions between the starts of sibling branches in scheme `predict`.
        remaining: tokens the answer may still grow by; due heads and `<|/para|>` are taken off already.
        content: tokens that the plain text may still grow by.
        block_budget, block_content: `remaining` and `content` when the current block forked.
        cut: a branch was closed by `max_branch_tokens`.
        cut_branch: first branch, from 1, of the last block that the budget of all tokens closed; 0: none.
        hide_from: position from which on the tokens of a title that was discarded are to be hidden.
        discarded: tokens of such titles.
        sampled: serial tokens sampled.
        passes: forward passes after prefill.
        parallel_passes: those that forked, fed branches or merged.
        critical_path: of the answer so far, finished blocks only (protocol, section 8).
        blocks: blocks of the answer merged or merging.
        branches: branches of these.
        draft: guesses of what follows the pending token of each segment (serial: the first); -1: none.
        drafted: draft tokens fed.
        accepted: those that were taken.
        segments: segments that took tokens, counted in every pass.
    """

    prompt_length: Int32[Array, " B"]
    phase: Int32[Array, " B"]
    finish: Int32[Array, " B"]
    token: Int32[Array, " B"]
    node: Int32[Array, " B"]
    chain: Int32[Array, " B"]
    branch_node: Int32[Array, "B N"]
    position: Int32[Array, " B"]
    block: Int32[Array, " B"]
    titles: Int32[Array, " B"]
    title_length: Int32[Array, "B N"]
    title_tokens: Int32[Array, "B N E"]
    branch_token: Int32[Array, "B N"]
    branch_offset: Int32[Array, "B N"]
    branch_sampled: Int32[Array, "B N"]
    branch_live: Bool[Array, "B N"]
    branch_closing: Bool[Array, "B N"]
    branch_cap: Int32[Array, " B"]
    stride: Int32[Array, " B"]
    remaining: Int32[Array, " B"]
    content: Int32[Array, " B"]
    block_budget: Int32[Array, " B"]
    block_content: Int32[Array, " B"]
    cut: Bool[Array, " B"]
    cut_branch: Int32[Array, " B"]
    hide_from: Int32[Array, " B"]
    discarded: Int32[Array, " B"]
    sampled: Int32[Array, " B"]
    passes: Int32[Array, " B"]
    parallel_passes: Int32[Array, " B"]
    critical_path: Int32[Array, " B"]
    blocks: Int32[Array, " B"]
    branches: Int32[Array, " B"]
    draft: Int32[Array, "B N D"]
    drafted: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    segments: Int32[Array, " B"]


class DecodeState(NamedTuple):
    """Everything that passes need beside the weights, by lifetime.

    Attributes:
        automaton: of tags; it never changes.
        request: changes when a row is given to another.
        permitted: tokens that may come next in each segment of a constrained row, a bit for each: 0 the serial segment,
            k branch k. Changes between passes, as the host follows the schemas.
        bias: added to the logits of every token in rows that are `biased`; V logits. Changes as `request` does.
        sequence: changes in every pass.
        cache: grows in every pass: all tokens fed so far, prompt included.
    """

    automaton: TagAutomaton
    request: Request
    permitted: UInt32[Array, "B M W"]
    bias: Float32[Array, "B V"]
    sequence: SequenceState
    cache: Cache


def empty_state(config: EngineConfig, cache: Cache, automaton: TagAutomaton) -> DecodeState:
    """A state in which no sequence is active."""
    sizes = {
        "B": cache.tokens.shape[0],
        "C": cache.tokens.shape[1],
        "N": config.max_branches,
        "M": config.max_branches + 1,
        "E": config.max_title_tokens,
        "D": config.draft_tokens,
    }
    sequence = zeros(SequenceState, sizes)
    sequence = sequence._replace(finish=sequence.finish + STOP, hide_from=sequence.hide_from + NOTHING)
    vocabulary = automaton.marker.size
    permitted = jnp.zeros((sizes["B"], sizes["M"], -(-vocabulary // 32)), jnp.uint32)
    bias = jnp.zeros((sizes["B"], vocabulary), jnp.float32)
    automaton = jax.tree.map(jnp.asarray, automaton)
    return DecodeState(automaton, zeros(Request, sizes), permitted, bias, sequence, cache)


def shard_state(state: DecodeState, mesh: Mesh | None) -> DecodeState:
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
def place_state(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """`shard_state`, for the host."""
    return shard_state(state, mesh)


def head_lengths(s: SequenceState, config: EngineConfig) -> jax.Array:
    """int32 [B, N]: tokens of each branch's head, `<|branch|>` + title + separator; 0 beyond the titles."""
    number = jnp.arange(config.max_branches)[None]
    rest = len(config.tags.branch_start) + len(config.separator)
    return jnp.where(number < s.titles[:, None], s.title_length + rest, 0)


def merge_position(s: SequenceState, config: EngineConfig) -> jax.Array:
    """int32 [B]: position of `<|/para|>` (protocol, section 4)."""
    number = jnp.arange(config.max_branches)[None]
    length = jnp.where(number < s.titles[:, None], s.branch_offset + 1, 0)
    scheme = config.model.config.positions
    if scheme == "sequential":
        span = jnp.sum(length, axis=1)
    elif scheme == "max":
        span = jnp.max(length, axis=1)
    else:
        span = s.titles * s.stride
    return s.position + 1 + span
