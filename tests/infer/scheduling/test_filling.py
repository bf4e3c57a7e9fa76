"""Parallel fields and templates: equal to independent decodings, valid, and blind to their siblings."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jsonschema
import numpy as np
import pytest

import infer.control.masks
from aspd_jax import LanguageModel
from aspd_jax.errors import AspdError, RequestError
from aspd_jax.fields import fields_template
from aspd_jax.layout import Layout
from aspd_jax.model.transformer import Transformer
from aspd_jax.structure import Parallel, Serial, plain_text
from aspd_jax.template import Hole, Template
from infer import Engine, SamplingParams
from infer.answers.events import Event
from infer.answers.filled import Filled, hole_text
from infer.control.filling import value_grammar
from infer.request import ScoredBranch
from tests.conftest import SIZES
from tests.helpers.engine_state import engine_state
from tests.infer.scheduling.test_structured_output import record, valid

WORD = {"type": "string", "maxLength": 9}
SCHEMA = record(
    name=WORD,
    address=record(street=WORD, zip={"type": "integer", "minimum": 0, "maximum": 99999}),
    kind={"enum": ["order", "complaint", "question"]},
    rush={"type": "boolean"},
    fixed={"const": "x"},
    tags={"type": "array", "items": WORD, "maxItems": 2},
    more={"anyOf": [{"type": "null"}, {"type": "number"}]},
)
LATER = record(first=WORD, second=WORD, both={**WORD, "x-after": ["first", "second"]}, third=WORD)
PROMPT = "Say it in JSON:"


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 300, "temperature": 1.0, "seed": 1} | changes)


@pytest.mark.further
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_field_is_what_it_is_alone(engine: Engine, seed: int) -> None:
    """Check that each field of the first block equals a serial answer after prompt and lead, under its grammar."""
    result = engine.generate([PROMPT], params(json_schema=SCHEMA, fields="parallel", temperature=0.0, seed=seed))[0]
    assert valid(result.text, SCHEMA) and result.finish_reason == "stop"
    template, encode = fields_template(SCHEMA), engine.lm.codec.text.encode
    assert template is not None and result.stats.blocks == 1 and result.stats.branches == 7
    different = 0
    for hole in template.holes:
        value: Any = json.loads(result.text)
        for name in hole.name.split("."):
            value = value[name]
        text = hole_text(template, hole)
        prompt, grammar = [*encode(PROMPT), *encode(text.lead)], value_grammar(text)
        alone = engine.generate([prompt], params(grammar=grammar, temperature=0.0))[0]
        assert json.JSONDecoder().raw_decode(alone.text.strip())[0] == value
        elsewhere = engine.generate([encode(PROMPT)], params(grammar=grammar, temperature=0.0))
        different += elsewhere[0].text != alone.text
    assert different, "negative control: the lead matters"


def test_tokens_equal_a_full_pass(engine: Engine) -> None:
    """Check that every sampled token is the likeliest of a full pass, whose layout is built by hand."""
    asked = params(json_schema=LATER, fields="parallel", temperature=0.0)
    handle = engine.submit(PROMPT, asked, "serial")
    filled: list[Filled] = []
    while handle.result is None:
        handle.advance(1)
        if handle.row is not None and handle.decoding and handle.result is None:
            output = engine_state(engine).read_output(handle)
            row, cache = handle.row, engine_state(engine).decode.cache
            layout = Layout(*(np.asarray(field)[row] for field in cache.layout))
            cached = np.asarray(cache.tokens)[row, : cache.length[row]]
            assert isinstance(output.template, Filled)
            filled.append(output.template)
    assert len(filled[-1].blocks) == 2 and valid(handle.result.text, LATER)
    prompt = len(handle.result.prompt_token_ids)
    by_branch: dict[tuple[int, int], list[int]] = {}
    for slot in range(prompt, len(cached)):
        key = int(layout.block[slot]), int(layout.branch[slot])
        by_branch.setdefault(key, []).append(int(cached[slot]))
    assert sorted(by_branch) == [(1, 1), (1, 2), (1, 3), (2, 1)]
    ids, position, block, branch = list(map(int, cached[:prompt])), list(range(prompt)), [0] * prompt, [0] * prompt
    at = prompt
    for number in (1, 2):
        start = at
        for (of, k), own in sorted(by_branch.items()):
            if of == number:
                ids += own
                position += range(start, start + len(own))
                block, branch = block + [number] * len(own), branch + [k] * len(own)
                at = max(at, start + len(own)) if engine.lm.config.positions == "max" else at + len(own)
    assert output.size
    one = np.ones((1, len(ids)), np.int32)
    arrays = [np.asarray([values], np.int32) for values in (position, block, branch)]
    whole = Layout(position=arrays[0], sequence=one, block=arrays[1], branch=arrays[2])
    model = Transformer(replace(engine.lm.config, attention="chunked"))
    logits = np.asarray(model.apply({"params": engine.lm.params}, np.asarray([ids], np.int32), whole))[0]
    checked, grammar = 0, value_grammar(hole_text(output.template.template, output.template.template.holes[0])) or ""
    for (of, k), own in by_branch.items():
        places = [n for n in range(len(ids)) if (block[n], branch[n]) == (of, k)]
        matcher = engine_state(engine).schemas.matcher("hole", grammar)
        lead = len(
            engine.lm.codec.text.encode(['{"first":', '{"second":', '{"third":', '{"both":'][k - 1 + 3 * (of - 1)])
        )
        for n in range(lead, len(own)):
            bits = matcher.mask()
            allowed = (bits[np.arange(logits.shape[1]) // 32] >> (np.arange(logits.shape[1]) % 32)) & 1
            likeliest = int(np.where(allowed > 0, logits[places[n] - 1], -np.inf).argmax())
            if matcher.known_tokens():
                likeliest = matcher.known_tokens()[0]
            else:
                checked += 1
            assert own[n] == likeliest, (of, k, n)
            matcher.take([own[n]])
    assert checked > 8


def test_log_probabilities_are_those_of_the_branches(engine: Engine) -> None:
    """Compare with known branches, which are fed to the stepwise engine; in serial form they have others."""
    (result,) = engine.generate([PROMPT], params(json_schema=SCHEMA, fields="parallel", logprobs=3))
    assert result.logprobs is not None and [token.token for token in result.logprobs] == result.token_ids
    (sizes,) = result.branch_sizes
    ends = list(accumulate(sizes))
    branches = [tuple(result.token_ids[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    prompt, known = result.prompt_token_ids, [*branches, tuple(result.token_ids)]
    *apart, joined = engine.score(prompt, [ScoredBranch(own, tuple(range(len(own) - 1)), own[1:]) for own in known])
    (first,) = engine.score(prompt[:-1], [ScoredBranch((prompt[-1],), (0,), (branches[0][0],))])
    found = np.asarray([token.logprob for token in result.logprobs])
    expected = np.concatenate([[*first, *own] for own in apart])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found[1:] - joined).max() > 0.1, "negative control: siblings are hidden"
    assert all(len(token.top) == 3 for token in result.logprobs)

    pointers = ["/name", "/address/street", "/address/zip", "/kind", "/rush", "/tags", "/more"]
    values = {value.pointer: value for value in result.values or ()}
    assert [place for place in values if not place.startswith("/tags/")] == [p for p in pointers if p in values]
    assert json.loads(values["/kind"].text) == json.loads(result.text)["kind"]
    places = range(ends[4] - sizes[4], ends[4])
    spelled = [
        n for n in places if result.logprobs[n].text.strip(b" ") and n >= places.start + len(lead(engine, "rush"))
    ]
    assert values["/rush"].logprob == pytest.approx(sum(found[spelled]))


def lead(engine: Engine, name: str) -> list[int]:
    template = fields_template(SCHEMA)
    assert template is not None
    (hole,) = (hole for hole in template.holes if hole.name == name)
    return engine.lm.codec.text.encode_exactly(hole_text(template, hole).lead)


@pytest.mark.further
def test_log_probabilities_of_later_blocks(engine: Engine) -> None:
    """Check blocks of one branch against the same tokens as serial text, whose mask and positions are the same."""
    asked = params(json_schema=record(a=WORD, b={**WORD, "x-after": ["a"]}), fields="parallel", logprobs=0)
    (result,) = engine.generate([PROMPT], asked)
    assert len(result.branch_sizes) == 2 and result.logprobs is not None
    own = tuple(result.token_ids)
    (joined,) = engine.score(result.prompt_token_ids, [ScoredBranch(own, tuple(range(len(own) - 1)), own[1:])])
    found = np.asarray([token.logprob for token in result.logprobs])
    np.testing.assert_allclose(found[1:], joined, atol=1e-4)


@pytest.mark.further
def test_log_probabilities_of_cut_answers(engine: Engine) -> None:
    """Check budgets, stop strings, free text, and fields out of order: the tokens are those of the text's branches."""
    whole = engine.generate([PROMPT], params(json_schema=LATER, fields="parallel", logprobs=0))[0]
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
    assert [value.pointer for value in whole.values or ()] == ["/first", "/second", "/both", "/third"]
    for more in (
        {"json_schema": LATER, "fields": "parallel", "stop": ('"both"',)},
        {"json_schema": LATER, "fields": "parallel", "max_branch_tokens": 14},
        {"template": "A:{a}\n\nB:{b}\n\nC:{c after a}", "max_branch_tokens": 20},
    ):
        (result,) = engine.generate([PROMPT], params(**more, logprobs=1))
        assert result.logprobs and len(result.logprobs) <= len(result.token_ids)
        said = b"".join(token.text for token in result.logprobs).decode(errors="replace")
        assert result.text.strip()[-4:] in said
        for value in result.values or ():
            assert value.text in result.text and value.logprob < 0
    assert [value.pointer for value in result.values or ()] == []


