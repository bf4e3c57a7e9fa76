"""Exact fields over the proxy: the greedy answers of serial mode, whatever the draft and what the upstream returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from infer.proxy import exact_upstream
from infer.proxy.routes import Proxy, make_app
from infer.proxy.upstream import UpstreamConfig
from infer.request import SamplingParams
from tests.helpers.serving import Running
from tests.infer.proxy.test_filling_upstream import QUESTION, SCHEMAS, ask, ask_fields, streamed_text, text_of
from tests.infer.proxy.test_proxy import Served

TEMPLATE = "Name: {name}\nCity: {city}\nEnd."


@pytest.fixture(scope="module")
def real(server: Running) -> Iterator[str]:
    lm, config = server.engine.lm, UpstreamConfig(f"{server.url}/v1", "demo")
    with Served(make_app(Proxy(config, lm.tokenizer, lm.end_ids, "proxied", 400))) as made:
        yield made.url


def serial(server: Running, **more: Any) -> Any:
    params = SamplingParams(temperature=0, **{"max_new_tokens": 400} | more)
    (result,) = server.engine.generate([[QUESTION]], params, mode="serial")
    return result


@pytest.mark.further
@pytest.mark.parametrize("alternatives", [20, 1])
@pytest.mark.parametrize("name", ["pair", "nested", "numbers", "kinds", "arrays", "later", "choices"])
def test_answers_are_those_of_serial_mode(
    name: str, alternatives: int, real: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check answers where 20 likeliest tokens are known, and where the likeliest one often is not permitted."""
    monkeypatch.setattr(exact_upstream, "ALTERNATIVES", alternatives)
    expected = serial(server, json_schema=SCHEMAS[name])
    answer = ask_fields(real, SCHEMAS[name], aspd={"fields": "exact"})
    choice = answer.json()["choices"][0]
    assert (text_of(answer), choice["finish_reason"]) == (expected.text, expected.finish_reason)
    assert answer.json()["usage"]["completion_tokens"] == expected.stats.content_tokens
    streamed = ask_fields(real, SCHEMAS[name], aspd={"fields": "exact"}, stream=True)
    assert streamed_text(streamed) == expected.text


@pytest.mark.further
def test_a_draft_changes_nothing(real: str, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = SCHEMAS["nested"]
    parallel, exact = ask_fields(real, schema), ask_fields(real, schema, aspd={"fields": "exact"})
    assert text_of(parallel) != text_of(exact), "the draft is corrected"
    monkeypatch.setattr(exact_upstream.DraftText, "next", lambda _: None)
    without = ask_fields(real, schema, aspd={"fields": "exact"})
    assert text_of(without) == text_of(exact) == serial(server, json_schema=schema).text


@pytest.mark.further
@pytest.mark.parametrize("limit", [1, 4, 13])
def test_budgets_and_stop_strings(limit: int, real: str, server: Running) -> None:
    schema = SCHEMAS["pair"]
    expected = serial(server, json_schema=schema, max_new_tokens=limit)
    answer = ask_fields(real, schema, aspd={"fields": "exact"}, max_tokens=limit)
    assert (text_of(answer), answer.json()["choices"][0]["finish_reason"]) == (expected.text, "length")
    stopped = ask_fields(real, schema, aspd={"fields": "exact"}, stop=['",'])
    assert text_of(stopped) == serial(server, json_schema=schema).text.partition('",')[0]


@pytest.mark.further
def test_templates(real: str, server: Running) -> None:
    expected = serial(server, template=TEMPLATE, fields="exact")
    answer = ask(real, aspd={"fields": "exact", "template": TEMPLATE})
    assert answer.status_code == 200, answer.text
    assert text_of(answer) == expected.text


def test_what_cannot_be_checked_is_refused(real: str) -> None:
    for field, value in (("temperature", 1), ("repetition_penalty", 1.5)):
        answer = ask_fields(real, SCHEMAS["pair"], aspd={"fields": "exact"}, **{field: value})
        assert answer.status_code == 400
        assert f"{field}: expected " in answer.json()["error"]["message"]


def test_an_upstream_without_log_probabilities_is_named(server: Running) -> None:
    upstream = FastAPI()

    @upstream.post("/v1/completions")
    def complete() -> JSONResponse:
        return JSONResponse({"choices": [{"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}]})

    lm = server.engine.lm
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}  # no draft
    with Served(upstream) as behind:
        config = UpstreamConfig(behind.url, "m", retries=0)
        with Served(make_app(Proxy(config, lm.tokenizer, lm.end_ids, "proxied", 400))) as before:
            answer = ask_fields(before.url, schema, aspd={"fields": "exact"})
    assert answer.status_code == 502
    assert "return_tokens_as_token_ids" in answer.json()["error"]["message"]
