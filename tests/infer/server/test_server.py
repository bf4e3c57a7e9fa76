"""The server, over real connections: the official client, streams, limits, faults, and the page."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from random import Random
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import openai
import pytest
from pydantic import ValidationError

import aspd
import infer.server.app
from aspd_jax.progress import programs_compiled
from infer import Engine, SamplingParams
from infer.answers.logprobs import token_logprobs
from infer.scheduling.runner import Runner
from infer.server.decisions import DecisionsRequest
from infer.server.messages import ChatRequest, CompletionRequest
from infer.server.refusals import describe
from infer.server.responses import ResponsesRequest
from tests.conftest import ROOT
from tests.helpers.browser import chromium
from tests.helpers.engine_state import engine_state
from tests.helpers.replay import replay
from tests.helpers.serving import QUESTIONS, SERVE, Running, ask, serving, wait_for

SAID = {"mode": "serial", "content": "x", "statistics": True}
LONG = {"role": "user", "content": "word " * 3000}
SERIAL = {"aspd": {"mode": "serial"}}


@pytest.fixture
def slow_motion(engine: Engine, monkeypatch: Any) -> None:
    """Delay steps to 10 ms at least, so that an answer of `endless` takes a while on any machine."""
    step = engine.step

    def one_step(max_steps: int) -> bool:
        worked = step(1)
        time.sleep(0.01 if worked else 0)
        return worked

    monkeypatch.setattr(engine, "step", one_step)


def endless(seed: int = 7, **more: Any) -> dict[str, Any]:
    """Return a request for an answer of at least 24 tokens."""
    return ask(seed=seed, temperature=2.0, **more, **SERIAL)


def test_the_official_client(server: Running) -> None:
    client, expected = server.client(), QUESTIONS[0].answer
    whole = client.chat.completions.create(**ask(), extra_body={"aspd": {"statistics": True}})
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "stop"
    stats = whole.model_extra["aspd"][0]["statistics"]  # type: ignore[index]
    assert stats["blocks"] == 1 and whole.usage is not None and whole.usage.completion_tokens == stats["content_tokens"]
    streamed, used = "", None
    for chunk in client.chat.completions.create(**ask(), stream=True, stream_options={"include_usage": True}):
        streamed += chunk.choices[0].delta.content or "" if chunk.choices else ""
        used = chunk.usage or used
    assert streamed == expected and used is not None and used.completion_tokens == whole.usage.completion_tokens
    serial = client.chat.completions.create(**ask(), extra_body=SERIAL)
    assert serial.usage is not None and serial.usage.completion_tokens <= whole.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["demo"] and client.models.retrieve("demo").id == "demo"


def test_branches_in_the_stream(server: Running, slow_motion: None) -> None:
    """Check that branches are interleaved and complete, and join to the same text."""
    blocks: dict[int, list[str]] = {}
    pieces: list[Any] = []
    order = []
    for chunk in server.client().chat.completions.create(
        **ask(), stream=True, extra_body={"aspd": {"stream": "branches"}}
    ):
        place = (chunk.choices[0].delta.model_extra or {}).get("aspd")
        if place is None:
            continue
        if place["event"] == "fork":
            blocks[place["block"]] = [""] * len(place["titles"])
            pieces.append(place["block"])
        elif place["event"] == "token" and place["block"]:
            blocks[place["block"]][place["branch"] - 1] += chunk.choices[0].delta.content or ""
            order.append(place["branch"])
        elif place["event"] == "token":
            pieces.append(chunk.choices[0].delta.content)
    text = "".join("".join(blocks[piece]) if isinstance(piece, int) else piece for piece in pieces)
    assert text == QUESTIONS[0].answer and order != sorted(order)


def test_what_is_asked_is_what_is_sampled(server: Running) -> None:
    """Compare seeds, several answers, stop strings, limits and log probabilities with the engine itself."""
    client = server.client()
    short = {"max_tokens": 24, "extra_body": SERIAL}
    sampled = ask(temperature=2.0, seed=4, n=2, **short)
    two = client.chat.completions.create(**sampled)
    texts = [choice.message.content for choice in two.choices]
    assert len(set(texts)) == 2 and all(choice.finish_reason == "length" for choice in two.choices)
    assert [c.message.content for c in client.chat.completions.create(**sampled).choices] == texts
    params = [SamplingParams(temperature=2.0, seed=seed, max_new_tokens=24) for seed in (4, 5)]
    alone = Engine(server.engine.lm, max_length=1024, max_batch=2)
    results = alone.generate([ask()["messages"]] * 2, params, "serial")
    assert [result.text for result in results] == texts
    stopped = client.chat.completions.create(**ask(stop=[" what"], **short))
    assert stopped.choices[0].message.content == "Here is" and stopped.choices[0].finish_reason == "stop"
    likely = client.chat.completions.create(
        **ask(logprobs=True, top_logprobs=2, max_completion_tokens=8, extra_body=SERIAL)
    )
    content = likely.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and "".join(token.token for token in content) == likely.choices[0].message.content
    assert b"".join(bytes(token.bytes or ()) for token in content).decode() == likely.choices[0].message.content
    assert all(token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob for token in content)
    raw = client.completions.create(
        model="demo",
        prompt="Price each line.\n3 pens at $20",
        max_tokens=6,
        temperature=0,
        logprobs=1,
        extra_body=SERIAL,
    )
    assert raw.choices[0].logprobs is not None and "".join(raw.choices[0].logprobs.tokens or []) == raw.choices[0].text


def test_serial_mode_on_a_given_text(server: Running) -> None:
    """Check that tags in it are text, beside requests without a script."""
    client, text = server.client(), "Six <|title|>pens\n* at $20 are </s> 120."
    free, told, whole = (
        client.chat.completions.create(**ask(max_tokens=limit, extra_body={"aspd": aspd}))
        for limit, aspd in ((9, {"mode": "serial"}), (9, SAID | {"content": text}), (99, SAID | {"content": text}))
    )
    assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "stop"
    cut = told.choices[0].message.content or ""
    assert text.startswith(cut) and 0 < len(cut) < len(text) and told.choices[0].finish_reason == "length"
    assert not text.startswith(free.choices[0].message.content or "")
    (cost,) = whole.model_extra["aspd"]  # type: ignore[index]
    assert cost["statistics"]["steps"] == cost["statistics"]["content_tokens"] == whole.usage.completion_tokens  # type: ignore[union-attr]


@pytest.mark.further
def test_log_probabilities_are_those_of_the_engine(engine: Engine) -> None:
    """Compare an answer with a block with the stepwise engine."""
    (result,) = engine.generate([ask()["messages"]], SamplingParams(max_new_tokens=400))
    found = token_logprobs(engine.lm, engine.config, result, 1)
    assert engine.lm.codec.text.decode([of.token for of in found]) == result.text
    logits = replay(engine, result.prompt_token_ids, result.token_ids).logits
    of_step = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    ids = iter(enumerate(result.token_ids))
    for of in found[1:]:  # the first one follows from the prompt
        place = next(
            at for at, token in ids if token == of.token and at > 0 and abs(of_step[at - 1][token] - of.logprob) < 1e-3
        )
        assert place


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("chat/completions", ask() | {"model": "x"}, 404, "unknown model 'x'; available: 'demo'"),
        ("chat/completions", ask(temperature=3), 400, "temperature: expected at most 2, got 3"),
        ("chat/completions", ask(presence_penalty=3), 400, "presence_penalty"),
        ("chat/completions", ask(tools=[{}]), 400, "tools[0].type: a value is required"),
        ("chat/completions", ask(n=99), 400, "n: expected at most 8 answers"),
        ("chat/completions", ask(max_tokens=0), 400, "max_tokens"),
        ("chat/completions", ask(top_logprobs=2), 400, "top_logprobs: expected none without logprobs: true"),
        ("chat/completions", ask(stream_options={}), 400, "stream_options: expected none without stream: true"),
        ("chat/completions", ask(stop=[""]), 400, "stop"),
        ("chat/completions", ask(aspd={"mode": "fast"}), 400, "aspd.mode: expected 'adaptive' or 'serial', got 'fast'"),
        ("chat/completions", ask(aspd={"content": "x"}), 400, "aspd: content: expected mode: serial"),
        ("chat/completions", ask(aspd=SAID, stop="a"), 400, "content: expected mode: serial, no stop"),
        ("chat/completions", ask(aspd=SAID | {"content": "word " * 600}), 400, "aspd.content: expected at most"),
        ("chat/completions", ask() | {"messages": [LONG]}, 400, "prompt: expected at most"),
        ("chat/completions", ask() | {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id"),
        ("completions", {"model": "demo", "prompt": "a", "tools": [{}]}, 400, "tools: tool calls are for chat"),
        ("completions", {"model": "demo", "prompt": [1, 99999]}, 400, "token ids: expected ids from 0"),
        ("completions", {"model": "demo", "prompt": ""}, 400, "prompt: expected at least one token"),
        ("completions", {"model": "demo"}, 400, "prompt: a value is required"),
        ("nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_mistakes_get_clear_errors(server: Running, path: str, body: dict[str, Any], status: int, said: str) -> None:
    reply = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == status and said in reply.json()["error"]["message"]
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_bodies_are_bounded(server: Running) -> None:
    url = f"{server.url}/v1/chat/completions"
    assert httpx.post(url, content=b"{" * (1 << 21)).status_code == 413
    assert httpx.post(url, content=iter([b"{" * (1 << 20)] * 2)).status_code == 413
    broken = httpx.post(url, content=b"{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 400 and "JSON" in broken.json()["error"]["message"]
    assert httpx.get(url).status_code == 405


@pytest.mark.parametrize(
    ("kind", "fields", "where"),
    [
        (ChatRequest, {"messages": [0] * 999}, "messages[0]"),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * 999}]}, "messages[0].content[0]"),
        (ChatRequest, ask(prediction={"type": "content", "content": [0] * 999}), "prediction.content[0]"),
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "aspd": {"token_ids": [-1] * 999}}]},
            "messages[0].aspd.token_ids[0]",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "tool_calls": [0] * 999}]},
            "messages[0].tool_calls[0]",
        ),
        (CompletionRequest, {"prompt": [-1] * 999}, "prompt[0]"),
        (CompletionRequest, {"prompt": [{}] * 999}, "prompt[0]"),
        (CompletionRequest, {"prompt": [[-1] * 999]}, "prompt[0][0]"),
        (
            CompletionRequest,
            {"prompt": "", "structured_outputs": {"choice": [0] * 999}},
            "structured_outputs.choice[0]",
        ),
        (ResponsesRequest, {"input": [0] * 999}, "input[0]"),
        (ResponsesRequest, {"input": "", "include": [0] * 999}, "include[0]"),
        (
            ResponsesRequest,
            {"input": [{"type": "function_call_output", "call_id": "x", "output": [0] * 999}]},
            "input[0].output[0]",
        ),
        (
            DecisionsRequest,
            {"input": "", "questions": [{"type": "predicate", "instructions": [0] * 999}]},
            "questions[0].instructions[0]",
        ),
    ],
)
def test_a_malformed_list_has_few_errors(kind: Any, fields: dict[str, Any], where: str) -> None:
    """Check that a body of the largest size does not hold up the event loop for the errors of all its entries."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "demo"} | fields)
    errors = [error | {"loc": ("body", *error["loc"])} for error in refused.value.errors()]
    assert len(errors) < 9 and describe(errors, fields)[0] == where


