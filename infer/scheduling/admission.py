"""Admission of requests to the decoding state, and the empty state.

S: number of tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout, build_layout
from aspd_jax.model.cache import empty_cache
from aspd_jax.sizes import next_power
from infer.control.tags import text_rule, text_stops
from infer.control.text_end import stop_tokens
from infer.decode.packed import Packed
from infer.decode.slots import Admission
from infer.decode.state import DecodeState, EngineConfig, RequestArrays, empty_state, place_state
from infer.decode.token_classes import TokenClasses, token_classes
from infer.request import PARAMETERS, Request

DTYPES: dict[type, Any] = {int: np.int32, float: np.float32}  # types of sampling parameters on the device
MIN_PROMPT = 64  # tokens of the smallest program that admits a prompt


def prompt_layout(lm: LanguageModel, config: EngineConfig, prompt: Sequence[int]) -> Layout:
    """Return the layout [S] of a prompt.

    Raises:
        RequestError: the prompt ends inside a branch.
    """
    tokens = np.asarray([prompt], np.int32)
    layout = Layout(*(part[0] for part in build_layout(tokens, config.special, lm.config.positions)))
    if layout.branch[-1]:
        raise RequestError("prompt: expected to end in serial text, got one that ends inside a branch.")
    return layout


def classes_of(lm: LanguageModel, config: EngineConfig) -> TokenClasses:
    """Return the classes and properties of the tokens of a model."""
    codec = None if lm.tokenizer is None else lm.codec.text
    return token_classes(lm.config.padded_vocab_size, config.special.ids, config.end, config.forbidden, codec)


def new_state(
    lm: LanguageModel, config: EngineConfig, batch: int, capacity: int, classes: TokenClasses | None = None
) -> DecodeState:
    """Return a state of empty rows.

    Args:
        lm: the model.
        config: configuration of the engine.
        batch: B, number of rows.
        capacity: number of slots of a row.
        classes: classes of the tokens; None: they are read here.
    """
    classes = classes or classes_of(lm, config)
    cache = empty_cache(lm.config, batch, capacity, lm.mesh)
    return place_state(empty_state(config, cache, classes.kind), lm.mesh)


def admission(
    lm: LanguageModel,
    config: EngineConfig,
    state: DecodeState,
    request: Request,
    row: int,
    prefix_tokens: int = 0,
    prefix_slots: int = 0,
    adapter: int = -1,
    arrival: int = 0,
) -> Packed[Admission]:
    """Return the arguments of `slots.admit` for a request.

    Args:
        lm: the model.
        config: configuration of the engine.
        state: the state, for its shapes.
        request: the request.
        row: index of the row; out of range means none.
        prefix_tokens, prefix_slots: number of tokens of the prompt that the row holds, and of the slots that they take.
        adapter: slot of the adapter in the parameters; negative: the base model.
        arrival: number of the request: where not all rows fit a step, the lowest are fed first.
    """
    layout = prompt_layout(lm, config, request.prompt)
    left = slice(prefix_tokens, len(request.prompt))
    size = min(state.cache.tokens.shape[1], max(MIN_PROMPT, next_power(left.stop - left.start)))

    def padded(values: Any) -> np.ndarray:
        rest = np.asarray(values, np.int32)[left]
        return np.pad(rest, (0, size - rest.size))

    params = request.params
    bias, biases = np.zeros(state.bias.shape[1], np.float32), params.biases(config.special.title_start)
    bias[list(biases)] = list(biases.values())
    script = np.asarray([token for segment in params.script for token in segment], np.int32)
    lengths = [*map(len, params.script), *[0] * (1 + config.max_branches - len(params.script))]
    arrays: dict[str, Any] = {
        "seed": np.uint32(request.seed),
        "biased": np.bool_(biases),
        "drafts_blocks": np.bool_(request.draft is not None),
        "adapter": np.int32(adapter),
        "script": np.pad(script, (0, state.cache.tokens.shape[1] - script.size)),
        "script_end": np.cumsum(lengths, dtype=np.int32),
    }
    arrays |= {
        name: DTYPES[parameter.kind](getattr(params, name))
        for name, parameter in PARAMETERS.items()
        if parameter.device
    }
    forks = request.mode == "adaptive" and not request.lists and config.max_branches >= 2
    words = state.stop_tokens.shape[1]
    ends = stop_tokens(params, lm.codec.text, words) if request.ends_by_text else np.zeros(words, np.uint32)
    numbers = {
        "row": row,
        "prefix_slots": prefix_slots,
        "position": layout.position[-1],
        "block": layout.block.max(),
        "budget": request.budget,
        "content": request.content_budget,
        "arrival": arrival,
        "rule": 0 if request.template or request.draft or request.scored else text_rule(forks).rule,
        "stops": text_stops(forks),
    }
    made: Any = Admission(
        request=RequestArrays(**arrays),
        tokens=padded(request.prompt),
        layout=Layout(*map(padded, layout)),
        stop_tokens=ends,
        bias=bias,
        **{name: np.int32(value) for name, value in numbers.items()},
    )
    result: Packed[Admission] = Packed.pack(made)
    return result
