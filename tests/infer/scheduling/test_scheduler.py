"""Continuous batching: events, joining and leaving, cancelling, reuse of the cache, held back branches."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from threading import Thread
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import infer.decode.derived
import infer.scheduling.runner
import infer.scheduling.scheduler
from aspd_jax import LanguageModel
from aspd_jax.errors import RequestError
from aspd_jax.tokens import SerialIds, split
from infer import Engine, Event, SamplingParams
from infer.answers.logprobs import token_logprobs
from infer.decode.decode_step import run, summarise
from infer.decode.derived import BranchBudget
from infer.decode.slots import copy_slots
from infer.decode.state import PROMPT, SequenceState
from infer.request import ScoredBranch
from infer.scheduling.buckets import PROMPT_BESIDE
from infer.scheduling.handle import Handle
from infer.scheduling.prefix_cache import MIN_COPIED, RowMemory, best_match, common_prefix
from infer.scheduling.runner import FREE_TOKENS, InFlightSteps, Runner
from infer.scheduling.step_cost import Sample, StepCost, draft_pays, fit
from tests.conftest import SIZES, deferred_branches
from tests.helpers.answers import EXAMPLE, SEPARATOR, linearise, same
from tests.helpers.engine_state import engine_state

HOT = SamplingParams(temperature=100.0, max_new_tokens=70)


def seeds_that_fork(engine: Engine, count: int) -> list[SamplingParams]:
    params = [replace(HOT, seed=seed) for seed in range(30)]
    results = engine.generate([[1, 2]] * len(params), params)
    chosen = [p for p, result in zip(params, results, strict=True) if result.stats.branches >= 3]
    assert len(chosen) >= count
    return chosen[:count]


def text_of(events: list[Event], blocks: int) -> list[Any]:
    """Return the answer from events alone: token ids of serial text and branches, in order."""
    parts: list[Any] = []
    open_block: dict[int, list[int]] = {}
    for event in events:
        if event.kind == "fork":
            open_block = {}
        elif event.kind == "token" and event.block:
            open_block.setdefault(event.branch, []).extend(event.token_ids)
        elif event.kind == "token":
            parts.extend(event.token_ids)
        elif event.kind == "merge":
            parts.append([open_block.get(number, []) for number in range(1, 1 + max(open_block, default=0))])
    return parts


def test_where_width_is_free_answers_are_the_same(
    engine: Engine, bare_lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an engine as on accelerators, which stays in a program for branches: equal answers, in fewer calls."""
    calls = list[int]()

    def counted(*args: Any) -> Any:
        calls.append(args[4].tokens)
        return run(*args)

    monkeypatch.setattr(infer.scheduling.runner, "run", counted)
    params = [replace(one, max_new_tokens=120) for one in seeds_that_fork(engine, 4)]
    monkeypatch.setattr(infer.scheduling.runner, "free_tokens", lambda: FREE_TOKENS)
    sizes = {"max_length": 256, "max_batch": 2, "max_branches": 3, "max_title_tokens": 2, "separator_ids": (15, 16)}
    free, found = Engine(bare_lm, **sizes), []  # type: ignore[arg-type]
    for own in (engine, free):
        calls.clear()
        found.append(([own.generate([[1, 2]], one)[0] for one in params], len(calls)))
    (expected, most), (results, fewer) = found
    assert all(map(same, results, expected)) and sum(result.stats.blocks for result in results) > 3
    assert fewer < 0.9 * most


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow), 1000])
def test_events_tell_the_whole_answer(engine: Engine, steps: int) -> None:
    for params in seeds_that_fork(engine, 3):
        (whole,) = engine.generate([[1, 2]], params)
        # As branches grow, nobody knows yet which of their tokens a budget has no room for.
        stream: Any = "text" if whole.finish_reason == "length" else "branches"
        events = list(engine.submit([1, 2], params, max_steps=steps, stream=stream))
        assert events[-1].kind == "done" and [e.kind for e in events].count("done") == 1
        result = events[-1].result
        assert result is not None and same(result, whole)
        kinds = [event.kind for event in events]
        assert kinds.count("fork") == kinds.count("merge") == result.stats.blocks
        assert kinds.count("branch") == result.stats.branches
        special, head = engine.config.special, len(SEPARATOR)
        expected: list[Any] = []
        ids = result.token_ids[:-1] if result.finish_reason == "stop" else result.token_ids
        for item in split(ids, special):
            if isinstance(item, SerialIds):
                expected.extend(item.ids)
            else:
                texts = [b[len(t) + head :] for t, b in zip(item.titles, item.branches, strict=True)]
                while texts and not texts[-1]:
                    texts.pop()
                expected.append(texts)
        assert text_of(events, result.stats.blocks) == expected


