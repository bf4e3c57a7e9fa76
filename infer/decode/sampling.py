"""Sampling: minimum length, logit bias, penalties, temperature (0: greedy), top-k, top-p and min-p.

L lanes, V vocabulary, C cache slots.

Every lane draws from its own random stream, derived from seed, block, branch and the tokens sampled in the segment. The
tokens of a lane do not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout, visible
from aspd_jax.model.cache import PLAIN_TEXT, TITLE_TEXT
from aspd_jax.model.cpu import bound_from_largest
from aspd_jax.sharding import named_sharding
from infer.decode.inputs import Lanes
from infer.decode.state import A_TITLE, MAX_BRANCHES, DecodeState, EngineConfig, RequestArrays

GROUP = 128  # tokens of a group: the width of a TPU register
BITS = 2  # bits of a bound that one pass over all logits determines
LOWEST_TEMPERATURE = 1e-30  # equals greedy except for ties; logits up to 1e8 stay finite


def visible_text(state: DecodeState, config: EngineConfig, lanes: Lanes, kind: jax.Array) -> jax.Array:
    """Return the tokens of the answer that each lane sees and that are of its `kind`, int32 [L]; bool [L, C]."""
    cache = state.cache
    seen_from = Layout(*(field[:, None] for field in lanes.layout))
    keys = Layout(*(field[lanes.row] for field in cache.layout))
    alike = cache.kind[lanes.row] == kind[:, None]
    in_answer = jnp.arange(cache.tokens.shape[1])[None] >= state.sequence.cursor.prompt_length[lanes.row][:, None]
    return visible(seen_from, keys, config.model.config.siblings)[:, 0] & alike & in_answer


def hold_back_end(
    logits: jax.Array, request: RequestArrays, state: DecodeState, config: EngineConfig, lanes: Lanes
) -> jax.Array:
    """Mask end of text in serial lanes until the answer has `min_tokens` tokens of plain text.

    A lane in which the grammar allows nothing else keeps it.
    """
    text = visible_text(state, config, lanes, jnp.full_like(lanes.row, PLAIN_TEXT))
    too_short = (lanes.branch == 0) & (jnp.sum(text, axis=1) < request.min_tokens)
    end = jnp.any(jnp.arange(logits.shape[-1])[:, None] == jnp.asarray(config.end, jnp.int32), axis=1)
    others = jnp.where(end, -jnp.inf, logits)
    return jnp.where((too_short & jnp.any(others > -jnp.inf, axis=1))[:, None], others, logits)


def penalise(
    logits: jax.Array, request: RequestArrays, state: DecodeState, config: EngineConfig, lanes: Lanes
) -> jax.Array:
    """Apply the penalties of each lane to the tokens that it can see in the answer.

    `repetition_penalty` divides positive logits and multiplies negative ones; then `frequency_penalty` is subtracted
    for each occurrence, and `presence_penalty` once.

    Plain text is penalised for tokens of plain text, and titles for tokens of titles. Tags are exempt, because a
    penalty on them would end lists early. Heads are exempt, so that a branch can repeat its title.
    """
    kind = jnp.where(state.sequence.cursor.writes[lanes.row] == A_TITLE, TITLE_TEXT, PLAIN_TEXT)
    visible = visible_text(state, config, lanes, kind)
    count = _count(state.cache.tokens[lanes.row], visible, logits.shape[-1])
    penalty = request.repetition_penalty[:, None]
    divided = jnp.where(logits > 0, logits / penalty, logits * penalty)
    subtracted = request.frequency_penalty[:, None] * count + request.presence_penalty[:, None]
    return jnp.where(count > 0, divided - subtracted, logits)


def _count(tokens: jax.Array, visible: jax.Array, size: int) -> jax.Array:
    """Count the occurrences of each of `size` token ids, float32 [L, V].

    On TPU, XLA sorts the indices of a scatter and writes one after another, so a product counts them there.

    Args:
        tokens: token ids, int32 [L, C].
        visible: tokens that are counted, bool [L, C].
    """
    return jax.lax.platform_dependent(
        tokens, visible, tpu=partial(count_by_product, size), default=partial(count_by_scatter, size)
    )


def count_by_scatter(size: int, tokens: jax.Array, visible: jax.Array) -> jax.Array:
    """Count by adding 1 at each token."""
    lane = jnp.arange(tokens.shape[0])[:, None]
    count = jnp.zeros((tokens.shape[0], size), jnp.float32)
    return count.at[lane, jnp.where(visible, tokens, size)].add(1.0, mode="drop")


def count_by_product(size: int, tokens: jax.Array, visible: jax.Array) -> jax.Array:
    """Count by a product over slots of two one-hot arrays: the group of a token, and its index in the group."""
    group = (tokens[..., None] // GROUP == jnp.arange(-(-size // GROUP))) & visible[..., None]
    place = tokens[..., None] % GROUP == jnp.arange(GROUP)
    one_hot = group.astype(jnp.bfloat16), place.astype(jnp.bfloat16)
    count = jnp.einsum("lcg,lcp->lgp", *one_hot, preferred_element_type=jnp.float32)
    return count.reshape(tokens.shape[0], -1)[:, :size]


def restrict(logits: jax.Array, request: RequestArrays) -> jax.Array:
    """Exclude tokens by top-k, top-p and min-p, in this order; logits [L, V] are divided by the temperature already.

    Each keeps the largest logits and those equal to the smallest of them. A lower bound suffices, so nothing is sorted.
    """
    count, counted = request.top_k.astype(logits.dtype), (request.top_k > 0) & (request.top_k < logits.shape[-1])
    bound = _bound(logits, lambda: jnp.ones_like(logits), count, counted)
    logits = jnp.where(_ordered(logits) >= bound[:, None], logits, -jnp.inf)
    share = jax.nn.softmax(logits, axis=-1)
    top_p = jnp.maximum(request.top_p, jnp.finfo(jnp.float32).tiny)  # the likeliest is kept if it rounded to 0
    nucleus = _bound(logits, lambda: share, top_p, request.top_p < 1.0)
    likely = _ordered(logits) >= nucleus[:, None]
    likely &= share >= request.min_p[:, None] * jnp.max(share, axis=-1, keepdims=True)
    return jnp.where(likely, logits, -jnp.inf)


def _bound(logits: jax.Array, weight: Callable[[], jax.Array], target: jax.Array, limited: jax.Array) -> jax.Array:
    """Return the key of the smallest logit that is kept if the largest have the target weight together, uint32 [L].

    Args:
        logits: float32 [L, V].
        weight: function that returns the weights of the logits, float32 [L, V]; called inside a conditional.
        target: float32 [L].
        limited: lanes of which logits are excluded, bool [L]; the result of others is 0, the least key.
    """

    def find() -> jax.Array:
        keys, weights = _ordered(logits), weight()  # made outside, the keys are read from HBM in every round on TPU
        return bound_from_largest(logits, weights, target, limited, keys, partial(_search, keys, weights, target))

    bounds = jax.lax.cond(jnp.any(limited), find, lambda: jnp.zeros(limited.shape, jnp.uint32))
    return jnp.where(limited, bounds, 0)


def _ordered(logits: jax.Array) -> jax.Array:
    """Map float32 to uint32 of the same order; -0 equals 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _search(keys: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """Return the largest key, uint32 [L], for which all keys from it upwards have the target weight, [L].

    Each round determines `BITS` bits. It reads all keys, and on a mesh adds up across devices.
    """

    def digit(number: jax.Array, bound: jax.Array) -> jax.Array:
        place = jnp.uint32(32 - BITS) - BITS * number.astype(jnp.uint32)
        higher = bound[:, None] + (jnp.arange(1, 1 << BITS, dtype=jnp.uint32) << place)
        weighs = jnp.sum(jnp.where(keys[:, None] >= higher[..., None], weight[:, None], 0), axis=-1)
        enough = jnp.sum(weighs >= target[:, None], axis=-1, dtype=jnp.uint32)
        return bound + (enough << place)

    return jax.lax.fori_loop(0, 32 // BITS, digit, jnp.zeros(keys.shape[:1], jnp.uint32))


def lane_keys(state: DecodeState, lanes: Lanes) -> jax.Array:
    """Return the typed PRNG key of each lane, [L]."""
    block = jnp.where(lanes.branch > 0, state.sequence.cursor.block[lanes.row], 0)

    def key(seed: jax.Array, segment: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), segment), place)

    return jax.vmap(key)(state.request.seed[lanes.row], block * MAX_BRANCHES + lanes.branch, lanes.sampled(state))


