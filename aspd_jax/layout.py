"""Tags, positions and segment ids of tokens, and the definition of the mask (protocol, sections 2 to 4).

B batch, S tokens of a row, Q query tokens, K key tokens.

Training and decoding pass a `Layout` along with the tokens; no mask is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from aspd_jax.errors import ConfigError

Array = Any  # np.ndarray on the host or jax.Array inside jit; all functions here accept both
PositionScheme = Literal["sequential", "max", "predict"]
Siblings = Literal["invisible", "shared"]
Titles = Literal["leads", "names"]


HIDDEN = -1e30  # score of a masked key; finite, so that a query that sees no key gives no NaN
NO_WINDOW = 1 << 30  # a window that hides no key


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the six special tokens."""

    title_start: int
    title_end: int
    parallel_start: int
    parallel_end: int
    branch_start: int
    branch_end: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the six ids, in the order of `TAGS`."""
        return tuple(getattr(self, name) for name in TAGS)


TAGS = {
    "title_start": "<|title|>",
    "title_end": "<|/title|>",
    "parallel_start": "<|para|>",
    "parallel_end": "<|/para|>",
    "branch_start": "<|branch|>",
    "branch_end": "<|/branch|>",
}


class Layout(NamedTuple):
    """Position and segment ids of tokens; int32 [B, S] per field.

    Attributes:
        position: position for RoPE.
        sequence: 1, 2, … for the packed sequences of a row; 0 for padding.
        block: 1, 2, … for the blocks of a sequence; 0 for serial tokens and padding.
        branch: 1, 2, … for the branches of a block; 0 for serial tokens and padding.
    """

    position: Array
    sequence: Array
    block: Array
    branch: Array


def check_choice(name: str, value: str, choices: Any) -> None:
    """Check that `value` is one of the strings of a `Literal` type or of a collection.

    Raises:
        ConfigError: it is not; the message lists the choices.
    """
    names = get_args(choices) or tuple(choices)
    if value not in names:
        raise ConfigError(f"{name}: expected one of {', '.join(names)}, got {value!r}")


def build_layout(
    tokens: Array,
    special: SpecialTokens,
    positions: PositionScheme = "sequential",
    padding_mask: Array | None = None,
    sequence: Array | None = None,
) -> Layout:
    """Return the layout of token ids; a block is a run of adjacent branches.

    Args:
        tokens: token ids, int [B, S]. A branch may be cut off at the end of a sequence.
        special: ids of the special tokens.
        positions: position scheme (protocol, section 4).
        padding_mask: bool or 0/1 [B, S], true for real tokens; default: all true.
        sequence: index of the packed sequence of each token, int [B, S]; 0 is padding, and sequences are contiguous.
            Default: one sequence per row.

    Returns:
        Layout of int32 NumPy arrays [B, S]; all fields are 0 at padding.

    Raises:
        ConfigError: the scheme is unknown, or an array has another shape or dtype.
    """
    check_choice("positions", positions, PositionScheme)
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(f"tokens: expected integers [B, S], got {tokens.dtype} {list(tokens.shape)}")
    owner = np.ones(tokens.shape, np.int32) if sequence is None else np.asarray(sequence, np.int32)
    real = owner > 0
    if padding_mask is not None:
        real = real & np.asarray(padding_mask).astype(bool)
    if owner.shape != tokens.shape or real.shape != tokens.shape:
        shapes = f"{list(real.shape)}, {list(owner.shape)}"
        raise ConfigError(f"padding_mask, sequence: expected the shape of tokens, {list(tokens.shape)}, got {shapes}")

    # The real tokens of all rows form one flat array from here on; a `group` is one packed sequence.
    row, column = np.nonzero(real)
    flat, flat_owner = tokens[row, column], owner[row, column]
    index = np.arange(flat.size)
    first = np.ones(flat.size, bool)
    first[1:] = (row[1:] != row[:-1]) | (flat_owner[1:] != flat_owner[:-1])
    group_start = np.maximum.accumulate(np.where(first, index, 0))

    starts = flat == special.branch_start
    last_start = np.maximum.accumulate(np.where(starts, index, -1))
    # `<|/branch|>` belongs to its branch; `<|/para|>` belongs to no branch, and also ends a branch that was cut off.
    ends = np.where(flat == special.parallel_end, index, -1)
    after_branch = np.flatnonzero(flat[:-1] == special.branch_end) + 1
    ends[after_branch] = after_branch
    last_end = np.maximum.accumulate(ends)
    inside = (last_start >= group_start) & (last_start >= last_end)

    # Branches and blocks are numbered over all rows first; the offset of each group is subtracted afterwards.
    branch_number = np.cumsum(starts)
    follows_branch = np.zeros(flat.size, bool)
    follows_branch[1:] = inside[:-1] & ~first[1:]
    block_starts = starts & ~follows_branch
    block_number = np.cumsum(block_starts)
    block_base = block_number[group_start] - block_starts[group_start]  # blocks before the group of each token
    block = np.where(inside, block_number - block_base, 0)
    block_index = np.flatnonzero(block_starts)
    branch = np.zeros(flat.size, np.int64)
    position = index - group_start
    if block_index.size:
        of_block = np.maximum(block_number - 1, 0)  # index of the block of each token over all rows
        branch = np.where(inside, branch_number - branch_number[block_index][of_block] + 1, 0)
        in_branch = np.flatnonzero(inside)
        branch_length = np.bincount(branch_number[in_branch] - 1, minlength=int(starts.sum()))
        branch_block = block_number[np.flatnonzero(starts)] - 1
        total = np.bincount(branch_block, weights=branch_length).astype(np.int64)
        longest = np.zeros(block_index.size, np.int64)
        np.maximum.at(longest, branch_block, branch_length)
        branches = np.bincount(branch_block)
        span = {"sequential": total, "max": longest, "predict": branches * longest}[positions]
        # The position of a serial token counts each earlier block by its span instead of its tokens.
        gain = np.concatenate([[0], np.cumsum(span - total)])
        finished = block_number - inside
        position = position + gain[finished] - gain[block_base]
        block_position = position[block_index]
        offset = block_position[of_block] + index - last_start
        if positions == "predict":
            offset = offset + (branch - 1) * longest[of_block]
        position = np.where(inside, offset, position)

    def scatter(values: np.ndarray) -> np.ndarray:
        full = np.zeros(tokens.shape, np.int32)
        full[row, column] = values
        return full

    return Layout(scatter(position), scatter(flat_owner), scatter(block), scatter(branch))


def visible(
    query: Layout,
    key: Layout,
    siblings: Siblings = "invisible",
    window: int | Array | None = None,
) -> Array:
    """Return which keys each query may attend to: the mask (protocol, section 3); bool [B, Q, K].

    Within a sequence, positions grow along the linearisation except between siblings. Rule 2 ("j comes no later than
    i") is therefore `key.position <= query.position` for all other keys. In the ablation `shared`, siblings are visible
    in the order of the linearisation.

    Args:
        query: layout of the query tokens [B, Q].
        key: layout of the key tokens [B, K].
        siblings: `invisible` (rule 3 holds) or `shared` (rule 3 dropped).
        window: sliding window: keys more than `window - 1` positions before the query are hidden; None: no window.
    """
    check_choice("siblings", siblings, Siblings)
    q = Layout(*(field[..., :, None] for field in query))
    k = Layout(*(field[..., None, :] for field in key))
    return sees(q, k, siblings, window)


def sees(q: Layout, k: Layout, siblings: Siblings = "invisible", window: int | Array | None = None) -> Array:
    """Return `visible` of fields that broadcast: queries [..., Q, 1] and keys [..., 1, K]."""
    same = (q.sequence == k.sequence) & (k.sequence > 0)
    sibling = (q.block == k.block) & (q.block > 0) & (q.branch != k.branch)
    seen = same & (k.position <= q.position) & ~sibling
    if siblings == "shared":
        seen = seen | (same & sibling & (k.branch < q.branch))
    if window is not None:
        seen = seen & (q.position - k.position < window)
    return seen
