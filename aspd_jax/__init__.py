"""Adaptive Serial-Parallel Decoding: structured answers, their layout and mask, and the model."""

from aspd_jax.language_model import LanguageModel, load_model, save_model
from aspd_jax.layout import Layout, build_layout, visible
from aspd_jax.structure import Branch, Parallel, Serial, plain_text
from aspd_jax.tokens import Codec, SpecialTokens

__all__ = [
    "Branch",
    "Codec",
    "LanguageModel",
    "Layout",
    "Parallel",
    "Serial",
    "SpecialTokens",
    "build_layout",
    "load_model",
    "plain_text",
    "save_model",
    "visible",
]
