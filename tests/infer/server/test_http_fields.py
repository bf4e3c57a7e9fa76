"""Parallel fields and templates over HTTP, as OpenAI's clients ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from aspd_jax import LanguageModel
from aspd_jax.template import Template
from infer import Engine, SamplingParams
from infer.lockstep import StepCommand
from infer.server.app import make_app
from infer.server.config import ServerConfig
from tests.conftest import SIZES
from tests.infer.scheduling.test_filling import LATER, SCHEMA
from tests.infer.scheduling.test_structured_output import valid

FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "seed": 5}


@pytest.fixture(scope="module")
def client(lm: LanguageModel) -> Iterator[TestClient]:
    # A chunk of one step: the pieces of a stream do not depend on time.
    config = ServerConfig(name="m", max_new_tokens=300, warm_up="none", chunk=1e-9)
    with TestClient(make_app(Engine(lm, **SIZES), config)) as client:
        yield client


TOOL = {"type": "function", "function": {"name": "order", "parameters": LATER}}


def wrong(field: dict[str, Any]) -> dict[str, Any]:
    """Return the response format of an object with this optional field and two others."""
    schema = {"type": "object", "properties": {"a": field, "b": {"type": "string"}, "c": {"type": "string"}}}
    return {"type": "json_schema", "json_schema": {"name": "wrong", "schema": schema}}


def with_strict(strict: bool | None) -> dict[str, Any]:
    """Return a response format with an unsupported keyword and an unknown format."""
    form = wrong({"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "null", "format": "é"}})
    form["json_schema"]["strict"] = strict
    return form


def ask(client: TestClient, **more: Any) -> Any:
    return client.post("/v1/chat/completions", json=BODY | more)


def chunks(client: TestClient, **more: Any) -> list[Any]:
    text = ask(client, stream=True, **more).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_fields_in_parallel(client: TestClient) -> None:
    reply = ask(client, response_format=FORMAT, aspd={"fields": "parallel", "statistics": True}).json()
    text = reply["choices"][0]["message"]["content"]
    assert valid(text, SCHEMA) and reply["choices"][0]["finish_reason"] == "stop"
    assert reply["aspd"][0]["statistics"]["branches"] == 7
    (fork, end) = reply["aspd"][0]["structure"]
    assert fork["branches"][1]["title"] == "address.street" and end["text"] == "}"
    asked = {"statistics": True, "fields": "serial"}
    serial = ask(client, response_format=FORMAT, aspd=asked).json()["aspd"][0]["statistics"]
    assert serial["branches"] == 0, "negative control"
    assert reply["aspd"][0]["statistics"]["steps"] * 2 < serial["steps"]


def test_exact_fields(client: TestClient) -> None:
    """Check that answers, streams and log probabilities are those of serial mode."""
    asked: dict[str, Any] = {"response_format": FORMAT, "logprobs": True, "top_logprobs": 2, "min_tokens": 40}
    serial, exact = (
        ask(client, **asked, aspd={"fields": name, "statistics": True}).json() for name in ("serial", "exact")
    )
    assert serial["choices"] == exact["choices"] and serial["usage"]["total_tokens"] == exact["usage"]["total_tokens"]
    assert exact["aspd"][0]["statistics"]["discarded_tokens"] > 0, "the fields were drafted"
    assert [value["pointer"] for value in exact["aspd"][0]["values"]][:3] == [
        "/name",
        "/address/street",
        "/address/zip",
    ]
    assert exact["aspd"][0]["values"] == serial["aspd"][0]["values"]
    parallel = ask(client, **asked | {"min_tokens": 0}, aspd={"fields": "parallel", "statistics": True}).json()
    assert parallel["choices"][0]["logprobs"]["content"]
    for reply in (exact, parallel):
        values = {value["pointer"]: value for value in reply["aspd"][0]["values"]}
        said = json.loads(reply["choices"][0]["message"]["content"])
        assert json.loads(values["/address/zip"]["text"]) == said["address"]["zip"]
    deltas = [
        chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(client, **asked, aspd={"fields": "exact"})
    ]
    assert "".join(deltas) == serial["choices"][0]["message"]["content"]
    refused = ask(client, aspd={"fields": "exact"})
    assert (
        refused.status_code == 400
        and "fields: expected a schema, tools or (for exact) a template beside exact" in refused.text
    )


def test_streams_join_to_the_answer(client: TestClient) -> None:
    asked: dict[str, Any] = {"response_format": FORMAT, "aspd": {"fields": "parallel"}}
    whole = ask(client, **asked).json()["choices"][0]["message"]["content"]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(client, **asked)]
    assert "".join(deltas) == whole and len([text for text in deltas if text]) > 5
    asked["aspd"] = {"fields": "parallel", "stream": "branches", "statistics": True}
    places = [chunk["choices"][0]["delta"] for chunk in chunks(client, **asked)]
    forks = [place["aspd"] for place in places if place.get("aspd", {}).get("event") == "fork"]
    assert len(forks) == 1 and len(forks[0]["titles"]) == 7
    by_branch: dict[int, str] = {}
    for place in places:
        if place.get("aspd", {}).get("event") == "token":
            by_branch[place["aspd"]["branch"]] = by_branch.get(place["aspd"]["branch"], "") + place["content"]
    assert "".join(by_branch[k] for k in (*range(1, 8), 0)) == whole


@pytest.mark.further
def test_a_template_is_filled_exactly(client: TestClient) -> None:
    """Check the text of the serial form, which the grammar of the template gives, too."""
    text = "A:{a}\n\nB:{b after a}"
    asked = {"max_tokens": 80, "logit_bias": {"10": 4}}
    exact = ask(client, **asked, aspd={"template": text, "fields": "exact", "statistics": True}).json()
    serial = ask(client, **asked, structured_outputs={"grammar": Template(text).grammar}).json()
    assert exact["choices"] == serial["choices"] and exact["aspd"][0]["statistics"]["discarded_tokens"] > 0
    assert exact["choices"][0]["message"]["content"].startswith("A:")


def test_templates(client: TestClient) -> None:
    reply = ask(client, aspd={"template": "A:{a}\n\nB:{b}"}, max_tokens=60).json()["choices"][0]
    assert reply["message"]["content"].startswith("A:")


@pytest.mark.further
def test_arguments_of_a_named_function(demo_engine: Engine) -> None:
    """Check with the embedded model, because the description of a tool needs a longer context."""
    tool: dict[str, Any] = TOOL
    named = {"type": "function", "function": {"name": "order"}}
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": named}
    once = asked | {"tool_choice": "required", "parallel_tool_calls": False}
    with TestClient(make_app(demo_engine, ServerConfig(name="m", max_new_tokens=300, warm_up="none"))) as client:
        called = []
        for fields, branches in (("parallel", 4), ("exact", 0), ("serial", 0)):
            reply = ask(client, **asked, aspd={"fields": fields, "statistics": True}).json()
            (call,) = reply["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "order" and valid(call["function"]["arguments"], LATER)
            assert reply["choices"][0]["finish_reason"] == "tool_calls"
            assert reply["aspd"][0]["statistics"]["branches"] == branches
            assert (reply["aspd"][0]["statistics"]["discarded_tokens"] > 0) == (fields == "exact")
            called.append(call["function"])
            single = ask(client, **once, aspd={"fields": fields, "statistics": True}).json()
            assert single["choices"][0]["message"]["tool_calls"][0]["function"] == call["function"]
            assert single["aspd"][0]["statistics"]["branches"] == branches
        assert called[1] == called[2], "exact arguments are the serial ones"
        likely = [
            ask(client, **asked, logprobs=True, aspd={"fields": fields, "statistics": True}).json()
            for fields in ("exact", "serial", "parallel")
        ]
        assert likely[0]["choices"][0]["logprobs"] == likely[1]["choices"][0]["logprobs"]
        assert likely[0]["aspd"][0]["values"] == likely[1]["aspd"][0]["values"]
        for reply in likely:
            arguments = json.loads(reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
            for value in reply["aspd"][0]["values"]:
                *before, name = value["pointer"].split("/")
                assert "/".join(before) == "/tool_calls/0/function/arguments"
                assert json.loads(value["text"]) == arguments.pop(name)
            assert not arguments
        other = tool | {"function": tool["function"] | {"name": "refund"}}
        for more in ({"parallel_tool_calls": True}, {"tools": [tool, other]}, {"tool_choice": "auto"}):
            reply = ask(client, **once | more, aspd={"fields": "parallel", "statistics": True}).json()
            assert reply["aspd"][0]["statistics"]["branches"] == 0, "the number of calls or the function is not known"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(client, **asked, aspd={"fields": "parallel"})]
        refused = ask(client, **asked, stream=True, aspd={"fields": "parallel", "stream": "branches"})
        assert refused.status_code == 400 and "aspd.stream: expected text" in refused.json()["error"]["message"]
    calls = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["name"] == "order" and valid("".join(call["arguments"] for call in calls), LATER)


def test_the_default_of_the_server(lm: LanguageModel) -> None:
    engine = Engine(lm, **SIZES)
    config = ServerConfig(name="m", max_new_tokens=300, warm_up="none", fields="parallel")
    with TestClient(make_app(engine, config)) as client:
        asked: dict[str, Any] = {"response_format": FORMAT}
        assert ask(client, **asked, aspd={"statistics": True}).json()["aspd"][0]["statistics"]["branches"] == 7
        serial = ask(client, **asked, aspd={"statistics": True, "fields": "serial"}).json()
        assert serial["aspd"][0]["statistics"]["branches"] == 0
        assert ask(client).status_code == 200
    with TestClient(make_app(engine, ServerConfig(name="m", max_new_tokens=300, warm_up="none"))) as client:
        exact, serial = (
            ask(client, **asked, aspd={"statistics": True, **more}).json() for more in ({}, {"fields": "serial"})
        )
        assert exact["choices"] == serial["choices"]
        assert [reply["aspd"][0]["statistics"]["drafted_fields"] for reply in (exact, serial)] == [7, 0]


def test_ignored_keywords_are_named(client: TestClient) -> None:
    """Check the header of whole answers and streams, for response formats and tools."""
    form, parallel = with_strict(False), {"fields": "parallel"}
    places = ("#/properties/a/uniqueItems", "#/properties/a/items/format")
    for more in ({}, {"stream": True}, {"aspd": parallel}):
        reply = ask(client, response_format=form, **more)
        names = reply.headers["X-Aspd-Ignored"].split(", ")
        assert reply.status_code == 200
        assert sorted(names) == sorted(f"json_schema{place}" for place in places)
    function = {"name": "f", "parameters": {"properties": {"é": {"not": {"pattern": "a"}}}}}
    named = ask(client, tools=[{"type": "function", "function": function}], max_tokens=5)
    assert named.status_code == 200, named.text
    assert named.headers["X-Aspd-Ignored"] == "tools[0].function.parameters#/properties/%C3%A9/not"
    assert "X-Aspd-Ignored" not in ask(client, response_format=FORMAT, max_tokens=5).headers


def test_names_of_ignored_keywords_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the size of the header, and that a request without a schema reads none."""
    properties = {"é" * 40 + str(number): {"not": {"pattern": "a"}} for number in range(30)}
    schema = {"name": "it", "schema": {"type": "object", "properties": properties}, "strict": False}
    named = ask(client, response_format={"type": "json_schema", "json_schema": schema}, max_tokens=5)
    *names, more = named.headers["X-Aspd-Ignored"].split(", ")
    assert len(", ".join(names)) <= 1000 and more == f"{30 - len(names)} more", named.text
    monkeypatch.setattr("infer.server.messages.read_schema", lambda *_: {}["not called"])
    assert ask(client, max_tokens=5).status_code == 200


