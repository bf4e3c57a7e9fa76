"""Requests that clients send by default, errors of other requests, and their transport over HTTP."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2 as httpx
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax.errors import ConfigError
from infer import Engine
from infer.server.config import ServerConfig
from infer.server.messages import ChatRequest, CompletionRequest
from infer.server.neutral import MESSAGE, PART, REQUEST, Neutral
from infer.server.refusals import Refused, describe, read_json
from infer.server.responses import ResponsesRequest
from tests.helpers.serving import Running, ask, serving

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is 2+3?"}], "temperature": 0}
TEXT = {"model": "demo", "prompt": "2+3?", "temperature": 0}
RESPONSES = {"model": "demo", "input": "What is 2+3?", "temperature": 0}
KINDS: Mapping[str, tuple[type[Any], dict[str, Any]]] = {
    "chat/completions": (ChatRequest, CHAT),
    "completions": (CompletionRequest, TEXT),
    "responses": (ResponsesRequest, RESPONSES),
}
SAMPLES: Mapping[type, Any] = {str: "some", dict: {"a": "b"}, bool: True, int: 3, list: [{"token": "a"}]}

# What clients send that changes nothing, written down beside the table.
DEFAULTS: dict[str, list[Any]] = {
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "parallel_tool_calls": [None, True, False],
    "functions": [None, []],
    "function_call": [None, "none"],
    "service_tier": [None, "auto", "default"],
    "reasoning_effort": [None, "low", "medium", "high", "minimal"],
    "verbosity": ["medium"],
    "prompt_cache_key": ["a"],
    "safety_identifier": ["a"],
    "user": ["a"],
    "metadata": [{}, {"a": "b"}],
    "store": [None, False],
    "prediction": [None],
    "modalities": [["text"]],
    "audio": [None],
    "web_search_options": [None],
    "top_k": [-1, 0, None],
    "min_p": [0, None],
    "ignore_eos": [False],
    "stream_options": [None],
    "chat_template_kwargs": [{}, None],
    "aspd": [None, {}],
    "n": [1, None, 1.0],
    "best_of": [1],
    "seed": [None, -1],
    "stop": [None, []],
    "top_p": [None, 1, 1.0],
    "use_beam_search": [False],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True, False],
    "length_penalty": [1, 1.0],
    "early_stopping": [False],
    "truncate_prompt_tokens": [None],
    "include_stop_str_in_output": [False],
    "stop_token_ids": [[]],
    "priority": [0],
    "request_id": ["a"],
    "bad_words": [[]],
    "prompt_logprobs": [None],
    "guided_regex": [None],  # replaced by structured_outputs
    "a_field_of_tomorrow": [None],
}


def parse(path: str, body: Any) -> tuple[Any, str]:
    """Read a request; return the error that a client gets, if there is one."""
    try:
        return KINDS[path][0].model_validate(body), ""
    except pydantic.ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        return None, ": ".join(describe(errors, body))


@pytest.fixture(scope="module")
def engine(demo_engine: Engine) -> Engine:
    return demo_engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with serving(engine, origins=("https://example.org",), max_new_tokens=200) as running:
        yield running


# Neutral values.


@pytest.mark.parametrize("path", KINDS)
def test_defaults_of_clients_change_nothing(path: str) -> None:
    plain, _ = parse(path, KINDS[path][1])
    for name, values in DEFAULTS.items():
        for value in values:
            body, said = parse(path, {**KINDS[path][1], name: value})
            assert not said, (name, value)
            if name not in ("seed", "stop", "metadata"):  # no stop string, in two ways; responses return metadata
                assert body.model_dump() == plain.model_dump(), (name, value)


@pytest.mark.parametrize("path", KINDS)
def test_every_neutral_value_and_no_other(path: str) -> None:
    """Check the whole table: its values are accepted, and others are refused by the name of their field."""
    table = KINDS[path][0].neutral
    assert set(REQUEST) <= set(table)
    for name, neutral in table.items():
        for value in (None, *neutral.values, *(SAMPLES[kind] for kind in neutral.kinds)):
            assert not parse(path, {**KINDS[path][1], name: value})[1], (name, value)
        if name in KINDS[path][0].model_fields:
            continue
        for value in ("other", {"x": 1}, [1], 7, True, False):
            if not neutral.accepts(value):
                said = parse(path, {**KINDS[path][1], name: value})[1]
                assert said.startswith(f"{name}: ") and "expected" in said, said


def test_true_is_not_one() -> None:
    assert not Neutral((1,)).accepts(True) and not Neutral((False,)).accepts(0) and Neutral((1,)).accepts(1.0)
    for path, field, value in (("chat/completions", "n", True), ("completions", "temperature", "0.5")):
        assert parse(path, {**KINDS[path][1], field: value})[1].startswith(f"{field}: expected")


def test_messages_as_clients_send_them() -> None:
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "function_call": None}
    marked = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    parts = [{"type": "input_text", "text": "a"}, marked, {"type": "output_text", "text": "c", "annotations": []}]
    item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": parts[2:]}
    messages = [
        {"role": "developer", "content": "d", "name": "x"},
        {"role": "user", "content": parts, "cache_control": {"type": "ephemeral"}},
        answer,
        {"role": "user", "content": []},
        item,
        {"role": "user", "content": ""},
    ]
    plain = [
        ("system", "d"), ("user", "abc"), ("assistant", ""), ("user", ""), ("assistant", "c"), ("user", ""),
    ]  # fmt: skip
    chat, said = parse("chat/completions", {**CHAT, "messages": messages})
    assert not said and [tuple(message.plain.values()) for message in chat.messages] == plain
    response, said = parse("responses", {**RESPONSES, "input": messages, "instructions": "first"})
    first = ("system", "first\n\nd")  # templates such as Gemma's refuse a second system message
    assert not said and [tuple(m.values()) for m in response.task.prompts[0]] == [first, *plain[1:]]
    twice = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, *messages[1:2]]
    chat, _ = parse("chat/completions", {**CHAT, "messages": twice})
    assert [tuple(m.values()) for m in chat.task.prompts[0]] == [("system", "a\n\nb"), ("user", "abc")]
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    chat, said = parse("chat/completions", {**CHAT, "messages": [*messages[:2], refused]})
    assert not said and chat.task.prompts[0][-1] == {"role": "assistant", "content": "No."}
    for table in (MESSAGE, PART):
        for name, neutral in table.items():
            for value in (None, *neutral.values, *(SAMPLES[kind] for kind in neutral.kinds)):
                of_message, of_part = ({name: value}, {}) if table is MESSAGE else ({}, {name: value})
                message = {"role": "user", "content": [{"type": "text", "text": "a", **of_part}], **of_message}
                assert not parse("chat/completions", {**CHAT, "messages": [message]})[1], (name, value)


def test_top_p_0_is_the_likeliest_token(server: Running) -> None:
    client, more = server.client(), {"max_tokens": 12, "extra_body": {"aspd": {"mode": "serial"}}}
    sampled = client.chat.completions.create(**ask(**more) | {"temperature": 2.0, "top_p": 0, "seed": 4})
    assert (
        sampled.choices[0].message.content == client.chat.completions.create(**ask(**more)).choices[0].message.content
    )


def test_neutral_values_reach_an_answer(server: Running) -> None:
    """Check all at once, in every interface; the answer equals that of the plain request."""
    url = f"{server.url}/v1"
    for path, (_, body) in KINDS.items():
        more = {name: values[-1] for name, values in DEFAULTS.items() if name != "seed"}
        replies = [httpx.post(f"{url}/{path}", json=asked, timeout=60) for asked in (body, {**body, **more})]
        assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
        plain, full = (reply.json() for reply in replies)
        for field in ("choices", "output_text"):
            assert plain.get(field) == full.get(field)
        if path == "responses":
            assert plain["output"][0]["content"] == full["output"][0]["content"]


def test_variables_of_the_chat_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that variables reach the template as in vLLM; prompts of completions have no template."""
    tokenizer = server.engine.lm.tokenizer
    template = "{{ '' if enable_thinking is defined and not enable_thinking else '5 6 7 ' }}" + tokenizer.chat_template
    tokens = {}
    for path, (_, body) in KINDS.items():
        for value in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            with monkeypatch.context() as patch:
                patch.setattr(tokenizer, "chat_template", template)
                limit = "max_output_tokens" if path == "responses" else "max_tokens"
                asked = {**body, "chat_template_kwargs": value, limit: 1}
                reply = httpx.post(f"{server.url}/v1/{path}", json=asked, timeout=60)
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            tokens.setdefault(path, []).append(usage.get("prompt_tokens", usage.get("input_tokens")))
    for path, (plain, without, within) in tokens.items():
        assert plain == within == without + (0 if path == "completions" else len(tokenizer("5 6 7 ")["input_ids"]))
    for value, where in (({"tokenize": True}, ".tokenize"), ({"a": [1]}, ".a"), ({"eos_token": "x"}, ".eos_token")):
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "chat_template_kwargs": value})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(f"chat_template_kwargs{where}: expected")


