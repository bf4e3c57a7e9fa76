"""The decoding state, grouped by lifetime: engine, request, sequence, and the cache.

B rows, one sequence each, N maximum branches, M = N + 1 segments, Q maximum pending tokens of a segment, E maximum
title tokens, D draft tokens of a segment, C cache slots, V vocabulary, W words of 32 tokens of the vocabulary.

A token is *pending* from when it is sampled (or known, for tokens that the engine feeds by itself) until a step feeds
it. `derived` says which pending tokens are due, `inputs` puts them into a batch, and `transition` takes the tokens
sampled after them. Nothing is fed twice, and special tokens take no steps of their own (protocol, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float32, Int32, UInt32

from aspd_jax.errors import RequestError
from aspd_jax.model.cache import Cache, layer_sharding
from aspd_jax.model.transformer import Transformer
from aspd_jax.tokens import SpecialTokens, TitleForm
from aspd_jax.trees import zeros
from infer.decode.tag_automaton import TagAutomaton

# Phases: the kind of the pending tokens of a sequence, and with it the grammar rule of the next token.
SERIAL = 0  # a serial token; the next is free text, a title or the end
TITLE = 1  # `<|title|>` or a token of a title
TITLED = 2  # `<|/title|>`
FORK = 3  # `<|para|>` and the heads of all branches
PARALLEL = 4  # one token of every live branch
MERGE = 5  # the closing tags of all branches, and `<|/para|>`
PROMPT = 6  # the rest of the prompt; the next sample is the first of the answer
HELD = 7  # none: the host opens the next block of a template
COUNT = 8  # `<|title|>` before the number of leads, or a digit of it

RUNNING, STOP, LENGTH = 0, 1, 2  # values of `Cursor.finish`
NOTHING = 1 << 30  # `Cursor.hide_from` without a hidden title
MAX_BRANCHES = 1 << 12  # limit of N; blocks and branches share one number in random streams


DraftSource = Literal["none", "lookup", "heads"]  # sources of draft tokens: the text so far, or draft heads


@dataclass(frozen=True)
class Tags:
    """Tags that the engine feeds, and maximum tokens of sampled tags.

    Attributes:
        branch_start, parallel_end: ids.
        branch_end: the first id of a closing tag, which takes the place of an end of text; the rest is sampled.
        title_start_cost, title_end_cost, parallel_start_cost, branch_end_cost: maximum tokens of each.
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
    """Static configuration of an engine; a hashable argument of the compiled programs.

    Attributes:
        model: the decoder.
        special: ids of the special tokens.
        form: form of the titles.
        end: ids that end an answer.
        forbidden: further ids that may not occur inside titles and branches.
        max_branches: N.
        max_title_tokens: E.
        draft_tokens: D, maximum draft tokens of a segment in a step; 0: no speculation.
        drafts: source of draft tokens.
        distinct_titles: whether a repeated title ends the list and is discarded.
        text_tags: tags of a model that writes them as strings; None: special tokens.
        mesh: mesh over which parameters and cache are sharded; None: one device.
    """

    model: Transformer
    special: SpecialTokens
    form: TitleForm
    end: tuple[int, ...]
    forbidden: tuple[int, ...]
    max_branches: int
    max_title_tokens: int
    draft_tokens: int = 0
    drafts: DraftSource = "none"
    distinct_titles: bool = True
    text_tags: Tags | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        c = self.model.config
        for name, value, decoded in (
            ("positions", c.positions, ("sequential", "max")),
            ("siblings", c.siblings, ("invisible",)),
        ):
            if value not in decoded:
                raise RequestError(
                    f"{name}: expected {' or '.join(decoded)} for decoding, got {value}. Models of this ablation are "
                    "trained and compared by likelihood; the engine of commit 8c87dab decodes them."
                )

    @property
    def tags(self) -> Tags:
        """Tags as they are written."""
        special = self.special
        return self.text_tags or Tags((special.branch_start,), (special.parallel_end,), special.branch_end)

    @property
    def longest_head(self) -> int:
        """Return the tokens of the longest head of a branch."""
        return len(self.tags.branch_start) + self.max_title_tokens + len(self.form.separator)

    @property
    def max_queued(self) -> int:
        """Return Q: the tokens of the longest head, or of the longest tags that the engine feeds; 2 at least."""
        return max(self.longest_head, len(self.tags.parallel_end), 2)


