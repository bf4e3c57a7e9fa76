"""Continuous batching: events, joining and leaving, cancelling, reuse of the cache, held back branches."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import infer.budget
import infer.grammar
import infer.passes
import infer.prefill
import infer.programs
import infer.scheduler
from aspd_jax import LanguageModel
from aspd_jax.errors import RequestError
from aspd_jax.tokens import SerialIds, split
from infer import Engine, Event, SamplingParams
from infer.handle import NO_LIMIT
from infer.policy import Policy, Sample, StepCost, fit
from infer.prefill import Prompt, chunk_size, next_chunk
from infer.request import Job
from infer.reuse import RowMemory, best_match
from infer.scheduler import STEPS_BESIDE_PREFILL
from infer.step import report
from tests.answers import EXAMPLE, SEPARATOR, linearise, same
from tests.conftest import patched

HOT = SamplingParams(temperature=100.0, max_new_tokens=70)


def seeds_that_fork(engine: Engine, count: int) -> list[SamplingParams]:
    params = [replace(HOT, seed=seed) for seed in range(30)]
    results = engine.generate([[1, 2]] * len(params), params)
    chosen = [p for p, result in zip(params, results, strict=True) if result.stats.branches >= 3]
    assert len(chosen) >= count
    return chosen[:count]


def text_of(events: list[Event], blocks: int) -> list[Any]:
    """The answer put together again from events alone: token ids of serial text and branches, in order."""
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


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow), 1000])
def test_events_tell_the_whole_answer(engine: Engine, steps: int) -> None:
    for params in seeds_that_fork(engine, 3):
        handle = engine.submit([1, 2], params, steps=steps)
        events = list(handle)
        assert events[-1].kind == "done" and [e.kind for e in events].count("done") == 1
        result = events[-1].result
        assert result is not None and same(result, engine.generate([[1, 2]], params)[0])
        kinds = [event.kind for event in events]
        assert kinds.count("fork") == kinds.count("merge") == result.stats.blocks
        assert kinds.count("branch") == result.stats.branches
        special, head = engine.protocol.special, len(SEPARATOR)
        expected: list[Any] = []
        ids = result.token_ids[:-1] if result.finish_reason == "stop" else result.token_ids
        for item in split(ids, special):
            if isinstance(item, SerialIds):
                expected.extend(item.ids.tolist())
            else:
                texts = [b[len(t) + head :].tolist() for t, b in zip(item.titles, item.branches, strict=True)]
                while texts and not texts[-1]:
                    texts.pop()
                expected.append(texts)
        assert text_of(events, result.stats.blocks) == expected


def test_events_have_text_and_stop_strings_never_show(lm: LanguageModel) -> None:
    own = Engine(lm, max_length=256, max_batch=1)
    for seed in range(6):
        params = SamplingParams(temperature=1.0, max_new_tokens=60, seed=seed, stop=("e1", "an"))
        events = list(own.submit("Run", params, steps=1))
        result = events[-1].result
        assert result is not None
        serial = "".join(event.text for event in events if event.kind == "token" and not event.block)
        assert serial == "".join(item.text for item in result.structure if hasattr(item, "text"))
        told = [event.text for event in events if event.kind == "branch"]
        written = [b.text for item in result.structure if hasattr(item, "branches") for b in item.branches]
        assert sorted(told) == sorted(written)
        assert not any(stop in text for text in (serial, *told) for stop in params.stop)


@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "heard"])
def test_requests_join_and_leave_without_a_trace(engine: Engine, heard: bool) -> None:
    """Each answer is what it is alone, whoever joined, left or was cancelled meanwhile; who waits starts in order."""
    params = seeds_that_fork(engine, 6)
    alone = [engine.generate([[1, 2, 3 + n]], p)[0] for n, p in enumerate(params)]
    handles = [engine.submit([1, 2, 3 + n], p) for n, p in enumerate(params[:2])]
    engine.pump(5)
    handles += [engine.submit([1, 2, 3 + n], p) for n, p in enumerate(params) if n >= 2]
    given_up = engine.submit([4, 4], replace(HOT, seed=1))
    never = engine.submit([4, 4], replace(HOT, seed=2))
    never.cancel()
    order: list[int] = []
    for handle in (*handles, given_up):
        handle.wanted = heard
    while any(handle.result is None for handle in handles):
        engine.pump(3)
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
    assert not engine.pump(), "nothing is left to do"


def test_a_follow_up_turn_feeds_nothing_again(bare_lm: LanguageModel, monkeypatch: Any) -> None:
    """The second turn goes on in the row of the first, branches included, and gives what a fresh engine gives."""
    own = Engine(bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR)
    fresh = Engine(
        bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR, reuse=False
    )
    fed: list[int] = []
    prefill = infer.prefill.prefill

    def counted(params: Any, state: Any, rows: Any, tokens: Any, layout: Any, *rest: Any) -> Any:
        fed.append(int((layout.sequence > 0).sum()))
        return prefill(params, state, rows, tokens, layout, *rest)

    monkeypatch.setattr(infer.prefill, "prefill", counted)
    prompt = [1, 2, 5, 9]
    any_params = [replace(HOT, seed=seed, max_new_tokens=120) for seed in range(60)]
    answers = zip(any_params, fresh.generate([prompt] * 60, any_params), strict=True)
    with_end = [p for p, answer in answers if answer.stats.blocks and answer.finish_reason == "stop"]
    assert len(with_end) >= 3
    for params in with_end[:3]:
        first = own.generate([prompt], params)[0]
        other = own.generate([[3, 3, 3]], params)[0]
        follow = prompt + first.token_ids + [6, 6]
        fed.clear()
        second = own.generate([follow], params)[0]
        # The end of text was sampled but never fed; so it comes with the next turn.
        assert second.stats.reused_tokens == len(prompt) + len(first.token_ids) - 1
        assert fed == [3]
        assert same(second, fresh.generate([follow], params)[0])
        assert same(other, fresh.generate([[3, 3, 3]], params)[0])


def test_a_shared_beginning_is_copied(bare_lm: LanguageModel) -> None:
    own = Engine(bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR)
    fresh = Engine(
        bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR, reuse=False
    )
    random = np.random.default_rng(0)
    system = random.integers(1, 15, 60).tolist()
    prompts = [system + random.integers(1, 15, 5).tolist() for _ in range(5)]
    params = [SamplingParams(temperature=3.0, max_new_tokens=40, seed=seed) for seed in range(5)]
    together = own.generate(prompts, params)
    reused = [result.stats.reused_tokens for result in together]
    assert reused[0] == 0 and all(tokens >= 60 for tokens in reused[1:]), reused
    for result, expected in zip(together, fresh.generate(prompts, params), strict=True):
        assert same(result, expected)
    changed = own.generate([[9, *system[1:], 4]], params[0])[0]
    assert changed.stats.reused_tokens == 0, "negative control: another beginning"


@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40), st.integers(0, 9))),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    busy=st.integers(0, 3),
)
def test_what_is_kept_of_a_row_is_the_prompt_s_beginning(rows: Any, prompt: list[int], busy: int) -> None:
    memories = [
        RowMemory(np.asarray(ids, np.int32), min(order, len(ids)), len(ids) + extra, stamp)
        for stamp, (ids, order, extra) in enumerate([*rows, ([], 0, 0)])
    ]
    free = [row for row in range(len(memories)) if row >= busy] or [0]
    match = best_match(memories, free, prompt, spare=5)
    source = memories[match.source]
    assert match.row in free
    assert match.tokens < len(prompt) and source.ids[: match.tokens].tolist() == prompt[: match.tokens]
    if match.slots > source.in_order:  # a whole row, gone on with
        assert match.source == match.row and match.tokens == source.ids.size and match.slots == source.slots
        assert match.slots - match.tokens <= 5
    else:
        assert match.slots == match.tokens


@pytest.mark.parametrize("policy", ["cap:1", "cap:2", "slo:0.001"])
def test_branches_held_back_change_no_answer(bare_lm: LanguageModel, engine: Engine, policy: str) -> None:
    """Not even where the budget ends inside a block: it is spent as if no branch had waited."""
    own = Engine(
        bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR,
        branch_policy=policy,
    )  # fmt: skip
    own.scheduler.cost = StepCost(base=1.0, per_token=1.0, per_slot=0.0)
    params = [replace(HOT, seed=seed, max_new_tokens=30 + seed) for seed in range(40)]
    free = engine.generate([[1, 2]] * 40, params)
    held = own.generate([[1, 2]] * 40, params)
    later = 0
    for a, b in zip(free, held, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        assert a.stats.critical_path == b.stats.critical_path
        later += b.stats.passes > a.stats.passes
    assert later >= 3, "negative control: branches did wait"
    assert any(r.finish_reason == "length" and r.stats.blocks for r in free)


@pytest.mark.slow
def test_without_the_lockstep_rule_held_back_branches_change_answers(
    bare_lm: LanguageModel, engine: Engine, monkeypatch: Any
) -> None:
    """Negative control: a budget spent in the order of decoding."""

    def spent_as_decoded(state: Any, protocol: Any) -> infer.budget.BranchBudget:
        live = state.branch_live.sum(axis=1)[:, None]
        affordable = (state.remaining[:, None] >= 2 * live) | (state.branch_live & False)
        return infer.budget.BranchBudget(affordable, affordable | True)

    params = [replace(HOT, seed=seed, max_new_tokens=30 + seed) for seed in range(40)]
    free = engine.generate([[1, 2]] * 40, params)
    own = Engine(
        bare_lm, max_length=256, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR,
        branch_policy="cap:1",
    )  # fmt: skip
    monkeypatch.setattr(infer.budget, "branch_budget", spent_as_decoded)
    with patched(infer.grammar, branch_budget=spent_as_decoded):
        held = own.generate([[1, 2]] * 40, params)
    assert any(a.token_ids != b.token_ids for a, b in zip(free, held, strict=True))


def test_prompts_go_in_as_many_as_fit_a_pass() -> None:
    def rows(*sizes: int) -> list[int]:
        made = [Prompt(Job((1,) * size, SamplingParams(), "serial", 1, 0), row) for row, size in enumerate(sizes)]
        for prompt in made:
            prompt.fed = 0
        return [prompt.row for prompt in next_chunk(made)]

    assert rows() == []
    assert rows(5000) == [0], "one goes in chunks of 512"
    assert rows(*[100] * 40) == list(range(32)), "32 x 128 = 4,096"
    assert rows(300, 300, 10, 10, 10, 10, 10, 10, 10) == list(range(8)), "8 x 384, for 9 need 16; padding counts"
    assert rows(10, 5000, 10) == [0, 1, 2]


def test_little_of_a_prompts_pass_is_padding() -> None:
    sizes = [chunk_size(left) for left in range(1, 2000)]
    assert sorted(set(sizes)) == [16, 32, 64, 96, 128, 192, 256, 384, 512]
    for left, size in enumerate(sizes[:512], 1):
        assert left <= size <= max(16, 2 * left) and (left <= 64 or size <= 1.5 * left)


def test_long_prompts_go_in_chunks_while_others_decode(bare_lm: LanguageModel) -> None:
    def engine() -> Engine:
        return Engine(bare_lm, max_length=512, max_batch=2, max_branches=3, separator_ids=SEPARATOR)

    long = np.random.default_rng(1).integers(1, 15, 440).tolist()
    params = SamplingParams(max_new_tokens=40)
    expected = [engine().generate([prompt], params, "serial")[0] for prompt in ([7, 8], long)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer.prefill, "PREFILL_CHUNK", 128)
        busy = engine()
        first = busy.submit([7, 8], params, "serial")
        busy.pump(1)
        second = busy.submit(long, params, "serial")
        decoded = []
        for _ in range(3):
            busy.pump(NO_LIMIT)
            decoded.append((len(first.partial().token_ids), len(second.partial().token_ids)))
        assert [other for _, other in decoded] == [0, 0, 0], "three of its four chunks"
        assert [own for own, _ in decoded] == [2 + STEPS_BESIDE_PREFILL * n for n in (1, 2, 3)]
        assert same(first.wait(), expected[0]) and same(second.wait(), expected[1])


def test_policies_are_parsed_and_costs_fitted() -> None:
    assert Policy.parse("all") == Policy() and Policy.parse("cap:3").cap == 3
    assert Policy.parse("slo:12.5").milliseconds == 12.5
    for bad in ("cap:0", "slo:0", "cap", "fast"):
        with pytest.raises(RequestError, match="it is all, cap:N"):
            Policy.parse(bad)
    true = StepCost(3.0, 0.25, 0.001)
    samples = [Sample(t, c, true.milliseconds(t, c)) for t in (1, 8, 64) for c in (128, 2048)]
    found = fit(samples)
    assert np.allclose([found.base, found.per_token, found.per_slot], [3.0, 0.25, 0.001], rtol=1e-6)
    assert fit([Sample(t, 100, 5.0 - t / 100) for t in (1, 8, 64)]).per_token == 0.0, "no part is negative"
    # 10 ms allow (10 - 3 - 1) / 0.25 = 24 tokens: 4 of them serial, the rest shared by 4 sequences in a block.
    assert Policy.parse("slo:10").branches(true, serial=4, parallel=4, context=1000) == 5
    assert Policy.parse("slo:1").branches(true, serial=4, parallel=4, context=1000) == 1
    assert Policy.parse("slo:10").branches(None, 4, 4, 1000) is None


def test_first_tokens_and_ends_are_told_at_once(engine: Engine) -> None:
    """A chunk that somebody waits for ends with what he waits for; one that nobody waits for does all of it."""
    params = [replace(HOT, max_new_tokens=40, seed=seed) for seed in range(8)]
    results = engine.generate([[1, 2]] * 8, params)
    long = max(zip(results, params, strict=True), key=lambda pair: pair[0].stats.passes)[1]
    short = replace(long, max_new_tokens=5)
    quiet, heard = engine.submit([1, 2], long), engine.submit([1, 2], short)
    heard.wanted = True
    engine.pump(30)
    assert engine.scheduler.chunk.passes == 0 and heard.poll(), "its first token, before any pass"
    engine.pump(30)
    assert heard.result is not None and quiet.result is None
    assert engine.scheduler.chunk.passes == heard.result.stats.passes
    unheard = engine.submit([1, 2], short)
    engine.pump()
    assert quiet.result is not None and unheard.result is not None
    assert engine.scheduler.chunk.seconds > 0


def test_passes_go_on_while_answers_are_looked_at(bare_lm: LanguageModel) -> None:
    """The next passes are started before an answer is read, but none where branches are held back."""
    asked = SamplingParams(max_new_tokens=24, seed=5)

    def heard_and_done(policy: str) -> list[tuple[int, int]]:
        """After each chunk of 4: the tokens that were told, and the passes that were started."""
        engine = Engine(bare_lm, max_length=128, max_batch=1, separator_ids=SEPARATOR, branch_policy=policy)
        handle, seen, told = engine.submit([1, 2], asked, "serial"), [], 0
        handle.wanted = True
        while handle.result is None:
            engine.pump(4)
            told += sum(len(event.token_ids) for event in handle.poll())
            seen.append((told, handle.partial().stats.passes))
        assert same(handle.result, engine.generate([[1, 2]], asked, "serial")[0])
        return seen

    chunks = [(1, 0), (5, 4), (9, 8), (13, 12), (17, 16), (21, 20), (24, 23)]
    assert heard_and_done("cap:1") == chunks
    assert heard_and_done("all") == [chunks[0], *((told, min(23, passes + 4)) for told, passes in chunks[1:])]


def test_what_was_started_for_a_request_that_is_gone_is_forgotten(engine: Engine) -> None:
    handle = engine.submit([1, 2], replace(HOT, seed=3), "serial")
    handle.wanted = True
    for _ in range(3):
        engine.pump(2)
    handle.cancel()
    assert handle.result is not None and handle.result.finish_reason == "cancelled"
    other = engine.submit([1, 2], replace(HOT, seed=4), "serial")
    engine.pump(1)
    assert engine.scheduler.chunk.passes == 1, "none of the one before"
    assert same(other.wait(), engine.generate([[1, 2]], replace(HOT, seed=4), "serial")[0])


def test_a_state_is_asked_once_what_it_needs(engine: Engine, monkeypatch: Any) -> None:
    """Passes report what the next ones need; the state is asked anew where something else has changed it."""
    asked = []
    monkeypatch.setattr(infer.scheduler, "report", lambda *args: asked.append(1) or report(*args))
    handles = [engine.submit([1, 2], replace(HOT, max_new_tokens=40, seed=seed)) for seed in range(2)]
    for pump in range(3):
        engine.pump(2)
        assert len(asked) == 1, pump
    handles[0].cancel()
    assert handles[1].wait().finish_reason is not None
    assert len(asked) == 2


def test_warm_up_leaves_nothing_to_compile(bare_lm: LanguageModel) -> None:
    own = Engine(bare_lm, max_length=128, max_batch=1, max_branches=2, max_title_tokens=1, separator_ids=())
    assert own.warm_up() > 0
    assert own.scheduler.cost is not None and own.scheduler.cost.milliseconds(1, 128) > 0
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    params = [SamplingParams(temperature=t, seed=s) for t in (0.0, 9.0) for s in range(3)]
    results = own.generate([[1] * size for size in (1, 2, 5, 40, 90, 3)], params)
    assert not [name for name in compiled if "backend_compile" in name]
    jax.block_until_ready(jax.jit(lambda x: x * len(compiled))(1.0))
    assert [name for name in compiled if "backend_compile" in name], "negative control: it is heard of"
    assert any(result.stats.blocks for result in results)
    handle = own.submit([1])
    own.pump(1)
    if handle.result is None:
        with pytest.raises(RequestError, match="engine at rest"):
            own.warm_up()
        handle.cancel()


def test_programs_are_forgotten_before_they_fill_the_process(
    bare_lm: LanguageModel, monkeypatch: Any, tmp_path: Path, caplog: Any
) -> None:
    """XLA on CPU ends a process that has no room for a program's memory maps."""
    own = Engine(bare_lm, max_length=128, max_batch=1, max_branches=2, separator_ids=SEPARATOR)
    maps, most = tmp_path / "maps", tmp_path / "max_map_count"
    most.write_text("80\n")
    monkeypatch.setattr(infer.programs, "MAPS", maps)
    monkeypatch.setattr(infer.programs, "MOST_MAPS", most)
    monkeypatch.setattr(infer.passes, "programs_compiled", count().__next__)
    forgotten: list[bool] = []
    monkeypatch.setattr(infer.passes.jax, "clear_caches", lambda: forgotten.append(True))
    maps.write_text("line\n" * 70)
    expected = own.generate([[1, 2]])[0]
    assert not forgotten and not caplog.records
    maps.write_text("line\n" * 71)
    assert same(own.generate([[1, 2]])[0], expected)
    assert len(forgotten) == 1, "what did not help is not done again"
    assert "max_map_count" in caplog.text
    caplog.clear()
    assert own.warm_up() > 0
    assert "room for 0 of" in caplog.text
    caplog.clear()
    maps.write_text("line\n" * 61)  # where warm-up stops, the next request forgets nothing
    assert own.warm_up() > 0 and "room for 0 of" in caplog.text
    fresh = Engine(bare_lm, max_length=128, max_batch=1, max_branches=2, separator_ids=SEPARATOR)
    assert same(fresh.generate([[1, 2]])[0], expected) and len(forgotten) == 1
    monkeypatch.setattr(infer.programs, "MOST_MAPS", tmp_path / "other systems have no such file")
    assert not infer.programs.crowded(infer.programs.WARM_SHARE)