def test_a_full_queue_says_when_to_come_back(engine: Engine, slow_motion: None) -> None:
    with serving(engine, max_waiting=0) as server, httpx.Client(timeout=60) as client:
        url = f"{server.url}/v1/chat/completions"
        streams = [client.stream("POST", url, json=endless(seed, stream=True)) for seed in (7, 8)]
        replies = [stream.__enter__() for stream in streams]
        assert [reply.status_code for reply in replies] == [200, 200]
        refused = httpx.post(url, json=ask())
        for stream in streams:
            stream.__exit__(None, None, None)
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"


def test_a_client_that_goes_frees_its_row(server: Running, slow_motion: None) -> None:
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(timeout=60) as client:
        with client.stream("POST", url, json=endless(stream=True)) as reply:
            assert reply.headers["X-Accel-Buffering"] == "no"
            next(reply.iter_lines())
        assert wait_for(lambda: server.engine_thread.occupancy == (0, 0), 120)
    cancelled = 'aspd_answers_total{finish="cancelled",mode="serial"}'
    before = re.search(f"{re.escape(cancelled)} (.*)", httpx.get(f"{server.url}/metrics").text)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url, json=endless(n=8), timeout=0.1)
    assert wait_for(lambda: server.engine_thread.occupancy == (0, 0), 120)
    after = re.search(f"{re.escape(cancelled)} (.*)", httpx.get(f"{server.url}/metrics").text)
    assert before and after and float(after[1]) == float(before[1]) + 8