def test_no_limit_as_clients_of_local_servers_ask_for_it() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        body, said = parse("chat/completions", {**CHAT, field: -1})
        assert not said and body.task.limit is None
    assert parse("completions", {**TEXT, "max_tokens": -1})[1].startswith("max_tokens: expected at least 0")


# Errors in terms of the request.

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a"}}
CONTENTS: list[tuple[Any, str]] = [
    ([{"type": "text", "text": "a"}, IMAGE], "[1]: expected a text part, got one of kind image"),
    ([{"type": "input_audio"}], "[0]: expected a text part, got one of kind audio"),
    ([{"type": "text", "text": None}], "[0].text: a value is required"),
    ([{"type": "text", "text": 5}], "[0].text: expected a string, got 5"),
    ([{"type": "x", "text": "a"}], "[0].type: expected 'text', 'input_text' or 'output_text', got 'x'"),
    ([{"type": "thinking", "x": "a"}], "[0].type: expected 'text', 'input_text' or 'output_text', got 'thinking'"),
    (["a"], "[0]: expected an object, got 'a'"),
    (5, ": expected a string or a list, got 5"),
    ({"text": "a"}, ": expected a string or a list, got an object"),
    (None, ": a value is required"),
]
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("chat/completions", {"messages": [{"role": "user", "content": content}]}, f"messages[0].content{said}")
        for content, said in CONTENTS
    ),
    (
        "chat/completions",
        {"messages": [{"role": "bot", "content": "a"}]},
        "messages[0].role: expected 'system', 'developer', 'user', 'assistant' or 'tool', got 'bot'",
    ),
    (
        "chat/completions",
        {"messages": [CALLS]},
        "messages[0].tool_calls[0].id: a value is required",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a", "mood": 1}]},
        "messages[0].mood: unknown field",
    ),
    ("chat/completions", {"messages": "hello"}, "messages: expected a list, got 'hello'"),
    ("chat/completions", {"messages": []}, "messages: expected at least 1 entry, got []"),
    ("chat/completions", {"messages": None}, "messages: a value is required"),
    ("chat/completions", {"stop": ["a", 3]}, "stop[1]: expected a string, got 3"),
    ("chat/completions", {"stop": 3}, "stop: expected a string or a list, got 3"),
    ("chat/completions", {"stop": ["a"] * 99}, "stop: expected at most"),
    ("chat/completions", {"temperature": "hot"}, "temperature: expected a number, got 'hot'"),
    ("chat/completions", {"max_tokens": 1.5}, "max_tokens: expected an integer, got 1.5"),
    ("chat/completions", {"stream": "yes"}, "stream: expected true or false, got 'yes'"),
    (
        "chat/completions",
        {"response_format": {"type": "xml"}},
        "response_format: expected an object with a type of 'text', 'json_object', 'json_schema', got an object",
    ),
    ("chat/completions", {"response_format": {}}, "response_format: expected an object with a type, got {}"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema: a value is required",
    ),
    ("chat/completions", {"response_format": SCHEMA}, "response_format.json_schema.schema: a value is required"),
    ("chat/completions", {"aspd": {"speed": 3}}, "aspd.speed: unknown field"),
    ("chat/completions", {"temprature": 1}, "temprature: unknown field"),
    ("completions", {"prompt": {"a": 1}}, "prompt: expected a string or a list, got an object"),
    ("responses", {"input": 3}, "input: expected a string or a list, got 3"),
    ("responses", {"input": [{"type": "reasoning"}]}, "input[0]: expected a message, got an item of type 'reasoning'"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id: responses are not stored; send the whole"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: a value is"),
    ("responses", {"max_tokens": 3}, "max_tokens: the field is max_output_tokens; expected null, got 3"),
    ("responses", {"include": ["all"]}, "include[0]: expected"),
]


