"""Programs that are compiled beside the passes: nobody waits for them, and no answer changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import infer.compiler
import infer.passes
import infer.scheduler
from aspd_jax import LanguageModel
from infer import Engine, SamplingParams
from infer.answer import Result
from infer.compiler import Compiler, Program
from infer.step import Extent
from tests.answers import SEPARATOR, same
from tests.test_programs import Pass, passes

# Some greedy, some sampled, and some with blocks of two and of three branches.
PARAMS = [SamplingParams(temperature=t, seed=seed, max_new_tokens=50) for t in (0.0, 9.0) for seed in range(5)]


@pytest.fixture
def ran(monkeypatch: Any) -> list[Extent]:
    """The programs that passes ran in, one after another."""
    found: list[Extent] = []
    original = infer.passes.run

    def run(*args: Any) -> Any:
        found.append(args[5])
        return original(*args)

    monkeypatch.setattr(infer.passes, "run", run)
    return found


@pytest.fixture
def gate(monkeypatch: Any) -> Iterator[threading.Event]:
    """Nothing is compiled in the thread until it is set."""
    event, original = threading.Event(), infer.compiler.Compiler._try

    def held(*args: Any) -> bool:
        assert event.wait(120)
        return original(*args)

    monkeypatch.setattr(infer.compiler.Compiler, "_try", held)
    yield event
    event.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: Any) -> None:
    """A program that was missed once is compiled."""
    monkeypatch.setattr(infer.compiler, "ENOUGH_MISSES", 1)


def make(lm: LanguageModel, beside: bool = True) -> Engine:
    return Engine(
        lm, max_length=128, max_batch=2, max_branches=3, max_title_tokens=2, separator_ids=SEPARATOR,
        compile_beside=beside,
    )  # fmt: skip


def answer(engine: Engine, params: list[SamplingParams] = PARAMS) -> list[Result]:
    """All together, and then one alone."""
    engine.forget()
    return engine.generate([[1, 2]] * len(params), params) + engine.generate([[1, 2]], params[-1:])


def all_same(results: list[Result], expected: list[Result]) -> bool:
    return all(same(*pair) for pair in zip(results, expected, strict=True))


@pytest.fixture(scope="module")
def expected(bare_lm: LanguageModel) -> list[Result]:
    """What an engine answers that waits for its programs."""
    results = answer(make(bare_lm, beside=False))
    assert {2, 3} <= {result.stats.branches for result in results if result.stats.blocks == 1}
    return results


def test_passes_run_in_larger_programs_until_the_best_is_there(
    bare_lm: LanguageModel, ran: list[Extent], gate: threading.Event, expected: list[Result]
) -> None:
    jax.clear_caches()
    own = make(bare_lm)
    compiler = own.scheduler.passes.compiler
    own.warm_up(closely=False)
    cover = set(own.scheduler.passes.programs.cover())
    heard: list[tuple[str, str]] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: heard.append((threading.current_thread().name, name))
    )
    assert all_same(answer(own), expected)
    assert ran and set(ran) <= cover and compiler._missed
    gate.set()
    while compiler._missed:
        compiler.wait()
        ran.clear()
        assert all_same(answer(own), expected)
    assert not set(ran) <= cover
    compiled = {thread for thread, name in heard if "backend_compile" in name}
    assert compiled == {"compiler"}, "what the thread compiled is used, and nobody waited"
    after = list(ran)
    ran.clear()
    answer(make(bare_lm, beside=False))
    assert ran == after, "in the end it is as if it had waited"


@given(passes(), st.data())
def test_the_smallest_that_is_there_takes_the_place_of_the_best(drawn: Pass, data: st.DataObject) -> None:
    programs, widths = drawn.programs, np.asarray(drawn.widths)
    best = Program(drawn.choose()[0], data.draw(st.booleans()), data.draw(st.booleans()))
    any_kind = st.builds(Program, st.sampled_from(programs.every()), st.booleans(), st.booleans())
    large = {within for within in programs.every() if within.holds(widths, drawn.slots)} - {best.within}
    there = data.draw(st.sets(any_kind, max_size=9))
    if large:
        there |= data.draw(st.sets(st.sampled_from([best._replace(within=within) for within in large]), max_size=6))
    compiler, missed = Compiler(None, None, beside=True), []  # type: ignore[arg-type, var-annotated]
    compiler._miss = lambda program, state: missed.append(program)  # type: ignore[method-assign]
    for program in there:
        compiler.note(program)
    within = compiler.pick(best, widths, drawn.slots, None)  # type: ignore[arg-type]
    fits = [of for of in there if of[1:] == best[1:] and of.within.holds(widths, drawn.slots)]
    if best in there or not fits:
        assert within == best.within and not missed
        assert compiler.pick(best, widths, drawn.slots, None) == best.within  # type: ignore[arg-type]
    else:
        assert within in [of.within for of in fits] and missed == [best]
        assert within.places == min(of.within.places for of in fits)


def test_nothing_that_holds_a_pass_is_compiled_at_once(
    bare_lm: LanguageModel, ran: list[Extent], gate: threading.Event, expected: list[Result]
) -> None:
    """Without warm-up, too: a program is waited for only where none holds the pass."""
    own = make(bare_lm)
    assert all_same(answer(own), expected)
    assert ran, "and nobody waited for the thread"
    gate.set()
    own.scheduler.passes.compiler.wait()
    own.scheduler.passes.compiler.forget()  # as when memory maps run out
    assert all_same(answer(own), expected)


def test_what_is_rarely_missed_is_not_compiled(
    bare_lm: LanguageModel, ran: list[Extent], expected: list[Result], monkeypatch: Any
) -> None:
    own = make(bare_lm)
    compiler, cover = own.scheduler.passes.compiler, set(own.scheduler.passes.programs.cover())
    own.warm_up(closely=False)
    monkeypatch.setattr(infer.compiler, "ENOUGH_MISSES", 1 << 30)
    assert all_same(answer(own), expected)
    compiler.wait()
    program, misses = compiler._missed.most_common(1)[0]
    assert set(ran) <= cover and misses > 1
    monkeypatch.setattr(infer.compiler, "ENOUGH_MISSES", misses)
    assert all_same(answer(own), expected)
    compiler.wait()
    ran.clear()
    assert all_same(answer(own), expected)
    assert program.within in ran


def test_at_rest_whatever_was_missed_is_compiled(
    bare_lm: LanguageModel, ran: list[Extent], expected: list[Result], monkeypatch: Any
) -> None:
    monkeypatch.setattr(infer.compiler, "ENOUGH_MISSES", 1 << 30)
    own = make(bare_lm)
    compiler, cover = own.scheduler.passes.compiler, set(own.scheduler.passes.programs.cover())
    own.warm_up(closely=False)
    assert all_same(answer(own), expected)
    compiler.wait()
    missed = {program.within for program in compiler._missed}
    assert missed and set(ran) <= cover
    compiler.rest(True)
    compiler.wait()
    assert not compiler._missed
    compiler.rest(False)
    ran.clear()
    assert all_same(answer(own), expected)
    compiler.wait()
    assert missed & set(ran)


def test_what_does_not_compile_is_not_tried_again(
    bare_lm: LanguageModel, ran: list[Extent], expected: list[Result], monkeypatch: Any, caplog: Any
) -> None:
    own = make(bare_lm)
    own.warm_up(closely=False)
    tried: list[Extent] = []

    def lower(*args: Any) -> Any:
        tried.append(args[5])
        raise RuntimeError("no room")

    monkeypatch.setattr(infer.compiler, "run", SimpleNamespace(lower=lower))
    for _ in range(2):
        assert all_same(answer(own), expected)
        own.scheduler.passes.compiler.wait()
    assert tried and set(ran) <= set(own.scheduler.passes.programs.cover())
    assert "does not compile" in caplog.text
    count = len(tried)
    answer(own)
    own.scheduler.passes.compiler.wait()
    assert len(tried) == count


def test_a_full_process_goes_on_with_what_it_has(
    bare_lm: LanguageModel, ran: list[Extent], expected: list[Result], monkeypatch: Any
) -> None:
    own = make(bare_lm)
    own.warm_up(closely=False)
    monkeypatch.setattr(infer.compiler, "crowded", lambda share: True)
    monkeypatch.setattr(infer.compiler, "run", None)
    for _ in range(2):
        assert all_same(answer(own), expected)
        own.scheduler.passes.compiler.wait()
    assert set(ran) <= set(own.scheduler.passes.programs.cover())


@pytest.mark.parametrize("processes", [1, 2])
def test_only_who_asks_for_it_and_is_alone_has_a_thread(
    bare_lm: LanguageModel, expected: list[Result], monkeypatch: Any, processes: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(infer.scheduler.jax, "process_count", lambda: processes)
        own = make(bare_lm, beside=processes > 1)
    monkeypatch.setattr(infer.compiler.threading, "Thread", None)
    own.warm_up(closely=False)
    assert all_same(answer(own), expected)
