"""Exact fields: the answers of serial decoding, token for token, whatever their drafts are."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infer.control.exact
import infer.decode.checking
import infer.scheduling.scheduler
from aspd_jax import LanguageModel, load_model, save_model
from aspd_jax.errors import RequestError
from aspd_jax.sharding import make_mesh
from aspd_jax.template import Hole, Template
from aspd_jax.tokens import TextCodec
from infer import Engine, Result, SamplingParams
from infer.control.draft_text import ANCHOR, DraftText
from infer.decode.grammar import sample_lanes
from infer.decode.inputs import Lanes
from infer.scheduling.step_cost import StepCost
from tests.conftest import SIZES, patched
from tests.infer.scheduling.test_filling import LATER, PROMPT, SCHEMA, random_schema
from tests.infer.scheduling.test_structured_output import LIMITED, record, valid

WIDE = record(**{name: {"type": "string", "maxLength": 16} for name in ("a", "b", "c", "d", "e", "f")})


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 300, "temperature": 1.0, "seed": 1, "json_schema": SCHEMA} | changes)


def plain(result: Result) -> Any:
    said = result.text, result.structure, result.token_ids, result.finish_reason, result.error
    return *said, result.logprobs, result.values


def both(engine: Engine, asked: Sequence[SamplingParams]) -> tuple[list[Result], list[Result]]:
    """Return the answers in serial mode and with exact fields, each in one batch."""
    serial = engine.generate([PROMPT] * len(asked), asked)
    return serial, engine.generate([PROMPT] * len(asked), [replace(one, fields="exact") for one in asked])


def same(one: Sequence[Result], other: Sequence[Result]) -> bool:
    return [plain(result) for result in one] == [plain(result) for result in other]


def drafting(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    """Change the drafts of all answers."""
    monkeypatch.setattr(infer.control.exact, "DraftText", lambda text, codec: DraftText(change(text), codec))


def test_answers_are_those_of_serial_mode(engine: Engine) -> None:
    """Check tokens, log probabilities and finish reasons in a batch, with penalties, limits of length and bias."""
    kinds: list[dict[str, Any]] = [
        *({"seed": seed, "logprobs": 2} for seed in range(3)),
        {"temperature": 0.0},
        {"json_schema": LATER, "temperature": 0.0, "repetition_penalty": 1.3},
        {"json_schema": LATER, "frequency_penalty": 0.7, "presence_penalty": 0.3, "top_k": 50},
        {"json_schema": WIDE, "top_p": 0.9, "min_p": 0.01, "min_tokens": 80},
        {"json_schema": WIDE, "logit_bias": {"70": 4.0, "71": -100.0}, "logprobs": 0},
    ]
    serial, exact = both(engine, [params(**kind) for kind in kinds])
    assert same(serial, exact) and {result.finish_reason for result in exact} == {"stop"}
    assert all(valid(r.text, k.get("json_schema", SCHEMA)) for r, k in zip(exact, kinds, strict=True))
    assert exact[0].values
    for one, other in zip(serial, exact, strict=True):
        assert one.stats.content_tokens == other.stats.content_tokens
        assert one.stats.critical_path - 3 <= other.stats.critical_path <= one.stats.critical_path
        assert other.stats.drafted_tokens >= other.stats.accepted_tokens > 0 and other.stats.discarded_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_drafts_save_steps(engine: Engine, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check drafts that are the answer: nearly all tokens come in a few passes, in one cache row."""
    asked = params(json_schema=WIDE, temperature=temperature)
    (serial,) = engine.generate([PROMPT], asked)
    drafting(monkeypatch, lambda text: serial.text)
    (exact,) = engine.generate([PROMPT], replace(asked, fields="exact"))
    assert same([serial], [exact]) and serial.stats.steps > 40
    drafted = exact.stats.steps - -(-len(serial.token_ids) // 63)
    assert exact.stats.accepted_tokens > 0.9 * len(serial.token_ids) and drafted < 20


def edited(text: str, draw: random.Random) -> str:
    """Return a text with a few parts replaced."""
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(text))
        other = draw.choice(["", "x", "7", '", "b": "', "größe €", text[:20]])
        text = text[:start] + other + text[start + draw.randint(0, 6) :]
    return text


