"""Fields and templates over the proxy: equal to single completions, valid, and robust against what upstreams do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import PreTrainedTokenizerFast

from aspd import main
from aspd_jax import LanguageModel, load_model
from aspd_jax.fields import fields_template
from aspd_jax.structure import Parallel, from_json, plain_text
from infer.proxy.filling_upstream import ValueCheck
from infer.proxy.routes import Proxy, make_app
from infer.proxy.upstream import UpstreamConfig
from tests.conftest import tiny_config, write_checkpoint
from tests.helpers.serving import Running, wait_for
from tests.infer.proxy.test_proxy import Served
from tests.infer.scheduling.test_structured_output import record, valid

WORD = {"type": "string", "maxLength": 9}
QUESTION = {"role": "user", "content": "What is <|para|> good for?"}
PAIR = record(name=WORD, city=WORD)
LATER = record(first=WORD, second=WORD, both={**WORD, "x-after": ["first", "second"]}, third=WORD)
SCHEMAS = {
    "pair": PAIR,
    "later": LATER,
    "kinds": record(kind={"enum": ["order", "bill", 3]}, rush={"type": "boolean"}, fixed={"const": "x"}, no=WORD),
    "numbers": record(n={"type": "integer", "minimum": 0, "maximum": 99999}, x={"enum": [0.5, 2, -100.0]}),
    "nested": record(name=WORD, at=record(street=WORD, zip={"type": "string", "pattern": "^[0-9]{4}$"})),
    "arrays": record(tags={"type": "array", "items": WORD, "maxItems": 2}, title=WORD),
    "choices": record(more={"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 9}]}, other={"type": "null"}),
    "definitions": {**record(a={"$ref": "#/$defs/word"}, b={"$ref": "#/$defs/word"}), "$defs": {"word": WORD}},
}


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def ask(url: str, path: str = "chat/completions", **more: Any) -> httpx.Response:
    asked: dict[str, Any] = {"model": "proxied", "temperature": 0}
    asked |= {"messages": [QUESTION]} if path == "chat/completions" else {"input": QUESTION["content"]}
    return httpx.post(f"{url}/{path}", json=asked | more, timeout=120)


def ask_fields(url: str, schema: Any, **more: Any) -> httpx.Response:
    aspd = {"fields": "parallel", "statistics": True} | more.pop("aspd", {})
    return ask(url, response_format=format_of(schema), aspd=aspd, **more)


def text_of(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def streamed_text(response: httpx.Response) -> str:
    """Return the text of a stream in reading order."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)


# Over a server of the embedded model.


@pytest.fixture(scope="module")
def real(server: Running) -> Iterator[str]:
    lm, config = server.engine.lm, UpstreamConfig(f"{server.url}/v1", "demo")
    with Served(make_app(Proxy(config, lm.tokenizer, lm.end_ids, "proxied", 400))) as made:
        yield made.url


def complete(server: Running, prompt: list[int], **more: Any) -> str:
    asked = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 120, "logit_bias": forbidden(server)}
    response = httpx.post(f"{server.url}/v1/completions", json=asked | more, timeout=120)
    return str(response.json()["choices"][0]["text"])


def forbidden(server: Running) -> dict[str, int]:
    return {str(tag): -100 for tag in server.engine.lm.codec.special.ids}