@pytest.mark.parametrize(("path", "more", "said"), MISTAKES)
def test_mistakes_are_worded_by_the_request(path: str, more: dict[str, Any], said: str) -> None:
    message = parse(path, {**KINDS[path][1], **more})[1]
    assert message.startswith(said), message


WORDS = re.compile(
    "Input should|Input is|valid (string|integer|number|list|dict)|list\\[|constrained|function-|union|pydantic|type="
    "|url_parsing|instance of|unable to|Extra inputs|Field required|dictionary|tagged|Value error|model_|another value"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-2, 3) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role", "a"]), inner),
    max_leaves=6,
)
FIELDS = sorted(
    {name for kind, _ in KINDS.values() for name in (*kind.model_fields, *kind.neutral)} - {"input", "model"}
)
PARTS = st.lists(
    JSON | st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "file", "x"]), "text": JSON}),
    max_size=2,
)
MESSAGES = st.lists(JSON | st.fixed_dictionaries({"role": JSON | st.just("user"), "content": PARTS | JSON}), max_size=2)
FORMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "x"])},
    optional={"json_schema": JSON, "schema": JSON, "name": JSON},
)


@settings(max_examples=400, deadline=None)
@given(
    path=st.sampled_from(sorted(KINDS)),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    more=st.fixed_dictionaries(
        {},
        optional={
            "messages": MESSAGES,
            "input": MESSAGES,
            "response_format": FORMS,
            "text": st.fixed_dictionaries({"format": FORMS}),
        },
    ),
)
def test_no_word_of_the_validation_library(path: str, body: Any, more: Any) -> None:
    """Check that every error names a place of the request in words of the interface."""
    asked = {**KINDS[path][1], **body, **more}
    parsed, said = parse(path, asked)
    assert parsed is not None or not WORDS.search(said), said
    if said:
        where = said.partition(": ")[0]
        head = re.match(r"[^.\[:]+", where)
        assert head is not None and (head[0] in asked or head[0] in KINDS[path][0].model_fields), said