def test_time_runs_out(engine: Engine, slow_motion: None) -> None:
    with serving(engine, timeout=0.05, chunk=0.01) as server:
        url = f"{server.url}/v1/chat/completions"
        late = httpx.post(url, json=endless(), timeout=60)
        assert late.status_code == 504 and late.json()["error"]["type"] == "timeout"
        assert late.headers["x-should-retry"] == "false", "the official client would ask again"
        with httpx.stream("POST", url, json=endless(stream=True), timeout=60) as reply:
            assert json.loads([line for line in reply.iter_lines() if line][-1][6:])["error"]["type"] == "timeout"


def test_bodies_have_to_arrive(engine: Engine) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with serving(engine, body_timeout=0.2) as server, socket.create_connection(server.address, 30) as slow:
        slow.sendall(head)
        assert b" 408 " in slow.recv(1 << 16).splitlines()[0]


def test_keys(engine: Engine) -> None:
    with serving(engine, keys=("secret", "other")) as server:
        for key, status in (("", 401), ("secre", 401), ("secret", 200), ("other", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 200 and httpx.get(server.url).status_code == 200
    with serving(engine, keys=("schlüssel",)) as server:
        given = {"Authorization": "Bearer schlüssel".encode()}
        assert httpx.get(f"{server.url}/v1/models", headers=given).status_code == 200


def test_probes_before_the_start_are_not_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a refused request is logged, and that health checks during warm-up are not."""
    caplog.set_level("INFO", logger="aspd.server")
    with serving(engine) as server:
        server.engine_thread.ready.clear()
        try:
            for path in ("health", "health", "live"):
                httpx.get(f"{server.url}/{path}")
            assert httpx.post(f"{server.url}/v1/chat/completions", json=ask()).status_code == 503
        finally:
            server.engine_thread.ready.set()
    logged = [message for message in caplog.messages if "request id" in message]
    assert len(logged) == 1 and "/v1/chat/completions" in logged[0]


def test_an_adapter_that_was_replaced_is_an_error(server: Running, engine: Engine, monkeypatch: Any) -> None:
    """Check a request whose adapter goes between its check and its start, whole and as a stream."""
    for stream in (False, True):
        loaded = iter([False])
        monkeypatch.setattr(engine.adapters, "loaded", lambda number, loaded=loaded: next(loaded, True))
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=ask(stream=stream), timeout=60)
        assert reply.status_code == (200 if stream else 400) and "adapter was removed or replaced" in reply.text


def test_a_poisoned_request_takes_no_other_with_it(engine: Engine, monkeypatch: Any) -> None:
    """Check that a request that fails alone, too, does not change the stream of another."""
    step, end, failures, ends = engine.step, Runner.end, [], []

    def together(max_steps: int) -> bool:
        state = engine_state(engine)
        if not failures and len([handle for handle in (*state.rows, *state.waiting) if handle]) < 2:
            time.sleep(0.001)  # neither ends before the other has come
            return True
        return step(1)

    def breaks(runner: Runner, started: Any) -> Any:
        running = [handle for handle in engine_state(engine).rows if handle]
        if any(handle.request.seed == 666 for handle in running):
            ends.append(len(running))
            if len(ends) > 3:
                failures.append(len(running))
                ends.clear()
                raise RuntimeError("poison")
        return end(runner, started)

    with serving(engine) as server:
        client = server.client()
        alone = client.chat.completions.create(**ask(seed=5, temperature=1.0, max_tokens=40, extra_body=SERIAL))
        monkeypatch.setattr(engine, "step", together)
        monkeypatch.setattr(Runner, "end", breaks)
        texts: dict[int, str] = {}

        def stream(seed: int) -> None:
            texts[seed] = ""
            try:
                for chunk in server.client().chat.completions.create(
                    **ask(seed=seed, temperature=1.0, max_tokens=40, stream=True, extra_body=SERIAL)
                ):
                    texts[seed] += chunk.choices[0].delta.content or ""
            except openai.APIError as error:
                texts[seed] = f"error: {error.message}"

        threads = [threading.Thread(target=stream, args=(seed,)) for seed in (5, 666)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        monkeypatch.undo()
        assert failures == [2, 1] and texts[666] == "error: the server failed on this request"
        assert texts[5] == alone.choices[0].message.content
        again = client.chat.completions.create(**ask(seed=5, temperature=1.0, max_tokens=40, extra_body=SERIAL))
        assert again.choices[0].message.content == texts[5]


def test_errors_outside_of_steps_fail_one_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a request that cannot be submitted, and one whose events cannot be sent."""
    submit = engine.submit_checked

    def refuses(request: Any) -> Any:
        if request.seed == 666:
            raise RuntimeError("poison")
        return submit(request)

    monkeypatch.setattr(engine, "submit_checked", refuses)
    deltas = infer.server.app.text_deltas
    with serving(engine, timeout=60.0) as server:
        client = server.client()
        short: dict[str, Any] = {"max_tokens": 4, "extra_body": SERIAL}
        with pytest.raises(openai.InternalServerError, match="the server failed on this request"):
            client.chat.completions.create(**ask(seed=666, **short))
        assert client.chat.completions.create(**ask(seed=5, **short)).choices[0].message.content
        monkeypatch.setattr(infer.server.app, "text_deltas", lambda _: {}["poison"])
        begun = time.monotonic()
        with pytest.raises(openai.APIError, match="the server failed on this request"):
            list(client.chat.completions.create(**ask(seed=5, stream=True, **short)))
        assert time.monotonic() - begun < 30, "it does not wait for the limit of time"
        monkeypatch.setattr(infer.server.app, "text_deltas", deltas)
        assert list(client.chat.completions.create(**ask(seed=5, stream=True, **short)))


@pytest.mark.further
def test_many_requests_leave_nothing_behind(server: Running) -> None:
    """Check complete answers, streams, clients that leave, and malformed requests, all mixed."""
    random = Random(0)
    outcomes: list[str] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        kind = random.choice(["whole", "stream", "leave", "nonsense"])
        more: dict[str, Any] = {"max_tokens": random.randint(1, 30), "seed": number, "temperature": 1.0} | SERIAL
        url = f"{server.url}/v1/chat/completions"
        if kind == "nonsense":
            body = random.choice([b"", b"[]", b"{", b'{"model": "demo"}', b"\xff\xfe", b"null"])
            reply = await client.post(url, content=body, headers={"Content-Type": "application/json"})
            assert 400 <= reply.status_code < 500
        elif kind == "whole":
            reply = await client.post(url, json=ask(number % 4, **more))
            assert reply.status_code in (200, 429)
        else:
            async with client.stream("POST", url, json=ask(number % 4, stream=True, **more)) as reply:
                async for _ in reply.aiter_lines():
                    if kind == "leave":
                        break
        outcomes.append(kind)

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=24)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(160)))

    asyncio.run(all_of_them())
    assert len(outcomes) == 160 and len(set(outcomes)) == 4
    assert wait_for(lambda: server.engine_thread.occupancy == (0, 0), 20)
    assert wait_for(lambda: not server.engine_thread._live, 5)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "aspd_running 0.0" in metrics and "aspd_waiting 0.0" in metrics
    counted = re.findall(r'aspd_requests_total\{path="/v1/chat/completions",status="200"\} (\d+)', metrics)
    assert counted and int(counted[0]) > 40


