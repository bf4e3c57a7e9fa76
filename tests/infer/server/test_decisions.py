"""`/v1/decisions` through OpenAI's client, and `/v1/systemone` through JevBench's."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from infer import Engine, Option, Question
from tests.helpers.serving import Running

INPUT = "Our export has failed three nights in a row."
PREDICATE = {"type": "predicate", "name": "failing", "instructions": "Is a feature failing?"}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Is it "}, {"type": "input_text", "text": "so?"}],
    "choices": [{"value": True}, {"value": "true", "description": "as text"}, {"value": "other"}],
}
SCORE = {"type": "score", "instructions": "How upset?", "levels": [{"label": "calm"}, {"label": "angry"}]}
QUESTIONS = [PREDICATE, CHOICE, SCORE]
ASKED = [
    Question("predicate", "Is a feature failing?"),
    Question("choice", "Is it so?", (Option(True), Option("true", "as text"), Option("other"))),
    Question("score", "How upset?", (Option("calm"), Option("angry"))),
]


def post(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(server: Running, **changes: Any) -> tuple[int, Any]:
    return post(server, "/v1/decisions", {"model": "demo", "input": INPUT, "questions": QUESTIONS} | changes)


def test_openai_client(server: Running, demo_engine: Engine) -> None:
    """Check every field against the engine's answers."""
    client = server.client()
    if not hasattr(client, "decisions"):
        pytest.skip("this version of openai has no decisions")
    made = client.decisions.create(model="demo", input=INPUT, questions=QUESTIONS, safety_identifier="x")
    predicate, choice, score = made.answers
    own = demo_engine.decide(INPUT, ASKED)
    assert (predicate.type, predicate.name) == ("predicate", "failing")
    assert predicate.probability == pytest.approx(own[0].probabilities[0], abs=1e-5)
    assert choice.type == "choice" and choice.name is None
    assert [one.value for one in choice.probabilities] == [True, "true", "other"]
    assert [one.probability for one in choice.probabilities] == pytest.approx(own[1].probabilities, abs=1e-5)
    assert choice.choice == choice.probabilities[own[1].best].value
    assert choice.confidence == pytest.approx(max(own[1].probabilities), abs=1e-5)
    assert [(one.value, one.label) for one in score.probabilities] == [(0, "calm"), (1, "angry")]
    assert score.score == pytest.approx(own[2].probabilities[1], abs=1e-5)
    assert sum(one.probability for one in score.probabilities) == pytest.approx(1)
    usage = made.usage
    assert usage.total_tokens == usage.input_tokens > 100 and usage.output_tokens == 0
    again = client.decisions.create(model="demo", input=INPUT, questions=QUESTIONS[:1])
    assert again.usage.input_tokens_details.cached_tokens > 0 and len(again.answers) == 1
    with pytest.raises(openai.BadRequestError, match="questions"):
        client.decisions.create(model="demo", input=INPUT, questions=[])


@pytest.mark.further
def test_inputs(server: Running) -> None:
    """Check all items of an input, which depend on what they say."""
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "ls", "namespace": "x"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Sort messages."}]},
        {"role": "user", "type": "message", "content": [{"type": "input_json", "data": {"text": INPUT}}]},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "Yes."}],
        },
        {"role": "user", "content": INPUT},
    ]
    tools = [call, {"type": "function_call_output", "call_id": "1", "output": "nothing"}]
    more = [
        custom,
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "a"}]},
    ]
    found = []
    for input in (items, items[:-1], [*items, *tools], [*items, *tools, *more]):
        status, body = ask(server, input=input)
        assert status == 200, body
        found.append(body["answers"][0]["probability"])
    assert len(set(found)) == 4
    assert ask(server, aspd={"calibration": "none"})[1] != ask(server)[1]
    status, body = ask(server, aspd={"calibration": "prior"}, prompt_cache_options={"mode": "explicit", "ttl": "30m"})
    assert status == 200 and all(0 <= outside <= 1 for outside in body["aspd"]["outside"])