def test_the_words_would_be_found() -> None:
    """Check that messages of the library itself contain its words (negative control)."""
    for wrong in ({"stop": 3}, {"a": 1}, {"messages": None}):
        with pytest.raises(pydantic.ValidationError) as caught:
            pydantic.create_model(
                "M", messages=(list[str], ...), stop=(str | list[str], None), __config__={"extra": "forbid"}
            )(**wrong)  # type: ignore[call-overload]
        assert all(WORDS.search(error["msg"]) for error in caught.value.errors())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{nope", "expected JSON: "),
        (b"", "expected JSON: "),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "1e999 is too large for a number of 64 bits"),
        (b"[" * 100_000, "nested too deep"),
        (b'"\xff"', "expected UTF-8, got byte 0xff at 1"),
        (b'{"messages": [{"content": "x \\ud83d"}]}', "messages[0].content: expected Unicode text, got an unpaired"),
        (b'{"a\\ud83d": 1}', "the request: expected Unicode text"),
        (b'"\xed\xa0\xbd"', "expected UTF-8"),
    ],
)
def test_bodies_that_are_not_json(body: bytes, said: str) -> None:
    with pytest.raises(Refused, match="expected") as caught:
        read_json(body)
    assert said in caught.value.body["error"]["message"] and caught.value.status_code == 400