def split_by_vocabulary(logits: jax.Array, config: EngineConfig) -> jax.Array:
    """Keep logits [L, V] split by vocabulary on a mesh; for GPUs, XLA gathers the results of conditionals otherwise."""
    if config.mesh is None:
        return logits
    return jax.lax.with_sharding_constraint(logits, named_sharding((None, "vocabulary"), logits.shape, config.mesh))


def draw_token(logits: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw a token of each lane from the softmax of its logits, int32 [L].

    The first random number selects a group of tokens, the second a token of the group. This takes two random numbers
    per lane instead of one for each token of the vocabulary, and sums over groups keep the precision of small shares.

    Args:
        logits: float32 [L, V], -inf where a token is excluded.
        keys: typed PRNG keys, [L].
    """
    weight = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weight = jnp.pad(weight, ((0, 0), (0, -weight.shape[-1] % GROUP)))
    groups = weight.reshape(len(weight), -1, GROUP)
    numbers = jax.vmap(partial(jax.random.uniform, shape=(2,)))(keys)
    group = select(jnp.sum(groups, axis=-1), numbers[:, 0])
    # A sum over a mask: on a mesh, a gather would collect all groups.
    chosen = jnp.arange(groups.shape[1]) == group[:, None]
    of_group = jnp.sum(jnp.where(chosen[..., None], groups, 0.0), axis=1)
    return group * GROUP + select(of_group, numbers[:, 1])


def select(weight: jax.Array, number: jax.Array) -> jax.Array:
    """Return an index with a probability proportional to its weight, int32 [L].

    Args:
        weight: float32 [L, N], not negative; an index of weight 0 is never returned.
        number: random number of each lane from [0, 1), float32 [L].
    """
    sums, index = jnp.cumsum(weight, axis=-1), jnp.arange(weight.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(weight > 0, index, 0), axis=-1)  # sums are rounded, and may end below the number
    above = (weight > 0) & (sums > number[:, None] * sums[:, -1:])
    return jnp.minimum(jnp.min(jnp.where(above, index, index.size), axis=-1), last)


def sample(logits: jax.Array, state: DecodeState, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return one token per lane, int32 [L], of its script if it has one; lanes at temperature 0 take the likeliest.

    Args:
        logits: float32 [L, V], -inf where the grammar forbids a token.
    """
    request = RequestArrays(*(field[lanes.row] for field in state.request))
    used = lanes.row < state.sequence.cursor.phase.size
    request = request._replace(
        temperature=jnp.where(used & ~(request.drafts_blocks & (lanes.branch > 0)), request.temperature, 0.0),
        repetition_penalty=jnp.where(used, request.repetition_penalty, 1.0),
        frequency_penalty=jnp.where(used, request.frequency_penalty, 0.0),
        presence_penalty=jnp.where(used, request.presence_penalty, 0.0),
        biased=request.biased & used,
        min_tokens=jnp.where(used, request.min_tokens, 0),
    )
    too_short = request.min_tokens > 0
    penalised = (request.repetition_penalty != 1) | (request.frequency_penalty != 0) | (request.presence_penalty != 0)

    def where_any(changed: jax.Array, change: Callable[[], jax.Array], logits: jax.Array) -> jax.Array:
        return split_by_vocabulary(jax.lax.cond(jnp.any(changed), change, lambda: logits), config)

    def shape() -> jax.Array:
        arguments = request, state, config, lanes
        extended = where_any(too_short, lambda: hold_back_end(logits, *arguments), logits)
        biased = jnp.where(request.biased[:, None], extended + state.bias[lanes.row], extended)
        return where_any(penalised, lambda: penalise(biased, *arguments), biased)

    # Each conditional copies the logits, so one encloses the others.
    logits = where_any(too_short | request.biased | penalised, shape, logits)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        warm = logits / jnp.maximum(request.temperature, LOWEST_TEMPERATURE)[:, None]
        limited = jnp.any((request.top_k > 0) | (request.top_p < 1.0) | (request.min_p > 0.0))
        warm = jax.lax.cond(limited, lambda: restrict(warm, request), lambda: warm)
        warm = split_by_vocabulary(warm, config)
        drawn = draw_token(warm, lane_keys(state, lanes))
        return jnp.where(request.temperature > 0, drawn, greedy)

    sampled = jax.lax.cond(jnp.any(request.temperature > 0), draw, lambda: greedy)
    return scripted(sampled, state, lanes)


def scripted(token: jax.Array, state: DecodeState, lanes: Lanes) -> jax.Array:
    """Return the sampled tokens, int32 [L], or those that the request's script has in their place.

    A branch that has to close does.
    """
    request, row, segment = state.request, lanes.row, lanes.branch
    closes = (segment > 0) & state.sequence.branches.closing[row, jnp.maximum(segment - 1, 0)]
    start = jnp.where(segment > 0, request.script_end[row, jnp.maximum(segment - 1, 0)], 0)
    place = start + lanes.sampled(state)
    follows = (place < request.script_end[row, segment]) & ~closes
    return jnp.where(follows, request.script[row, place], token)