@pytest.mark.further
@settings(max_examples=10)
@given(seed=st.integers(0, 1 << 30))
def test_wrong_drafts_change_nothing_but_steps(engine: Engine, seed: int) -> None:
    """Check that any draft gives the same answer: the answer with parts replaced, and another answer."""
    draw = random.Random(seed)
    asked = [params(json_schema=schema, seed=seed, temperature=draw.choice([0.0, 1.0])) for schema in (SCHEMA, WIDE)]
    serial = engine.generate([PROMPT] * 2, asked)
    with pytest.MonkeyPatch.context() as patch:
        drafting(patch, lambda text: edited(serial["zip" not in text].text, draw))
        exact = engine.generate([PROMPT] * 2, [replace(one, fields="exact") for one in asked])
    assert same(serial, exact) and sum(result.stats.accepted_tokens for result in exact) > 10


@pytest.mark.further
@settings(max_examples=8)
@given(draw=st.randoms(use_true_random=False))
def test_random_schemas(engine: Engine, draw: random.Random) -> None:
    schemas = [random_schema(draw) for _ in range(6)]
    asked = [
        params(json_schema=schema, seed=n, temperature=n % 2, max_new_tokens=200) for n, schema in enumerate(schemas)
    ]
    assert same(*both(engine, asked))