@pytest.mark.further
@pytest.mark.parametrize("fields", ["serial", "parallel"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_known_tokens_cost_no_steps_and_change_nothing(
    engine: Engine, fields: Any, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [params(json_schema=schema, fields=fields, temperature=temperature) for schema in (SCHEMA, LATER)]
    fast = engine.generate([PROMPT] * 2, asked)
    monkeypatch.setattr(infer.control.masks, "MAX_KNOWN", 0)
    slow = engine.generate([PROMPT] * 2, asked)
    for one, other in zip(fast, slow, strict=True):
        assert one.text == other.text and one.token_ids == other.token_ids
        assert one.stats.steps < other.stats.steps or fields == "parallel"


@pytest.mark.further
def test_long_leads_are_fed_in_parts(engine: Engine) -> None:
    """Check that a lead longer than the queue of a segment is fed in several steps, without other changes."""
    long = "The following is a long heading that has far more tokens than a title may have, " * 3
    template = Template(f"{long}\n\n{long}A:{{a}}\n\nB:{{b}}")
    result = engine.generate(
        ["Hi"], params(template=template, temperature=0.0, max_new_tokens=360, max_branch_tokens=170)
    )[0]
    short = Template([*template.parts])
    assert template == short and result.text.startswith(f"{long}\n\n{long}A:")
    prompt = [*engine.lm.codec.text.encode("Hi"), *engine.lm.codec.text.encode(template.opening)]
    lead = engine.lm.codec.text.encode(template.lead(template.holes[0]))
    assert len(lead) > engine.config.max_queued
    alone = engine.generate([[*prompt, *lead]], params(temperature=0.0, max_new_tokens=40), mode="serial")[0]
    own = result.structure[1].branches[0].text if isinstance(result.structure[1], Parallel) else ""
    assert own.removeprefix(template.lead(template.holes[0]))[:20] == alone.text[:20]


@pytest.mark.further
def test_the_batch_changes_no_field(engine: Engine) -> None:
    """Check that templates, schemas and free answers decode together as alone."""
    asked = [
        params(json_schema=SCHEMA, fields="parallel"),
        params(max_new_tokens=60),
        params(json_schema=LATER, fields="parallel", seed=2),
        params(json_schema=SCHEMA, seed=3),
        params(template="A:{a}\n\nB:{b}\n\nC:{c after a}", max_branch_tokens=20),
    ]
    together = engine.generate([PROMPT] * len(asked), asked)
    for one, result in zip(asked, together, strict=True):
        engine.reset_cache()
        assert engine.generate([PROMPT], one)[0].token_ids == result.token_ids


@pytest.mark.further
def test_a_template_leaves_no_blocks_for_later_prompts(engine: Engine) -> None:
    """Check that a prompt with the tokens of an answer is fed as text: the row keeps the prompt alone."""
    engine.reset_cache()
    result = engine.generate([PROMPT], params(json_schema=LATER, fields="parallel"))[0]
    again = engine.generate([[*result.prompt_token_ids, *result.token_ids, 5]], params(max_new_tokens=20))[0]
    assert again.stats.reused_tokens <= len(result.prompt_token_ids)
    engine.reset_cache()
    fresh = engine.generate([[*result.prompt_token_ids, *result.token_ids, 5]], params(max_new_tokens=20))[0]
    assert again.token_ids == fresh.token_ids


@pytest.mark.further
def test_more_fields_than_branches(lm: LanguageModel) -> None:
    engine = Engine(lm, max_length=512, max_batch=1, max_branches=2)
    result = engine.generate([PROMPT], params(json_schema=SCHEMA, fields="parallel"))[0]
    assert valid(result.text, SCHEMA) and result.stats.blocks == 4 and result.stats.branches == 7


@pytest.mark.further
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_any_schema_gives_valid_json(count: int, engine: Engine) -> None:
    """Check random schemas with nested objects, optional properties and dependencies."""
    draw = random.Random(0)
    schemas = [random_schema(draw) for _ in range(count)]
    asked = [params(json_schema=s, fields="parallel", seed=n, max_new_tokens=480) for n, s in enumerate(schemas)]
    results = engine.generate([PROMPT] * len(asked), asked)
    ended = [(r, s) for r, s in zip(results, schemas, strict=True) if r.finish_reason == "stop"]
    assert len(ended) > 0.9 * count
    for result, schema in ended:
        jsonschema.validate(json.loads(result.text), schema)
        assert result.text == plain_text(result.structure)


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    leaves: list[dict[str, Any]] = [
        WORD, {"type": "integer", "minimum": -5, "maximum": 500}, {"type": "boolean"}, {"enum": ["a", "bc", 7, None]},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2},
        {"anyOf": [WORD, {"type": "null"}]}, {"const": {"a": [1]}}, {"type": "string", "enum": ["x"]},
    ]  # fmt: skip
    names = draw.sample(["id", "full name", "größe", 'say "hi"', "a.b", "note"], draw.randint(2, 4))
    fields: dict[str, Any] = {}
    for name in names:
        nested = depth < 2 and draw.random() < 0.2
        fields[name] = random_schema(draw, depth + 1) if nested else dict(draw.choice(leaves))
        if len(fields) > 1 and draw.random() < 0.3:
            fields[name]["x-after"] = [names[0]]
    required = draw.sample(names, draw.randint(0, len(names)))
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def events_of(engine: Engine, asked: SamplingParams, stream: Any) -> list[Event]:
    return list(engine.submit(PROMPT, asked, "serial", max_steps=1, stream=stream))


def test_events_join_to_the_answer(engine: Engine) -> None:
    asked = params(json_schema=SCHEMA, fields="parallel")
    events = events_of(engine, asked, "text")
    result = events[-1].result
    assert result is not None and "".join(event.text for event in events) == result.text
    assert len([event for event in events if event.text]) > 2, "it grows"
    events = events_of(engine, asked, "branches")
    fork = next(event for event in events if event.kind == "fork")
    assert fork.titles == ("name", "address.street", "address.zip", "kind", "rush", "tags", "more")
    texts = ["".join(e.text for e in events if e.kind == "token" and e.branch == k) for k in range(1, 8)]
    final = "".join(event.text for event in events if event.kind == "token" and event.branch == 0)
    assert "".join(texts) + final == result.text
    assert [e.text for e in sorted((e for e in events if e.kind == "branch"), key=lambda e: e.branch)] == texts
    assert [event.kind for event in events][-1] == "done" and sum(event.kind == "merge" for event in events) == 1


def test_events_begin_with_the_literal_text_before_the_first_block(engine: Engine) -> None:
    asked = params(template="Report\nA:{a}\nB:{b}.", max_branch_tokens=20)
    events = events_of(engine, asked, "branches")
    texts = [[e.text for e in events if e.kind == "token" and e.branch == k] for k in range(3)]
    result = events[-1].result
    assert result is not None and result.text == texts[0][0] + "".join(texts[1] + texts[2]) + texts[0][1]


@pytest.mark.further
def test_stop_strings_end_a_template_in_reading_order(engine: Engine) -> None:
    asked = params(json_schema=SCHEMA, fields="parallel")
    whole = engine.generate([PROMPT], asked)[0].text
    for stop in ('"kind"', "}", whole[12:15]):
        result = engine.generate([PROMPT], replace(asked, stop=(stop,)))[0]
        assert result.text == whole[: whole.index(stop)] and result.finish_reason == "stop"


@pytest.mark.further
def test_budgets_cut_and_say_so(engine: Engine) -> None:
    """Check that the text is a beginning of the whole, or the request is refused, whatever the budget."""
    asked = params(json_schema=LATER, fields="parallel")
    whole = engine.generate([PROMPT], asked)[0]
    refused = cut = 0
    for limit in range(1, len(whole.token_ids) + 12, 3):
        for name in ("max_new_tokens", "max_content_tokens"):
            limited: Any = replace(asked, **{name: limit})
            try:
                result = engine.generate([PROMPT], limited)[0]
            except RequestError:
                refused += 1
                continue
            cut += result.finish_reason == "length"
            tokens = len(result.token_ids) if name == "max_new_tokens" else result.stats.content_tokens
            assert tokens <= limit and whole.text.startswith(result.text)
            if result.finish_reason == "stop":
                assert result.text == whole.text
    assert refused and cut


NUMBERS = record(a={"type": "integer", "minimum": 0}, b={"type": "number", "x-after": ["a"]}, c={"type": "integer"})


@pytest.mark.further
@pytest.mark.parametrize("name", ["max_new_tokens", "max_content_tokens", "max_branch_tokens"])
@pytest.mark.parametrize(
    "asked",
    [{"json_schema": NUMBERS, "fields": "parallel"}, {"template": "A:{a}\n\nB:{b after a}."}],
    ids=["numbers", "text"],
)
def test_a_value_that_a_budget_cuts_does_not_end_with_stop(engine: Engine, name: str, asked: dict[str, Any]) -> None:
    """Check that the beginning of a number, or of free text, is never returned as a whole one."""
    whole = engine.generate([PROMPT], params(**{"max_branch_tokens": 40, "max_new_tokens": 120} | asked))[0]
    cut = 0
    for limit in range(3, 44):
        try:
            limited = params(**{"max_branch_tokens": 40, "max_new_tokens": 120} | asked | {name: limit})
            result = engine.generate([PROMPT], limited)[0]
        except RequestError:
            continue
        shorter = result.text != whole.text
        cut += shorter
        assert result.finish_reason == "length" or not shorter, (limit, result.text, whole.text)
        assert whole.text.startswith(result.text) or (name == "max_branch_tokens" and "template" in asked)
    assert cut


def test_a_schema_that_refers_to_itself_is_decoded_as_a_whole(engine: Engine) -> None:
    """Check that `#` keeps its meaning, which it would lose in a leaf (negative control)."""
    below = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    tree = record(value={"type": "integer", "maximum": 9}, name=WORD, below=below)
    result = engine.generate([PROMPT], params(json_schema=tree, fields="parallel", max_new_tokens=450))[0]
    assert result.stats.branches == 0 and (result.finish_reason == "length" or valid(result.text, tree))
    assert valid('{"value": 1, "name": "", "below": []}', tree)
    assert not valid('{"value": 1, "name": "", "below": [[]]}', tree)


@pytest.mark.further
def test_free_text_ends_before_the_literal_text_behind_it(engine: Engine) -> None:
    result = engine.generate(["Hi"], params(template="A:{a}\nB: {b}.", max_branch_tokens=30, temperature=0.0))[0]
    (block, end) = result.structure
    assert isinstance(block, Parallel) and end == Serial(".") and result.text.startswith("A:")
    assert [branch.title for branch in block.branches] == ["a", "b"] and "\nB: " in result.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": "parallel"}, "json_schema: expected a schema"),
        ({"fields": "both", "json_schema": SCHEMA}, "fields"),
        ({"template": "none"}, "at least one hole"),
        ({"template": 5}, "template: expected a text or a Template, got 5"),
        ({"template": {"a": 1}}, "template: expected a text or a Template, got {'a': 1}"),
        ({"template": "A:{a} B:{a}"}, "hole 'a': expected different names, got this one 2 times"),
        ({"template": "A:{a after b} B:{b after a}"}, "template: expected holes that do not depend on each other"),
        ({"template": "{a} {b}"}, "hole 'a': expected literal text before it"),
        ({"template": "A:{a}{b}"}, "hole 'b': expected literal text before it"),
        ({"template": "A:{a}", "regex": "a"}, "regex and template: expected one of them"),
        ({"template": "A:{a}", "script": [[1]]}, "script: expected none with a template"),
        ({"template": "A:{a}", "max_new_tokens": 2}, "template: expected a budget"),
        ({"json_schema": record(a={"type": "objekt"}, b=WORD), "fields": "parallel"}, "json_schema.*objekt"),
        ({"json_schema": record(a={**WORD, "x-after": ["z"]}, b=WORD), "fields": "parallel"}, "unknown field 'z'"),
        ({"json_schema": record(a={**WORD, "x-after": ["b"]}, b={**WORD, "x-after": ["a"]}), "fields": "parallel"},
         "depend on each other"),
        ({"json_schema": record(a=False, b=WORD, c=WORD), "fields": "parallel"}, "required property 'a'"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(engine: Engine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AspdError, match=message):
        engine.submit("Hi", params(**changes), "serial")
    assert not engine.step(1)


@pytest.mark.further
def test_the_end_of_a_value_is_free(engine: Engine) -> None:
    """Check that the grammar permits every continuation after a value (negative control)."""
    template = Template(["A: ", Hole("a", schema="{}"), "B:", Hole("b", schema="{}")])
    spaced, grammar = (value_grammar(hole_text(template, hole)) or "" for hole in template.holes)
    for text, follows in (('"x",', True), (' "x"}', False), ('"x" }\n', True), ("7, ", True), ('"x"y', False)):
        matcher = engine_state(engine).schemas.matcher("hole", spaced)
        assert matcher._matcher.deep_copy().try_consume_tokens(engine.lm.codec.text.encode(" " + text.strip())) > 1
        matcher = engine_state(engine).schemas.matcher("hole", grammar)
        ids = engine.lm.codec.text.encode(text)
        assert (matcher._matcher.deep_copy().try_consume_tokens(ids) == len(ids)) == follows, text
