from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aspd_jax import LanguageModel
from aspd_jax.errors import RequestError
from aspd_jax.layout import Layout
from aspd_jax.model import cpu
from aspd_jax.model.cache import OTHER, PLAIN_TEXT, TITLE_TEXT, Bucket
from aspd_jax.model.cpu import LARGEST
from infer import Engine, SamplingParams
from infer.decode.inputs import Lanes, next_inputs, plan_step
from infer.decode.sampling import (
    GROUP,
    count_by_product,
    count_by_scatter,
    draw_token,
    lane_keys,
    penalise,
    restrict,
    sample,
    select,
)
from infer.decode.state import A_TITLE, DecodeState, EngineConfig, RequestArrays
from infer.request import Request
from tests.conftest import after_prompts, laid_out
from tests.helpers.answers import SEPARATOR


@pytest.fixture(scope="module")
def config(bare_lm: LanguageModel) -> EngineConfig:
    return Engine(bare_lm, separator_ids=SEPARATOR).config


def state_for(lm: LanguageModel, config: EngineConfig, *params: SamplingParams) -> DecodeState:
    jobs = [Request((1, 2), each, "adaptive", 50, seed=each.seed or 0) for each in params]
    return after_prompts(lm, config, jobs)


@partial(jax.jit, static_argnames=("config", "bucket"))
def next_lanes(state: DecodeState, config: EngineConfig, bucket: Bucket) -> Lanes:
    return next_inputs(state, plan_step(state, config, bucket), config, bucket, drafting=False).lanes


def serial_lanes(state: DecodeState, config: EngineConfig) -> Lanes:
    """Return the lanes of the next step, in which every sequence feeds a serial token."""
    rows, capacity = state.cache.tokens.shape
    lanes = next_lanes(state, config, Bucket(rows, rows, 1, capacity))
    assert lanes.row.tolist() == list(range(rows)) and not lanes.branch.any()
    return lanes


jitted_sample = jax.jit(sample, static_argnames="config")
jitted_penalise = jax.jit(penalise, static_argnames="config")


def changed(state: DecodeState, **fields: Any) -> DecodeState:
    """Return a state with other fields of its cursors."""
    sequence = state.sequence
    return state._replace(sequence=sequence._replace(cursor=sequence.cursor._replace(**fields)))


def after(state: DecodeState, sampled: jax.Array) -> DecodeState:
    """Return a state whose segments have sampled these numbers of tokens, int32 [B]."""
    segments = state.sequence.segments
    segments = segments._replace(sampled=jnp.broadcast_to(sampled[:, None], segments.sampled.shape))
    return state._replace(sequence=state.sequence._replace(segments=segments))


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


JITTED_RESTRICT = jax.jit(restrict)