def test_bodies_that_are() -> None:
    assert read_json(b"\xef\xbb\xbf{}") == {} and read_json(b'"\\ud83d\\ude00"') == "😀"


# HTTP.


def test_errors_have_one_form(server: Running) -> None:
    wrong = httpx.post(f"{server.url}/v1/chat/completions", json=ask(n="two"))
    assert wrong.status_code == 400 and wrong.headers["x-request-id"].startswith("req_")
    assert wrong.json()["error"] == {
        "message": "n: expected an integer, got 'two'",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_value",
    }
    form = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": "text/x"})
    assert form.status_code == 400 and "Content-Type: application/json" in form.json()["error"]["message"]
    missing = httpx.get(f"{server.url}/v1/responses/resp_1")
    assert missing.status_code == 404 and "responses are not stored" in missing.json()["error"]["message"]


def test_chunked_bodies(server: Running) -> None:
    """Check that chunked bodies are read within the same bound as others."""
    url, body = f"{server.url}/v1/chat/completions", json.dumps({**CHAT, "max_tokens": 4}).encode()
    headers = {"Content-Type": "application/json"}
    pieces = (body[at : at + 7] for at in range(0, len(body), 7))
    chunked = httpx.post(url, content=pieces, headers=headers, timeout=60)
    assert chunked.request.headers["transfer-encoding"] == "chunked" and chunked.status_code == 200
    long = httpx.post(url, content=(b" " * (1 << 16) for _ in range(17)), headers=headers)
    assert long.status_code == 413 and "expected at most 1048576" in long.json()["error"]["message"]
    with socket.create_connection(server.address, 30) as bare:  # no length, no chunks: an empty body
        bare.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\r\n")
        assert b" 400 " in bare.recv(1 << 16).splitlines()[0]


def test_request_ids(server: Running, caplog: Any) -> None:
    caplog.set_level("INFO", logger="aspd.server")
    for sent, kept in (("my-id.1", True), ("bad id\x7f", False), ("x" * 200, False), ("", False)):
        reply = httpx.post(f"{server.url}/v1/nothing", headers={"x-request-id": sent} if sent else {})
        assert (reply.headers["x-request-id"] == sent) == kept
        assert reply.headers["x-request-id"] in caplog.text
    assert httpx.get(f"{server.url}/health").headers["x-request-id"].startswith("req_")


def test_failures_have_the_request_id(server: Running, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(server.engine_thread, "submit", lambda *_, **__: 1 / 0)
    failed = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc"})
    assert failed.status_code == 500 and "(request id abc)" in failed.json()["error"]["message"]
    assert "ZeroDivisionError" in caplog.text and "abc" in caplog.text and "Division" not in failed.text


def test_methods(server: Running) -> None:
    for path in ("/", "/health", "/live", "/v1/models", "/v1/models/demo", "/metrics"):
        head, got = httpx.head(f"{server.url}{path}"), httpx.get(f"{server.url}{path}")
        assert head.status_code == got.status_code == 200 and not head.content and got.content
        assert head.headers["content-type"] == got.headers["content-type"]
    assert httpx.head(f"{server.url}/v1/models/other/one").status_code == 404
    options = httpx.request("OPTIONS", f"{server.url}/v1/chat/completions")
    assert options.status_code == 405 and options.headers["allow"] == "POST"


def test_other_origins(engine: Engine, server: Running) -> None:
    """Check that pages of an origin may read every response with the option, errors included, and none without."""
    url = f"{server.url}/v1/chat/completions"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}

    def allowed(reply: httpx.Response) -> str | None:
        return reply.headers.get("access-control-allow-origin")  # type: ignore[no-any-return]

    def preflight(url: str, origin: str) -> httpx.Response:
        return httpx.request("OPTIONS", url, headers={"Origin": origin, **asks})

    before = preflight(url, "https://example.org")
    assert before.status_code == 200 and allowed(before) == "https://example.org"
    assert "authorization" in before.headers["access-control-allow-headers"]
    reply = httpx.post(url, json={}, headers={"Origin": "https://example.org"})
    assert reply.status_code == 400 and allowed(reply) == "https://example.org"
    assert "x-aspd-ignored" in reply.headers["access-control-expose-headers"]
    assert allowed(preflight(url, "https://evil.org")) is None
    with serving(engine, keys=("k",)) as plain, serving(engine, keys=("k",), origins=("*",)) as opened:
        assert allowed(preflight(f"{plain.url}/v1/models", "https://example.org")) is None
        free = preflight(f"{opened.url}/v1/models", "https://example.org")
        assert free.status_code == 200 and allowed(free) == "*"  # a preflight has no key
        refused = httpx.get(f"{opened.url}/v1/models", headers={"Origin": "https://example.org"})
        assert refused.status_code == 401 and allowed(refused) == "*"
    for wrong in ("example.org", "https://example.org/", "https://*.org/x", ""):
        with pytest.raises(ConfigError, match="origins"):
            ServerConfig(origins=(wrong,))