def test_room_for_programs_is_looked_at_only_after_one_was_compiled(bare_lm: LanguageModel, monkeypatch: Any) -> None:
    """Counting memory maps takes milliseconds, for which a request would wait."""
    own = Engine(bare_lm, max_length=128, max_batch=1, separator_ids=SEPARATOR)
    own.generate([[1, 2]])
    own.generate([[1, 2]])  # looks once more, because of what the first has compiled
    looked: list[float] = []
    monkeypatch.setattr(infer.passes, "crowded", lambda share: looked.append(share))
    own.generate([[1, 2]])
    assert not looked
    jax.block_until_ready(jax.jit(lambda x: x * len(looked) + 3)(1.0))
    own.generate([[1, 2]])
    assert looked == [infer.programs.FULL_SHARE]


def test_a_failure_takes_nobody_with_it_who_waits(bare_lm: LanguageModel, monkeypatch: Any) -> None:
    own = Engine(bare_lm, max_length=128, max_batch=1, separator_ids=SEPARATOR)
    expected = own.generate([[1, *linearise(own.protocol.special, EXAMPLE, end=None)]])[0]
    running, waiting = own.submit([5]), own.submit(expected.prompt_token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(infer.passes, "run", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            own.pump()
    with pytest.raises(RuntimeError, match="submit it again"):
        running.wait()
    assert same(waiting.wait(), expected)