@pytest.mark.further
@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_restrict_keeps_what_the_definitions_keep(
    bare_lm: LanguageModel, config: EngineConfig, seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    asked = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    jobs = [Request((1, 2), each, "adaptive", 50, 0) for each in (asked, SamplingParams())]
    admitted = laid_out(bare_lm, config, jobs).request
    logits = np.random.default_rng(seed).standard_normal((4, 24)).astype(np.float32) * 2
    of_lanes = RequestArrays(*(field[jnp.array([0, 0, 0, 1])] for field in admitted))
    out = np.asarray(JITTED_RESTRICT(logits, of_lanes))
    for lane in range(3):
        assert set(np.flatnonzero(np.isfinite(out[lane])).tolist()) == kept_by_definition(logits[lane], asked)
    np.testing.assert_array_equal(out[3], logits[3])  # a neighbour without limits keeps everything


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the kept tokens, whole groups of equal logits, bool [V]; in float64."""
    smallest = np.sort(logits)[::-1][(top_k or logits.size) - 1 :][:1]
    kept = np.isfinite(logits) & (logits >= (smallest[0] if smallest.size else -np.inf))
    weights = np.where(kept, np.exp(logits.astype(np.float64) - logits.max()), 0.0)
    shares = weights / weights.sum()
    if top_p < 1:
        values = np.unique(logits[kept])[::-1]
        reached = np.cumsum([shares[logits == value].sum() for value in values]) >= top_p
        kept &= logits >= (values[np.argmax(reached)] if reached.any() else -np.inf)
    return kept & (shares >= min_p * shares.max())


def limits(top_k: list[int], top_p: list[float], min_p: list[float]) -> RequestArrays:
    """Return the parameters of lanes that differ in these three."""
    lanes = len(top_k)
    return RequestArrays(
        seed=jnp.zeros(lanes, jnp.uint32),
        temperature=jnp.ones(lanes),
        top_k=jnp.array(top_k, jnp.int32),
        top_p=jnp.array(top_p, jnp.float32),
        min_p=jnp.array(min_p, jnp.float32),
        repetition_penalty=jnp.ones(lanes),
        frequency_penalty=jnp.zeros(lanes),
        presence_penalty=jnp.zeros(lanes),
        biased=jnp.zeros(lanes, bool),
        drafts_blocks=jnp.zeros(lanes, bool),
        min_tokens=jnp.zeros(lanes, jnp.int32),
        max_branch_tokens=jnp.ones(lanes, jnp.int32),
        adapter=jnp.full(lanes, -1),
        script=jnp.zeros((lanes, 1), jnp.int32),
        script_end=jnp.zeros((lanes, 1), jnp.int32),
    )


VOCABULARY = 24
LOGITS = st.one_of(
    st.floats(-8, 8, width=32, allow_subnormal=False),
    st.sampled_from([-3.0, -1.0, -0.0, 0.0, 1.0, 2.0]),
    st.sampled_from([-np.inf, -3e38, -1e-37, 1e-37, 3e38]),
)


@pytest.mark.further
@settings(max_examples=300)
@given(
    logits=st.lists(LOGITS, min_size=VOCABULARY, max_size=VOCABULARY),
    top_k=st.one_of(st.sampled_from([0, 1, VOCABULARY, VOCABULARY + 1]), st.integers(0, VOCABULARY)),
    top_p=st.one_of(st.sampled_from([1e-50, 0.5, 1.0]), st.floats(0, 1, exclude_min=True)),
    min_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-30, 1)),  # less is less than float32 tells from 0
)
def test_restrict_keeps_what_sorting_keeps(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    """Check equality where the shares differ from the limits by more than the rounding of float32."""
    values = np.array(logits, np.float32)
    assume(np.isfinite(values).any())
    fewest = kept_by_sorting(values, top_k, top_p - 1e-6, min(1.0, min_p * 1.00001))
    most = kept_by_sorting(values, top_k, top_p + 1e-6, min_p / 1.00001)
    assume((fewest == most).all())
    request = limits([top_k], [top_p], [min_p])
    out = np.asarray(JITTED_RESTRICT(values[None], request))[0]
    np.testing.assert_array_equal(out, np.where(most, values, -np.inf))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("plain", [False, True], ids=["cpu", "plain"])
def test_limits_of_a_large_vocabulary(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check lanes that need few logits, many logits, equal logits or no limit; a lane by itself keeps the same."""
    monkeypatch.setattr(cpu, "PLAIN", plain)
    random = np.random.default_rng(3)
    few, many = random.standard_normal((2, 1000)).astype(np.float32) * np.float32([[5], [0.1]])
    lanes = np.stack([few, few, many, many, np.round(few), np.round(few), few])
    top_k, top_p = [20, 0, 3 * LARGEST, 0, 10, 0, 0], [0.8, 0.9, 1.0, 0.9, 1.0, 0.5, 1.0]
    restricted = jax.jit(lambda *arguments: restrict(*arguments))
    out = np.asarray(restricted(lanes, limits(top_k, top_p, [0.0] * len(lanes))))
    for lane, kept, k, p in zip(lanes, out, top_k, top_p, strict=True):
        np.testing.assert_array_equal(np.isfinite(kept), kept_by_sorting(lane, k, p, 0.0))
        np.testing.assert_array_equal(np.asarray(restricted(lane[None], limits([k], [p], [0.0])))[0], kept)
    sizes = np.isfinite(out).sum(axis=-1)
    assert (sizes[[0, 1]] < LARGEST).all() and (sizes[[2, 3]] > LARGEST).all() and sizes[4] > 10 and sizes[6] == 1000


@pytest.mark.further
@settings(max_examples=60)
@given(
    slots=st.lists(st.tuples(st.integers(0, 299), st.booleans()), min_size=6, max_size=6),
    size=st.sampled_from([256, 299, 300]),
)
def test_tokens_are_counted_as_they_are_scattered(slots: list[tuple[int, bool]], size: int) -> None:
    """Check two lanes of three slots, a vocabulary that is no multiple of a group, and ids beyond it."""
    tokens, seen = (np.array(field).reshape(2, 3) for field in zip(*slots, strict=True))
    expected = np.array(
        [[(lane[mask] == token).sum() for token in range(size)] for lane, mask in zip(tokens, seen, strict=True)]
    )
    for form in (count_by_product, count_by_scatter):
        np.testing.assert_array_equal(jax.jit(form, static_argnums=0)(size, tokens, seen), expected)


@pytest.mark.further
def test_nothing_is_sorted(bare_lm: LanguageModel, config: EngineConfig) -> None:
    """Check that programs for TPU and GPU have no sort, and those for TPU no scatter, whose indices XLA sorts."""
    asked = SamplingParams(
        temperature=1.0, top_k=3, top_p=0.9, repetition_penalty=1.1, frequency_penalty=1.0, min_tokens=4
    )
    state = state_for(bare_lm, config, asked)
    lanes, logits = serial_lanes(state, config), jnp.zeros((1, 24))

    def sampled(logits: jax.Array, state: DecodeState, lanes: Lanes) -> jax.Array:
        return sample(logits, state, config, lanes)

    def operations(platform: str) -> set[str]:
        text = jax.jit(sampled).trace(logits, state, lanes).lower(lowering_platforms=(platform,)).as_text()
        return {name for name in ("scatter", "sort", "top_k") if f"hlo.{name}" in text}

    assert operations("tpu") == set() and operations("cuda") == {"scatter"}
    assert operations("cpu") == {"scatter", "top_k"}, "negative control"


def in_a_block(state: DecodeState) -> tuple[DecodeState, Lanes]:
    """Return a state of one row with a block of two branches, and a lane at the end of each."""
    #    prompt, serial, a title, heads of branches 1 and 2, and their texts; 5 and 6 stand twice in theirs
    tokens = [1, 2, 3, 4, 11, 9, 10, 5, 6, 5, 6, 7, 8]
    kind = [OTHER] * 2 + [PLAIN_TEXT] * 2 + [TITLE_TEXT] + [OTHER] * 2 + [PLAIN_TEXT] * 6
    blocks = [0] * 5 + [1] * 8
    branch = [0] * 5 + [1, 2] * 4
    positions = [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7, 8, 8]
    cache, size = state.cache, len(tokens)
    put = [np.array(a) for a in (cache.tokens, cache.kind, *cache.layout)]
    for array, values in zip(put, (tokens, kind, positions, [1] * size, blocks, branch), strict=True):
        array[0, :size] = values
    layout = Layout(*(jnp.asarray(field) for field in put[2:]))
    cache = cache._replace(
        tokens=jnp.asarray(put[0]), kind=jnp.asarray(put[1]), layout=layout, length=jnp.array([size])
    )
    looking = Layout(*(field[0, size - 2 : size] for field in layout))
    return state._replace(cache=cache), Lanes(jnp.array([0, 0]), jnp.array([1, 2]), looking)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    repetition=st.sampled_from([1.0, 2.0, 0.5]),
    frequency=st.sampled_from([0.0, 1.5, -0.5]),
    presence=st.sampled_from([0.0, 0.75, -2.0]),
)
def test_penalties_see_what_the_row_sees(
    bare_lm: LanguageModel, config: EngineConfig, seed: int, repetition: float, frequency: float, presence: float
) -> None:
    """Check that tokens before the block and of the branch count, and tokens of the prompt and of siblings do not."""
    asked = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, max_new_tokens=50
    )
    state, lanes = in_a_block(state_for(bare_lm, config, asked))
    logits = np.random.default_rng(seed).standard_normal((2, 24)).astype(np.float32)
    logits[0, 3] = -np.inf

    def expected(counts: list[dict[int, int]]) -> np.ndarray:
        out = logits.astype(np.float64)
        for lane, of_lane in enumerate(counts):
            for token, count in of_lane.items():
                value = out[lane, token]
                value = value / repetition if value > 0 else value * repetition
                out[lane, token] = value - frequency * count - presence
        return out

    of_lanes = RequestArrays(*(field[lanes.row] for field in state.request))
    out = np.asarray(jitted_penalise(jnp.asarray(logits), of_lanes, state, config, lanes))
    in_text = [{3: 1, 4: 1, 5: 2, 7: 1}, {3: 1, 4: 1, 6: 2, 8: 1}]
    np.testing.assert_allclose(out, expected(in_text), rtol=1e-6, atol=1e-6)
    in_title = changed(state, writes=jnp.full_like(state.sequence.cursor.writes, A_TITLE))
    out = np.asarray(jitted_penalise(jnp.asarray(logits), of_lanes, in_title, config, lanes))
    np.testing.assert_allclose(out, expected([{11: 1}, {11: 1}]), rtol=1e-6, atol=1e-6)
    if (repetition, frequency, presence) == (1.0, 0.0, 0.0):
        np.testing.assert_array_equal(out, logits, "bit for bit")