@pytest.mark.further
def test_budgets_and_stop_strings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that answers end at the same token with right drafts, which reach beyond the end."""
    (whole,) = engine.generate([PROMPT], params())
    drafting(monkeypatch, lambda text: whole.text)
    limits = range(1, len(whole.token_ids) + 2, 5)
    asked = [params(**{name: n}, logprobs=0) for name in ("max_new_tokens", "max_content_tokens") for n in limits]
    asked += [params(stop=(stop,), logprobs=0) for stop in ('"kind"', "}", whole.text[12:15], whole.text[-9:-4], "a")]
    serial, exact = both(engine, asked)
    assert same(serial, exact) and {result.finish_reason for result in exact} == {"stop", "length"}


@pytest.mark.further
def test_answers_that_exceed_a_limit(engine: Engine) -> None:
    schema = record(a={"type": "boolean"}, words=LIMITED["properties"]["words"])
    serial, exact = both(engine, [params(json_schema=schema, seed=seed, max_new_tokens=60) for seed in range(4)])
    assert same(serial, exact) and "error" in {result.finish_reason for result in exact}


@pytest.mark.further
@pytest.mark.parametrize("drafts", ["lookup", "none"])
def test_engines(lm: LanguageModel, drafts: Any) -> None:
    """Check other draft sources, several blocks, and rows that others join and leave."""
    own = Engine(lm, max_length=512, max_batch=3, max_branches=2, drafts=drafts, draft_tokens=3, force_drafts=True)
    asked = [params(json_schema=schema, seed=n, max_new_tokens=150) for n in range(3) for schema in (SCHEMA, LATER)]
    free = params(json_schema=None, max_new_tokens=70)
    serial, exact = both(own, asked)
    mixed = [part for one in asked for part in (replace(one, fields="exact"), free)]
    together = own.generate([PROMPT] * len(mixed), mixed)
    assert same(serial, exact) and same(serial, together[::2])
    assert same(together[1::2], own.generate([PROMPT], free) * len(asked))


@pytest.mark.further
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_meshes(lm: LanguageModel, engine: Engine, axes: dict[str, int], tmp_path: Path) -> None:
    """Check checks of several rows in one pass, where rows of the cache are split over devices."""
    save_model(lm, tmp_path / "model")
    own = Engine(load_model(tmp_path / "model", mesh=make_mesh(axes)), **SIZES)
    asked = [params(json_schema=schema, temperature=0.0, max_new_tokens=120) for schema in (SCHEMA, LATER, WIDE)]
    serial = engine.generate([PROMPT] * 3, asked)
    exact = own.generate([PROMPT] * 3, [replace(one, fields="exact") for one in asked])
    assert [result.token_ids for result in exact] == [result.token_ids for result in serial]


@pytest.mark.further
def test_streams_and_later_turns(engine: Engine) -> None:
    """Check that events show the checked answer only, and that a later prompt reuses it."""
    engine.reset_cache()
    (serial,) = engine.generate([PROMPT], params())
    for stream in ("text", "branches"):
        engine.reset_cache()
        events = list(engine.submit(PROMPT, params(fields="exact"), "serial", max_steps=1, stream=stream))
        assert "".join(event.text for event in events) == serial.text and {e.kind for e in events} == {"token", "done"}
        later = [*serial.prompt_token_ids, *serial.token_ids, 5]
        (again,) = engine.generate([later], params(json_schema=None, max_new_tokens=20))
        assert again.stats.reused_tokens >= len(later) - 3
        engine.reset_cache()
        assert engine.generate([later], params(json_schema=None, max_new_tokens=20))[0].token_ids == again.token_ids


@pytest.mark.further
def test_a_cancelled_draft_leaves_the_prompt(engine: Engine) -> None:
    engine.reset_cache()
    handle = engine.submit(PROMPT, params(fields="exact"), "serial")
    while not handle.output.branch_ids:
        handle.advance(1)
    handle.cancel()
    assert handle.result is not None and (handle.result.text, handle.result.finish_reason) == ("", "cancelled")
    assert same(*both(engine, [params()]))


@pytest.mark.further
def test_a_draft_that_costs_more_than_it_saves_is_left_out(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check answer, steps and statistics; there is a draft where wide steps are cheap, and where it is forced."""
    monkeypatch.setattr(infer.scheduling.scheduler, "compile_all", lambda programs: None)
    dear, cheap = StepCost(1.0, 1.0, 0.0), StepCost(1.0, 0.0, 0.0)
    for cost, force, fields in ((dear, False, 0), (cheap, False, 7), (dear, True, 7)):
        monkeypatch.setattr(infer.scheduling.scheduler, "measure_cost", lambda *given, cost=cost: (given[2], cost))
        own = Engine(lm, force_drafts=force, **SIZES)
        own.warm_up(alone=True, checks=True)
        (serial,), (exact,) = both(own, [params(logprobs=1)])
        assert same([serial], [exact]) and (serial.stats.drafted_fields, exact.stats.drafted_fields) == (0, fields)
        assert (exact.stats.steps == serial.stats.steps) == (not fields) == (not exact.stats.discarded_tokens)


@pytest.mark.further
def test_checks_are_needed(engine: Engine) -> None:
    """Check that answers change where samples ignore their place, or the grammar (negative control)."""
    asked = [params(json_schema=WIDE, seed=seed) for seed in range(3)]
    serial = engine.generate([PROMPT] * 3, asked)
    for change in (lambda lanes: {"ahead": None}, lambda lanes: {"bits": ~jnp.zeros_like(lanes.bits)}):

        def broken(*given: Any, change: Callable[[Lanes], dict[str, Any]] = change) -> Any:
            return sample_lanes(*given[:-1], given[-1]._replace(**change(given[-1])))

        with patched(infer.decode.checking, sample_lanes=broken):
            exact = engine.generate([PROMPT] * 3, [replace(one, fields="exact") for one in asked])
        assert not same(serial, exact)


TEMPLATE = 'Pros:{pros}\n\nCons: {cons after pros} "so"\n{{{x}}}{verdict after pros, cons}'
NUMBER = Hole("n", schema='{"type": "integer", "minimum": 0, "maximum": 999}')