# Usage while a stream grows, and responses.


def test_usage_with_every_chunk(server: Running) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.client().chat.completions.create(**ask(), stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks[1:] if chunk.usage]
    whole = server.client().chat.completions.create(**ask()).usage
    assert len(counts) == len(chunks) - 1 and counts == sorted(counts) and whole is not None
    assert counts[-2:] == [whole.completion_tokens] * 2 and chunks[1].usage.prompt_tokens == whole.prompt_tokens  # type: ignore[union-attr]


def responses(server: Running) -> openai.resources.Responses:
    return server.client().responses


def test_a_response_is_the_chat_completion(server: Running) -> None:
    chat = server.client().chat.completions.create(**ask(max_tokens=200))
    question = ask()["messages"][0]["content"]
    asked: Any = {"model": "demo", "input": question, "temperature": 0, "max_output_tokens": 200, "store": False}
    whole = responses(server).create(**asked, extra_body={"aspd": {"statistics": True}})
    assert whole.output_text == chat.choices[0].message.content and whole.id.startswith("resp_")
    assert whole.usage is not None and chat.usage is not None and "aspd" in (whole.model_extra or {})
    assert whole.usage.output_tokens == chat.usage.completion_tokens and whole.usage.input_tokens_details is not None
    events = list(responses(server).create(**asked, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1 and kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", f"response.{whole.status}",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]
    with responses(server).stream(**{**asked, "input": [{"role": "user", "content": question}]}) as stream:
        final = stream.get_final_response()
    assert final.output_text == whole.output_text and final.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]


def test_a_response_that_is_cut(server: Running) -> None:
    question = ask()["messages"][0]["content"]
    asked: Any = {"model": "demo", "input": question, "temperature": 0, "max_output_tokens": 5}
    whole = responses(server).create(**asked)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert list(responses(server).create(**asked, stream=True))[-1].type == "response.incomplete"


def test_a_response_of_a_schema(server: Running) -> None:
    class Sum(pydantic.BaseModel):
        right: bool

    asked: Any = {"model": "demo", "input": "2+3=5?", "instructions": "Answer.", "temperature": 0}
    parsed = responses(server).parse(**asked, text_format=Sum)
    assert isinstance(parsed.output_parsed, Sum)
    with_tokens = responses(server).create(
        **asked, max_output_tokens=6, include=["message.output_text.logprobs"], top_logprobs=2
    )
    (part,) = with_tokens.output[0].content  # type: ignore[union-attr]
    assert "".join(token.token for token in part.logprobs) == part.text and len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr,arg-type]


def test_a_response_that_fails(engine: Engine) -> None:
    with serving(engine, timeout=1e-6) as late:
        asked: Any = {"model": "demo", "input": "2+3?", "stream": True}
        events = list(responses(late).create(**asked))
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error is not None and "no answer within" in events[-1].response.error.message