@pytest.mark.further
def test_bias_and_least_length_keep_to_the_grammar(bare_lm: LanguageModel, config: EngineConfig) -> None:
    """Check logits in which token 0 ends the text; a lane without bias keeps its logits."""
    asked = SamplingParams(logit_bias={5: 100, 6: 100, 9: -100}, min_tokens=6)
    state, block = in_a_block(state_for(bare_lm, config, asked, SamplingParams()))
    logits = np.random.default_rng(3).standard_normal((2, 24)).astype(np.float32)
    logits[:, 0], logits[:, 9], logits[0, 5] = 50.0, 40.0, -np.inf
    serial = block._replace(branch=jnp.zeros(2, jnp.int32))
    neighbour = serial._replace(row=jnp.array([0, 1]))

    def picks(lanes: Lanes, logits: np.ndarray = logits) -> list[int]:
        return jitted_sample(jnp.asarray(logits), state, config, lanes).tolist()

    assert picks(serial) == [6, 5], "the grammar forbids 5 in the first lane"
    assert picks(neighbour) == [6, 0]
    free = state._replace(request=state.request._replace(biased=jnp.zeros(2, bool)))
    assert jitted_sample(jnp.asarray(logits), free, config, serial).tolist() == [9, 9], "end of text is held back"
    assert jitted_sample(jnp.asarray(logits), free, config, block).tolist() == [0, 0], "the end of a branch is not"
    long_enough = free._replace(request=free.request._replace(min_tokens=jnp.array([5, 0])))
    assert jitted_sample(jnp.asarray(logits), long_enough, config, serial).tolist() == [0, 0]
    only_end = np.where(np.arange(24) == 0, 1.0, -np.inf).astype(np.float32) * np.ones((2, 1), np.float32)
    assert picks(serial, only_end) == [0, 0], "the grammar leaves nothing else"


