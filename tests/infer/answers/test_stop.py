"""Stop strings: the text before the first match, whole and streamed; repeated objects (protocol, section 5)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspd_jax import LanguageModel
from aspd_jax.structure import Branch, Parallel, Serial, canonical, plain_text
from aspd_jax.tokens import SerialIds, split
from infer import Engine, Result, SamplingParams
from infer.answers.events import Event, StopFilter
from infer.answers.stop import first_match, repeats_an_object, undecided
from tests.conftest import SIZES, deferred_branches, with_one_program


def before(text: str, stop: tuple[str, ...]) -> str:
    """Return the text before the match that ends first, from all beginnings of the text."""
    for end in range(len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)]
    return text


strings = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("ab\n", max_size=24), strings, st.randoms(use_true_random=False))
def test_pieces_of_a_text_end_where_the_whole_ends(text: str, stop: list[str], random: Random) -> None:
    match = first_match(text, stop)
    assert (text if match is None else text[: match.start]) == before(text, tuple(stop))
    filter, shown, at = StopFilter(stop), "", 0
    while at < len(text):
        size = random.randint(1, 5)
        events = [Event("token", text=text[at : at + size]), Event("branch", 1, 1)]
        shown += "".join(event.text for event in filter.take(events, final=False))
        at += size
        assert before(text, tuple(stop)).startswith(shown), "nothing is taken back"
        sure = before(text[:at], tuple(stop))
        if not filter.matched:
            assert len(shown) == len(sure) - undecided(sure, stop), "and nothing is held without need"
    shown += "".join(event.text for event in filter.take([], final=True))
    assert shown == before(text, tuple(stop)) and filter.matched == (match is not None)


def stops(text: str, structure: tuple[object, ...], random: Random) -> list[tuple[str, ...]]:
    """Draw strings of a text: anywhere, at the boundaries of its branches, and two at once."""
    places = [random.randrange(len(text)) for _ in range(2)]
    at = 0
    for item in structure:
        for part in item.branches if isinstance(item, Parallel) else [item]:
            at += len(part.text)  # type: ignore[attr-defined]
            places.append(max(0, at - 1))
    one = [(text[place : place + random.randint(1, 4)],) for place in places if text[place : place + 1]]
    return [*one, (*one[0], *one[-1])]


def streamed(engine: Engine, params: SamplingParams, stream: str, **more: object) -> tuple[str, Result]:
    handle = engine.submit("Run", params, max_steps=1, stream=stream, **more)  # type: ignore[arg-type]
    events = list(handle)
    assert handle.result is not None
    return "".join(event.text for event in events if event.kind == "token"), handle.result


def answer(random: Random) -> tuple[Serial | Parallel, ...]:
    """Return an answer with a block, of a few letters."""

    def text(most: int) -> str:
        return "".join(random.choice("ab \n.é") for _ in range(random.randint(0, most)))

    branches = [Branch(title, text(20)) for title in ("one", "two", "three")]
    return canonical([Serial("x" + text(10)), Parallel(branches), Serial(text(10))])


def written(lm: LanguageModel, structure: Sequence[Serial | Parallel]) -> SamplingParams:
    """Return parameters with which an engine writes a structure of one block."""
    special, serial, branches = lm.codec.special, list[int](), list[list[int]]()
    for item in split(lm.codec.linearise(structure).tokens, special, lm.codec.form):
        if isinstance(item, SerialIds):
            serial += item.ids
            continue
        for title in item.titles:
            serial += [special.title_start, *title, special.title_end]
        serial.append(special.parallel_start)
        branches = [[*text.ids, special.branch_end] for text in item.texts]
    return SamplingParams(max_new_tokens=400, script=[[*serial, lm.end_ids[0]], *branches])


Answers: TypeAlias = tuple[Engine, list[tuple[SamplingParams, Result]]]


@pytest.fixture(scope="module")
def answers(lm: LanguageModel) -> Answers:
    engine, random = Engine(lm, **SIZES), Random(3)
    params = [written(lm, answer(random)) for _ in range(12)]
    results = engine.generate(["Run"] * len(params), params)
    assert all(result.stats.blocks == 1 and result.finish_reason == "stop" for result in results)
    return engine, list(zip(params, results, strict=True))


def test_the_text_ends_before_the_first_match(answers: Answers) -> None:
    engine, free = answers
    random, in_block, across, fewer = Random(0), 0, 0, 0
    for params, whole in free:
        asked = [replace(params, stop=stop) for stop in stops(whole.text, whole.structure, random)]
        for stopping, result in zip(asked, engine.generate(["Run"] * len(asked), asked), strict=True):
            expected = before(whole.text, stopping.stop)
            assert result.text == plain_text(result.structure) == expected, stopping.stop
            assert result.finish_reason == "stop"
            in_block += len(result.structure) == 2
            fewer += result.stats.steps < whole.stats.steps
            parts = [part.text for item in whole.structure for part in getattr(item, "branches", [item])]
            across += not any(one in part for one in stopping.stop for part in parts)
        for stream, stopping in zip(("text", "branches"), asked[-2:], strict=True):
            assert streamed(engine, stopping, stream)[0] == before(whole.text, stopping.stop)
    assert in_block > 10 and across > 4 and fewer > 20


def test_a_string_that_never_comes_changes_nothing(answers: Answers) -> None:
    engine, free = answers
    for params, whole in free[:4]:
        text, result = streamed(engine, replace(params, stop=("never",)), "text")
        assert text == result.text == whole.text and result.token_ids == whole.token_ids


def test_texts_stream_in_reading_order(answers: Answers) -> None:
    """Check that every text sent is a beginning of the answer; a limit removes nothing of it."""
    engine, free = answers
    mixed = 0
    for params, whole in free[:6]:
        for limit in (None, 11, 30):
            bound = replace(params, max_content_tokens=limit)
            text, result = streamed(engine, bound, "text")
            assert text == result.text and whole.text.startswith(text.rstrip("\ufffd"))
            mixed += streamed(engine, bound, "branches")[0] != result.text
    assert mixed, "negative control: as they grow, branches are mixed"


def test_the_rest_is_cancelled(lm: LanguageModel, answers: Answers) -> None:
    """Check that a match in a branch ends this branch and later ones; earlier ones go on to their ends."""
    engine, _ = answers
    branches = [Branch("one", "a" * 10), Branch("two", "bbXX" + "b" * 80), Branch("three", "c" * 80)]
    params = written(lm, (Serial("x"), Parallel(branches), Serial("end")))
    (whole,) = engine.generate(["Run"], [params])
    (result,) = engine.generate(["Run"], [replace(params, stop=("XX",))])
    assert result.text == "x" + "a" * 10 + "bb" and result.stats.critical_path < whole.stats.critical_path - 60
    assert result.stats.content_tokens == len(lm.codec.text.encode(result.text)) + len(lm.codec.text.encode("XX"))


def with_drafts(lm: LanguageModel) -> Engine:
    return with_one_program(Engine(lm, **(SIZES | {"max_batch": 1}), drafts="lookup", draft_tokens=2))


@pytest.mark.further
@pytest.mark.parametrize("deferred", [False, True])
def test_every_engine(lm: LanguageModel, answers: Answers, deferred: bool) -> None:
    engine, random = Engine(lm, **SIZES) if deferred else with_drafts(lm), Random(1)
    with deferred_branches(1) if deferred else nullcontext():
        for params, whole in answers[1][:4]:
            asked = [replace(params, stop=stop) for stop in stops(whole.text, whole.structure, random)]
            for stopping, result in zip(asked, engine.generate(["Run"] * len(asked), asked), strict=True):
                assert result.text == before(whole.text, stopping.stop), stopping.stop


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0, "", "a", "}"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


def equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: numbers by value, and no number is a Boolean."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def spelled(value: Any, random: Random) -> str:
    """Return JSON text of a value with any order of keys, white space, and spelling of numbers."""
    blank = random.choice(["", " ", "\n  "])
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}:{blank}{spelled(item, random)}" for key, item in value.items()]
        return "{" + blank + f",{blank}".join(random.sample(parts, len(parts))) + blank + "}"
    if isinstance(value, list):
        return "[" + f",{blank}".join(spelled(item, random) for item in value) + "]"
    if type(value) is int:
        return random.choice([f"{value}", f"{value}.0", f"{value}e0"])
    return json.dumps(value)


@given(
    st.lists(st.tuples(st.sampled_from("fg"), st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2)), max_size=4),
    st.randoms(use_true_random=False),
)
def test_repeated_objects(calls: list[tuple[str, dict[str, Any]]], random: Random) -> None:
    text = "".join(f'<{name}> {spelled(value, random)}"' for name, value in calls)
    pairs = [(one, other) for n, one in enumerate(calls) for other in calls[:n]]
    repeats = any(one[0] == other[0] and equal(one[1], other[1]) for one, other in pairs)
    assert repeats_an_object(text, re.compile("<(f|g)> ")) == repeats
    for name, value in calls:
        assert not repeats_an_object(f"<{name}> {spelled(value, random)} <{name}> " + "{", re.compile("<(f|g)> "))


def test_an_answer_ends_after_a_repeated_object(lm: LanguageModel) -> None:
    """Check the end beside a grammar that would permit more, and beside none."""
    engine = Engine(lm, **SIZES)
    text = 'f={"a": 1} f={"a": 2} f={"a": 1} f={"a": 3}'
    pieces = re.split(r"(?<=\})", text)
    tokens = [*(token for piece in pieces for token in lm.codec.text.encode(piece)), *lm.end_ids[:1]]
    grammar = r'start: /(f=\{"a": [0-9]\} ?){4}/'
    for more in ({}, {"grammar": grammar}):
        params = SamplingParams(script=(tokens,), max_new_tokens=80, end_at_repeat="(f)=", **more)  # type: ignore[arg-type]
        for change, left in ((params, text[:32]), (replace(params, end_at_repeat="(g)="), text)):
            result = engine.generate(["Run"], change, "serial")[0]
            assert result.text[: len(left)] == left and result.finish_reason == "stop"
            # The beginning of the fourth object is determined, so it was fed with the end of the third.
            assert result.text in ((text,) if left == text else (left, f"{left} f", f"{left} f={{")), result.text
