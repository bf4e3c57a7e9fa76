"""Adaptive Serial-Parallel Decoding: structured answers, their layout and mask, and the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# The module of each name. Names are imported at their first use: the data pipeline needs no JAX, which takes seconds.
_MODULES = {
    **dict.fromkeys(("LanguageModel", "load_model", "save_model"), "language_model"),
    **dict.fromkeys(("Layout", "build_layout", "visible"), "layout"),
    **dict.fromkeys(("Branch", "Parallel", "Serial", "plain_text"), "structure"),
    **dict.fromkeys(("Codec", "SpecialTokens"), "tokens"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