def test_answers_follow_the_definitions(bare_lm: LanguageModel, engine: Engine) -> None:
    """Compare the engine with full passes and NumPy, token by token; plain answers do not change."""
    prompt, size = [1, 2, 3], 24
    asked = [
        SamplingParams(max_new_tokens=size),
        SamplingParams(max_new_tokens=size, frequency_penalty=1.5, presence_penalty=0.5, logit_bias={4: 2.0, 7: -3.0}),
        SamplingParams(max_new_tokens=size, logit_bias={0: 100.0}, min_tokens=6),
        SamplingParams(max_new_tokens=size, logit_bias={11: 100.0, 0: -100.0}),
        SamplingParams(max_new_tokens=size, presence_penalty=-2.0, repetition_penalty=1.2, logit_bias={0: -100.0}),
    ]

    @jax.jit
    def after(tokens: jax.Array, place: jax.Array) -> jax.Array:
        layout = Layout(jnp.arange(32)[None], jnp.ones((1, 32), jnp.int32), *[jnp.zeros((1, 32), jnp.int32)] * 2)
        return bare_lm.model.apply({"params": bare_lm.params}, tokens[None], layout)[0, place]  # type: ignore[index]

    def expected(params: SamplingParams) -> list[int]:
        said: list[int] = []
        while len(said) < size and 0 not in said:
            tokens = np.zeros(32, np.int32)
            tokens[: len(prompt) + len(said)] = prompt + said
            logits = np.asarray(after(tokens, len(prompt) + len(said) - 1), np.float64)[:24]
            logits[17:23] = -np.inf
            if len(said) < params.min_tokens:
                logits[0] = -np.inf
            for token, bias in params.logit_bias.items():
                logits[token] += bias
            for token in set(said):
                value = logits[token] / params.repetition_penalty ** np.sign(logits[token])
                logits[token] = value - params.frequency_penalty * said.count(token) - params.presence_penalty
            said.append(int(np.argmax(logits)))
        return said

    said = [result.token_ids for result in engine.generate([prompt] * len(asked), asked, "serial")]
    assert said == list(map(expected, asked))
    assert said[2][-1] == 0 and len(said[2]) == 7 and said[3] == [11] * size
    assert len({tuple(tokens) for tokens in said}) == len(said), "negative control: every parameter changes the answer"


