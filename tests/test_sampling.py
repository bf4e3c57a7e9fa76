from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax import LanguageModel
from aspd_jax.model.cache import OTHER, PLAIN_TEXT, TITLE_TEXT
from infer import Engine, SamplingParams
from infer.feed import Lanes, lanes_of, plan
from infer.prefill import start
from infer.request import Job
from infer.sampling import lane_keys, penalise_repetition, restrict, sample
from infer.state import TITLE, DecodeState, Protocol, Request
from tests.test_engine import SEPARATOR


@pytest.fixture(scope="module")
def protocol(bare_lm: LanguageModel) -> Protocol:
    return Engine(bare_lm, separator_ids=SEPARATOR).protocol


def state_for(lm: LanguageModel, protocol: Protocol, *params: SamplingParams) -> DecodeState:
    jobs = [Job((1, 2), each, "adaptive", 50, seed=each.seed or 0) for each in params]
    return start(lm, protocol, jobs)


def kept_by_definition(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Top-k, then the nucleus of what is left, then min-p: one token at a time, in float64."""
    order = np.argsort(-logits, kind="stable")
    order = order[: params.top_k] if params.top_k else order
    weights = np.exp(logits[order].astype(np.float64) - logits[order[0]])
    shares = weights / weights.sum()
    kept, total = [], 0.0
    for token, share in zip(order, shares, strict=True):
        if kept and total >= params.top_p:
            break
        kept.append((int(token), share))
        total += share
    return {token for token, share in kept if share >= params.min_p * kept[0][1]}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_restrict_keeps_what_the_definitions_keep(
    bare_lm: LanguageModel, protocol: Protocol, seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    asked = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    state = state_for(bare_lm, protocol, asked, SamplingParams())
    logits = np.random.default_rng(seed).standard_normal((4, 24)).astype(np.float32) * 2
    of_lanes = Request(*(field[jnp.array([0, 0, 0, 1])] for field in state.request))
    out = np.asarray(restrict(jnp.asarray(logits), of_lanes))
    for lane in range(3):
        assert set(np.flatnonzero(np.isfinite(out[lane])).tolist()) == kept_by_definition(logits[lane], asked)
    np.testing.assert_array_equal(out[3], logits[3])  # a neighbour without limits keeps everything


def test_repetition_penalty_sees_what_the_row_sees(bare_lm: LanguageModel, protocol: Protocol) -> None:
    """Tokens of the prompt and of siblings do not count; tokens before the block and of the branch itself do."""
    state = state_for(bare_lm, protocol, SamplingParams(repetition_penalty=2.0))
    #    prompt, serial, a title, heads of branches 1 and 2, and these; the last of each is looked from
    tokens = [1, 2, 3, 4, 11, 9, 10, 5, 6, 7, 8]
    kind = [OTHER] * 2 + [PLAIN_TEXT] * 2 + [TITLE_TEXT] + [OTHER] * 2 + [PLAIN_TEXT] * 4
    blocks = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    branch = [0, 0, 0, 0, 0, 1, 2, 1, 2, 1, 2]
    positions = [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7]
    cache = state.cache
    put = [np.array(a) for a in (cache.tokens, cache.kind, *cache.layout)]
    for array, values in zip(put, (tokens, kind, positions, [1] * 11, blocks, branch), strict=True):
        array[0, :11] = values
    layout = type(cache.layout)(*put[2:])
    cache = cache._replace(tokens=put[0], kind=put[1], layout=layout, length=jnp.array([11]))
    state = state._replace(cache=cache)
    looking = type(layout)(*(jnp.asarray(field[0, 9:11]) for field in layout))
    lanes = Lanes(jnp.array([0, 0]), jnp.array([1, 2]), looking)
    of_lanes = Request(*(field[lanes.row] for field in state.request))
    logits = jnp.where(jnp.arange(24) % 2 == 0, 1.0, -1.0) * jnp.ones((2, 24))
    out = np.asarray(penalise_repetition(logits, of_lanes, state, protocol, lanes))
    for lane, seen in enumerate([{3, 4, 5, 7}, {3, 4, 6, 8}]):
        expected = [(v / 2 if v > 0 else v * 2) if t in seen else v for t, v in enumerate(np.asarray(logits)[lane])]
        np.testing.assert_allclose(out[lane], expected)
    in_title = state._replace(phase=jnp.full_like(state.phase, TITLE))
    out = np.asarray(penalise_repetition(logits, of_lanes, in_title, protocol, lanes))
    np.testing.assert_allclose(out[:, 11], -2.0)
    np.testing.assert_array_equal(np.delete(out, 11, 1), np.delete(logits, 11, 1))


def test_samples_follow_the_distribution(bare_lm: LanguageModel, protocol: Protocol) -> None:
    params = SamplingParams(temperature=0.7)
    state = state_for(bare_lm, protocol, params)
    lanes = lanes_of(plan(state, protocol, 1), None)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 24)), jnp.float32)

    def draw(place: Any) -> Any:
        return sample(logits, state._replace(sampled=place[None]), protocol, lanes)[0]

    drawn = np.asarray(jax.vmap(draw)(jnp.arange(20_000)))
    expected = np.asarray(jax.nn.softmax(logits[0] / 0.7))
    counts = np.bincount(drawn, minlength=24)
    chi_square = float(((counts - 20_000 * expected) ** 2 / (20_000 * expected)).sum())
    assert chi_square < 60  # 23 degrees of freedom: exceeded once in 30,000 draws of this test
    flat = np.full(24, 1 / 24)
    assert float(((counts - 20_000 * flat) ** 2 / (20_000 * flat)).sum()) > 1000, "negative control"


def test_temperature_zero_takes_the_likeliest_beside_sampled_neighbours(
    bare_lm: LanguageModel, protocol: Protocol
) -> None:
    state = state_for(bare_lm, protocol, SamplingParams(), SamplingParams(temperature=50.0))
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((2, 24)), jnp.float32)
    lanes = lanes_of(plan(state, protocol, 1), None)
    picks = [np.asarray(sample(logits, state._replace(sampled=jnp.array([i, i])), protocol, lanes)) for i in range(30)]
    assert {int(pick[0]) for pick in picks} == {int(np.argmax(logits[0]))}
    assert len({int(pick[1]) for pick in picks}) > 5


def test_every_place_has_its_own_stream(bare_lm: LanguageModel, protocol: Protocol) -> None:
    params = [replace(SamplingParams(temperature=1.0), seed=seed) for seed in (1, 2)]
    state = state_for(bare_lm, protocol, *params)
    keys = set()
    lanes = jnp.array([[0, 1, 2], [0, 1, 2]])
    for block in (1, 2):
        for place in (0, 1):
            now = state._replace(
                block=jnp.full_like(state.block, block),
                sampled=jnp.full_like(state.sampled, 10 * block + place),
                branch_sampled=jnp.full_like(state.branch_sampled, place),
            )
            of_feed = lanes_of(plan(now, protocol, 3)._replace(lane=lanes), None)
            data = np.asarray(jax.random.key_data(lane_keys(now, of_feed)))
            keys |= {tuple(key) for key in data.reshape(-1, 2).tolist()}
    assert len(keys) == 2 * 2 * 2 * 3