@pytest.mark.further
def test_other_endpoints_take_the_same_parts(server: Running) -> None:
    """Check parts with JSON and refusals, and calls of custom tools; negative controls: data that is no object."""
    items = [
        {"role": "user", "content": [{"type": "input_json", "data": {"text": INPUT}}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "a"},
    ]
    limits = {"model": "demo", "max_output_tokens": 2}
    status, body = post(server, "/v1/responses", limits | {"input": items})
    assert status == 200, body
    chat = {"model": "demo", "max_tokens": 2}
    status, same = post(
        server, "/v1/chat/completions", chat | {"messages": [*items[:2], {"role": "user", "content": "?"}]}
    )
    assert status == 200, same
    shown = [{"role": "user", "content": f'{{"text":"{INPUT}"}}'}, {"role": "assistant", "content": "No."}]
    status, body = post(server, "/v1/chat/completions", chat | {"messages": [*shown, {"role": "user", "content": "?"}]})
    assert body["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    for data in ([1], "text", None):
        wrong = [{"role": "user", "content": [{"type": "input_json", "data": data}]}]
        status, body = post(server, "/v1/responses", limits | {"input": wrong})
        assert status == 400 and body["error"]["param"].startswith("input[0].content[0]"), body


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
DEEP: Any = {}
for _ in range(40):
    DEEP = {"a": DEEP}
DEEP_PART = {"type": "input_json", "data": DEEP}


@pytest.mark.default_cases(100)
@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"questions": []}, "questions", "at least 1 entry"),
        ({"questions": [PREDICATE] * 401}, "questions", "at most 400 entries"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices", "got 'a' twice"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices", "expected 2 to 255, got 1"),
        ({"questions": [{"type": "choice", "instructions": "x"}]}, "questions[0].choices", "expected 2 to 255, got 0"),
        ({"questions": [{**PREDICATE, "levels": []}]}, "questions[0].levels", "expected none for a predicate"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}] * 2}]}, "questions[0].levels", "different values"),
        ({"questions": [{"type": "box", "instructions": "x"}]}, "questions[0].type", "predicate"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "required"),
        ({"questions": [{**PREDICATE, "instructions": [IMAGE]}]}, "questions[0].instructions[0]", "kind image"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]", "kind image"),
        ({"input": [{"role": "user", "content": [DEEP_PART]}]}, "input[0].content[0].data", "levels"),
        ({"input": "a b c " * 2000}, "input", "at most"),
        ({"questions": [{**PREDICATE, "instructions": "Is it so? " * 400}]}, "questions", "at most"),
        ({"input": []}, "input", "at least 1"),
        ({"stream": True}, "stream", "unknown field"),
        ({"model": "other"}, "model", "unknown model"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Running, changes: Any, param: str, message: str) -> None:
    status, body = ask(server, **changes)
    assert status in (400, 404) and body["error"]["param"] == param and message in body["error"]["message"], body


SYSTEM_ONE: dict[str, Any] = {
    "model": "demo",
    "state": {"text": INPUT},
    "questions": {
        "failing": {"type": "noul", "instructions": "Is a feature failing?", "criteria": {"true": "it fails"}},
        "team": {"type": "choice", "criteria": {"engineering": "repairs", "billing": None}},
        "mood": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "upset", "angry"]},
    },
}


def test_system_one(server: Running) -> None:
    status, body = post(server, "/v1/systemone", SYSTEM_ONE)
    assert status == 200, body
    answers = body["answers"]
    assert list(answers) == ["failing", "team", "mood"] and 0 < answers["failing"]["noul"] < 1
    for name, keys in (("team", ["engineering", "billing"]), ("mood", ["0", "1", "2"])):
        shares = answers[name]["probabilities"]
        assert list(shares) == keys and sum(shares.values()) == pytest.approx(1)
        assert answers[name]["confidence"] == max(shares.values())
    assert answers["team"]["choice"] in answers["team"]["probabilities"]
    assert answers["mood"]["legend"] == {"0": "calm", "1": "upset", "2": "angry"}
    status, body = post(server, "/v1/systemone", SYSTEM_ONE | {"state": "a b c " * 2000})
    assert status == 400 and body["error"]["param"] == "state" and "at most" in body["error"]["message"]
    for field in ("images", "assets"):
        status, body = post(server, "/v1/systemone", SYSTEM_ONE | {field: ["data:image/png;base64,AAAA"]})
        assert status == 400 and body["error"]["param"] == field and "only text" in body["error"]["message"]


@pytest.mark.further
def test_jevbench(server: Running, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the benchmark's own client and its laws of independence, which hold for every pair of its requests."""
    jevbench = pytest.importorskip("jevbench")
    monkeypatch.chdir(tmp_path)
    model = jevbench.systemone(f"{server.url}/v1/systemone", model="demo")
    assert jevbench.check(model)
    report = jevbench.evaluate(model, suite="examples", dimensions=["BAT"])
    outcomes = report.result["outcomes"]
    assert len(outcomes) >= 5 and not report.errors
    assert max(outcome["deviation"] for outcome in outcomes) < 1e-4