@pytest.mark.further
def test_a_bias_chooses_the_structure(engine: Engine) -> None:
    """Check a bias on the id of a tag: a block wherever the grammar permits one, or none at all."""
    start = engine.config.special.title_start
    params = [SamplingParams(max_new_tokens=60, seed=3, temperature=1.0, logit_bias={start: b}) for b in (100, -100)]
    forks, serial = engine.generate([[1, 2, 3]] * 2, params)
    assert forks.stats.blocks > 0 and forks.token_ids[0] == start
    assert serial.stats.blocks == 0
    named = [replace(one, logit_bias={}, fork_bias=bias) for one, bias in zip(params, (100, -100), strict=True)]
    named += [replace(params[0], fork_bias=-100), replace(params[0], logit_bias={})]  # the two biases add up
    again = [result.token_ids for result in engine.generate([[1, 2, 3]] * 4, named)]
    assert again[:2] == [forks.token_ids, serial.token_ids] and again[2] == again[3]
    short = [SamplingParams(temperature=1.0, seed=seed, logit_bias={0: 3.0, start: 3.0}) for seed in range(6)]
    long = [replace(params, min_tokens=12) for params in short]
    sizes = [
        [result.stats.content_tokens for result in engine.generate([[1, 2, 3]] * 6, params)] for params in (short, long)
    ]
    assert min(sizes[0]) < 12 <= min(sizes[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"min_tokens": 300},
        {"min_tokens": -1},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {3: 101}},
        {"logit_bias": [3]},
        {"logit_bias": {24: 1.0}},
        {"regex": ""},
        {"grammar": ""},
        {"choices": ("a", "")},
        {"regex": "a", "grammar": "start: /a/"},
    ],
)
def test_values_out_of_range_are_refused_by_name(engine: Engine, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^(request 0: )?{next(iter(fields))}"):
        engine.generate([[1]], SamplingParams(**fields))


def test_samples_follow_the_distribution(bare_lm: LanguageModel, config: EngineConfig) -> None:
    params = SamplingParams(temperature=0.7)
    state = state_for(bare_lm, config, params)
    lanes = serial_lanes(state, config)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 24)), jnp.float32)

    def draw(place: Any) -> Any:
        return sample(logits, after(state, place[None]), config, lanes)[0]

    drawn = np.asarray(jax.vmap(draw)(jnp.arange(20_000)))
    expected = np.asarray(jax.nn.softmax(logits[0] / 0.7))
    counts = np.bincount(drawn, minlength=24)
    chi_square = float(((counts - 20_000 * expected) ** 2 / (20_000 * expected)).sum())
    assert chi_square < 60  # 23 degrees of freedom: exceeded once in 30,000 draws of this test
    flat = np.full(24, 1 / 24)
    assert float(((counts - 20_000 * flat) ** 2 / (20_000 * flat)).sum()) > 1000, "negative control"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("size", [3, GROUP, 5 * GROUP + 7])