def test_events_have_text_and_stop_strings_never_show(lm: LanguageModel) -> None:
    own, stopped, branches = Engine(lm, **SIZES), 0, 0
    for seed in range(6):
        free = SamplingParams(temperature=1.0, max_new_tokens=150, seed=seed, fork_bias=5.0)
        params = replace(free, stop=("e1", "an"))
        stopped += any(stop in own.generate(["Run"], free)[0].text for stop in params.stop)
        events = list(own.submit("Run", params, max_steps=1))
        result = events[-1].result
        assert result is not None
        serial = "".join(event.text for event in events if event.kind == "token" and not event.block)
        assert serial == "".join(item.text for item in result.structure if hasattr(item, "text"))
        told = [event.text for event in events if event.kind == "branch"]
        written = [b.text for item in result.structure if hasattr(item, "branches") for b in item.branches]
        assert set(told) <= set(written)
        assert len(written) - len(told) <= (result.finish_reason == "stop"), "a stop string may end one branch"
        assert not any(stop in text for text in (serial, *told) for stop in params.stop)
        branches += len(told)
    assert stopped and branches, "answers without these strings would show nothing"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "heard"])
def test_requests_join_and_leave_without_a_trace(engine: Engine, heard: bool) -> None:
    """Check that each answer equals the one alone, whoever joins, leaves or is cancelled; requests start in order."""
    params = seeds_that_fork(engine, 6)
    alone = [engine.generate([[1, 2, 3 + n]], p)[0] for n, p in enumerate(params)]
    handles = [engine.submit([1, 2, 3 + n], p) for n, p in enumerate(params[:2])]
    engine.step(5)
    handles += [engine.submit([1, 2, 3 + n], p) for n, p in enumerate(params) if n >= 2]
    given_up = engine.submit([4, 4], replace(HOT, seed=1))
    never = engine.submit([4, 4], replace(HOT, seed=2))
    never.cancel()
    order: list[int] = []
    for handle in (*handles, given_up):
        handle.stream = "branches" if heard else None
    while any(handle.result is None for handle in handles):
        engine.step(3)
        order += [n for n, handle in enumerate(handles) if handle.row is not None and n not in order]
        if given_up.row is not None and given_up.result is None:
            given_up.cancel()
    assert order == sorted(order), "first come, first served"
    for handle, expected in zip(handles, alone, strict=True):
        assert handle.result is not None and same(handle.result, expected)
        assert handle.result.stats.seconds["total"] >= handle.result.stats.seconds["queued"]
    for handle in (given_up, never):
        assert handle.result is not None and handle.result.finish_reason == "cancelled"
    assert never.result is not None and never.result.token_ids == []
    assert not engine.step(), "nothing is left to do"


