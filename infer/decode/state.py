"""The decoding state, grouped by lifetime: engine, request, sequence, and the cache.

B rows, one sequence each, N maximum branches, M = N + 1 segments, Q maximum pending tokens of a segment, D draft tokens
of a segment, C cache slots, V vocabulary, W words of 32 tokens of the vocabulary.

A token is *pending* from when it is sampled (or known, for tokens that the engine feeds by itself) until a step feeds
it. `derived` says which pending tokens are due, `inputs` puts them into a batch, and `transition` takes the tokens
sampled after them. Nothing is fed twice, and special tokens take no steps of their own (protocol, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float32, Int32, UInt8, UInt32

from aspd_jax.errors import RequestError
from aspd_jax.model.cache import Cache, layer_sharding
from aspd_jax.model.transformer import Transformer
from aspd_jax.sharding import named_sharding
from aspd_jax.tokens import SpecialTokens, TitleForm
from aspd_jax.trees import zeros

# Phases: the kind of the pending tokens of a sequence, and with it the grammar rule of the next token.
SERIAL = 0  # a token of the serial segment
FORK = 1  # `<|para|>` and the heads of all branches
PARALLEL = 2  # one token of every live branch
MERGE = 3  # the closing tags of all branches, and `<|/para|>`
PROMPT = 4  # the rest of the prompt, or of text that the host appended; the next sample follows it

RUNNING, STOP, LENGTH = 0, 1, 2  # values of `Cursor.finish`
A_TEXT, A_TITLE, A_NUMBER = 0, 1, 2  # values of `Cursor.writes`
UNMASKED, MASK_EACH, MASK_ONCE = 0, 1, 2  # values of `Segments.masked`
NO_LIMIT = 1 << 30  # `Segments.left` where the host does not have to look
MAX_BRANCHES = 1 << 12  # limit of N; blocks and branches share one number in random streams


Tree = TypeVar("Tree")
DraftSource = Literal["none", "lookup", "heads"]  # sources of draft tokens: the text so far, or draft heads


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
        max_title_tokens: maximum tokens of a title.
        draft_tokens: D, maximum draft tokens of a segment in a step; 0: no speculation.
        drafts: source of draft tokens.
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
    def ends(self) -> frozenset[int]:
        """Return the tokens with which the device may end a segment that the host follows: ends of text, and tags."""
        return frozenset((*self.end, *self.special.ids))

    @property
    def longest_head(self) -> int:
        """Return the tokens of the longest head of a branch."""
        return 1 + self.max_title_tokens + len(self.form.separator)

    @property
    def max_queued(self) -> int:
        """Return Q: the tokens of the longest head, or of two tags."""
        return max(self.longest_head, 2)


class RequestArrays(NamedTuple):
    """Sampling parameters and limits of the request in each row.

    Attributes:
        seed: seed of the random streams.
        temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty: see `SamplingParams`.
        biased: whether `DecodeState.bias` is added to the logits.
        drafts_blocks: whether blocks are drafts, whose branches are decoded greedily.
        min_tokens: tokens of plain text before which the answer does not end.
        max_branch_tokens: maximum tokens sampled in a branch, closing tag included.
        adapter: index of the adapter in the parameters; negative: none.
        script: tokens of `SamplingParams.script`, its segments one after the other.
        script_end: end of each segment in `script`.
    """

    seed: UInt32[Array, " B"]
    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    repetition_penalty: Float32[Array, " B"]
    frequency_penalty: Float32[Array, " B"]
    presence_penalty: Float32[Array, " B"]
    biased: Bool[Array, " B"]
    drafts_blocks: Bool[Array, " B"]
    min_tokens: Int32[Array, " B"]
    max_branch_tokens: Int32[Array, " B"]
    adapter: Int32[Array, " B"]
    script: Int32[Array, "B C"]
    script_end: Int32[Array, "B M"]


class Cursor(NamedTuple):
    """Phase and position of each sequence.

    Attributes:
        arrival: number of the request, in the order of admission.
        prompt_length: cache slots of the prompt.
        known_length: cache slots of the prompt, or of text that the host appended; in PROMPT they are fed up to this.
        phase: phase, one of the constants above.
        finish: RUNNING, STOP or LENGTH. Rows without a request are finished.
        position: position of the next serial token to be fed; in FORK, PARALLEL and MERGE: of the last one before the
            branches; in PROMPT: of the last known one.
        block: number of blocks opened so far, those of the prompt included.
        rule: classes of tokens that may come next in serial text: bit c for class c (`infer.decode.token_classes`); 0:
            no serial text is sampled, and the sequence waits for the host after its prompt and after each merge.
        writes: what serial text is: A_TEXT, A_TITLE or A_NUMBER (of leads).
    """

    arrival: Int32[Array, " B"]
    prompt_length: Int32[Array, " B"]
    known_length: Int32[Array, " B"]
    phase: Int32[Array, " B"]
    finish: Int32[Array, " B"]
    position: Int32[Array, " B"]
    block: Int32[Array, " B"]
    rule: Int32[Array, " B"]
    writes: Int32[Array, " B"]


class Segments(NamedTuple):
    """The segments of each sequence: 0 the serial segment, k branch k of the current block.

    Attributes:
        queue: pending tokens in the order in which they are fed. Those of a closed branch wait for the merge.
        queued: number of pending tokens.
        sampled: tokens sampled so far.
        masked: whether `DecodeState.token_mask` restricts the next tokens: UNMASKED; MASK_EACH: the segment waits for
            the host after a step; MASK_ONCE: it goes on without a mask.
        stops: classes of tokens after which the segment waits for the host: bit c for class c, and bits ITEM and
            LINE_START of the beginning of a line. END: the host ends the branch, also at a closing tag.
        left: tokens after which it waits; 0: it waits. Meanwhile the sequence is not fed.
    """

    queue: Int32[Array, "B M Q"]
    queued: Int32[Array, "B M"]
    sampled: Int32[Array, "B M"]
    masked: Int32[Array, "B M"]
    stops: Int32[Array, "B M"]
    left: Int32[Array, "B M"]


class Branches(NamedTuple):
    """The branches of the current block.

    Attributes:
        number: number of branches.
        offset: tokens of the branch fed so far.
        live: whether the branch samples further tokens.
        closing: whether the next sampled token has to be the closing tag.
        lead: tokens of the head that are plain text.
    """

    number: Int32[Array, " B"]
    offset: Int32[Array, "B N"]
    live: Bool[Array, "B N"]
    closing: Bool[Array, "B N"]
    lead: Int32[Array, "B N"]


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
        drafted: draft tokens fed.
        accepted: draft tokens accepted.
        segments: segments that took tokens, summed over all steps.
    """

    steps: Int32[Array, " B"]
    parallel_steps: Int32[Array, " B"]
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
    budget: Budget
    counters: Counters
    draft: Int32[Array, "B N D"]


