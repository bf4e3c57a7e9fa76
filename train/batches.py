"""Packed batches of examples.

B: rows; S: tokens of a row.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import grain
import numpy as np
from grain import experimental as grain_experimental

from aspd_jax.errors import DataError
from aspd_jax.layout import Layout, build_layout
from aspd_jax.tokens import SpecialTokens
from train.config import TrainConfig
from train.records import Example, Records

PARTS = ("serial", "title", "branch")  # kinds of targets in metrics


class Batch(NamedTuple):
    """Packed rows.

    Attributes:
        tokens: token ids, int32 [B, S].
        layout: layout of the tokens, int32 [B, S] each.
        loss: weight of each token as a target, float32 [B, S].
        part: index into `PARTS` of each token, int32 [B, S].
    """

    tokens: np.ndarray
    layout: Layout
    loss: np.ndarray
    part: np.ndarray


def record_batches(records: Records, special: SpecialTokens, config: TrainConfig, epochs: int | None = None) -> Any:
    """Return Grain's iterator over the batches of records, shuffled in every epoch and packed first-fit.

    Its `get_state` and `set_state` have its position as JSON values.

    Args:
        records: tokenised records.
        special: ids of the tags.
        config: configuration of the run.
        epochs: number of epochs; None: unlimited.
    """
    return iter(_packed(records, config, epochs, shuffle=True).map(partial(_as_batch, special, config)))


def record_steps(records: Records, config: TrainConfig) -> int:
    """Return the number of batches in the configured epochs.

    Raises:
        DataError: the records do not fill a batch.
    """

    class Sizes:
        def __len__(self) -> int:
            return len(records)

        def __getitem__(self, index: int) -> Example:
            size = int(records.sizes[index])
            return Example(np.zeros(size, np.int32), np.zeros(size, bool))

    steps = sum(1 for _ in _packed(Sizes(), config, config.epochs, shuffle=True))
    if not steps:
        batch = f"{config.data.rows} x {config.data.length}"
        raise DataError(
            f"data.train: expected records for at least one batch of {batch} tokens in {config.epochs} epochs, got "
            f"{int(records.sizes.sum())} tokens in each. Reduce data.rows, or set steps."
        )
    return steps


def record_held_out(records: Records, special: SpecialTokens, config: TrainConfig) -> list[Batch]:
    """Return the first `evaluate_batches` batches of held-out records in file order."""
    rows = _packed(records, config, 1, shuffle=False, whole=False)
    return list(islice(map(partial(_as_batch, special, config), rows), config.evaluate_batches))


def _as_batch(special: SpecialTokens, config: TrainConfig, packed: dict[str, np.ndarray]) -> Batch:
    """Convert Grain's rows to a batch; a smaller last batch is padded with empty rows."""
    missing = config.data.rows - len(packed["tokens"])
    tokens, sequence, loss = (
        np.pad(packed[name], [(0, missing), (0, 0)]) for name in ("tokens", "tokens_segment_ids", "loss")
    )
    layout = build_layout(tokens, special, config.model.positions, sequence=sequence)
    opened = np.cumsum(tokens == special.title_start, axis=1) - np.cumsum(tokens == special.title_end, axis=1)
    title = (opened > 0) | (tokens == special.title_end)
    part = np.where(layout.branch > 0, 2, title).astype(np.int32)
    return Batch(tokens, layout, loss.astype(np.float32), part)


def _packed(records: Any, config: TrainConfig, epochs: int | None, shuffle: bool, whole: bool = True) -> Any:
    """Return Grain's iterable of {"tokens", "tokens_segment_ids", "loss"}, arrays [rows, length]."""
    source = grain.MapDataset.source(records).seed(config.seed)
    source = source.shuffle() if shuffle else source
    source = source.repeat(epochs).map(Example._asdict)
    # No threads: packing dominates the time, and a resumed run must see the same order.
    rows = grain_experimental.FirstFitPackIterDataset(
        source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct=dict.fromkeys(Example._fields, config.data.length),
        num_packing_bins=config.data.bins,
        seed=config.seed,
        shuffle_bins=shuffle,
    )
    return rows.batch(config.data.rows, drop_remainder=whole)