def test_tokens_are_drawn_by_their_share(size: int) -> None:
    """Check small and large vocabularies by the chi-square test; excluded tokens are never drawn."""
    logits = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    logits[1::3] = -np.inf
    count = 100 * size + 10_000
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(7)))(jnp.arange(count))
    drawn = jax.jit(jax.vmap(lambda key: draw_token(logits[None], key[None])[0]))(keys)
    counts, expected = np.bincount(drawn, minlength=size), count * np.asarray(jax.nn.softmax(logits))
    assert counts.size == size and not counts[1::3].any()
    allowed = expected > 0

    def chi_square(expected: np.ndarray) -> float:
        return float(((counts - expected)[allowed] ** 2 / expected[allowed]).sum())

    degrees = int(allowed.sum()) - 1
    limit = degrees + 5 * (2 * degrees) ** 0.5 + 10
    assert chi_square(expected) < limit
    assert chi_square(np.full(size, count / size)) > limit, "negative control"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-24])
def test_excluded_tokens_are_not_drawn_at_the_limits(number: float) -> None:
    """Check random numbers at which rounding decides: no weight at both ends, and weights that sums lose."""
    weight = np.zeros((3, 300), np.float32)
    weight[0, 100:200] = 1e-3
    weight[1, [5, 7]] = 1, 1e-30
    weight[2, 299] = 1
    picked = np.asarray(jax.jit(select)(weight, jnp.full(3, number, jnp.float32)))
    assert (np.take_along_axis(weight, picked[:, None], 1) > 0).all()


@pytest.mark.further
def test_temperature_zero_takes_the_likeliest_beside_sampled_neighbours(
    bare_lm: LanguageModel, config: EngineConfig
) -> None:
    state = state_for(bare_lm, config, SamplingParams(), SamplingParams(temperature=50.0))
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((2, 24)), jnp.float32)
    lanes = serial_lanes(state, config)
    picks = [np.asarray(jitted_sample(logits, after(state, jnp.array([i, i])), config, lanes)) for i in range(30)]
    assert {int(pick[0]) for pick in picks} == {int(np.argmax(logits[0]))}
    assert len({int(pick[1]) for pick in picks}) > 5


def test_a_temperature_next_to_zero_takes_the_likeliest(bare_lm: LanguageModel, config: EngineConfig) -> None:
    """Check a temperature by which logits would be infinite."""
    state = state_for(bare_lm, config, SamplingParams(temperature=1e-37, top_p=0.9))
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((1, 24)) * 20, jnp.float32)
    assert jitted_sample(logits, state, config, serial_lanes(state, config)).tolist() == [int(jnp.argmax(logits))]


@pytest.mark.further
def test_every_place_has_its_own_stream(bare_lm: LanguageModel, config: EngineConfig) -> None:
    params = [replace(SamplingParams(temperature=1.0), seed=seed) for seed in (1, 2)]
    state = state_for(bare_lm, config, *params)
    keys = set()
    nowhere = Layout(*[jnp.zeros(6, jnp.int32)] * 4)
    lanes = Lanes(jnp.array([0, 0, 0, 1, 1, 1]), jnp.array([0, 1, 2] * 2), nowhere)
    s = state.sequence
    for block in (1, 2):
        for place in (0, 1):
            sampled = jnp.full_like(s.segments.sampled, place).at[:, 0].set(10 * block + place)
            now = changed(state, block=jnp.full_like(s.cursor.block, block))
            now = now._replace(sequence=now.sequence._replace(segments=s.segments._replace(sampled=sampled)))
            data = np.asarray(jax.random.key_data(lane_keys(now, lanes)))
            keys |= {tuple(key) for key in data.reshape(-1, 2).tolist()}
    assert len(keys) == 2 * 2 * 2 * 3