class RequestArrays(NamedTuple):
    """Sampling parameters and limits of the request in each row.

    Attributes:
        adaptive: whether the model may fork.
        seed: seed of the random streams.
        temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty: see `SamplingParams`.
        biased: whether `DecodeState.bias` is added to the logits.
        min_tokens: tokens of plain text before which the answer does not end.
        max_branch_tokens: maximum tokens sampled in a branch, closing tag included.
        constrained: whether `DecodeState.token_mask` restricts the next tokens.
        adapter: index of the adapter in the parameters; negative: none.
        script: tokens of `SamplingParams.script`, its segments one after the other.
        script_end: end of each segment in `script`.
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


class Cursor(NamedTuple):
    """Phase and position of each sequence.

    Attributes:
        prompt_length: cache slots of the prompt.
        phase: phase, one of the constants above.
        finish: RUNNING, STOP or LENGTH. Rows without a request are finished.
        position: position of the first pending serial token; in PARALLEL and MERGE: of `<|para|>`; in PROMPT: of the
            last prompt token.
        block: number of blocks opened so far, those of the prompt included.
        match_length: tokens of the partial tag at the end of the serial segment.
        opened: position of the first `<|title|>` of the current or last block.
        hide_from: position from which discarded tokens are hidden; NOTHING: none are.
        templated: whether the host opens and ends all blocks (a template): serial text and tags are not sampled.
        took_back: whether a block was taken back; the answer does not fork again.
    """

    prompt_length: Int32[Array, " B"]
    phase: Int32[Array, " B"]
    finish: Int32[Array, " B"]
    position: Int32[Array, " B"]
    block: Int32[Array, " B"]
    match_length: Int32[Array, " B"]
    opened: Int32[Array, " B"]
    hide_from: Int32[Array, " B"]
    templated: Bool[Array, " B"]
    took_back: Bool[Array, " B"]


class Segments(NamedTuple):
    """The segments of each sequence: 0 the serial segment, k branch k of the current block.

    Attributes:
        queue: pending tokens in the order in which they are fed. Those of a closed branch wait for the merge.
        queued: number of pending tokens.
        tag_state: state of the tag automaton (`infer.decode.tag_automaton`).
        sampled: tokens sampled so far.
    """

    queue: Int32[Array, "B M Q"]
    queued: Int32[Array, "B M"]
    tag_state: Int32[Array, "B M"]
    sampled: Int32[Array, "B M"]


class Branches(NamedTuple):
    """The branches of the current block.

    Attributes:
        offset: tokens of the branch fed so far.
        live: whether the branch samples further tokens.
        closing: whether the next sampled token has to be the closing tag.
    """

    offset: Int32[Array, "B N"]
    live: Bool[Array, "B N"]
    closing: Bool[Array, "B N"]


class Titles(NamedTuple):
    """The titles of the current block.

    Attributes:
        complete: number of complete titles.
        length: tokens of each title, the one under way included.
        tokens: token ids of each title.
        stated: number of leads that the model has stated, as far as it is written; 0 for names.
    """

    complete: Int32[Array, " B"]
    length: Int32[Array, "B N"]
    tokens: Int32[Array, "B N E"]
    stated: Int32[Array, " B"]


class Budget(NamedTuple):
    """The tokens that each sequence may still take (protocol, section 5).

    Attributes:
        tokens: remaining tokens of the answer; heads and `<|/para|>` are subtracted when a block opens.
        content: remaining tokens of the plain text.
        block_tokens, block_content: `tokens` and `content` at the fork of the current block.
        cut: whether `max_branch_tokens` closed a branch.
        exhausted: branches of the current or last block that the budget of the answer ended: they took a token when
            only their end was permitted.
    """

    tokens: Int32[Array, " B"]
    content: Int32[Array, " B"]
    block_tokens: Int32[Array, " B"]
    block_content: Int32[Array, " B"]
    cut: Bool[Array, " B"]
    exhausted: Bool[Array, "B N"]


class Counters(NamedTuple):
    """Statistics of each sequence (protocol, section 8).

    Attributes:
        steps: steps that fed tokens of the answer.
        parallel_steps: those that forked, fed branches or merged.
        critical_path: critical path of the finished part of the answer.
        blocks: blocks of the answer that are merged or merging.
        branches: branches of these blocks.
        discarded: sampled tokens that were discarded.
        drafted: draft tokens fed.
        accepted: draft tokens accepted.
        segments: segments that took tokens, summed over all steps.
    """

    steps: Int32[Array, " B"]
    parallel_steps: Int32[Array, " B"]
    critical_path: Int32[Array, " B"]
    blocks: Int32[Array, " B"]
    branches: Int32[Array, " B"]
    discarded: Int32[Array, " B"]
    drafted: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    segments: Int32[Array, " B"]


class SequenceState(NamedTuple):
    """Progress of each sequence. Steps change it; the host changes it through `slots` and `guidance`.

    Attributes:
        draft: draft tokens that follow the pending token of each segment (index 0 also serves the serial segment); -1:
            none.
    """

    cursor: Cursor
    segments: Segments
    branches: Branches
    titles: Titles
    budget: Budget
    counters: Counters
    draft: Int32[Array, "B N D"]


class DecodeState(NamedTuple):
    """The decoding state, grouped by lifetime.

    Attributes:
        automaton: tag automaton; constant.
        request: parameters of the requests; changes when a row is assigned to another request.
        token_mask: tokens allowed in each segment of a constrained row, next and after each draft token, one bit each.
            Changes between steps, when the host advances the grammars.
        bias: bias of the logits in rows that are `biased`, of V tokens. Changes as `request` does.
        sequence: progress; changes in every step.
        cache: KV cache; every step appends to it.
    """

    automaton: TagAutomaton
    request: RequestArrays
    token_mask: UInt32[Array, "B M 1+D W"]
    bias: Float32[Array, "B V"]
    sequence: SequenceState
    cache: Cache


def empty_state(config: EngineConfig, cache: Cache, automaton: TagAutomaton) -> DecodeState:
    """Return a state without active sequences."""
    sizes = {
        "B": cache.tokens.shape[0],
        "C": cache.tokens.shape[1],
        "N": config.max_branches,
        "M": config.max_branches + 1,
        "E": config.max_title_tokens,
        "D": config.draft_tokens,
        "Q": config.max_queued,
    }
    sequence = zeros(SequenceState, sizes)
    cursor = sequence.cursor
    cursor = cursor._replace(finish=cursor.finish + STOP, hide_from=cursor.hide_from + NOTHING)
    sequence = sequence._replace(cursor=cursor)
    vocabulary = automaton.marker.size
    token_mask = jnp.zeros((sizes["B"], sizes["M"], 1 + sizes["D"], -(-vocabulary // 32)), jnp.uint32)
    bias = jnp.zeros((sizes["B"], vocabulary), jnp.float32)
    automaton = jax.tree.map(jnp.asarray, automaton)
    return DecodeState(automaton, zeros(RequestArrays, sizes), token_mask, bias, sequence, cache)


def shard_state(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """Shard the cache over the mesh and replicate the rest, so that every process can read it."""
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
    """Apply `shard_state` outside of other programs."""
    return shard_state(state, mesh)
