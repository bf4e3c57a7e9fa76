"""Contents of an adapter: LoRA factors, and embedding and head rows of new tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from aspd_jax.errors import CheckpointError

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # names of both in Hugging Face's tensors


class Factors(NamedTuple):
    """A low-rank change of a kernel [outputs, inputs]: `scale * up @ down`, up [outputs, R], down [R, inputs]."""

    down: np.ndarray
    up: np.ndarray
    scale: float

    def change(self) -> np.ndarray:
        """Return the change of the kernel, float32 [outputs, inputs]."""
        change: np.ndarray = self.scale * (self.up.astype(np.float32) @ self.down.astype(np.float32))
        return change


class Rows(NamedTuple):
    """Trained rows of the embedding or the head: token ids [T], and values [T, D]."""

    tokens: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Adapter:
    """Contents of an adapter folder.

    Attributes:
        source: path, for messages.
        factors: LoRA factors by the Hugging Face name of the linear layer.
        rows: trained rows by the Hugging Face name of embedding and head.
        settings: position scheme, mask and form of titles of the training.
    """

    source: str
    factors: Mapping[str, Factors]
    rows: Mapping[str, Rows] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """Sorted ids of all tokens with trained rows."""
        return sorted({token for rows in self.rows.values() for token in rows.tokens})

    def check_tokens(self, known: int, tags: tuple[int, ...]) -> None:
        """Check that the base model has the tokens of the trained rows.

        Args:
            known: number of tokens of the base model.
            tags: ids of the six tags; an adapter with rows of exactly these may extend the base model.

        Raises:
            CheckpointError: the base model lacks a token.
        """
        if any(rows.tokens != tags and max(rows.tokens) >= known for rows in self.rows.values()):
            raise CheckpointError(
                f"{self.source}: expected a base with the tokens {self.tokens}, got one with {known} tokens"
            )

    def applied(self, tensors: Iterable[tuple[str, np.ndarray]], source: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors of a base model with this adapter merged; embedding and head are extended if needed.

        Args:
            tensors: tensors of the base model.
            source: path of the base model, for messages.

        Raises:
            CheckpointError: the base model lacks a layer of the adapter, or shapes differ.
        """
        left = {*self.factors, *self.rows}
        for name, tensor in tensors:
            layer = name.removesuffix(".weight")
            if layer in self.factors:
                change = self.factors[layer].change()
                self._same(layer, change.shape, tensor.shape, source)
                tensor = tensor.astype(np.float32) + change  # rounded only once, to the dtype of parameters
            if layer in self.rows:
                tokens, values = self.rows[layer]
                self._same(layer, values.shape[1:], tensor.shape[1:], source)
                tensor = np.pad(tensor, ((0, max(0, max(tokens) + 1 - len(tensor))), (0, 0)))
                tensor[list(tokens)] = values
            left.discard(layer)
            yield name, tensor
        if left:
            raise CheckpointError(f"{self.source}: expected a base with {sorted(left)[0]}, got none in {source}")

    def _same(self, layer: str, ours: tuple[int, ...], theirs: tuple[int, ...], source: str) -> None:
        if ours != theirs:
            raise CheckpointError(
                f"{self.source}: {layer}: expected the shape {list(theirs)} of {source}, got {list(ours)}"
            )
