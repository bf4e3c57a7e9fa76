"""Structured output: answers that are JSON of a schema, checked by the library jsonschema."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema
import llguidance
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

import infer.control.schemas
import infer.decode.grammar
from aspd_jax import LanguageModel
from aspd_jax.errors import RequestError
from aspd_jax.json_schema import json_rule
from aspd_jax.template import Hole, Template
from aspd_jax.tool_format import HERMES
from infer import Engine, SamplingParams
from infer.server.app import make_app
from infer.server.config import ServerConfig
from infer.server.tool_calls import Function, ToolCalls, ToolChoice
from tests.conftest import SIZES, patched
from tests.helpers.engine_state import engine_state


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


WORD = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "choice": record(winner={"enum": ["A", "B", "tie"]}),
    "verdict": record(same={"type": "boolean"}, reason=WORD),
    "rating": record(rating={"type": "integer", "minimum": 1, "maximum": 10}),
    "list": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 4},
    "nested": record(items={"type": "array", "items": record(title=WORD, kind={"enum": ["s", "p"]}), "maxItems": 3}),
    "either": {"anyOf": [{"type": "null"}, record(at={"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"})]},
}


def valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Engine:
    return Engine(lm, **SIZES)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 30.0])
def test_answers_are_json_of_their_schema(engine: Engine, temperature: float) -> None:
    """Six schemas in one batch, beside requests without one, whose answers are what they are without them."""
    asked = [
        SamplingParams(temperature=temperature, max_new_tokens=300, seed=seed, json_schema=schema)
        for seed in range(2)
        for schema in SCHEMAS.values()
    ]
    free = [SamplingParams(temperature=temperature, max_new_tokens=40, seed=seed) for seed in range(4)]
    mixed = [params for pair in zip(asked, free * 3, strict=True) for params in pair]
    found = engine.generate(["Say it in JSON:"] * len(mixed), mixed)
    for params, result in zip(asked, found[::2], strict=True):
        assert result.finish_reason == "stop" and not result.stats.blocks
        assert valid(result.text, json.loads(str(params.json_schema))), result.text
    alone = engine.generate(["Say it in JSON:"] * len(free), free)
    assert [result.token_ids for result in found[1::2]] == [result.token_ids for result in alone] * 3
    assert not any(valid(result.text, {}) for result in alone), "negative control"


def test_a_value_that_the_budget_cuts_says_so(engine: Engine) -> None:
    short = SamplingParams(max_new_tokens=5, json_schema=SCHEMAS["nested"])
    assert engine.generate(["Hi"], short)[0].finish_reason == "length"


@pytest.mark.further
def test_a_choice_may_have_thousands_of_texts(engine: Engine) -> None:
    words = [f"word{number}" for number in range(3000)]
    result = engine.generate(["Hi"], SamplingParams(max_new_tokens=40, choices=words))[0]
    assert result.finish_reason == "stop" and result.text in words


@pytest.mark.further
@given(texts=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6), other=st.text(max_size=6))
def test_a_choice_is_one_of_the_texts_and_no_other(engine: Engine, texts: list[str], other: str) -> None:
    """Texts have marks of regular expressions, line breaks and other scripts; Python's `in` decides."""
    name, grammar = SamplingParams(choices=texts).answer_grammar or ("", "")
    matcher, encode = engine_state(engine).schemas.matcher(name, grammar), engine.lm.codec.text.encode
    for text in (*texts, other, texts[0][:-1], texts[0] + ".", texts[0] + texts[-1]):
        tokens = encode(text)
        assert matcher.accepts(tokens) == (text in texts)


LIMITED = record(words={"type": "string", "maxLength": 5000, "pattern": r"^(?:\S+\s+){0,499}\S+$"})


@pytest.mark.parametrize("taken", [0, 3, 100])
def test_a_copy_that_exceeds_a_limit_changes_no_other_position(engine: Engine, taken: int) -> None:
    schema, encode = {"anyOf": [LIMITED, record(ok={"type": "boolean"})]}, engine.lm.codec.text.encode
    whole, beyond = encode('{"ok": true}'), encode('{"words": "ab cd ef gh ij')
    matcher = engine_state(engine).schemas.matcher("json_schema", json.dumps(schema))
    copy = matcher.copy()
    matcher.take(whole[:taken])
    for token in beyond:
        copy.take([token])
        copy.mask()
    assert copy.error and matcher.accepts(whole) and not matcher.accepts(whole[:-1])
    assert not matcher.error and (taken < len(whole) or matcher.known_tokens() == [])