@pytest.mark.further
@pytest.mark.parametrize("source", [TEMPLATE, ["n = ", NUMBER, ";\n", Hole("rest"), "."]])
def test_templates(engine: Engine, source: Any) -> None:
    """Check that an answer is that of its serial form as a grammar, and that its literal text is the template's."""
    template = Template(source)
    kinds: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2, "logprobs": 1}, {"temperature": 0.0}, {"max_new_tokens": 9}]
    kinds = [{"json_schema": None, "logit_bias": {"10": 3.0, "34": 3.0, "46": 3.0}} | kind for kind in kinds]
    serial = engine.generate([PROMPT] * 4, [params(**kind, grammar=template.grammar) for kind in kinds])
    asked = [params(**kind, template=template, fields="exact") for kind in kinds]
    exact = engine.generate([PROMPT] * 4, asked)
    assert same(serial, exact) and any(result.stats.discarded_tokens for result in exact)
    literals = [part for part in template.parts if isinstance(part, str)]
    pattern = "(?s)" + ".*?".join(map(re.escape, literals))
    assert all(re.match(pattern, result.text) for result in exact if result.finish_reason == "stop")
    (other,) = engine.generate([PROMPT], params(**kinds[0], template=template))
    assert other.token_ids != exact[0].token_ids, "negative control: values that do not see each other"


def test_templates_beside_other_structure() -> None:
    with pytest.raises(RequestError, match="json_schema and template: expected one of them, got 2"):
        params(template="a{b}", fields="exact")
    with pytest.raises(RequestError, match="grammar and template: expected one of them"):
        params(json_schema=None, template="a{b}", grammar='start: "a"')


def test_a_schema_without_fields_is_decoded_serially(engine: Engine) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    serial, exact = both(engine, [params(json_schema=schema), params(max_new_tokens=20)])
    assert same(serial, exact) and not exact[0].stats.discarded_tokens


class TestDraftText:
    @pytest.fixture
    def codec(self, lm: LanguageModel) -> TextCodec:
        return lm.codec.text

    def test_it_gives_the_tokens_of_its_text(self, codec: TextCodec) -> None:
        text = '{"größe": "€ 12", "b": [1, true]}'
        draft, found = DraftText(text, codec), list[int]()
        while (token := draft.next()) is not None:
            draft.follow([token])
            found.append(token)
        assert codec.decode(found) == text

    @given(seed=st.integers(0, 1 << 30))
    def test_it_goes_on_behind_a_difference(self, lm: LanguageModel, seed: int) -> None:
        """Check with a search of its own that the place is behind `ANCHOR` equal bytes, or a name and what follows."""
        codec, draw = lm.codec.text, random.Random(seed)
        text = "".join(f', "{name}": "{draw.choice(["yes", "no", "maybe €"])}"' for name in "abcdefgh")
        answer = edited(text, draw).encode(errors="ignore").decode(errors="ignore")
        draft, said = DraftText(text, codec), b""
        for token in codec.byte_tokens.encode(answer):
            draft.follow([token])
            said += codec.byte_tokens.tokens[token]
            following = draft.next()
            if following is not None:
                piece = codec.byte_tokens.tokens[following]
                name = re.search(rb'"[a-h]":[^:]*$', said)
                ends = [said[-ANCHOR:], *([name[0]] if name else [])]
                assert any(end + piece in text.encode() for end in ends)


def test_the_first_difference_ends_a_check(engine: Engine) -> None:
    """Check numbers of accepted tokens with a draft that differs in one place."""
    asked = params(json_schema=WIDE, temperature=0.0)
    (serial,) = engine.generate([PROMPT], asked)
    at = serial.text.index('"d"') + 6
    other = serial.text[:at] + "~" + serial.text[at:]
    with pytest.MonkeyPatch.context() as patch:
        drafting(patch, lambda text: other)
        (exact,) = engine.generate([PROMPT], replace(asked, fields="exact"))
    assert same([serial], [exact])
    rejected = exact.stats.drafted_tokens - exact.stats.accepted_tokens
    assert 0 < rejected <= 64 and exact.stats.accepted_tokens > 0.7 * len(serial.token_ids)
