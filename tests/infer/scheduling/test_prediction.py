"""Predictions: texts that answers may have, which change nothing but the number of steps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from aspd_jax import LanguageModel, load_model
from aspd_jax.errors import RequestError
from infer import Engine, Result, SamplingParams
from infer.server.app import make_app
from infer.server.config import ServerConfig
from tests.conftest import SIZES
from tests.infer.scheduling.test_exact import edited, same
from tests.infer.scheduling.test_filling import PROMPT, SCHEMA

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "top_p": 0.95, "logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"temperature": 1.0, "min_tokens": 50, "logit_bias": {"80": 2.0}},
    {"temperature": 1.0, "json_schema": SCHEMA},
    {"temperature": 0.0, "regex": "(ab|cd|efg){30}"},
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine of the embedded model, whose answers are text; the texts of random ones are no UTF-8."""
    return Engine(load_model("demo"), **SIZES)


def answers(engine: Engine, asked: list[SamplingParams]) -> list[Result]:
    return engine.generate([PROMPT] * len(asked), asked, "serial")


@pytest.mark.further
def test_right_predictions_save_steps(engine: Engine) -> None:
    """Check predictions that are the answers, in a batch: equal answers in a fraction of the steps."""
    asked = [SamplingParams(max_new_tokens=150, seed=n, **kind) for n, kind in enumerate(KINDS)]
    serial = answers(engine, asked)
    predicted = [replace(one, prediction=result.text) for one, result in zip(asked, serial, strict=True)]
    found = answers(engine, predicted)
    assert same(serial, found)
    for one, other in zip(serial, found, strict=True):
        assert other.stats.steps < 0.4 * one.stats.steps and other.stats.accepted_tokens > 0.7 * len(one.token_ids)


def test_checks_hold_up_no_other_answer(engine: Engine) -> None:
    """Check that a stream gets a token for each check of a long prediction, in chunks of one step."""
    endless = dict.fromkeys(engine.config.end, -100.0)
    long = SamplingParams(max_new_tokens=300, temperature=1.0, seed=3, logit_bias=endless)
    (whole,) = answers(engine, [long])
    stream = engine.submit(PROMPT, replace(long, max_new_tokens=200, seed=4), "serial", stream="text")
    while not stream.partial().token_ids:
        engine.step(1)
    predicted, grown, gained = engine.submit(PROMPT, replace(long, prediction=whole.text), "serial"), [0], [0]
    while predicted.result is None:
        engine.step(1)
        grown.append(len(stream.partial().token_ids))
        gained.append(len(predicted.partial().token_ids))
    stream.cancel()
    assert predicted.result.token_ids == whole.token_ids and predicted.result.stats.steps < 30
    assert max(now - before for before, now in itertools.pairwise(gained)) <= 65, "one check in a chunk"
    held = sum(now == before for before, now in itertools.pairwise(grown))
    assert held <= 2, "the stream goes on, but where the prompt is fed"


@pytest.mark.further
@pytest.mark.parametrize("seed", range(4))
def test_wrong_predictions_change_nothing(engine: Engine, seed: int) -> None:
    draw = random.Random(seed)
    asked = [SamplingParams(max_new_tokens=120, seed=seed, **kind) for kind in KINDS]
    serial = answers(engine, asked)
    texts = [edited(result.text, draw) for result in serial]
    found = answers(engine, [replace(one, prediction=text) for one, text in zip(asked, texts, strict=True)])
    assert same(serial, found) and sum(result.stats.accepted_tokens for result in found) > 20
    others = [replace(one, prediction=serial[0].text) for one in asked[1:]]
    assert same(serial[1:], answers(engine, others))


@pytest.mark.further
def test_budgets_and_stop_strings(engine: Engine) -> None:
    """Check that predictions that go on behind the end of an answer change nothing."""
    endless: dict[str, Any] = {"max_new_tokens": 150, "temperature": 1.0, "seed": 3, "logprobs": 0}
    endless["logit_bias"] = dict.fromkeys(engine.config.end, -100.0)
    (whole,) = answers(engine, [SamplingParams(**endless)])
    limits: list[dict[str, Any]] = [
        {name: n} for name in ("max_new_tokens", "max_content_tokens") for n in (1, 2, 64, 65)
    ]
    limits += [{"stop": (whole.text[at : at + 3],)} for at in (1, 30, len(whole.text) - 4)]
    asked = [SamplingParams(**endless | one) for one in limits]
    serial = answers(engine, asked)
    assert same(serial, answers(engine, [replace(one, prediction=whole.text + " and more") for one in asked]))
    assert {result.finish_reason for result in serial} == {"stop", "length"} and len(whole.token_ids) == 150


@pytest.mark.further
def test_other_draft_tokens_and_adaptive_mode(engine: Engine) -> None:
    """Check draft tokens of every step beside predictions, and that adaptive mode becomes serial."""
    own = Engine(engine.lm, drafts="lookup", draft_tokens=3, force_drafts=True, **SIZES)
    asked = [SamplingParams(max_new_tokens=100, seed=n, **kind) for n, kind in enumerate(KINDS)]
    serial = answers(engine, asked)
    predicted = [
        replace(one, prediction=edited(r.text, random.Random(1))) for one, r in zip(asked, serial, strict=True)
    ]
    assert same(serial, own.generate([PROMPT] * len(asked), predicted, "adaptive"))
    (first, second) = own.generate([PROMPT], replace(predicted[1], n=2), "serial")[0].outputs
    assert first.token_ids == serial[1].token_ids and second.finish_reason


@pytest.mark.further
def test_the_interface(engine: Engine) -> None:
    app = make_app(engine, ServerConfig(name="m", max_new_tokens=100, warm_up="none"))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "aspd": {"mode": "serial"}}
    with TestClient(app) as client:

        def ask(**more: Any) -> Any:
            return client.post("/v1/chat/completions", json=body | more)

        free = ask().json()
        text = free["choices"][0]["message"]["content"]
        for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
            found = ask(prediction={"type": "content", "content": content}).json()
            assert found["choices"] == free["choices"]
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 50 and details["rejected_prediction_tokens"] < 3
        assert "completion_tokens_details" not in free["usage"]
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        prediction = {"prediction": {"type": "content", "content": "x"}}
        for other, message in (
            ({"tools": [tool]}, "prediction: expected no tools beside it"),
            ({"aspd": {"template": "A:{a} B:{b}"}}, "prediction: expected none with a template"),
        ):
            reply = ask(**other, **prediction)
            assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text
        assert ask(prediction={"type": "text", "content": "x"}).status_code == 400


def test_predictions_that_are_refused(engine: Engine, bare_lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="prediction: expected a non-empty string"):
        SamplingParams(prediction="")
    with pytest.raises(RequestError, match="prediction: expected a model whose tokens have bytes"):
        Engine(bare_lm, max_length=64, max_batch=1).submit([1, 2], SamplingParams(prediction="a"), "serial")