@pytest.mark.further
@pytest.mark.parametrize("name", ["pair", "numbers", "nested", "kinds"])
def test_a_field_is_what_it_is_alone(name: str, real: str, server: Running) -> None:
    """Check that each value equals the beginning of a free completion after prompt and lead, or the constrained one."""
    answer = ask_fields(real, SCHEMAS[name])
    found, template, lm = json.loads(text_of(answer)), fields_template(SCHEMAS[name]), server.engine.lm
    assert template is not None and answer.json()["choices"][0]["finish_reason"] == "stop"
    prompt, different, requests = server.engine.encode([QUESTION]), 0, 0
    for hole in template.holes:
        lead = lm.codec.text.encode(str(hole.context).rstrip(" "))
        schema = json.loads(str(hole.schema))
        written = complete(server, [*prompt, *lead]).lstrip()
        try:
            written = json.dumps(json.JSONDecoder().raw_decode(written)[0])
        except ValueError:
            written = ""
        requests += 1
        if not valid(written, schema):
            written = complete(server, [*prompt, *lead], response_format=format_of(schema))
            requests += 1
        value = found
        for key in hole.path:
            value = value[key]
        assert json.loads(written) == value
        different += complete(server, prompt, response_format=format_of(schema)) != written
    assert answer.json()["aspd"][0]["statistics"] == {"requests": requests}
    assert different, "negative control: the lead matters"


@pytest.mark.further
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid(name: str, real: str) -> None:
    answer = ask_fields(real, SCHEMAS[name], temperature=1, seed=3)
    assert valid(text_of(answer), SCHEMAS[name]) and answer.json()["choices"][0]["finish_reason"] == "stop"
    structure = from_json(answer.json()["aspd"][0]["structure"])
    assert plain_text(structure) == text_of(answer) and isinstance(structure[0], Parallel)
    assert not valid(text_of(answer)[:-1], SCHEMAS[name]), "negative control"


@pytest.mark.further
def test_a_schema_without_fields_is_one_request(real: str, server: Running) -> None:
    short = record(n={"type": "integer", "maximum": 99})
    prompt = server.engine.encode([QUESTION])
    expected = complete(server, prompt, response_format=format_of(PAIR))
    for schema, aspd in ((PAIR, {}), (short, {"fields": "parallel"}), (PAIR, {"fields": "serial"})):
        answer = ask(real, response_format=format_of(schema), aspd={"statistics": True} | aspd)
        assert valid(text_of(answer), schema) and answer.json()["aspd"][0]["statistics"] == {"requests": 1}
        assert text_of(answer) == expected or schema == short
    assert (
        streamed_text(ask(real, response_format=format_of(PAIR), stream=True, aspd={"stream": "branches"})) == expected
    )


@pytest.mark.further
def test_responses(real: str) -> None:
    expected = text_of(ask_fields(real, PAIR))
    client = openai.OpenAI(base_url=real, api_key="none", max_retries=0)
    text: Any = {"format": {"type": "json_schema", "name": "it", "schema": PAIR}}
    more: Any = {"model": "proxied", "input": QUESTION["content"], "text": text, "temperature": 0}
    more |= {"extra_body": {"aspd": {"fields": "parallel"}}}
    assert client.responses.create(**more).output_text == expected
    pieces = [
        event.delta for event in client.responses.create(stream=True, **more) if "output_text.delta" in event.type
    ]
    assert "".join(pieces) == expected


def test_text_with_a_repetition_penalty(server: Running) -> None:
    """Check an upstream that takes the penalty by one name, and returns no tags: the model has none."""
    lm = server.engine.lm
    app = make_app(Proxy(UpstreamConfig(f"{server.url}/v1", "demo"), lm.tokenizer, lm.end_ids, "m", 400, forks=False))
    prompt, more = server.engine.encode([QUESTION]), {"repetition_penalty": 1.1, "max_tokens": 20}
    asked = {"model": "demo", "prompt": prompt, "temperature": 0}
    expected = httpx.post(f"{server.url}/v1/completions", json=asked | more, timeout=120).json()["choices"][0]["text"]
    with Served(app) as made:
        reply = ask(made.url, **more, model="m", aspd={"lists": "serial"})
    assert reply.status_code == 200 and text_of(reply) == expected, reply.text
    other = httpx.post(f"{server.url}/v1/completions", json=asked | more | {"repeat_penalty": 1.2}, timeout=120)
    assert other.status_code == 400 and "the field is repetition_penalty" in other.text


# Over a scripted upstream.