def test_a_field_without_values_is_left_out(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"b": {"enum": [1, 2]}, "c": {"enum": [1, 2]}}, "required": ["b", "c"]}
    for field in ({"type": "integer", "enum": ["1"]}, {"type": "integer", "minimum": 2, "maximum": 1}, False):
        schema |= {"properties": {"a": field, **schema["properties"]}, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        for fields in ("parallel", "serial"):
            reply = ask(client, response_format=form, aspd={"fields": fields}).json()
            assert list(json.loads(reply["choices"][0]["message"]["content"])) == ["b", "c"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"aspd": {"fields": "parallel"}},
            "fields: expected a schema, tools or (for exact) a template beside parallel",
        ),
        ({"aspd": {"fields": "both"}}, "fields"),
        ({"aspd": {"template": "{a"}}, "line 1, column 1"),
        ({"aspd": {"template": "A:{a}"}, "response_format": FORMAT}, "template"),
        ({"aspd": {"template": "A:{a}"}, "max_tokens": 1}, "template: expected a budget"),
        ({"aspd": {"template": "A:{a} B:{a}"}}, "hole 'a': expected different names"),
        ({"aspd": {"template": "A:{a after b} B:{b after a}"}}, "do not depend on each other, got a, b"),
        ({"aspd": {"template": "no hole"}}, "template: expected at least one hole"),
        ({"aspd": {"fields": "parallel"}, "response_format": wrong({"x-after": ["z"]})}, 'a: "x-after": unknown field'),
        ({"aspd": {"fields": "parallel"}, "response_format": wrong({"x-after": ["a"]})}, "do not depend on each other"),
        ({"aspd": {"fields": "parallel"}, "response_format": wrong({"x-after": 5})}, 'a: "x-after": expected a list'),
        ({"response_format": wrong({"pattern": "(?=a)"})}, "json_schema: #/properties/a/pattern: expected a regular"),
        ({"aspd": {"fields": "parallel"}, "response_format": wrong({"not": {"pattern": "a"}})}, "#/properties/a/not: "),
        ({"response_format": with_strict(True)}, "json_schema: #/properties/a/uniqueItems: expected keywords"),
        ({"structured_outputs": {"json": {"x-guidance": {"lenient": True}}}}, "json_schema: #/x-guidance: expected"),
        ({"structured_outputs": {"json": "true"}}, "json_schema: expected the schema as an object, got true"),
        ({"aspd": {"template": "A:{a}"}, "tools": [TOOL]}, "template: expected no tools beside it"),
        (
            {"aspd": {"template": "A:{a}", "fields": "parallel"}, "tools": [TOOL], "tool_choice": "required"},
            "template: expected no tools beside it",
        ),
    ],
)
def test_requests_that_are_refused(client: TestClient, fields: dict[str, Any], message: str) -> None:
    reply = ask(client, **fields)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_other_processes_read_the_same_request(client: TestClient, lm: LanguageModel) -> None:
    engine = Engine(lm, **SIZES)
    for params in (
        SamplingParams(template="A:{a}\nB:{b after a}"),
        SamplingParams(json_schema=SCHEMA, fields="parallel"),
    ):
        command = StepCommand(((1, engine.check("Hi", replace(params, seed=1), "serial")),))
        assert StepCommand.from_bytes(command.to_bytes()).submitted[0][1].template == command.submitted[0][1].template
