"""Models with draft heads."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from aspd_jax import LanguageModel
from aspd_jax.model.draft_heads import DRAFT_HEADS, draft_shapes
from aspd_jax.model.transformer import Transformer


def with_draft_heads(lm: LanguageModel, heads: int, scale: float = 1.0) -> LanguageModel:
    """The model with random draft heads; with `scale` 0 they guess the next token again."""
    config = replace(lm.config, draft_heads=heads)
    random = np.random.default_rng(3)
    layer = {
        name: jnp.asarray(random.standard_normal(shape) * shape[-1] ** -0.5 * (scale if name == "down" else 1.0))
        for name, shape in draft_shapes(config.hidden_size).items()
    }
    layer = {name: value.astype(jnp.float32) for name, value in layer.items()}
    return replace(lm, config=config, model=Transformer(config), params={**lm.params, DRAFT_HEADS: layer})
