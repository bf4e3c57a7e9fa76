"""Draft tokens of constrained answers: equal answers, fewer steps, and no tokens after the end of a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import infer.control.filling
import infer.control.schemas
import infer.decode.speculation
from aspd_jax import LanguageModel
from aspd_jax.template import Template
from infer import Engine, Result, SamplingParams
from infer.answers.answer import RequestOutput
from infer.control.filling import Filling
from infer.decode.derived import Derived
from infer.decode.state import PARALLEL, DecodeState, EngineConfig
from tests.conftest import SIZES, patched
from tests.helpers.draft_heads import with_draft_heads
from tests.infer.scheduling.test_filling import LATER, SCHEMA
from tests.infer.scheduling.test_structured_output import LIMITED, SCHEMAS, record, valid

pytestmark = pytest.mark.further

PROMPT = "Say it in JSON:"
DRAFT = 3


@pytest.fixture(scope="module")
def plain(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


def requests(engine: Engine) -> list[SamplingParams]:
    """Serial values, fields in one block and in two, free text, forked answers, and free answers."""
    special, encode = engine.config.special, engine.lm.codec.text.encode
    titles = [t for name in ("sun", "rain") for t in (special.title_start, *encode(name), special.title_end)]
    forked: dict[str, Any] = {"script": [[*titles, special.parallel_start]]}
    kinds: list[dict[str, Any]] = [{"json_schema": schema} for schema in SCHEMAS.values()]
    kinds += [{"json_schema": {"type": "array", "items": {"pattern": "^[ab]{4}$"}, "minItems": 8, "maxItems": 8}}]
    kinds += [{"json_schema": schema, "fields": "parallel"} for schema in (SCHEMA, LATER)]
    kinds += [{"template": Template("Pros:{pros}\nCons:{cons}\nSum:{sum after pros, cons}"), "max_branch_tokens": 20}]
    kinds += [forked, {"max_new_tokens": 40}]
    return [
        SamplingParams(**{"max_new_tokens": 200, "temperature": temperature, "seed": 2} | kind)
        for temperature in (0.0, 1.0)
        for kind in kinds
    ]


def same(results: Sequence[Result], expected: Sequence[Result]) -> bool:
    pairs = zip(results, expected, strict=True)
    return all((a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason) for a, b in pairs)


@pytest.mark.parametrize(("drafts", "least"), [("heads", 6), pytest.param("lookup", 4, marks=pytest.mark.slow)])
def test_answers_are_the_same_with_drafts(drafts: Any, least: int, plain: Engine) -> None:
    """Check equality in a batch, greedy and sampled, whatever the draft tokens."""
    asked = requests(plain)
    expected = plain.generate([PROMPT] * len(asked), asked)
    lm = with_draft_heads(plain.lm, DRAFT, scale=0.0)
    own = Engine(lm, drafts=drafts, draft_tokens=DRAFT, force_drafts=True, **SIZES)
    results = own.generate([PROMPT] * len(asked), asked)
    assert same(results, expected)
    constrained = [result for params, result in zip(asked, results, strict=True) if params.json_schema]
    assert sum(result.stats.drafted_tokens > 0 for result in constrained) >= least
    assert sum(result.stats.accepted_tokens for result in results) > 0
    assert sum(r.stats.steps for r in results) <= sum(r.stats.steps for r in expected)


def recorded(engine: Engine, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, list[list[int]]]:
    """Return an answer, and the tokens of its segments: the serial one, or the branches of its only block."""
    seen: list[RequestOutput] = []
    read = Filling.read

    def watched(self: Filling, output: RequestOutput) -> RequestOutput:
        seen.append(output)
        return read(self, output)

    with monkeypatch.context() as patch:
        patch.setattr(infer.control.filling.Filling, "read", watched)
        (result,) = engine.generate([PROMPT], params)
    branches = next((output.branch_ids for output in reversed(seen) if output.branch_ids), ())
    return result, [result.token_ids, *branches]


def knowing(segments: Sequence[Sequence[int]]) -> Callable[..., jax.Array]:
    """Return a `drafts_from_text` that knows the tokens of each segment."""
    size = max(map(len, segments)) + DRAFT
    known = jnp.asarray([[*segment, *[-1] * (size - len(segment))] for segment in segments], jnp.int32)

    def source(state: DecodeState, derived: Derived, config: EngineConfig, used: int) -> jax.Array:
        s, ahead = state.sequence, jnp.arange(config.draft_tokens)
        in_block = (s.cursor.phase == PARALLEL)[:, None, None]
        number = jnp.where(in_block[..., 0], 1 + jnp.arange(config.max_branches), 0)
        place = jnp.take_along_axis(s.segments.sampled, number, axis=1)[..., None] + ahead
        return known[jnp.minimum(number, len(segments) - 1)[..., None], jnp.minimum(place, size - 1)]

    return source


def looking_up(lm: LanguageModel, draft_tokens: int) -> Engine:
    sizes = SIZES | {"max_batch": 1, "draft_tokens": draft_tokens}
    return Engine(lm, drafts="lookup", force_drafts=True, **sizes)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"json_schema": SCHEMAS["list"]}, marks=pytest.mark.slow),
        {"json_schema": SCHEMA, "fields": "parallel"},
    ],
)
def test_right_draft_tokens_save_steps(kind: Any, plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=4, **kind)
    expected, segments = recorded(plain, params, monkeypatch)
    own = looking_up(plain.lm, DRAFT)
    with patched(infer.decode.speculation, drafts_from_text=knowing(segments)):
        (result,) = own.generate([PROMPT], params)
    assert same([result], [expected]) and valid(result.text, kind["json_schema"])
    assert result.stats.accepted_tokens > 0.5 * result.stats.drafted_tokens > 0
    assert result.stats.steps < 0.75 * expected.stats.steps


def test_known_tokens_after_a_draft_token_are_not_sampled(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one draft token: the token after it is sampled, in its usual spelling if the schema determines it."""
    params = SamplingParams(max_new_tokens=300, temperature=30.0, seed=4, json_schema=SCHEMA, fields="parallel")
    expected, segments = recorded(plain, params, monkeypatch)
    own = looking_up(plain.lm, 1)
    with patched(infer.decode.speculation, drafts_from_text=knowing(segments)):
        (result,) = own.generate([PROMPT], params)
    assert same([result], [expected]) and result.stats.accepted_tokens > 0