class Scripted:
    """An upstream that says the pieces of `say`, which gets the prompt and whether the request has a constraint."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.bodies, self.sent, self.open, self.delay = lm, list[dict[str, Any]](), 0, 0, 0.0
        self.say: Callable[[str, bool], list[str] | JSONResponse] = lambda prompt, constrained: ['"x"']
        self.reason: str | None = "stop"
        self.app = FastAPI()
        self.app.post("/v1/completions", response_model=None)(self.complete)

    async def complete(self, request: Request) -> JSONResponse | StreamingResponse:
        body = await request.json()
        self.bodies.append(body)
        pieces = self.say(self.lm.tokenizer.decode(body["prompt"]), "response_format" in body)
        if isinstance(pieces, JSONResponse):
            return pieces

        async def stream() -> AsyncIterator[str]:
            self.open += 1
            left = body["max_tokens"]
            try:
                for number, piece in enumerate(pieces):
                    left -= len(self.lm.codec.text.encode(piece))
                    cut, last = left < 0, number + 1 == len(pieces)
                    reason = "length" if cut else self.reason if last else None
                    choice = {"index": 0, "text": "" if cut else piece, "finish_reason": reason, "logprobs": None}
                    head = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
                    yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
                    self.sent += 1
                    await asyncio.sleep(self.delay)
                    if cut:
                        break
                yield "data: [DONE]\n\n"
            finally:
                self.open -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return load_model("demo")


@pytest.fixture
def upstream(demo: LanguageModel) -> Scripted:
    return Scripted(demo)


@pytest.fixture
def proxy(upstream: Scripted) -> Iterator[str]:
    with Served(upstream.app) as behind:
        config, lm = UpstreamConfig(behind.url, "m", retries=1), upstream.lm
        with Served(make_app(Proxy(config, lm.tokenizer, lm.end_ids, "proxied", 300))) as before:
            yield before.url


@pytest.mark.further
def test_values_end_in_tokens_that_go_on(proxy: str, upstream: Scripted) -> None:
    """Check tokens that end a value and contain a comma; the text after it is not decoded."""
    upstream.delay = 0.02
    run_on = [", "] * 400
    upstream.say = lambda prompt, _: (
        [' "A', 'na"', *run_on] if prompt.endswith('{"name":') else [' "Porto', '",', *run_on]
    )
    answer = ask_fields(proxy, PAIR)
    assert text_of(answer) == '{"name": "Ana", "city": "Porto"}' and len(upstream.bodies) == 2
    assert answer.json()["aspd"][0]["statistics"] == {"requests": 2}
    assert wait_for(lambda: not upstream.open, 10) and upstream.sent < 100, "the streams are closed"
    assert not any("response_format" in body or "skip_special_tokens" in body for body in upstream.bodies)
    assert {body["max_tokens"] for body in upstream.bodies} == {300 - sum(
        len(upstream.lm.codec.text.encode(lead)) for lead in ('{"name":', '{"city":')
    )}  # fmt: skip


def test_a_value_that_does_not_fit_is_requested_again(proxy: str, upstream: Scripted) -> None:
    """Check that a free request is closed once its value cannot fit, and repeated with the schema of the leaf."""
    colours = record(colour={"enum": ["red", "green"]}, size={"type": "integer", "maximum": 20})
    upstream.delay = 0.02
    free = {'"colour":': [' "', "r", "o"] + ["se"] * 400, '"size":': [" 2", "1", ","]}
    fitting = {'"colour":': [' "green"'], '"size":': ["1", "7"]}

    def say(prompt: str, constrained: bool) -> list[str]:
        return next(text for end, text in (fitting if constrained else free).items() if prompt.endswith(end))

    upstream.say = say
    answer = ask_fields(proxy, colours)
    assert text_of(answer) == '{"colour": "green", "size": 17}' and len(upstream.bodies) == 4
    formats = [body["response_format"] for body in upstream.bodies if "response_format" in body]
    assert sorted(map(json.dumps, formats)) == sorted(
        json.dumps({"type": "json_schema", "json_schema": {"name": "value", "schema": schema}})
        for schema in colours["properties"].values()
    )
    assert wait_for(lambda: not upstream.open, 10) and upstream.sent < 100
    assert streamed_text(ask_fields(proxy, colours, stream=True)) == text_of(answer)
    upstream.say = lambda prompt, _: say(prompt, False)  # negative control: an upstream that ignores the constraint
    refused = ask_fields(proxy, colours)
    assert refused.status_code == 502 and "expected a value of" in refused.json()["error"]["message"]


def test_a_value_that_ends_too_early_is_requested_again(proxy: str, upstream: Scripted) -> None:
    upstream.say = lambda prompt, constrained: ['"so"'] if constrained else [' "s']
    assert text_of(ask_fields(proxy, PAIR)) == '{"name": "so", "city": "so"}' and len(upstream.bodies) == 4
    upstream.reason = None
    refused = ask_fields(proxy, PAIR)
    assert refused.status_code == 502 and "without a finish_reason" in refused.json()["error"]["message"]


def test_later_fields_see_earlier_ones(proxy: str, upstream: Scripted) -> None:
    deep = record(a=record(b=WORD, c=WORD), d={**WORD, "x-after": ["a"]})
    upstream.say = lambda prompt, _: [f' "{prompt[-3]}"', "}"]
    assert text_of(ask_fields(proxy, deep)) == '{"a": {"b": "b", "c": "c"}, "d": "d"}'
    text, prompts = upstream.lm.tokenizer, [body["prompt"] for body in upstream.bodies]
    asked = [text.decode(prompt).rpartition("assistant")[2].partition("{")[2] for prompt in prompts]
    assert sorted(asked[:2]) == ['"a": {"b":', '"a": {"c":'] and len(asked) == 3
    assert asked[2] == '"a": {"b": "b"}}{"a": {"c": "c"}}{"d":'
    special = upstream.lm.codec.special
    assert special.parallel_start not in prompts[0]  # typed by the user: text
    assert set(upstream.bodies[0]["logit_bias"]) == {str(tag) for tag in special.ids}


TEMPLATE = "Report.\n\nPros: {pros}\n\nCons: {cons}\n\nVerdict: {verdict after pros, cons}\nEnd."
SAID = {"Pros:": [" good", "\n\nCo", "ns: no"], "Cons:": [" bad", "\n", "\nVerdict: x"], "Verdict:": [" so", " so"]}
REPORT = "Report.\n\nPros: good\n\nCons: bad\n\nVerdict: so so\nEnd."


def say_report(prompt: str, _: bool) -> list[str]:
    return next(pieces for end, pieces in SAID.items() if prompt.endswith(end))


def test_templates(proxy: str, upstream: Scripted) -> None:
    """Check that free text ends before the literal text after it, or with the answer."""
    upstream.say = say_report
    answer = ask(proxy, aspd={"template": TEMPLATE, "statistics": True})
    assert text_of(answer) == REPORT and answer.json()["choices"][0]["finish_reason"] == "stop"
    last = upstream.lm.tokenizer.decode(upstream.bodies[-1]["prompt"])
    assert last.endswith("Report.\n\nPros: good\n\nCons: bad\n\nVerdict:")
    assert streamed_text(ask(proxy, stream=True, aspd={"template": TEMPLATE})) == REPORT
    client = openai.OpenAI(base_url=proxy, api_key="none")
    asked: Any = {"model": "proxied", "messages": [QUESTION], "stream": True}
    aspd = {"template": TEMPLATE, "stream": "branches"}
    places = [c.choices[0].delta for c in client.chat.completions.create(**asked, extra_body={"aspd": aspd})][1:-1]
    kinds = [place.model_extra["aspd"]["event"] for place in places]
    assert [kind for kind in kinds if kind != "token"] == [
        "fork",
        "branch",
        "branch",
        "merge",
        "fork",
        "branch",
        "merge",
    ]
    assert sorted("".join(place.content for place in places)) == sorted(REPORT)


@pytest.mark.parametrize("stop", ["\n\nP", "oo", "d\n\nC", "Verdict: so", "so\nE", ["x", "ros"]])
def test_stop_strings(stop: Any, proxy: str, upstream: Scripted) -> None:
    upstream.say = say_report
    first = min(at for one in ([stop] if isinstance(stop, str) else stop) if (at := REPORT.find(one)) >= 0)
    answer = ask(proxy, stop=stop, aspd={"template": TEMPLATE, "statistics": True})
    assert text_of(answer) == REPORT[:first] and answer.json()["choices"][0]["finish_reason"] == "stop"
    assert plain_text(from_json(answer.json()["aspd"][0]["structure"])) == REPORT[:first]
    assert streamed_text(ask(proxy, stop=stop, stream=True, aspd={"template": TEMPLATE})) == REPORT[:first]


@pytest.mark.further
def test_budgets_end_answers(proxy: str, upstream: Scripted) -> None:
    """Check that the text is a beginning of the whole one; the budget counts leads and values, as in the engine."""
    upstream.say = lambda prompt, _: [' "', *"abcdefgh", '",']
    whole = '{"name": "abcdefgh", "city": "abcdefgh"}'
    seen = set()
    for most in range(1, 60):
        answer = ask_fields(proxy, PAIR, max_tokens=most)
        if answer.status_code == 400:
            assert "template: expected a budget of at least" in answer.json()["error"]["message"]
            continue
        choice = answer.json()["choices"][0]
        assert whole.startswith(choice["message"]["content"]) and answer.json()["usage"]["completion_tokens"] <= most
        assert choice["finish_reason"] == ("stop" if choice["message"]["content"] == whole else "length")
        assert streamed_text(ask_fields(proxy, PAIR, max_tokens=most, stream=True)).startswith('{"name": ')
        seen.add(choice["finish_reason"])
    assert seen == {"stop", "length"}


def test_faults_of_the_upstream_end_all_requests(proxy: str, upstream: Scripted) -> None:
    upstream.delay = 0.1
    broken = JSONResponse({"error": {"message": "out of memory"}}, 400)
    upstream.say = lambda prompt, _: [' "a'] + ["b"] * 4 if prompt.endswith('{"name":') else broken
    refused = ask_fields(proxy, PAIR)
    assert refused.status_code == 400 and "out of memory" in refused.json()["error"]["message"]
    assert wait_for(lambda: not upstream.open, 10)
    streamed = ask_fields(proxy, PAIR, stream=True).text
    assert "out of memory" in streamed and "[DONE]" not in streamed


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_requests(stream: bool, proxy: str, upstream: Scripted) -> None:
    upstream.delay = 0.2
    upstream.say = lambda prompt, _: [" on"] * 500
    template = "A: {a}\nB: {b}\nC: {c}"
    asked = {"model": "proxied", "messages": [QUESTION], "stream": stream, "aspd": {"template": template}}
    path = f"{proxy}/chat/completions"
    with suppress(httpx.ReadTimeout), httpx.stream("POST", path, json=asked, timeout=2) as response:
        next(line for line in response.iter_lines() if upstream.open == 3)
    assert len(upstream.bodies) == 3
    assert wait_for(lambda: upstream.open == 0, 10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"aspd": {"template": "no hole"}}, "template: expected at least one hole"),
        ({"aspd": {"template": "A:{a}{b}"}}, "hole 'b': expected literal text before it"),
        ({"aspd": {"template": "A:{a} B:{a}"}}, "hole 'a': expected different names"),
        (
            {"aspd": {"fields": "parallel"}},
            "fields: expected a schema, tools or (for exact) a template beside parallel",
        ),
        ({"response_format": format_of({"type": "objekt"})}, "json_schema: Invalid type: objekt"),
        (
            {"response_format": format_of(record(a=WORD, b={"type": "objekt"})), "aspd": {"fields": "parallel"}},
            "json_schema: #/properties/b: Invalid type: objekt",
        ),
        (
            {
                "response_format": format_of(record(a={**WORD, "x-after": ["b"]}, b={**WORD, "x-after": ["a"]})),
                "aspd": {"fields": "parallel"},
            },
            "depend on each other",
        ),
        (
            {
                "response_format": format_of(record(a=WORD, b={**WORD, "x-after": ["c"]})),
                "aspd": {"fields": "parallel"},
            },
            "unknown field 'c'; expected one of a, b",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs: not supported by the proxy"),
    ],
)
def test_what_cannot_be_filled_is_refused(more: dict[str, Any], message: str, proxy: str, upstream: Scripted) -> None:
    refused = ask(proxy, **more)
    assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    assert not upstream.bodies


def test_checkpoints_without_special_tokens(upstream: Scripted) -> None:
    """Check that fields and templates have branches, other answers are serial, and no missing token is sent."""
    lm = upstream.lm
    upstream.say = lambda prompt, _: [' "x"', ","] if prompt.endswith('":') else ["<|title|>", "A"]
    with Served(upstream.app) as behind:
        config = UpstreamConfig(behind.url, "m")
        with Served(make_app(Proxy(config, lm.tokenizer, lm.end_ids, "proxied", 300, forks=False))) as before:
            assert text_of(ask_fields(before.url, PAIR)) == '{"name": "x", "city": "x"}'
            assert text_of(ask(before.url)) == "<|title|>A"
    assert not any(body["logit_bias"] for body in upstream.bodies)


def test_checks_share_nothing() -> None:
    """Check a schema that exceeds llguidance's default limits: one check may fail alone."""
    schema = json.dumps({"type": "string", "maxLength": 5000, "pattern": r"^(?:\S+\s+){0,499}\S+$"})
    first, second = ValueCheck(schema), ValueCheck(schema)
    assert first.follow('"two words', False) and not first.follow('"two words\\', True)
    assert second.follow('"two words"', True)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        (WORD, ['"abc"', '"ä"', '""'], ["abc", '"abcdefghij"', "3", '"a\nb"']),
        ({"type": "integer", "maximum": 99}, ["7", "99"], ["100", "1.5", '"7"', "-"]),
        (
            {"type": "array", "items": {"type": "integer"}},
            ["[]", "[1, 2]", "[\n  1,\n  2\n]"],
            ['["a"]', "{}", "[1 2]"],
        ),
        ({}, ["null", '{"a": [1]}'], ["nul", "yes"]),
    ],
)
def test_values_are_checked_as_they_grow(schema: Any, fitting: list[str], others: list[str]) -> None:
    def fits(value: str) -> bool:
        check = ValueCheck(json.dumps(schema))
        beginnings = [check.follow(value[:size], False) for size in range(1, len(value))]
        return all(beginnings) and check.follow(value, True)

    assert all(map(fits, fitting)) and not any(map(fits, others))


@pytest.mark.parametrize("forks", [True, False])
def test_the_command_reads_whether_the_checkpoint_forks(
    forks: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    folder = write_checkpoint(tmp_path, config)
    tokenizer.save_pretrained(folder)
    if not forks:
        for file in folder.glob("tokenizer*.json"):
            file.write_text(file.read_text().replace("<|para|>", "<|other|>"))
    made: list[Any] = []
    monkeypatch.setattr("infer.proxy.routes.Proxy", lambda *arguments: made.append(arguments))
    monkeypatch.setattr("infer.proxy.routes.make_app", lambda _: None)
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    words = ["proxy", "--upstream", "http://127.0.0.1:9/v1", "--model", "m", "--tokenizer", str(folder)]
    assert main([*words, "--chat-template", str(tmp_path / "chat.jinja")]) == 0
    assert made[0][-2:] == (forks, "parallel")
