"""Which tokens may come next: only well-formed structure that still fits the budget (spec, section 5).

B sequences, L lanes, V vocabulary.

Every token belongs to one class; a rule allows or forbids whole classes. A block is opened only if the
smallest block fits what the answer may still grow by, and every further title or branch token only if
the block can still be closed after it. So every answer is well formed, one cut off by its budget too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from infer.budget import branch_budget
from infer.feed import Lanes
from infer.state import MERGE, SERIAL, TITLE, TITLED, DecodeState, Protocol

TEXT, TITLE_START, TITLE_END, PARALLEL_START, PARALLEL_END, BRANCH_START, BRANCH_END, END, OTHER = range(9)
CLASSES = 9


def token_classes(protocol: Protocol) -> np.ndarray:
    """int8 [V]: the class of every token. OTHER are special tokens that may stand in serial text only."""
    classes = np.full(protocol.model.config.vocabulary, TEXT, np.int8)
    classes[[i for i in protocol.forbidden if i < classes.size]] = OTHER
    for token, kind in zip(protocol.special.ids, range(TITLE_START, BRANCH_END + 1), strict=True):
        if token >= 0:  # a model without the six tokens has none to classify
            classes[token] = kind
    classes[list(protocol.end)] = END
    return classes


def allowed(state: DecodeState, protocol: Protocol, lanes: Lanes) -> jax.Array:
    """Bool [L, 9]: the classes that may come next in each lane."""
    serial, branch = _serial_rule(state, protocol)[lanes.row], _branch_rule(state, lanes)
    return jnp.where((lanes.lane == 0)[:, None], serial, branch)


def _close_cost(titles: jax.Array, title_tokens: jax.Array, separator: int) -> jax.Array:
    """Tokens still to come when a block forks right after its titles and all its branches stay empty:
    `<|para|>`, heads, closing tags, `<|/para|>`.
    """
    return 2 + titles * (2 + separator) + title_tokens


def _serial_rule(state: DecodeState, protocol: Protocol) -> jax.Array:
    """Bool [B, 9], for the serial lane."""
    separator, limit = len(protocol.separator), protocol.max_branches
    remaining, titles = state.remaining, state.titles
    rule = jnp.where(state.phase == MERGE, SERIAL, state.phase)
    number = jnp.arange(limit)[None]
    length = jnp.sum(jnp.where(number == titles[:, None], state.title_length, 0), axis=1)
    complete = jnp.sum(jnp.where(number < titles[:, None], state.title_length, 0), axis=1)
    another = 6 + separator  # a further title of one token, and its head and closing tag

    smallest = 2 * 3 + _close_cost(jnp.asarray(2), jnp.asarray(2), separator)
    may_open = state.request.adaptive & (remaining >= smallest) & (limit >= 2)

    # In a title: one more token, its copy in the head, and then everything that has to follow.
    missing = jnp.where(titles + 1 < 2, another, 0)
    after_token = 2 + _close_cost(titles + 1, complete + length + 1, separator) + missing
    may_extend = (length == 0) | ((length < protocol.max_title_tokens) & (remaining >= after_token))

    may_add_title = (titles < limit) & (
        (titles < 2) | (remaining >= another + _close_cost(titles, complete, separator))
    )

    in_serial, in_title, titled = rule == SERIAL, rule == TITLE, rule == TITLED
    never = jnp.zeros_like(in_serial)
    columns = [never] * CLASSES
    columns[TEXT] = in_serial | (in_title & may_extend)
    columns[OTHER] = columns[END] = in_serial
    columns[TITLE_START] = (in_serial & may_open) | (titled & may_add_title)
    columns[TITLE_END] = in_title & (length > 0)
    columns[PARALLEL_START] = titled & (titles >= 2)
    return jnp.stack(columns, axis=1)


def _branch_rule(state: DecodeState, lanes: Lanes) -> jax.Array:
    """Bool [L, 9], for lanes that continue branches."""
    at = (lanes.row, jnp.maximum(lanes.lane - 1, 0))
    affordable = branch_budget(state).affordable[at]
    within = state.branch_sampled[at] + 1 < state.request.max_branch_tokens[lanes.row]
    free = affordable & ~state.branch_closing[at] & within
    never, always = jnp.zeros_like(free), jnp.ones_like(free)
    columns = [never] * CLASSES
    columns[TEXT] = free
    columns[BRANCH_END] = columns[END] = always  # end of text in a branch counts as its closing tag
    return jnp.stack(columns, axis=1)