@pytest.mark.parametrize("source", ["prediction", "lookup"])
def test_draft_tokens_that_exceed_a_limit_change_nothing(
    source: str, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check answers whose grammar ends within a draft, beside some that exceed the limit by themselves."""
    words, yes = LIMITED["properties"]["words"], {"type": "boolean"}
    schema, kind = {"anyOf": [LIMITED, record(ok=yes)]}, dict[str, Any]()
    if source == "lookup":
        schema, kind = record(a={"anyOf": [words, yes]}, b=yes), {"fields": "parallel"}
    asked = [
        SamplingParams(seed=seed, temperature=30.0, max_new_tokens=60, json_schema=schema, **kind) for seed in range(16)
    ]
    expected = plain.generate([PROMPT] * len(asked), asked)
    if source == "prediction":
        predicted = [replace(params, prediction='{"words": "ab cd ef gh"}') for params in asked]
        results = plain.generate([PROMPT] * len(asked), predicted)
    else:
        failed = next(params for params, result in zip(asked, expected, strict=True) if result.error)
        _, segments = recorded(plain, failed, monkeypatch)
        with patched(infer.decode.speculation, drafts_from_text=knowing((segments * 3)[:3])):
            results = looking_up(plain.lm, 8).generate([PROMPT] * len(asked), asked)
    assert same(results, expected) and [r.error for r in results] == [r.error for r in expected]
    assert {"error"} < {result.finish_reason for result in results} <= {"error", "stop", "length"}
    drafted = any(result.stats.drafted_tokens for result in results)
    assert drafted == (source == "lookup")  # a prediction that exceeds a limit is dropped as a whole


@pytest.mark.slow
def test_drafts_that_the_host_does_not_check_change_answers(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that answers change without the cut at the end of a value (negative control)."""
    params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=4, json_schema=SCHEMA, fields="parallel")
    expected, segments = recorded(plain, params, monkeypatch)
    longer = [[*segment, *segment] for segment in segments]
    monkeypatch.setattr(infer.control.filling.HoleState, "completes", lambda self, tokens: False)
    own = looking_up(plain.lm, DRAFT)
    with patched(infer.decode.speculation, drafts_from_text=knowing(longer)):
        (result,) = own.generate([PROMPT], params)
    assert len(result.token_ids) > len(expected.token_ids)
