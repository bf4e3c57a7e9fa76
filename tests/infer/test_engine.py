"""Requests: batches, limits, streams, stop strings, devices (protocol, sections 5 and 6), each with a control."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from aspd_jax import LanguageModel, SpecialTokens, load_model
from aspd_jax.errors import RequestError
from aspd_jax.model.cache import Bucket
from aspd_jax.sharding import make_mesh
from infer import Engine, SamplingParams
from infer.decode.decode_step import summarise
from infer.decode.inputs import widest
from infer.decode.state import PROMPT, RUNNING, DecodeState
from infer.request import Request
from infer.scheduling.buckets import Buckets
from tests.conftest import (
    SIZES,
    after_prompts,
    decided,
    laid_out,
    one_step,
    shared,
    tiny_config,
    with_one_program,
    write_checkpoint,
)
from tests.helpers.answers import EXAMPLE, SEPARATOR, linearise, same
from tests.helpers.engine_state import engine_state
from tests.helpers.replay import replay


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    random = np.random.default_rng(5)
    prompts = [random.integers(1, 15, size).tolist() for size in (1, 7, 3, 20, 2, 11, 5)]
    params = [
        SamplingParams(
            temperature=(0.0, 20.0)[number % 3 != 0],
            top_k=(0, 12)[number % 3 == 1],
            top_p=(1.0, 0.9)[number % 3 == 2],
            repetition_penalty=(1.0, 1.3)[number % 4 == 3],
            frequency_penalty=(0.0, 0.8)[number % 4 == 1],
            logit_bias=({}, {4: 1.5, 0: -2.0})[number % 4 == 2],
            min_tokens=number,
            max_new_tokens=60 + 15 * number,
            seed=number,
        )
        for number in range(len(prompts))
    ]
    return prompts, params, ["adaptive", "adaptive", "serial", "adaptive", "adaptive", "adaptive", "adaptive"]


def test_output_is_the_same_alone_in_a_batch_and_afterwards(engine: Engine) -> None:
    prompts, params, modes = mixed_requests()
    together = engine.generate(prompts, params, modes)
    backwards = engine.generate(prompts[::-1], params[::-1], modes[::-1])[::-1]
    for number, result in enumerate(together):
        alone = engine.generate([prompts[number]], params[number], modes[number])[0]
        assert same(alone, result)
        assert same(alone, backwards[number])
    assert sum(result.stats.blocks for result in together) >= 2
    other = engine.generate([prompts[1]], replace(params[1], seed=99), modes[1])[0]
    assert other.token_ids != together[1].token_ids, "negative control: another seed gives another answer"


def assert_same_state(state: DecodeState, expected: DecodeState) -> None:
    """Check that all that the host can read is equal; keys and values may be rounded differently."""
    states = (state, expected)
    read = (jax.tree.map(np.asarray, (of.sequence, of.cache._replace(layers=()))) for of in states)
    jax.tree.map(np.testing.assert_array_equal, *read)
    for one, other in zip(state.cache.layers, expected.cache.layers, strict=True):
        np.testing.assert_allclose(one.key, other.key, atol=1e-4)
        np.testing.assert_allclose(one.value, other.value, atol=1e-4)


@pytest.mark.further
def test_a_fork_beside_branches_is_one_step(bare_lm: LanguageModel) -> None:
    """Check that sequences feed long heads in a step in which others feed tokens of branches."""
    own = Engine(bare_lm, max_length=256, max_branches=3, max_title_tokens=6, separator_ids=SEPARATOR)
    jobs = [Request((1, 2, 3), SamplingParams(temperature=100.0), "adaptive", 150, seed) for seed in range(22, 26)]
    state, whole = after_prompts(bare_lm, own.config, jobs), Bucket(4, 128, 32, 256)
    while [((summary := summarise(state, own.config).read()).tokens > few).sum() for few in (1, 16)] != [3, 1]:
        state = decided(bare_lm, own.config, one_step(bare_lm.params, state, own.config, whole))
        assert (state.sequence.cursor.finish == RUNNING).any(), "there was no such step"
    best, _, _ = Buckets(own.config, 4, 256, widest(own.config)).select(summary, True)
    close = Bucket(
        4, int(summary.tokens.sum()), int(summary.tokens.max()), int((summary.length + summary.tokens).max())
    )
    one_longer = close._replace(per_row=4, longest=close.per_row)
    ways = (whole, best, close, one_longer, close._replace(per_row=4), close._replace(rows=2))
    plain, *alike, narrow, few = (one_step(bare_lm.params, state, own.config, way) for way in ways)
    for state_after in alike:
        assert_same_state(state_after, plain)
    stood_still = plain.cache.length != narrow.cache.length
    np.testing.assert_array_equal(stood_still, summary.tokens > 4)
    np.testing.assert_array_equal(narrow.cache.length[stood_still], state.cache.length[stood_still])
    np.testing.assert_array_equal(few.cache.length, [*plain.cache.length[:2], *state.cache.length[2:]])


@pytest.mark.further
def test_tokens_that_do_not_fit_a_step_wait_and_no_answer_changes(bare_lm: LanguageModel) -> None:
    """Check prompts in pieces and alone, branches, forks and merges, in steps that are too small for some of them."""
    own = Engine(bare_lm, max_length=256, max_branches=3, max_title_tokens=6, separator_ids=SEPARATOR)
    prompts = [(1, 2, 3), (4,), tuple(range(1, 15)) * 2, (5, 6, 7, 8, 9)]
    hot = SamplingParams(temperature=100.0)
    jobs = [Request(prompt, hot, "adaptive", 100, 10 + seed) for seed, prompt in enumerate(prompts)]

    def decoded(ways: list[Bucket]) -> tuple[DecodeState, int]:
        state, steps = laid_out(bare_lm, own.config, jobs), 0
        while summarise(state, own.config).read().tokens.any():
            state = one_step(bare_lm.params, state, own.config, ways[steps % len(ways)])
            state = decided(bare_lm, own.config, state)
            steps += 1
            assert steps < 2000
        return state, steps

    whole = Bucket(4, 128, 32, 256)
    expected, fewest = decoded([whole])
    assert (expected.sequence.cursor.block > 0).sum() >= 2
    waiting, steps = decoded(
        [Bucket(4, 4, 1, 256), Bucket(4, 8, 4, 256), Bucket(4, 32, 4, 256, 32), Bucket(2, 8, 8, 256)]
    )
    assert steps > 1.2 * fewest, "negative control: something had to wait"
    assert_same_state(waiting, expected)
    np.testing.assert_array_equal(waiting.sequence.cursor.prompt_length, [len(prompt) for prompt in prompts])
    assert not (waiting.sequence.cursor.phase == PROMPT).any()


@pytest.mark.further
def test_prompts_of_all_lengths_beside_branches(bare_lm: LanguageModel) -> None:
    """Check requests that come while others decode: every answer equals that of a new engine."""
    random = np.random.default_rng(7)
    own, alone = (
        Engine(bare_lm, max_length=512, max_batch=rows, max_branches=4, max_title_tokens=3, separator_ids=SEPARATOR)
        for rows in (5, 1)
    )
    alone = with_one_program(alone)
    sizes = [2, 150, 1, 64, 9, 65, 330, 33, 3, 128, 17, 200]
    prompts = [random.integers(1, 15, size).tolist() for size in sizes]
    params = [SamplingParams(temperature=100.0, max_new_tokens=60, seed=4 + seed) for seed in range(len(sizes))]
    left, handles, beside = [*zip(prompts, params, strict=True)], [], 0
    while left or any(handle.result is None for handle in handles):
        if left:
            handles.append(own.submit(*left.pop(0)))
            handles[-1].stream = "branches"
        own.step(int(random.integers(1, 6)))
        sequence = engine_state(own).decode.sequence
        running = np.asarray(sequence.cursor.finish) == RUNNING
        fed, live = np.asarray(sequence.cursor.phase) == PROMPT, np.asarray(sequence.branches.live).any(axis=1)
        beside += bool((fed & running).any() and (live & running).any())
    results = [handle.wait() for handle in handles]
    assert beside, "prompts were fed beside branches"
    assert sum(result.stats.blocks > 0 for result in results) >= 4
    for prompt, each, result in zip(prompts, params, results, strict=True):
        assert same(result, alone.generate([prompt], each)[0])


@pytest.mark.further
@pytest.mark.several
def test_output_is_the_same_on_eight_devices(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
    folder = write_checkpoint(tmp_path, tiny_config(vocab_size=24, num_hidden_layers=1, **heads), seed=2)
    prompts, params, modes = mixed_requests()
    prompts, params, modes = (
        prompts[1:3],
        [replace(p, temperature=0.0, repetition_penalty=1.0, max_new_tokens=40) for p in params[1:3]],
        modes[1:3],
    )
    params[1] = replace(params[1], logit_bias={5: 1.0, 11: -1.0})
    results, logits = [], []
    for mesh in (None, make_mesh({"data": 2, "tensor": 4})):
        lm = load_model(folder, mesh=mesh)
        lm.special_tokens = SpecialTokens(17, 18, 19, 20, 21, 22)
        own = Engine(lm, max_length=128, max_batch=2, max_branches=3, separator_ids=SEPARATOR)
        results.append(own.generate(prompts, params, modes))
        logits.append(replay(own, [1], linearise(own.config.special, EXAMPLE)).logits)
    for other, other_logits in zip(results[1:], logits[1:], strict=True):
        assert [r.token_ids for r in other] == [r.token_ids for r in results[0]]
        np.testing.assert_allclose(other_logits, logits[0], atol=1e-3)
    jobs = [Request((1, 2), SamplingParams(), "serial", 10, 0)]
    state = laid_out(lm, own.config, jobs)
    assert state.cache.layers[0].key.sharding.spec[2] == "tensor", "the cache is split by kv heads"
    assert state.bias.sharding.spec[1] == "tensor", "and the bias by the vocabulary"


def test_the_cache_is_never_moved_or_recomputed(engine: Engine) -> None:
    """Check that every slot keeps its keys and values, bit by bit, from the step that writes it to the end."""
    config, lm = engine.config, engine.lm
    forks = 0
    for seed in range(8):
        job = Request((1, 2, 3, 4, 5, 6), SamplingParams(temperature=100.0), "adaptive", 100, seed)
        state = laid_out(lm, config, [job])
        history: list[tuple[int, np.ndarray]] = []
        while (summary := summarise(state, config).read()).finish[0] == RUNNING:
            due = int(summary.tokens.max())
            forks += due >= 7
            bucket = Bucket(1, 4, 4, 128) if summary.phase[0] == PROMPT else Bucket(1, 32, 32, 128)
            state = decided(lm, config, one_step(lm.params, state, config, bucket))
            history.append((int(state.cache.length[0]), np.asarray(state.cache.layers[-1].key)[0]))
        lengths = [length for length, _ in history]
        assert lengths == sorted(lengths) and lengths[:2] == [4, 6]
        for length, keys in history:
            np.testing.assert_array_equal(keys[:length], history[-1][1][:length])
            assert not keys[length:].any(), "nothing is written ahead"
    assert forks


def test_budgets_and_limits_have_errors_that_name_them(engine: Engine) -> None:
    with pytest.raises(
        RequestError, match=r"request 1: prompt: expected at most 255 tokens \(max_length .*: 256\), got 600"
    ):
        engine.generate([[1], [1] * 600])
    with pytest.raises(RequestError, match="request 0: prompt: expected at least one token"):
        engine.generate([[]])
    with pytest.raises(RequestError, match="token ids: expected ids from 0 to 23"):
        engine.generate([[24]])
    with pytest.raises(RequestError, match="prompts: expected a list, got a string"):
        engine.generate("hello")
    with pytest.raises(RequestError, match="prompt: expected token ids, got text"):
        engine.generate(["hello"])
    with pytest.raises(RequestError, match="params: expected 2 entries, one for each prompt, got 1"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(RequestError, match=r"prompt and answer: expected at most 256 tokens \(max_length\), got 257"):
        replay(engine, [1], [1] * 256)
    with pytest.raises(RequestError, match="got one that ends inside a branch"):
        engine.generate([[1, engine.config.special.branch_start, 2]])


@pytest.mark.default_cases(100)
@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": -0.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": float("inf")},
        {"max_new_tokens": 0},
        {"max_branch_tokens": 0},
        {"stop": ("",)},
        {"seed": -1},
    ],
    ids=str,
)
def test_sampling_params_name_the_bad_field(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        SamplingParams(**field)


@pytest.mark.further
def test_a_full_cache_ends_with_length(bare_lm: LanguageModel) -> None:
    own = Engine(bare_lm, max_length=40, separator_ids=SEPARATOR)
    results = [
        own.generate([[1] * 10], SamplingParams(temperature=3.0, max_new_tokens=500, seed=s))[0] for s in range(8)
    ]
    cut = [result for result in results if result.finish_reason == "length"]
    assert cut
    assert all(10 + len(result.token_ids) <= 40 for result in cut)
    assert all(result.stats.critical_path == result.stats.steps + 1 for result in results)


def test_stream_ends_with_the_result(lm: LanguageModel) -> None:
    own = Engine(lm, **SIZES)
    params = SamplingParams(temperature=1.0, max_new_tokens=60, seed=4)
    partial = list(own.stream("Run", params, max_steps=3))
    final = own.generate(["Run"], params)[0]
    assert same(partial[-1], final)
    assert partial[-1].text == final.text
    assert all(result.finish_reason is None for result in partial[:-1])
    lengths = [len(result.token_ids) for result in partial]
    assert lengths == sorted(lengths)
    assert len(lengths) > 5


@pytest.mark.further
def test_stop_strings_end_the_answer(lm: LanguageModel) -> None:
    own = Engine(lm, **SIZES)
    stopped_answers = 0
    for seed in range(8):
        params = SamplingParams(temperature=1.0, max_new_tokens=150, seed=seed)
        free = own.generate(["Run"], params)[0]
        stopped = own.generate(["Run"], replace(params, stop=("e", "1")))[0]
        for item in stopped.structure:
            texts = [item.text] if hasattr(item, "text") else [branch.text for branch in item.branches]
            assert not any("e" in text or "1" in text for text in texts)
        if stopped.finish_reason == "stop" and stopped.token_ids[-1] not in own.config.end:
            stopped_answers += 1
            assert free.text.startswith(stopped.text) or stopped.stats.blocks
        assert stopped.stats.steps == stopped.stats.critical_path - 1
    assert stopped_answers > 3


def test_real_checkpoint_greedy() -> None:
    folder = shared("data", "checkpoints", "stories260k")
    expected = json.loads((folder / "greedy_expected.json").read_text())["greedy_tokens"]
    lm = load_model(folder)
    result = Engine(lm).generate([""], SamplingParams(max_new_tokens=len(expected) - 1), mode="serial")[0]
    assert result.prompt_token_ids + result.token_ids == expected


def test_a_length_above_the_positions_of_the_model_is_refused(bare_lm: LanguageModel) -> None:
    assert bare_lm.context_length == 512 and Engine(bare_lm).max_length == 512
    assert Engine(replace(bare_lm, context_length=1 << 20)).max_length == 2048
    with pytest.raises(
        RequestError, match=r"max_length: expected at most 512, the context length of the model, got 51"
    ):
        Engine(bare_lm, max_length=513)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
    ],
)
def test_rope_scaling_extends_the_context_length(scaling: dict[str, Any], expected: int, tmp_path: Path) -> None:
    if scaling["rope_type"] == "llama3":
        scaling["original_max_position_embeddings"] = 64
    lm = load_model(write_checkpoint(tmp_path / "model", tiny_config(rope_scaling=scaling)))
    assert lm.context_length == Engine(lm, max_length=expected).max_length == expected


@pytest.mark.default_cases(100)
@pytest.mark.parametrize(
    ("serial", "branch"),
    [
        ([3, 19, 4], []),  # `<|para|>` without titles
        ([3, 18, 4], []),  # `<|/title|>` without a title
        ([17, 17, 3, 18], []),  # `<|title|>` in a title
        ([17, 3, 18, 19], []),  # one title
        ([17, 3, 18, 17, 3, 18, 19], []),  # equal titles
        ([3, 20, 21, 22], []),  # tags that the engine feeds
        ([3], [4, 17, 5]),  # a tag in a branch
    ],
)
@pytest.mark.further
def test_a_malformed_script_is_refused_before_it_ends_other_requests(
    engine: Engine, serial: list[int], branch: list[int]
) -> None:
    with pytest.raises(RequestError, match="script: "):
        engine.generate([[1, 2]], SamplingParams(script=[serial, branch]))
    fine = [[3, 17, 4, 18, 17, 5, 18, 19, 6, 0], [7, 22], [8, 22]]
    assert engine.generate([[1, 2]], SamplingParams(script=fine))[0].stats.blocks == 1, "negative control"