@pytest.mark.further
def test_it_finishes_what_is_under_way_when_told_to_stop() -> None:
    command = [*SERVE, "--batch", "1", "--max-length", "1024"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert url is not None
        assert wait_for(lambda: httpx.get(f"{url[0]}/health").status_code == 200)
        with httpx.stream("POST", f"{url[0]}/v1/chat/completions", json=ask(stream=True), timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest)
        assert text == QUESTIONS[0].answer and rest[-1]["choices"][0]["finish_reason"] == "stop"
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "expected a loopback address or API keys"),
        (["--port", "99999"], "port: expected 0 to 65535"),
        (["--timeout", "0"], "timeout: expected more than 0"),
        (["--key-file", "nowhere"], "--key-file"),
        (["--model", "nowhere"], "nowhere: expected a Hugging Face folder"),
    ],
)
def test_mistakes_on_the_command_line(capsys: Any, monkeypatch: Any, arguments: list[str], said: str) -> None:
    monkeypatch.delenv("ASPD_API_KEY", raising=False)
    assert aspd.main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert (
            aspd.main(["serve", "--model", "demo", "--port", str(taken.getsockname()[1]), "--max-length", "256"]) == 2
        )
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_the_page_in_a_browser(server: Running) -> None:
    with chromium() as browser:
        page = browser.new_page()
        problems: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        before = programs_compiled()

        def ask_first() -> str:
            page.fill("#question", QUESTIONS[0].question)
            page.keyboard.press("Enter")
            page.wait_for_selector(".ratio:has-text('x')", timeout=120_000)
            return page.inner_text(".ratio")

        assert ask_first().endswith("ask again") == (programs_compiled() > before)
        page.click("#anew")
        speed = ask_first()
        count = page.locator(".branch.ended").count()
        shown = page.inner_text(".run:nth-child(2) .answer")
        lanes = page.locator(".run:first-child .lanes rect").count()
        titles = [title.inner_text() for title in page.locator(".branch .title").all()]
        text = "".join(part.text_content() or "" for part in page.locator(".run:first-child .answer .text").all())
        if path := os.environ.get("ASPD_SCREENSHOT"):
            page.screenshot(path=path, full_page=True)
        assert count >= 3 and len(titles) == count and lanes == count + 2
        assert page.get_attribute(".answer >> nth=0", "aria-busy") == "false"
        assert page.inner_text("#spoken").startswith("answered")

        page.uncheck("#compare")
        page.fill("#question", QUESTIONS[1].question)  # a second turn, on the cache of the first
        page.click("#ask")
        page.wait_for_selector("#spoken:text-is('answered. ')", state="attached", timeout=120_000)
        assert page.evaluate("said.length") == 4 and page.locator(".answer").count() == 3
        assert page.evaluate("said[1].content") == QUESTIONS[0].answer
        page.set_viewport_size({"width": 360, "height": 640})  # a phone: nothing to scroll sideways
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.click("#anew")
        assert page.locator(".turn").count() == 0

        rendered = page.evaluate(
            """text => { const box = document.createElement("div"); markdown(text, box); return box.innerHTML; }""",
            "# Head\n<img src=x onerror=alert(1)> **bold** *it* `a<b`\n\n3. one\n4. [x](javascript:alert(1))\n- dash\n"
            "```\n<script>**no**\n```",
        )
        assert rendered == (
            "<h3>Head</h3>"
            "<p>&lt;img src=x onerror=alert(1)&gt; <strong>bold</strong> <em>it</em> <code>a&lt;b</code></p>"
            '<ol start="3"><li>one</li><li>[x](javascript:alert(1))</li></ol><ul><li>dash</li></ul>'
            "<pre><code>&lt;script&gt;**no**</code></pre>"
        )
        page.fill("#question", "word " * 3000)
        page.click("#ask")
        page.wait_for_selector(".answer .error", timeout=60_000)
        assert "prompt: expected at most" in page.inner_text(".error")
        assert page.input_value("#question").startswith("word word")  # what failed can be changed and asked again
    bare = "".join(QUESTIONS[0].answer.split())
    assert "".join(text.split()) == bare and "".join(shown.split()) == bare
    found = re.fullmatch(r"\d+\.\d\dx: (\d+) steps, serial (\d+)", speed)
    assert found is not None and int(found[1]) < int(found[2])
    assert all(url.startswith(server.url) for url in asked)
    assert not [problem for problem in problems if "400" not in problem]
