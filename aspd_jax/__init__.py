"""Adaptive Serial-Parallel Decoding: structured answers, their layout and mask, and the model."""

from etils import epy

with epy.lazy_api_imports(globals()):  # at their first use, so that commands without a model need no JAX
    from aspd_jax.language_model import LanguageModel, load_model, save_model
    from aspd_jax.layout import Layout, build_layout, visible
    from aspd_jax.structure import Branch, Parallel, Serial, plain_text
    from aspd_jax.template import Hole, Template
    from aspd_jax.tokens import Codec, SpecialTokens

__version__ = "0.1.0"

__all__ = [
    "Branch",
    "Codec",
    "Hole",
    "LanguageModel",
    "Layout",
    "Parallel",
    "Serial",
    "SpecialTokens",
    "Template",
    "build_layout",
    "load_model",
    "plain_text",
    "save_model",
    "visible",
]
