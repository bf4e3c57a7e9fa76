"""New requests as the device takes them, and an empty state for them.

S tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout, build_layout
from aspd_jax.model.cache import empty_cache
from aspd_jax.sizes import next_power
from infer.decode.slots import Admission, admit, put_bias
from infer.decode.state import DecodeState, EngineConfig, RequestArrays, empty_state, place_state
from infer.decode.tag_automaton import TagAutomaton, token_automaton
from infer.request import PARAMETERS, Job

DTYPES: dict[type, Any] = {int: np.int32, float: np.float32}  # of sampling parameters on the device
MIN_PROMPT = 64  # tokens of the smallest program that lays out a prompt


class Beginning(NamedTuple):
    """What a row holds of a prompt already.

    Attributes:
        tokens: of the prompt.
        slots: that they take; after a block they are not in the order of the linearisation.
    """

    tokens: int = 0
    slots: int = 0


NOTHING_KEPT = Beginning()


def prompt_layout(lm: LanguageModel, config: EngineConfig, prompt: Sequence[int]) -> Layout:
    """Layout [S] of a prompt.

    Raises:
        RequestError: it ends inside a branch.
    """
    tokens = np.asarray([prompt], np.int32)
    layout = Layout(*(part[0] for part in build_layout(tokens, config.special, lm.config.positions)))
    if layout.branch[-1]:
        raise RequestError("a prompt ends inside a branch; an answer can only follow serial text")
    return layout


def new_state(
    lm: LanguageModel, config: EngineConfig, batch: int, capacity: int, automaton: TagAutomaton | None = None
) -> DecodeState:
    """A state of empty rows with so many slots each; tags are the special tokens where no automaton is given."""
    if automaton is None:
        codec = None if lm.tokenizer is None else lm.codec.text
        automaton = token_automaton(
            lm.config.padded_vocab_size, config.special.ids, config.end, config.forbidden, codec
        )
    cache = empty_cache(lm.config, batch, capacity, lm.mesh)
    return place_state(empty_state(config, cache, automaton), lm.mesh)


def begin(
    lm: LanguageModel,
    config: EngineConfig,
    state: DecodeState,
    job: Job,
    row: int,
    beginning: Beginning = NOTHING_KEPT,
    adapter: int = -1,
) -> DecodeState:
    """Give a row to a request; the next passes feed its prompt.

    Args:
        adapter: place of its adapter among the parameters; negative: none.
    """
    layout = prompt_layout(lm, config, job.prompt)
    left = slice(beginning.tokens, len(job.prompt))
    size = min(state.cache.tokens.shape[1], max(MIN_PROMPT, next_power(left.stop - left.start)))

    def filled(values: Any) -> np.ndarray:
        own = np.asarray(values, np.int32)[left]
        return np.pad(own, (0, size - own.size))

    longest_head = len(config.tags.branch_start) + config.max_title_tokens + len(config.separator)
    params = job.params
    told = np.asarray([token for segment in params.script for token in segment], np.int32)
    lengths = [*map(len, params.script), *[0] * (1 + config.max_branches - len(params.script))]
    request: dict[str, Any] = {
        "adaptive": np.bool_(job.mode == "adaptive"),
        "constrained": np.bool_(job.constrained),
        "seed": np.uint32(job.seed),
        "biased": np.bool_(params.logit_bias),
        "adapter": np.int32(adapter),
        "script": np.pad(told, (0, state.cache.tokens.shape[1] - told.size)),
        "script_end": np.cumsum(lengths, dtype=np.int32),
    }
    request |= {
        name: DTYPES[parameter.kind](getattr(params, name))
        for name, parameter in PARAMETERS.items()
        if parameter.device
    }
    numbers = {
        "row": row,
        "kept": beginning.slots,
        "position": layout.position[-1],
        "block": layout.block.max(),
        "budget": job.budget,
        "content": params.max_content_tokens or job.budget,
        "stride": longest_head + params.max_branch_tokens,
    }
    new: Any = Admission(
        request=RequestArrays(**request),
        tokens=filled(job.prompt),
        layout=Layout(*map(filled, layout)),
        **{name: np.int32(value) for name, value in numbers.items()},
    )
    if params.logit_bias:
        bias = np.zeros(state.bias.shape[1], np.float32)
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
        state = put_bias(state, np.int32(row), bias, config)
    return admit(state, new, config)