class DecodeState(NamedTuple):
    """The decoding state, grouped by lifetime.

    Attributes:
        classes: class of each token; constant.
        request: parameters of the requests; changes when a row is assigned to another request.
        token_mask: tokens allowed in each segment that is `masked`, next and after each draft token, one bit each.
            Changes between steps, when the host decides.
        stop_tokens: tokens after which every segment of a row waits for the host, one bit each. Changes as `request`
            does.
        bias: bias of the logits in rows that are `biased`, of V tokens. Changes as `request` does.
        sequence: progress; changes in every step.
        cache: KV cache; every step appends to it.
    """

    classes: UInt8[Array, " V"]
    request: RequestArrays
    token_mask: UInt32[Array, "B M 1+D W"]
    stop_tokens: UInt32[Array, "B W"]
    bias: Float32[Array, "B V"]
    sequence: SequenceState
    cache: Cache


def empty_state(config: EngineConfig, cache: Cache, classes: np.ndarray) -> DecodeState:
    """Return a state without active sequences; `classes`: class of each token, uint8 [V]."""
    sizes = {
        "B": cache.tokens.shape[0],
        "C": cache.tokens.shape[1],
        "N": config.max_branches,
        "M": config.max_branches + 1,
        "D": config.draft_tokens,
        "Q": config.max_queued,
    }
    sequence = zeros(SequenceState, sizes)
    sequence = sequence._replace(cursor=sequence.cursor._replace(finish=sequence.cursor.finish + STOP))
    vocabulary, words = classes.size, -(-classes.size // 32)
    token_mask = jnp.zeros((sizes["B"], sizes["M"], 1 + sizes["D"], words), jnp.uint32)
    stop_tokens = jnp.zeros((sizes["B"], words), jnp.uint32)
    bias = jnp.zeros((sizes["B"], vocabulary), jnp.float32)
    return DecodeState(
        jnp.asarray(classes), zeros(RequestArrays, sizes), token_mask, stop_tokens, bias, sequence, cache
    )


def waiting(s: SequenceState) -> Bool[Array, " B"]:
    """Return the sequences of which a segment waits for the host."""
    phase, waits = s.cursor.phase, s.segments.left <= 0
    serial = ((phase == SERIAL) | (phase == MERGE)) & waits[:, 0]
    branches = (phase == PARALLEL) & jnp.any(s.branches.live & waits[:, 1:], axis=1)
    return (s.cursor.finish == RUNNING) & (serial | branches)


def shard_state(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """Shard the cache, and the vocabulary of token masks and bias, over the mesh; replicate the rest.

    Every process can read what is replicated.
    """
    if mesh is None:
        return state
    everywhere = NamedSharding(mesh, PartitionSpec())
    places = jax.tree.map(lambda _: everywhere, state)
    layers = jax.tree.map(lambda array: layer_sharding(array.shape, mesh), state.cache.layers)
    places = places._replace(
        cache=places.cache._replace(layers=layers),
        token_mask=named_sharding((None, None, None, "vocabulary"), state.token_mask.shape, mesh),
        bias=named_sharding((None, "vocabulary"), state.bias.shape, mesh),
    )
    placed: DecodeState = jax.lax.with_sharding_constraint(state, places)
    return placed


def replicate(tree: Tree, mesh: Mesh | None) -> Tree:
    """Replicate arrays over the mesh, so that every process can read them."""
    if mesh is None:
        return tree
    placed: Tree = jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))
    return placed


@partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def place_state(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """Apply `shard_state` outside of other programs."""
    return shard_state(state, mesh)
