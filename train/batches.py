"""Packed batches of examples from the synthetic tasks or from records.

B: rows; S: tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np
from grain import experimental as grain_experimental

from aspd_jax.chat import encode_turns
from aspd_jax.errors import ConfigError, DataError
from aspd_jax.layout import Layout, PositionScheme, build_layout
from aspd_jax.structure import Serial
from aspd_jax.tokens import Codec, SpecialTokens
from train.config import TrainConfig
from train.records import Example, Records
from train.tasks import Problem, held_out, problem, recital

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


class Batches(Protocol):
    """A resumable stream of batches; `state` is its position as JSON values."""

    def __next__(self) -> Batch: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @state.setter
    def state(self, value: dict[str, Any]) -> None: ...


def make_batch(
    tokens: np.ndarray,
    sequence: np.ndarray,
    loss: np.ndarray,
    special: SpecialTokens,
    positions: PositionScheme,
) -> Batch:
    """Make a batch from packed rows.

    Args:
        tokens: token ids, int32 [B, S].
        sequence: number of the sequence of each token, int32 [B, S]; 0: padding.
        loss: weight of each token as a target, bool or float32 [B, S].
        special: ids of the tags.
        positions: position scheme.
    """
    layout = build_layout(tokens, special, positions, sequence=sequence)
    opened = np.cumsum(tokens == special.title_start, axis=1) - np.cumsum(tokens == special.title_end, axis=1)
    title = (opened > 0) | (tokens == special.title_end)
    part = np.where(layout.branch > 0, 2, title).astype(np.int32)
    return Batch(tokens, layout, loss.astype(np.float32), part)


def example(codec: Codec, tokenizer: Any, problem: Problem, structured: bool, fed_loss: bool = False) -> Example:
    """Encode a problem: prompt, answer and end of text, with loss on the answer.

    Args:
        codec: codec of the tokenizer.
        tokenizer: tokenizer with a chat template.
        problem: problem.
        structured: whether to linearise the structure or to use the plain answer.
        fed_loss: whether tokens that the engine feeds have loss too.
    """
    messages = [{"role": "user", "content": problem.question}]
    (prompt,) = encode_turns(tokenizer, codec.text, (tokenizer.eos_token_id,), messages, prompt=True)
    answer = codec.linearise(problem.structure if structured else (Serial(problem.answer),))
    tokens = np.asarray([*prompt, *answer.tokens, tokenizer.eos_token_id], np.int32)
    loss = np.concatenate([np.zeros(len(prompt), bool), ~answer.fed | fed_loss, [True]])
    return Example(tokens, loss)


def first_fit(sizes: Sequence[int], rows: int, length: int) -> list[int | None]:
    """Assign examples to rows, the longest first, and return the row of each; None if it fits in no row.

    Args:
        sizes: tokens of each example.
        rows: number of rows.
        length: tokens of a row.

    Raises:
        ConfigError: an example is longer than a row.
    """
    if max(sizes) > length:
        raise ConfigError(f"data.length: expected at least the tokens of every example, {max(sizes)}, got {length}")
    free = np.full(rows, length)
    placed: list[int | None] = [None] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = np.flatnonzero(free >= sizes[index])
        if fits.size:
            placed[index] = int(fits[0])
            free[fits[0]] -= sizes[index]
    return placed


def pack(
    examples: Sequence[Example],
    placed: Sequence[int | None],
    special: SpecialTokens,
    rows: int,
    length: int,
    positions: PositionScheme,
) -> Batch:
    """Pack examples into their rows (see `first_fit`); examples without a row are dropped."""
    tokens = np.zeros((rows, length), np.int32)
    sequence = np.zeros((rows, length), np.int32)
    loss = np.zeros((rows, length), np.float32)
    used = [0] * rows
    for item, row in zip(examples, placed, strict=True):
        if row is None:
            continue
        place = slice(used[row], used[row] + len(item.tokens))
        tokens[row, place], loss[row, place] = item
        sequence[row, place] = sequence[row].max() + 1
        used[row] = place.stop
    return make_batch(tokens, sequence, loss, special, positions)


def synthetic_batch(codec: Codec, tokenizer: Any, config: TrainConfig, step: int) -> Batch:
    """Return the batch of a step: a pure function of (seed, step), so that resuming does not change the data.

    ASPD and Seq models get the same problems, because the size of the structured form decides for both which fit.
    """
    problems: list[Problem] = []
    examples: list[Example] = []
    data = config.data
    rows, length = config.batch_shape(step)
    total = number = 0
    short = step < data.short_steps
    recital_every = data.recital_every if short else 0
    while total < rows * length:
        seed = (config.seed << 48) + (step << 16) + number
        recite = recital_every and number % recital_every == recital_every - 1
        item = recital(seed) if recite else problem(seed, held_out=False)
        structured = example(codec, tokenizer, item, True, data.fed_loss)
        number += 1
        if len(structured.tokens) > length:
            continue  # a few problems are longer than a row
        problems.append(item)
        examples.append(structured)
        total += len(structured.tokens)
    placed = first_fit([len(item.tokens) for item in examples], rows, length)
    serial_share = 0 if short else data.plain_every
    for number, item in enumerate(problems):
        if not data.structured or (serial_share and number % serial_share == 0):
            examples[number] = example(codec, tokenizer, item, False)
    return pack(examples, placed, codec.special, rows, length, config.model.positions)


class SyntheticBatches:
    """Batches of the synthetic tasks."""

    def __init__(self, codec: Codec, tokenizer: Any, config: TrainConfig) -> None:
        self._make = lambda step: synthetic_batch(codec, tokenizer, config, step)
        self._step = 0

    def __next__(self) -> Batch:
        batch = self._make(self._step)
        self._step += 1
        return batch

    @property
    def state(self) -> dict[str, Any]:
        """Position of the stream."""
        return {"step": self._step}

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._step = value["step"]


def held_out_batches(codec: Codec, tokenizer: Any, config: TrainConfig) -> list[Batch]:
    """Return the batches of held-out synthetic problems."""
    rows, length = config.data.rows, config.data.length
    problems = held_out(64 * config.evaluate_batches * rows)
    encoded = (example(codec, tokenizer, item, config.data.structured, config.data.fed_loss) for item in problems)
    batches = []
    for _ in range(config.evaluate_batches):
        examples: list[Example] = []
        while sum(len(item.tokens) for item in examples) < rows * length:
            item = next(encoded)
            if len(item.tokens) <= length:
                examples.append(item)
        placed = first_fit([len(item.tokens) for item in examples], rows, length)
        batches.append(pack(examples, placed, codec.special, rows, length, config.model.positions))
    return batches


class RecordBatches:
    """Batches of records, shuffled in every epoch and packed first-fit.

    Args:
        records: tokenised records.
        special: ids of the tags.
        config: configuration of the run.
        epochs: number of epochs; None: unlimited.
    """

    def __init__(
        self, records: Records, special: SpecialTokens, config: TrainConfig, epochs: int | None = None
    ) -> None:
        self._special, self._config = special, config
        self._iterator = iter(_packed(records, config, epochs, shuffle=True))

    def __next__(self) -> Batch:
        return _as_batch(next(self._iterator), self._special, self._config)

    @property
    def state(self) -> dict[str, Any]:
        """Position of the stream."""
        return dict(self._iterator.get_state())

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._iterator.set_state(value)


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
    batches = []
    for rows in _packed(records, config, 1, shuffle=False, whole=False):
        batches.append(_as_batch(rows, special, config))
        if len(batches) == config.evaluate_batches:
            break
    return batches


def _as_batch(packed: dict[str, np.ndarray], special: SpecialTokens, config: TrainConfig) -> Batch:
    """Convert Grain's rows to a batch; a smaller last batch is padded with empty rows."""
    missing = config.data.rows - len(packed["tokens"])
    tokens, sequence, loss = (
        np.pad(packed[name], [(0, missing), (0, 0)]) for name in ("tokens", "tokens_segment_ids", "loss")
    )
    return make_batch(tokens, sequence, loss, special, config.model.positions)


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
