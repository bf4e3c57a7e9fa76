"""Adaptive Serial-Parallel Decoding: structured answers, their layout and mask, and the model."""

from typing import TYPE_CHECKING

from aspd_jax.lazy_names import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(
    __name__,
    {
        "language_model": ("LanguageModel", "load_model", "save_model"),
        "layout": ("Layout", "build_layout", "visible"),
        "structure": ("Branch", "Parallel", "Serial", "plain_text"),
        "template": ("Hole", "Template"),
        "tokens": ("Codec", "SpecialTokens"),
    },
)