def engines(lm: LanguageModel, rows: int) -> tuple[Engine, Engine]:
    """An engine with the prefix cache, and one without."""
    return tuple(
        Engine(
            lm, max_length=256, max_batch=rows, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR, reuse=reuse
        )
        for reuse in (True, False)
    )  # type: ignore[return-value]


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the prompt tokens of each run of steps that fed some."""
    counts: list[int] = []
    end = Runner.end

    def counted(runner: Runner, started: InFlightSteps) -> Any:
        done, after = end(runner, started)
        before = started.first
        left = np.where(after.phase == PROMPT, after.tokens, 0)
        if tokens := int((before.tokens - left)[before.phase == PROMPT].sum()):
            counts.append(tokens)
        return done, after

    monkeypatch.setattr(Runner, "end", counted)
    return counts


def first_turns(fresh: Engine, prompt: list[int]) -> list[SamplingParams]:
    """Return three answers with a block that end by themselves."""
    any_params = [replace(HOT, seed=seed, max_new_tokens=120) for seed in range(60)]
    answers = zip(any_params, fresh.generate([prompt] * 60, any_params), strict=True)
    with_end = [
        params
        for params, answer in answers
        if answer.stats.blocks and answer.finish_reason == "stop" and len(answer.token_ids) > MIN_COPIED
    ]
    assert len(with_end) >= 3
    return with_end[:3]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_follow_up_turn_feeds_nothing_again(bare_lm: LanguageModel, fed: list[int], rows: int) -> None:
    """The second turn goes on where the first ended, branches included, and gives what a fresh engine gives. Others
    that came meanwhile took other rows. The row of a turn that is under way is copied.
    """
    own, fresh = engines(bare_lm, rows)
    prompt = [1, 2, 5, 9]
    for number, params in enumerate(first_turns(fresh, prompt)):
        own.reset_cache()
        first = own.generate([prompt], params)[0]
        others = own.generate([[3, 3, 3]] * (rows - 2), params)
        busy = own.submit([4, 4, 4 + number], replace(HOT, seed=number, max_new_tokens=200), "serial")
        own.step(2)
        assert busy.row != 0 and busy.result is None, "the row of the first turn is not taken"
        follow = prompt + first.token_ids + [6, 6]
        fed.clear()
        second = own.generate([follow], params)[0]
        # The end of text was sampled but never fed; so it comes with the next turn.
        assert second.stats.reused_tokens == len(prompt) + len(first.token_ids) - 1
        assert fed == [3]
        assert same(second, fresh.generate([follow], params)[0])
        assert all(same(other, fresh.generate([[3, 3, 3]], params)[0]) for other in others)
        assert same(busy.wait(), fresh.generate([busy.request.prompt], busy.request.params, "serial")[0])
        third = [*follow, *second.token_ids, 6]
        short = replace(HOT, seed=number, max_new_tokens=30)
        held = own.submit(third, short, "serial")
        own.step(2)
        assert held.row == 0 and held.result is None
        copied = own.generate([[*third, 7]], short)[0]
        assert copied.stats.reused_tokens == len(third)
        assert same(copied, fresh.generate([[*third, 7]], short)[0])
        held.cancel()
    fed.clear()
    fresh.generate([follow], params)
    assert sum(fed) == len(follow), "negative control: without reuse, all of it is fed"


@pytest.mark.further
def test_two_conversations_take_turns(bare_lm: LanguageModel) -> None:
    """A turn of one does not cost the other what the cache holds of it: each goes on with its own row."""
    own, fresh = engines(bare_lm, 2)
    system = np.random.default_rng(2).integers(1, 15, 10).tolist()
    talks, known = [[*system, *[1, 2] * 12], [*system, *[3, 4, 5] * 9]], [0, 0]
    for turn in range(3):
        for number, talk in enumerate(talks):
            params = replace(HOT, seed=10 * turn + number, max_new_tokens=20)
            result = own.generate([talk], params, "serial")[0]
            assert same(result, fresh.generate([talk], params, "serial")[0])
            if turn:
                assert result.stats.reused_tokens == known[number], (turn, number)
            known[number] = len(talk) + len(result.token_ids) - 1  # the last was sampled but never fed
            talks[number] = [*talk, *result.token_ids, 6]


@pytest.mark.further
def test_in_an_engine_of_one_row_the_last_to_come_is_kept(bare_lm: LanguageModel) -> None:
    own, _ = engines(bare_lm, 1)
    params = replace(HOT, seed=1, max_new_tokens=40)
    first = own.generate([[1, 2]], params)[0]
    own.generate([[3, 4]], params)
    again = own.generate([[1, 2, *first.token_ids, 6]], params)[0]
    assert again.stats.reused_tokens == 0


def test_a_shared_beginning_is_copied(bare_lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    own, fresh = engines(bare_lm, 2)
    random = np.random.default_rng(0)
    system = random.integers(1, 15, 60).tolist()
    prompts = [system + random.integers(1, 15, 5).tolist() for _ in range(5)]
    params = [SamplingParams(temperature=3.0, max_new_tokens=40, seed=seed) for seed in range(5)]
    copied: list[int] = []
    monkeypatch.setattr(
        infer.scheduling.scheduler, "copy_slots", lambda *args: copied.append(args[-1]) or copy_slots(*args)
    )
    together = own.generate(prompts, params)
    reused = [result.stats.reused_tokens for result in together]
    assert reused[0] == 0 and all(tokens >= 60 for tokens in reused[1:]), reused
    for result, expected in zip(together, fresh.generate(prompts, params), strict=True):
        assert same(result, expected)
    assert copied[0] == 64, "of a row with 256 slots, no more than what is shared"
    changed = own.generate([[9, *system[1:], 4]], params[0])[0]
    assert changed.stats.reused_tokens == 0, "negative control: another beginning"


@pytest.mark.further
def test_the_first_rows_are_used_first(bare_lm: LanguageModel) -> None:
    """Check rows that were last used at the same time, or never."""
    own, _ = engines(bare_lm, 3)
    short, long = (replace(HOT, max_new_tokens=tokens, seed=2) for tokens in (3, 60))  # no end of text comes before
    handles = [own.submit([1, 2], params, "serial") for params in (short, long, short)]
    own.step(1)
    assert [handle.row for handle in handles] == [0, 1, 2]
    while handles[0].result is None or handles[2].result is None:
        own.step(1)
    assert handles[1].result is None
    later = own.submit([5, 5, 5], long, "serial")
    own.step(1)
    assert later.row == 0
    later.cancel()
    handles[1].cancel()


def memories(rows: Any, extra: Any = None) -> list[RowMemory]:
    """Return memories from tokens, the number in order, further slots, and the time of the last use."""
    return [
        RowMemory(np.asarray(ids, np.int32), min(order, len(ids)), len(ids) + more, stamp)
        for ids, order, more, stamp in rows
    ]


PROMPT_IDS = np.random.default_rng(4).integers(0, 9, 80).tolist()
one_row = st.tuples(
    st.tuples(st.integers(0, 70), st.lists(st.integers(0, 9), max_size=5)).map(lambda at: PROMPT_IDS[: at[0]] + at[1]),
    st.integers(0, 80),
    st.integers(0, 9),
    st.integers(0, 3),
)


@given(rows=st.lists(one_row, min_size=1, max_size=6), data=st.data())
def test_what_is_kept_of_a_row_is_the_prompt_s_beginning(rows: Any, data: st.DataObject) -> None:
    held, free = memories(rows), data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))
    prompt = PROMPT_IDS[: data.draw(st.integers(1, 80))]
    match = best_match(held, free, prompt, 5)
    source, target, tokens, slots = held[match.source], match.target, match.tokens, match.slots
    assert tokens < len(prompt) and source.ids[:tokens].tolist() == prompt[:tokens]
    assert match.source == target or tokens >= MIN_COPIED, "copying less is not worth it"
    goes_on = tokens == source.ids.size and slots == source.slots and slots - tokens <= 5
    if slots > source.in_order or match.in_order < slots:  # a whole row, gone on with after a block
        assert goes_on and match.in_order == source.in_order
    else:
        assert slots == tokens == match.in_order
    for row, memory in enumerate(held):  # none holds more
        common = common_prefix(memory.ids, np.asarray(prompt[:-1], np.int32))
        assert memory.ids[:common].tolist() == prompt[:common]
        possible = min(common, memory.in_order)
        if common == memory.ids.size and memory.slots - common <= 5:
            possible = common
        assert possible <= tokens or (row != target and possible < MIN_COPIED)


@given(rows=st.lists(one_row, min_size=1, max_size=6), data=st.data())
def test_a_prompt_takes_the_row_left_longest_ago_or_goes_on_with_its_own(rows: Any, data: st.DataObject) -> None:
    held, prompt = memories(rows), PROMPT_IDS[: data.draw(st.integers(1, 80))]
    free = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))
    match = best_match(held, free, prompt, 5)
    taken = held[match.target]
    assert match.target in free
    if match.source == match.target and match.tokens == taken.ids.size:
        return  # nothing is lost
    assert taken.stamp == min(held[row].stamp for row in free)
    alike = [row for row in free if held[row].stamp == taken.stamp]
    assert taken.ids.size == 0 or all(held[row].ids.size for row in alike), "an empty one before one that is not"


def test_which_row_a_prompt_takes() -> None:
    long, short = PROMPT_IDS[:MIN_COPIED], PROMPT_IDS[: MIN_COPIED - 1]
    rows = memories([(long, 40, 0, 3), ([], 0, 0, 2), (short, 40, 0, 1)])
    for free, prompt, expected in (
        ({0, 1, 2}, PROMPT_IDS, (0, 0, MIN_COPIED)),  # it continues all of row 0
        ({1, 2}, PROMPT_IDS, (0, 2, MIN_COPIED)),  # which is in use
        ({0, 1}, short, (1, 1, 0)),  # copying less is not worth it
        ({0, 2}, short, (2, 2, MIN_COPIED - 2)),  # in place it is
        ({0}, short, (0, 0, MIN_COPIED - 2)),
    ):
        assert best_match(rows, free, prompt, 5)[:3] == expected


@pytest.mark.further
@pytest.mark.parametrize("count", [1, 2])
def test_branches_held_back_change_no_answer(bare_lm: LanguageModel, engine: Engine, count: int) -> None:
    """Check also budgets that end inside a block: they are spent as if no branch had waited."""
    own = Engine(bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR)
    params = [replace(HOT, seed=seed, max_new_tokens=30 + seed) for seed in range(40)]
    free = engine.generate([[1, 2]] * 40, params)
    with deferred_branches(count):
        held = own.generate([[1, 2]] * 40, params)
    later = 0
    for a, b in zip(free, held, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        assert a.stats.critical_path == b.stats.critical_path
        later += b.stats.steps > a.stats.steps
    assert later >= 3, "negative control: branches did wait"
    assert any(r.finish_reason == "length" and r.stats.blocks for r in free)


@pytest.mark.slow
def test_without_the_lockstep_rule_held_back_branches_change_answers(
    bare_lm: LanguageModel, engine: Engine, monkeypatch: Any
) -> None:
    """Negative control: a budget spent in the order of decoding."""

    def spent_as_decoded(s: SequenceState, config: Any) -> BranchBudget:
        live = s.branches.live.sum(axis=1)[:, None]
        affordable = (s.budget.tokens[:, None] >= 2 * live) | (s.branches.live & False)
        return BranchBudget(affordable, affordable | True, affordable | True)

    params = [replace(HOT, seed=seed, max_new_tokens=30 + seed) for seed in range(40)]
    free = engine.generate([[1, 2]] * 40, params)
    own = Engine(bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR)
    with deferred_branches(1, branch_budget=spent_as_decoded):
        held = own.generate([[1, 2]] * 40, params)
    assert any(a.token_ids != b.token_ids for a, b in zip(free, held, strict=True))


@pytest.mark.further
@pytest.mark.parametrize("streamed", [True, False])
def test_long_prompts_go_in_pieces_beside_an_answer_that_is_streamed(bare_lm: LanguageModel, streamed: bool) -> None:
    def engine() -> Engine:
        return Engine(bare_lm, max_length=512, max_batch=2, max_branches=3, separator_ids=SEPARATOR)

    long = np.random.default_rng(1).integers(1, 15, 440).tolist()
    params = SamplingParams(max_new_tokens=40)
    expected = [engine().generate([prompt], params, "serial")[0] for prompt in ([7, 8], long)]
    busy = engine()
    first = busy.submit([7, 8], params, "serial")
    while not first.partial().token_ids:
        busy.step(1)
    first.stream = "branches" if streamed else None
    second = busy.submit(long, params, "serial")
    if not streamed:
        taken = list[int]()
        while not second.partial().token_ids:
            busy.step(1)
            taken.append(len(first.partial().token_ids))
        assert set(taken[:-1]) <= {1}, "the prompt is fed alone, but for a last piece of few tokens"
        assert same(first.wait(), expected[0]) and same(second.wait(), expected[1])
        return
    piece = PROMPT_BESIDE - 1  # beside a token of the answer
    pieces = ceil(440 / piece)
    decoded, fed = [len(first.partial().token_ids)], [0]
    for left in reversed(range(pieces)):
        first.stream = "branches" if left > 0 else None  # else further steps would be in flight after the last piece
        busy.step(1)
        assert busy.last_chunk.steps == 1
        decoded.append(len(first.partial().token_ids))
        fed.append(int(engine_state(busy).decode.cache.length[1]))
        if len(decoded) <= pieces:
            assert second.partial().token_ids == []
    assert decoded == list(range(1, 2 + pieces)), "a token in every step in which the prompt is fed"
    assert fed == [*range(0, 440, piece), 440]
    assert len(second.partial().token_ids) == 1, "the first comes with the last piece"
    assert same(first.wait(), expected[0]) and same(second.wait(), expected[1])


@pytest.mark.further
def test_a_prompt_given_up_half_way_leaves_nothing(bare_lm: LanguageModel) -> None:
    own, fresh = engines(bare_lm, 1)
    prompt = np.random.default_rng(3).integers(1, 15, 200).tolist()
    params = replace(HOT, seed=5, max_new_tokens=30)
    handle = own.submit(prompt, params)
    own.step(1)
    assert 0 < engine_state(own).decode.cache.length[0] < 200, "some of it has been fed"
    handle.cancel()
    assert handle.result is not None
    assert handle.result.finish_reason == "cancelled" and handle.result.token_ids == []
    shorter = own.generate([prompt[:150]], params)[0]
    assert shorter.stats.reused_tokens == 0
    assert same(shorter, fresh.generate([prompt[:150]], params)[0])


def test_costs_of_steps_are_fitted() -> None:
    true = StepCost(3.0, 0.25, 0.001)
    samples = [Sample(t, c, true.milliseconds(t, c)) for t in (1, 8, 64) for c in (128, 2048)]
    found = fit(samples)
    assert np.allclose([found.base, found.per_token, found.per_slot], [3.0, 0.25, 0.001], rtol=1e-6)
    assert fit([Sample(t, 100, 5.0 - t / 100) for t in (1, 8, 64)]).per_token == 0.0, "no part is negative"


@pytest.mark.further
def test_drafts_of_fields_pay_where_wide_steps_are_cheap(bare_lm: LanguageModel) -> None:
    """Check with costs by hand: 5 serial steps for each field, against 12 steps of all fields and two checks."""
    buckets = Engine(bare_lm, max_length=256, max_branches=16).buckets
    assert [buckets.padded(width) for width in (1, 2, 5, 9, 64)] == [1, 4, 8, 16, 64]
    level, steep = StepCost(1.0, 0.0, 0.0), StepCost(0.9, 0.1, 0.0)
    for cost, blocks, pays in (
        (level, [2], 5 * 2 > 12 + 2),
        (level, [3], 5 * 3 > 12 + 2),
        (level, [3, 1], 5 * 4 > 24 + 2),
        (steep, [6], 5 * 6 > 12 * 1.7 + 2 * 7.3),
        (steep, [8], 5 * 8 > 12 * 1.7 + 2 * 7.3),
        (replace(steep, per_slot=0.01), [6], 5 * 6 * 11 > 12 * 11.7 + 2 * 17.3),
    ):
        assert draft_pays(cost, blocks, buckets, 1000) == pays
    assert [draft_pays(steep, [width], buckets, 0) for width in (6, 8)] == [False, True]


@pytest.mark.further
def test_first_tokens_and_ends_are_told_at_once(engine: Engine) -> None:
    """Check that a chunk ends with the first token of a stream or an ended request; without either, it runs on."""
    params = [replace(HOT, max_new_tokens=40, seed=seed) for seed in range(8)]
    results = engine.generate([[1, 2]] * 8, params)
    long = max(zip(results, params, strict=True), key=lambda pair: pair[0].stats.steps)[1]
    short = replace(long, max_new_tokens=5)
    quiet, heard = engine.submit([1, 2], long), engine.submit([1, 2], short)
    heard.stream = "branches"
    engine.step(30)
    assert engine.last_chunk.steps == 1 and heard.poll(), "its first token, with its prompt"
    engine.step(30)
    assert heard.result is not None and quiet.result is None
    assert engine.last_chunk.steps == heard.result.stats.steps
    unheard = engine.submit([1, 2], short)
    engine.step()
    assert quiet.result is not None and unheard.result is not None
    assert engine.last_chunk.seconds > 0


@pytest.mark.further
def test_steps_run_while_answers_are_read(bare_lm: LanguageModel) -> None:
    """Check that 4 steps have been started beyond each chunk of 4 whose tokens are in events."""
    asked = SamplingParams(max_new_tokens=24, seed=5)
    engine = Engine(bare_lm, max_length=128, max_batch=1, separator_ids=SEPARATOR)
    handle, seen, told = engine.submit([1, 2], asked, "serial"), [], 0
    handle.stream = "branches"
    while handle.result is None:
        engine.step(4)
        told += sum(len(event.token_ids) for event in handle.poll())
        seen.append((told, handle.partial().stats.steps))
    assert same(handle.result, engine.generate([[1, 2]], asked, "serial")[0])
    assert seen == [(1, 4), (5, 8), (9, 12), (13, 16), (17, 20), (21, 23), (24, 23)]


@pytest.mark.further
def test_what_was_started_for_a_request_that_is_gone_is_forgotten(engine: Engine) -> None:
    handle = engine.submit([1, 2], replace(HOT, seed=3), "serial")
    handle.stream = "branches"
    for _ in range(3):
        engine.step(2)
    handle.cancel()
    assert handle.result is not None and handle.result.finish_reason == "cancelled"
    other = engine.submit([1, 2], replace(HOT, seed=4), "serial")
    engine.step(1)
    assert engine.last_chunk.steps == 1, "none of the one before"
    assert same(other.wait(), engine.generate([[1, 2]], replace(HOT, seed=4), "serial")[0])


@pytest.mark.further
def test_a_state_is_asked_once_what_it_needs(engine: Engine, monkeypatch: Any) -> None:
    """Check that steps return the summary of their state; it is computed again only after other changes."""
    asked = []
    monkeypatch.setattr(infer.scheduling.scheduler, "summarise", lambda *args: asked.append(1) or summarise(*args))
    handles = [engine.submit([1, 2], replace(HOT, max_new_tokens=40, seed=seed)) for seed in range(2)]
    for chunk in range(3):
        engine.step(2)
        assert len(asked) == 1, chunk
    handles[0].cancel()
    assert handles[1].wait().finish_reason is not None
    assert len(asked) == 1, "decisions return the summary, too"


def programs_compiled(names: list[str]) -> int:
    return sum("backend_compile" in name for name in names)


@pytest.mark.further
def test_warm_up_leaves_nothing_to_compile(lm: LanguageModel) -> None:
    """Check every kind of request, alone and beside others."""
    own = Engine(lm, max_length=128, max_batch=2, max_branches=2, max_title_tokens=1)
    assert own.warm_up(checks=True) > 0
    assert (cost := engine_state(own).cost) is not None and cost.milliseconds(1, 128) > 0
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    hot = {"temperature": 9.0, "max_new_tokens": 30}
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "max_new_tokens": 100},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
        {"logit_bias": {5: 2.0}, "frequency_penalty": 1.0, "presence_penalty": 1.0, "min_tokens": 4},
        {"stop": ("e", "th")},
        {"json_schema": {"type": "object"}},
        {"choices": ("yes", "no")},
        {"json_schema": {"type": "integer"}},
        {"script": ((40, 41, 42),)},
        {"max_content_tokens": 0},
        {"logit_bias": {own.config.special.title_start: 100.0}},
        {"json_schema": {"properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}, "fields": "exact"},
        {"prediction": "Of the rain in the rain of the night"},
    ]
    params = [SamplingParams(**{**hot, "seed": number} | kind) for number, kind in enumerate(kinds)]
    prompts = [[40 + n % 50 for n in range(size)] for size in (1, 2, 5, 40, 90, 3, 33, 64, 7, 20, 4, 12, 9)]
    results = own.generate(prompts, params)
    for number, kind in enumerate(params):
        results += own.generate([prompts[number]], kind)
    for number, result in enumerate(results):
        token_logprobs(own.lm, own.config, result, number, echo=number % 2 == 0)
    turn = [*results[0].prompt_token_ids, *results[0].token_ids, 50]
    results += own.generate([turn, [*prompts[4], 50], [*prompts[4], 51, 52]], params[0])
    handles = [own.submit(prompt, params[0], max_steps=2) for prompt in prompts[2:6]]
    for handle in handles:
        handle.stream = "branches"
    while any(handle.result is None for handle in handles):
        own.step(1)
        if handles[3].result is None and handles[0].result is not None:
            handles[3].partial()
            handles[3].cancel()
    known = [ScoredBranch((40, 41, 42) * size, (2,), (43,)) for size in (1, 3, 12)]
    scored = [own.submit_checked(own.check_branches(prompt, known)) for prompt in prompts[2:4]]
    assert all(handle.wait().scores for handle in scored) and own.score(prompts[2], known[:1])
    assert any(result.stats.blocks for result in results) and any(result.stats.reused_tokens for result in results)
    assert not programs_compiled(compiled)
    jax.block_until_ready(jax.jit(lambda x: x * len(compiled))(1.0))
    assert programs_compiled(compiled), "negative control: it is heard of"
    handle = own.submit([40])
    own.step(1)
    if handle.result is None:
        with pytest.raises(RequestError, match="warm_up: expected no running request, got"):
            own.warm_up()
        handle.cancel()


@pytest.mark.further
def test_the_first_answer_compiles_nothing_after_a_warm_up_for_one(
    lm: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the log counts all programs up to the end, and that log probabilities are not among them."""
    own = Engine(lm, max_length=128, max_batch=2, max_branches=3, max_title_tokens=1)
    caplog.set_level("INFO", logger="infer.scheduling.warm_up")
    own.warm_up(alone=True)
    counts = [re.match(r"program (\d+) of (\d+): ", message) for message in caplog.messages]
    numbers = [(int(count[1]), int(count[2])) for count in counts if count]
    assert numbers == [(number, len(numbers)) for number in range(1, len(numbers) + 1)]
    assert len(numbers) > len([bucket for bucket in own.buckets.buckets if bucket.rows == 1])
    assert not any("log probabilities" in message for message in caplog.messages)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    params = SamplingParams(temperature=9.0, seed=1, max_new_tokens=30)
    for size in (1, 30, 90):
        own.generate([[40 + n % 50 for n in range(size)]], params)
    assert not programs_compiled(compiled)
    own.generate([[40], [41]], params)
    assert programs_compiled(compiled), "negative control: two at a time have other programs"


