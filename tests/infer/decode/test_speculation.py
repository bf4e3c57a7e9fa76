"""Draft tokens: unchanged answers, their sources, and the control that leaves them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infer.decode.speculation
from aspd_jax import LanguageModel, build_layout
from aspd_jax.errors import RequestError, StructureError
from infer import Engine, SamplingParams
from infer.answers.answer import Result
from infer.decode.derived import Derived, derive
from infer.decode.speculation import drafts_from_text
from infer.decode.state import PARALLEL, SERIAL, DecodeState, DraftSource, EngineConfig
from infer.request import Mode, Request
from infer.scheduling.runner import DRAFTING_STEPS, PLAIN_STEPS, DraftControl
from infer.scheduling.step_cost import StepCost
from tests.conftest import laid_out, patched
from tests.helpers.answers import SEPARATOR, critical_path, linearise
from tests.helpers.draft_heads import with_draft_heads

DRAFT = 3
HOT = SamplingParams(temperature=100.0, max_new_tokens=70)


def drafting_engine(lm: LanguageModel, draft_tokens: int = DRAFT, drafts: DraftSource = "lookup") -> Engine:
    return Engine(
        lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR,
        drafts=drafts, draft_tokens=draft_tokens, force_drafts=True,
    )  # fmt: skip


def script_of(engine: Engine, parts: list) -> tuple[list[list[int]], list[int]]:
    """Return an answer as a script, and as its linearisation."""
    special = engine.config.special
    serial: list[int] = []
    branches: list[list[int]] = [[] for _ in range(engine.config.max_branches)]
    for part in parts:
        if isinstance(part[0], tuple):
            for title, _ in part:
                serial += [special.title_start, *title, special.title_end]
            serial.append(special.parallel_start)
            for number, (_, text) in enumerate(part):
                assert branches[number] in ([], [*text, special.branch_end])
                branches[number] = [*text, special.branch_end]
        else:
            serial += part
    serial.append(0)
    return [serial, *branches], linearise(special, parts)


def knowing(wrong: int = 0) -> Callable[..., jax.Array]:
    """Return a `drafts_from_text` that knows the script up to the next tag; every `wrong`-th token (0: none) is wrong.

    The host decides what follows a tag, so draft tokens behind one are not taken.
    """

    def source(state: DecodeState, derived: Derived, config: EngineConfig, used: int) -> jax.Array:
        s, ahead, end = state.sequence, jnp.arange(config.draft_tokens), state.request.script_end[..., None]
        batch = jnp.arange(s.cursor.phase.size)[:, None, None]

        def told(place: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
            return jnp.where(begin + place < end, state.request.script[batch, begin + place], -1)

        place = s.segments.sampled[:, 1:, None] + ahead
        next_serial = s.segments.sampled[:, :1, None] + ahead
        number = jnp.arange(config.max_branches)[None, :, None]
        in_branch = told(place, end[:, :-1], end[:, 1:])
        serial = told(jnp.broadcast_to(next_serial, in_branch.shape), jnp.zeros_like(end[:, :1]), end[:, :1])
        in_block = (s.cursor.phase == PARALLEL)[:, None, None]
        found = jnp.where(in_block, jnp.where(s.branches.live[..., None], in_branch, -1), serial)
        found = jnp.where(in_block | (number == 0), found, -1)
        if wrong:
            found = jnp.where((jnp.where(in_block, place, next_serial) % wrong == 1) & (found >= 0), 11, found)
        ends = jnp.where(found >= 0, state.classes[found], 0) > 0
        behind = jnp.cumsum(ends, axis=2) - ends > 0
        return jnp.where(jnp.cumprod((found >= 0) & ~behind, axis=2) > 0, found, -1)

    return source


@pytest.mark.further
@pytest.mark.parametrize("wrong", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_right_draft_tokens_save_steps_in_every_phase(bare_lm: LanguageModel, wrong: int) -> None:
    """Check a scripted answer with titles, forks, unequal branches and merges, which the draft tokens know."""
    # All blocks of a scripted answer have the same texts in their branches.
    first, second = [6, 7, 8, 6, 7, 1, 1, 2], [1]
    one, other = [([5], first), ([9, 2], second), ([4], [])], [([1], first), ([2], second)]
    parts = [[3, 4, 4, 9, 8, 7, 5, 5, 6, 4, 3, 9], one, [4, 2], other, [7, 7, 7, 8, 9]]
    own = drafting_engine(bare_lm)
    script, expected = script_of(own, parts)
    special = own.config.special
    with patched(infer.decode.speculation, drafts_from_text=knowing(wrong)):
        results = own.generate([[1, 2, 3]] * 3, SamplingParams(script=script))
    for result in results:
        assert result.token_ids == expected and result.finish_reason == "stop"
        stats = result.stats
        assert stats.critical_path == critical_path(special, parts)
        # Draft tokens beyond the end of a segment are never accepted.
        assert (stats.accepted_tokens > 0.75 * stats.drafted_tokens) == (wrong == 0)
        assert stats.steps < (0.5 if wrong == 0 else 0.8) * stats.critical_path


def mixed() -> tuple[list[list[int]], list[SamplingParams], list[Mode]]:
    """Return requests, greedy and sampled, in both modes."""
    prompts = [[1, 2, 3, 4, 1, 2, 5, 6, seed % 3 + 1] for seed in range(16)]
    params = [
        replace(HOT, temperature=t, seed=seed, max_new_tokens=40 + seed)
        for seed, t in enumerate([0.0, 0.7, 2.0, 100.0] * 4)
    ]
    return prompts, params, ["serial", *["adaptive"] * 3] * 4


def anything(state: DecodeState, derived: Derived, config: EngineConfig, used: int) -> jax.Array:
    """Return random draft tokens."""
    random = np.random.default_rng(0).integers(1, 15, (3, DRAFT))
    shifted = (jnp.asarray(random, jnp.int32) + state.sequence.counters.steps[:, None, None]) % 14 + 1
    return jnp.broadcast_to(shifted, state.sequence.draft.shape)


def the_same(results: list[Result], expected: list[Result]) -> bool:
    pairs = zip(results, expected, strict=True)
    return all(a.token_ids == b.token_ids and a.finish_reason == b.finish_reason for a, b in pairs)


@pytest.mark.parametrize("source", [anything, pytest.param(drafts_from_text, marks=pytest.mark.slow)])
def test_answers_are_the_same_with_drafts(bare_lm: LanguageModel, engine: Engine, source: Any) -> None:
    """Check equality token by token, greedy and sampled, whatever the draft tokens."""
    expected = engine.generate(*mixed())
    assert sum(result.stats.blocks for result in expected) >= 3
    with patched(infer.decode.speculation, drafts_from_text=source):
        results = drafting_engine(bare_lm).generate(*mixed())
    assert the_same(results, expected)
    assert sum(result.stats.accepted_tokens for result in results) > 0
    assert sum(result.stats.drafted_tokens for result in results) > 100
    for a, b in zip(results, expected, strict=True):
        assert a.stats.critical_path == b.stats.critical_path and a.stats.steps <= b.stats.steps


@pytest.mark.further
@pytest.mark.parametrize("scale", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_answers_are_the_same_with_draft_heads(bare_lm: LanguageModel, engine: Engine, scale: float) -> None:
    """Check equality token by token, greedy and sampled, whatever the heads propose."""
    expected = engine.generate(*mixed())
    results = drafting_engine(with_draft_heads(bare_lm, DRAFT, scale), drafts="heads").generate(*mixed())
    assert the_same(results, expected)
    assert sum(result.stats.accepted_tokens for result in results) > 0
    assert sum(result.stats.drafted_tokens for result in results) > 100
    for a, b in zip(results, expected, strict=True):
        assert a.stats.critical_path == b.stats.critical_path and a.stats.steps <= b.stats.steps


@pytest.mark.further
@pytest.mark.parametrize("draft_tokens", [1, DRAFT, DRAFT + 5])
def test_heads_without_effect_propose_repetition(bare_lm: LanguageModel, draft_tokens: int) -> None:
    """Check greedy serial answers: heads without effect repeat the likeliest next token; counted by hand."""
    own = drafting_engine(with_draft_heads(bare_lm, DRAFT, scale=0.0), draft_tokens, "heads")
    depth, accepted = min(draft_tokens, DRAFT), 0
    assert own.config.draft_tokens == depth
    for seed in range(4):
        prompt = [1 + seed, 2, 3]
        (result,) = own.generate([prompt], SamplingParams(max_new_tokens=60), "serial")
        tokens, place, steps = result.token_ids, 0, 0
        whole = np.asarray([[*prompt, *tokens]])
        layout = build_layout(whole, own.config.special, bare_lm.config.positions)
        logits = np.asarray(bare_lm.model.apply({"params": bare_lm.params}, whole, layout))[0]
        likeliest = logits[len(prompt) - 1 :].argmax(axis=-1)
        while place < len(tokens) - 1:
            run = 1
            while run <= depth and place + run < len(tokens) and tokens[place + run] == likeliest[place]:
                run += 1
            place, steps = place + run, steps + 1
        assert result.stats.steps == steps
        accepted += result.stats.accepted_tokens
    assert accepted > 10


@pytest.mark.slow
def test_rejected_draft_tokens_that_stay_visible_change_answers(bare_lm: LanguageModel, engine: Engine) -> None:
    """Negative control."""
    expected, same_still = engine.generate(*mixed()), True
    with patched(infer.decode.speculation, drafts_from_text=anything, hide_rejected=lambda state, *_: state):
        try:
            same_still = the_same(drafting_engine(bare_lm).generate(*mixed()), expected)
        except StructureError:
            same_still = False
    assert not same_still


@pytest.mark.slow
def test_sampled_tokens_follow_the_distribution(bare_lm: LanguageModel) -> None:
    """Compare the fourth token with its exact distribution; the third is a draft token, the likeliest one."""
    prompt, words = [1, 2, 3], 24
    own = Engine(
        bare_lm, max_length=128, max_batch=32, max_branches=2, max_title_tokens=1, drafts="lookup", draft_tokens=1
    )
    every = np.stack(np.meshgrid(*[np.arange(words)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    tokens = np.concatenate([np.tile(prompt, (len(every), 1)), every], axis=1)
    layout = build_layout(tokens, own.config.special, bare_lm.config.positions)
    logits = np.array(bare_lm.model.apply({"params": bare_lm.params}, tokens, layout))[:, len(prompt) - 1 :]
    logits[..., list(own.config.special.ids)] = -np.inf  # serial mode has no tags
    share = np.asarray(jax.nn.softmax(logits, axis=-1)).reshape(words, words, words, 4, words)
    beginning = share[0, 0, 0, 0][:, None, None] * share[:, 0, 0, 1][:, :, None] * share[:, :, 0, 2]
    likeliest = int(beginning[1:, 1:, 1:].sum(axis=(0, 1)).argmax()) + 1
    goes_on = np.zeros((words, words, words))
    goes_on[1:, 1:, 1:] = 1  # 0 is end of text
    exact = np.einsum("abc,abcd->d", beginning * goes_on, share[..., 3, :])
    exact[0] += 1 - exact.sum()  # an answer that ended before counts as ended

    def source(state: DecodeState, derived: Derived, config: EngineConfig, used: int) -> jax.Array:
        return jnp.full_like(state.sequence.draft, likeliest)

    count = 3000
    params = [SamplingParams(temperature=1.0, max_new_tokens=4, seed=seed) for seed in range(count)]
    with patched(infer.decode.speculation, drafts_from_text=source):
        results = own.generate([prompt] * count, params, "serial")
    assert sum(result.stats.accepted_tokens for result in results) > 50
    seen = np.bincount([(*result.token_ids, 0, 0, 0, 0)[3] for result in results], minlength=words)
    likely = exact * count >= 5
    observed, expected = (np.append(of[likely], of[~likely].sum()) for of in (seen, exact * count))
    chi_square = float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    assert chi_square < 60, chi_square  # at most 23 degrees of freedom: exceeded once in 30,000 draws of this test


@pytest.fixture(scope="module")
def blank(bare_lm: LanguageModel) -> tuple[EngineConfig, DecodeState]:
    config = drafting_engine(bare_lm).config
    return config, laid_out(bare_lm, config, [Request((1,), SamplingParams(), "serial", 100, 0)])


@pytest.mark.further
@settings(max_examples=40)
@given(prompt=st.lists(st.integers(1, 3), min_size=1, max_size=60), pending=st.integers(1, 3))
def test_guesses_are_what_followed_before(
    blank: tuple[EngineConfig, DecodeState], prompt: list[int], pending: int
) -> None:
    config, state = blank[0], state_after(blank[1], tuple(prompt), pending)
    found = np.asarray(drafts_from_text(state, derive(state.sequence, config), config, 128))[0]
    assert (found[1:] == -1).all()
    expected: list[int] = []
    text = [*prompt, pending]
    for length in (3, 2):
        ends = [n for n in range(length, len(prompt)) if prompt[n - length : n] == text[-length:]]
        if ends and not expected and len(text) >= length:
            expected = (prompt[ends[-1] : ends[-1] + DRAFT] + [-1] * DRAFT)[:DRAFT]
            break
    assert found[0].tolist() == (expected or [-1] * DRAFT)


def state_after(state: DecodeState, prompt: tuple[int, ...], pending: int) -> DecodeState:
    """Return a state whose cache holds a prompt, without running the model."""
    length = len(prompt)
    tokens, sequence, position = (np.zeros((1, 128), np.int32) for _ in range(3))
    tokens[0, :length], sequence[0, :length], position[0, :length] = prompt, 1, np.arange(length)
    layout = state.cache.layout._replace(sequence=jnp.asarray(sequence), position=jnp.asarray(position))
    cache = state.cache._replace(tokens=jnp.asarray(tokens), layout=layout, length=jnp.asarray([length]))
    s = state.sequence
    sequence = s._replace(
        cursor=s.cursor._replace(phase=jnp.asarray([SERIAL]), position=jnp.asarray([length])),
        segments=s.segments._replace(
            queue=s.segments.queue.at[0, 0, 0].set(pending), queued=s.segments.queued.at[0, 0].set(1)
        ),
    )
    return state._replace(cache=cache, sequence=sequence)


@pytest.mark.further
def test_guesses_that_do_not_pay_are_left_out() -> None:
    cost = StepCost(base=1.0, per_token=0.25, per_slot=0.0)  # 1.25 ms with one token, 2.0 ms with four: 1.6 times
    looking = StepCost(base=1.0, per_token=0.25, per_slot=0.0, per_drafting_row=0.25)  # 2.25 ms: 1.8 times
    for of, accepted, pays in ((cost, 24, True), (cost, 16, False), (looking, 24, False)):  # 1.75, 1.5 tokens a step
        control = DraftControl(3)
        assert control.active and control.steps == DRAFTING_STEPS
        control.note(of, DRAFTING_STEPS, 4, 1, 0, DRAFTING_STEPS, accepted)
        assert control.active == pays
        if not pays:
            assert control.steps == PLAIN_STEPS
            control.note_plain(PLAIN_STEPS)
            assert control.active, "they are tried again"
        forced = DraftControl(3, always=True)
        forced.note(of, DRAFTING_STEPS, 4, 1, 0, DRAFTING_STEPS, accepted)
        assert forced.active and forced.steps > 1 << 20
    never = DraftControl(0)
    never.note_plain(10)
    assert not never.active


def test_drafts_have_limits(bare_lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="draft_tokens: expected at least 1"):
        drafting_engine(bare_lm, 0)
    with pytest.raises(RequestError, match="got heads; this model has none"):
        drafting_engine(bare_lm, drafts="heads")
    with pytest.raises(RequestError, match="drafts: expected none, lookup, heads, got 'medusa'"):
        drafting_engine(bare_lm, drafts=cast(Any, "medusa"))
