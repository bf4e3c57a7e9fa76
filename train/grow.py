"""A trained model inside a wider one that computes the same, to go on from (Net2Net, Chen et al. 2015, in kind).

D hidden size, F inner size of the feed-forward part.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from aspd_jax.errors import ConfigError
from aspd_jax.language_model import LanguageModel, random_model
from aspd_jax.model.config import ModelConfig

# Parts that write to the residual stream. What is new of it stays 0 until they learn to write there, and so nothing
# that reads it has changed.
WRITING = ("embedding", "output", "down")


def wider(shape: ModelConfig, hidden_size: int, feed_forward: int) -> ModelConfig:
    """A shape with these D and F.

    Raises:
        ConfigError: one of them is smaller than it was.
    """
    for name, size, old in (
        ("hidden_size", hidden_size, shape.hidden_size),
        ("feed_forward", feed_forward, shape.feed_forward),
    ):
        if size < old:
            raise ConfigError(f"model.{name}: the checkpoint has {old}, and grows to no less, got {size}")
    return replace(shape, hidden_size=hidden_size, feed_forward=feed_forward)


def grow(lm: LanguageModel, hidden_size: int, feed_forward: int, seed: int) -> LanguageModel:
    """A model of a larger D and F with the same logits. What is new reads at random, and writes nothing yet.

    Args:
        lm: with float kernels and without adapters, whole on this host.

    Raises:
        ConfigError: see `wider`.
    """
    shape = wider(lm.config, hidden_size, feed_forward)
    sizes = {"hidden_size": hidden_size, "intermediate_size": feed_forward, "head_dim": shape.head_dim}
    grown = random_model(shape, None, {**lm.hf_config, **sizes}, seed, lm.end_ids)
    old = flatten_dict(lm.params)
    new = flatten_dict(grown.params)
    leaves = {path: _grow(path, np.asarray(new[path]), np.asarray(old[path])) for path in new}
    return replace(lm, model=grown.model, config=shape, hf_config=grown.hf_config, params=unflatten_dict(leaves))


def _grow(path: tuple[str, ...], new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """A parameter of the wider model: the old one in its first places, 0 or `new` in the others."""
    if path[-2] in WRITING:
        new = np.zeros_like(new)
    if path[-1] == "scale":  # the mean square of a norm is over more numbers now, the new ones 0
        old = (old * sqrt(old.size / new.size)).astype(new.dtype)
    grown = new.copy()
    grown[tuple(slice(size) for size in old.shape)] = old
    return grown