def test_an_answer_that_exceeds_a_limit_says_so_and_its_neighbours_go_on(engine: Engine) -> None:
    """Check that answers share nothing that one of them can break: one schema, side by side and one after another.

    After the first letter of its text, this schema exceeds the limits of llguidance.
    """
    schema = {"anyOf": [LIMITED, record(ok={"type": "boolean"})]}
    for kind in ({"json_schema": schema}, {"grammar": f"start: {json_rule(schema)}"}):
        asked = [SamplingParams(seed=seed, temperature=30.0, max_new_tokens=40, **kind) for seed in range(16)]
        results = engine.generate(["Hi"] * 16, asked)
        failed = [result for result in results if result.finish_reason == "error"]
        assert failed and all('"w' in result.text for result in failed)
        for result in failed:
            where = "json_schema: expected a schema within the limits" if "json_schema" in kind else "grammar: expected"
            assert result.error.startswith(where) and "maxLength" in result.error and "too many" in result.error
        others = [result for result in results if not result.error]
        assert others and all(valid(result.text, schema) for result in others), others
        assert [engine.generate(["Hi"], one)[0].text for one in asked] == [result.text for result in results]


@pytest.mark.further
def test_a_hole_that_exceeds_a_limit_ends_its_answer_alone(engine: Engine) -> None:
    words, yes = LIMITED["properties"]["words"], {"type": "boolean"}
    schemas = record(a=words, b=yes), record(a=yes, b=yes)
    asked = [SamplingParams(max_new_tokens=80, json_schema=schema, fields="parallel") for schema in schemas]
    template = Template(["A: ", Hole("a", schema=json.dumps(words)), "\nB: ", Hole("b")])
    asked.append(SamplingParams(max_new_tokens=80, max_branch_tokens=20, template=template))
    hard, easy, filled = engine.generate(["Hi"] * 3, asked)
    assert hard.finish_reason == filled.finish_reason == "error" and easy.finish_reason == "stop"
    assert all(result.error.startswith("json_schema: a: expected a schema within") for result in (hard, filled))


def test_a_call_that_exceeds_a_limit_names_its_function(engine: Engine) -> None:
    function = Function("count_words", "", LIMITED)
    calls = ToolCalls([function], ToolChoice("required"), HERMES, engine.lm.codec.text)
    result = engine.generate(["Hi"], SamplingParams(max_new_tokens=100, grammar=calls.grammar))[0]
    assert result.finish_reason == "error" and "for '// tools: count_words'. Use simpler" in result.error


@pytest.mark.further
def test_a_grammar_may_have_thousands_of_alternatives(engine: Engine) -> None:
    words = [f"word{number}" for number in range(3000)]
    rules = "root ::= " + " | ".join(json.dumps(word) for word in words)
    result = engine.generate(["Hi"], SamplingParams(max_new_tokens=40, grammar=rules))[0]
    assert result.finish_reason == "stop" and result.text in words


@pytest.mark.further
def test_a_request_starts_while_a_grammar_is_compiled(engine: Engine, monkeypatch: Any) -> None:
    """Check that compiling does not hold a lock for which the engine's thread would wait."""
    compile_grammar, compiling, started = llguidance.grammar_from, threading.Event(), threading.Event()

    def slow(form: Any, text: str) -> str:
        compiling.set()
        assert started.wait(60)
        return compile_grammar(form, text)

    known = SamplingParams(max_new_tokens=40, json_schema=SCHEMAS["choice"])
    expected = engine.generate(["Hi"], known)[0].text
    monkeypatch.setattr(llguidance, "grammar_from", slow)
    other = threading.Thread(target=engine.check, args=("Hi", SamplingParams(max_new_tokens=40, regex="slow|late")))
    other.start()
    assert compiling.wait(60)
    texts: list[str] = []
    answering = threading.Thread(target=lambda: texts.append(engine.generate(["Hi"], known)[0].text))
    answering.start()
    answering.join(30)
    waited = list(texts)
    started.set()
    other.join()
    answering.join()
    assert waited == [expected]