@pytest.mark.further
def test_warm_up_forgets_what_rows_held(bare_lm: LanguageModel) -> None:
    """Check that no later prompt reuses a cache that timed steps have overwritten."""
    own = Engine(bare_lm, max_length=128, max_batch=2, max_branches=2, max_title_tokens=2, separator_ids=SEPARATOR)
    prompt, params = [1 + n % 9 for n in range(50)], SamplingParams(max_new_tokens=12)
    first, again = (own.generate([prompt], params, "serial")[0] for _ in range(2))
    assert again.stats.reused_tokens >= 32, "negative control: without warm-up it is kept"
    own.warm_up()
    after = own.generate([prompt], params, "serial")[0]
    assert after.stats.reused_tokens == 0 and same(after, first)


@pytest.mark.further
def test_interrupted_calls_leave_no_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an interrupt of `generate` between and within chunks, and a stream that its reader leaves."""

    def nothing_left() -> bool:
        state = engine_state(engine)
        return not any(state.rows) and not state.waiting

    wait = Handle.wait

    def interrupted(handle: Handle) -> Any:
        if handle.request.seed == 1:
            engine.step(1)
            raise KeyboardInterrupt
        return wait(handle)

    params = [replace(HOT, seed=seed, max_new_tokens=20) for seed in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr(Handle, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2]] * len(params), params)
    assert nothing_left()
    with monkeypatch.context() as patch:
        patch.setattr(infer.scheduling.runner, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2]] * len(params), params)
    assert nothing_left()
    stream = engine.stream([1, 2], params[0])
    next(stream)
    assert not nothing_left()
    stream.close()
    assert nothing_left()


@pytest.mark.further
def test_requests_of_other_threads_join_while_steps_run(engine: Engine) -> None:
    """Check that no request is lost, and that the engine does not fail, while four threads submit."""
    handles: list[Handle] = []

    def submit(number: int) -> None:
        for k in range(50):
            params = SamplingParams(max_new_tokens=1 + k % 3)
            handles.append(engine.submit([1, 2, 3 + number], params, "serial"))

    threads = [Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or any(handle.result is None for handle in handles):
        engine.step(2)
    assert len(handles) == 200 and all(handle.result is not None for handle in handles)


def test_a_failure_at_the_end_of_an_answer_fails_its_request(bare_lm: LanguageModel, monkeypatch: Any) -> None:
    own, _ = engines(bare_lm, 1)
    running = own.submit([5], SamplingParams(max_new_tokens=2))
    with monkeypatch.context() as patch:
        patch.setattr(infer.scheduling.scheduler, "make_result", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            running.wait()
    with pytest.raises(RuntimeError, match="submit it again"):
        running.wait()
    assert own.generate([[5]], SamplingParams(max_new_tokens=2))[0].finish_reason == "length"


def test_a_failure_takes_nobody_with_it_who_waits(bare_lm: LanguageModel, monkeypatch: Any) -> None:
    own, _ = engines(bare_lm, 2)
    expected = own.generate([[1, *linearise(own.config.special, EXAMPLE, end=None)]])[0]
    running, *_, waiting = own.submit([5]), own.submit([6]), own.submit(expected.prompt_token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(infer.scheduling.runner, "run", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            own.step()
    with pytest.raises(RuntimeError, match="submit it again"):
        running.wait()
    assert same(waiting.wait(), expected)
