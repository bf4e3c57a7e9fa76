"""Shapes and dtypes in annotations equal those of the arrays, for any answer."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jaxtyping import Bool, Int32

from aspd_jax import LanguageModel
from aspd_jax.trees import shapes, zeros
from infer import Engine, SamplingParams
from infer.decode import decode_step
from infer.decode.state import RequestArrays, SequenceState
from tests.conftest import ROOT, patched
from tests.helpers.answers import SEPARATOR
from tests.helpers.engine_state import engine_state
from tests.infer.decode.test_speculation import drafting_engine


class Inner(NamedTuple):
    flags: Bool[Array, "B N"]


class Outer(NamedTuple):
    number: Int32[Array, ""]
    counts: Int32[Array, " B"]
    inner: Inner


def test_zeros_are_as_annotated() -> None:
    made = zeros(Outer, {"B": 2, "N": 3})
    assert made.number.shape == () and made.counts.shape == (2,) and made.inner.flags.shape == (2, 3)
    assert made.counts.dtype == jnp.int32 and made.inner.flags.dtype == jnp.bool_
    with pytest.raises(KeyError, match="N"):
        zeros(Outer, {"B": 2})


@pytest.mark.further
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_the_state_is_as_annotated_after_decoding(bare_lm: LanguageModel, engine: Engine, draft_tokens: int) -> None:
    own = drafting_engine(bare_lm, draft_tokens) if draft_tokens else engine
    params = [SamplingParams(temperature=100.0, max_new_tokens=40, seed=seed) for seed in range(16)]
    assert any(result.stats.blocks for result in own.generate([[1, 2]] * 16, params))
    state = engine_state(own).decode
    sizes = {"B": 2, "C": state.cache.tokens.shape[1], "N": 3, "M": 4, "E": 2, "D": draft_tokens}
    sizes["Q"] = own.config.max_queued

    def same(annotated: Any, array: jax.Array) -> bool:
        return (annotated.shape, annotated.dtype) == (array.shape, array.dtype)

    for kind, tree in ((SequenceState, state.sequence), (RequestArrays, state.request)):
        assert jax.tree.all(jax.tree.map(same, shapes(kind, sizes), tree))
    other = shapes(SequenceState, sizes | {"N": 4})
    assert not jax.tree.all(jax.tree.map(same, other, state.sequence)), "negative control"


@pytest.mark.further
def test_a_decode_step_is_few_frames_from_its_caller(bare_lm: LanguageModel) -> None:
    """Check the number of the project's frames from `Engine.generate` to the forward pass."""
    depths: list[int] = []
    forward = decode_step.forward

    def counted(*args: Any) -> Any:
        ours = [frame.function for frame in inspect.stack() if frame.filename.startswith(str(ROOT / "infer"))]
        depths.append(len(ours))
        return forward(*args)

    with patched(forward=counted):
        Engine(bare_lm, max_length=128, max_batch=1, separator_ids=SEPARATOR).generate([[1]])
    assert depths and max(depths) <= 12, depths