@pytest.mark.further
def test_the_matcher_of_an_answer_is_made_before_the_engine_needs_it(engine: Engine, monkeypatch: Any) -> None:
    """Check that compiling takes place in the thread of the client, once for each answer."""
    original, makers = llguidance.LLMatcher, []

    def recorder(*args: Any, **kwargs: Any) -> Any:
        makers.append(threading.current_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(llguidance, "LLMatcher", recorder)
    requests: list[Any] = []
    params = SamplingParams(max_new_tokens=40, regex="(early|late)r?")
    client = threading.Thread(target=lambda: requests.extend(engine.check("Hi", params) for _ in range(2)))
    client.start()
    client.join()
    results = [engine.submit_checked(request).wait() for request in requests]
    assert makers == [client, client] and {result.finish_reason for result in results} == {"stop"}
    engine.submit_checked(requests[0]).wait()  # without a check, the engine makes it
    assert makers == [client, client, threading.current_thread()]


@pytest.mark.further
def test_matchers_of_requests_that_never_start_are_dropped(engine: Engine, monkeypatch: Any) -> None:
    schemas = engine_state(engine).schemas
    monkeypatch.setattr(infer.control.schemas, "MAX_READY", 3)
    for number in range(6):
        engine.check("Hi", SamplingParams(max_new_tokens=40, regex=f"number{number % 4}"))
    assert sum(map(len, vars(schemas)["_ready"].values())) == 3
    for number in range(4):
        result = engine.generate(["Hi"], SamplingParams(max_new_tokens=40, regex=f"number{number}"))[0]
        assert result.text == f"number{number}"


@pytest.mark.further
def test_without_the_permission_answers_are_not_json(lm: LanguageModel) -> None:
    """Check that the device applies the token masks (negative control)."""
    engine = Engine(lm, max_length=512, max_batch=2)
    asked = SamplingParams(temperature=1.0, max_new_tokens=100, seed=1, json_schema=SCHEMAS["verdict"])
    with patched(infer.decode.grammar, apply_token_mask=lambda legal, state, lanes: legal):
        result = engine.generate(["Say it in JSON:"], asked)[0]
    assert not valid(result.text, SCHEMAS["verdict"])


@pytest.mark.parametrize(
    ("field", "schema", "words"),
    [
        ("json_schema", "{", "json_schema: expected a JSON schema"),
        ("json_schema", "[1]", "json_schema: expected a JSON schema"),
        ("json_schema", {"type": "objekt"}, "json_schema: Invalid type: objekt"),
        ("regex", "a(", "regex: .*invalid regex"),
    ],
)
def test_a_bad_schema_is_told_before_anything_waits(engine: Engine, field: str, schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine.submit("Hi", SamplingParams(**{field: schema}))
    assert not engine.step(1)


def test_a_schema_needs_a_tokenizer(bare_lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        Engine(bare_lm, max_length=64, max_batch=1).submit([1, 2], SamplingParams(json_schema={}), "serial")


def test_the_interface_has_response_format(engine: Engine) -> None:
    app = make_app(engine, ServerConfig(name="m", max_new_tokens=200, warm_up="none"))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "seed": 5}
    named = {"name": "verdict", "strict": True, "schema": SCHEMAS["verdict"]}
    with TestClient(app) as client:

        def ask(**more: Any) -> Any:
            return client.post("/v1/chat/completions", json=body | more)

        reply = ask(response_format={"type": "json_schema", "json_schema": named}).json()["choices"][0]
        assert reply["finish_reason"] == "stop" and valid(reply["message"]["content"], SCHEMAS["verdict"])
        whole = ask(response_format={"type": "json_object"}).json()["choices"][0]
        assert whole["finish_reason"] == "length" or valid(whole["message"]["content"], {"type": "object"})
        assert whole["message"]["content"].lstrip().startswith("{")
        assert ask(response_format={"type": "text"}).status_code == 200
        bad = ask(response_format={"type": "json_schema", "json_schema": named | {"schema": {"type": "objekt"}}})
        assert bad.status_code == 400 and "objekt" in bad.json()["error"]["message"]
        unknown = ask(response_format={"type": "xml"})
        assert unknown.status_code == 400 and "response_format" in unknown.text


@pytest.mark.further
def test_the_interface_names_the_schema_that_exceeds_a_limit(engine: Engine) -> None:
    app = make_app(engine, ServerConfig(name="m", max_new_tokens=200, warm_up="none"))
    form = {"type": "json_schema", "json_schema": {"name": "limited", "schema": LIMITED}}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "seed": 5, "response_format": form}
    with TestClient(app) as client:
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(
            "json_schema: expected a schema"
        )
        stream = client.post("/v1/chat/completions", json=body | {"stream": True}).text
        assert '"error"' in stream and "json_schema: expected a schema within the limits" in stream
        assert 'finish_reason":"' not in stream and "[DONE]" not in stream
        named = {"name": "v", "schema": SCHEMAS["verdict"]}
        again = body | {"response_format": {"type": "json_schema", "json_schema": named}}
        assert client.post("/v1/chat/completions", json=again).json()["choices"][0]["finish_reason"] == "stop"
