"""The proxy over a scripted upstream that knows nothing of branches."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import aspd
from aspd_jax import LanguageModel, load_model
from aspd_jax.structure import Branch, Parallel, Serial, from_json, plain_text
from aspd_jax.tokens import Codec
from infer.evaluation.peers import Server
from infer.proxy.answering import Proxied, read_leads
from infer.proxy.routes import Proxy, make_app
from infer.proxy.upstream import UpstreamConfig
from infer.request import MAX_TITLE_TOKENS
from tests.helpers.serving import wait_for

B = "<|title|>2/2 B<|/title|>"
SCRIPT = {
    "": "So:\n<|title|>never shown",
    "<|title|>": f"1/2 A<|/title|>{B}<|para|><|branch|>never shown",
    "1/2 A: ": "alpha <b>\n<|/branch|>more",
    "2/2 B: ": "beta is a longer one\n<|/branch|>",
    "<|/para|>": "Bye.END",
}
STRUCTURE = [Serial("So:\n"), Parallel([Branch("1/2 A", "alpha <b>\n"), Branch("2/2 B", "beta is a longer one\n")])]
STRUCTURE.append(Serial("Bye."))
TEXT = "So:\nalpha <b>\nbeta is a longer one\nBye."


class Upstream:
    """Says what a script has for the end of the prompt, a few characters at a time, up to a stop string."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.script, self.bodies = lm, dict(SCRIPT), []  # type: ignore[var-annotated]
        self.open, self.delay, self.cut = 0, 0.0, ""  # cut: end of a prompt; its stream ends without a finish reason
        self.before: Callable[[int], Response | None] = lambda _: None
        self.whole = False  # whether a text comes in one piece, with its finish reason
        self.app = FastAPI()
        self.app.post("/v1/completions", response_model=None)(self.complete)

    def says(self, prompt: str) -> str:
        return next((text for end, text in self.script.items() if end and prompt.endswith(end)), self.script[""])

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if (refusal := self.before(len(self.bodies))) is not None:
            return refusal
        prompt = self.lm.tokenizer.decode(body["prompt"])
        said = self.says(prompt).replace("END", self.lm.tokenizer.eos_token)
        cuts = [at for stop in body["stop"] if (at := said.find(stop)) >= 0]
        said, reason = (said[: min(cuts)], "stop") if cuts else (said, "stop")
        ids = self.lm.tokenizer.encode(said, add_special_tokens=False)
        if len(ids) > body["max_tokens"]:
            said, reason = self.lm.tokenizer.decode(ids[: body["max_tokens"]]), "length"

        async def stream() -> AsyncIterator[str]:
            self.open += 1
            try:
                for at in () if self.whole else range(0, len(said), 3):
                    yield self._chunk(said[at : at + 3], None)
                    await asyncio.sleep(self.delay)
                if not (self.cut and prompt.endswith(self.cut)):
                    yield self._chunk(said if self.whole else "", reason)
                yield "data: [DONE]\n\n"
            finally:
                self.open -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    @staticmethod
    def _chunk(text: str, reason: str | None) -> str:
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        head = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
        return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


class Served:
    def __init__(self, app: FastAPI) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[self._socket]), daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        assert wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return load_model("demo")


@pytest.fixture
def upstream(demo: LanguageModel) -> Upstream:
    return Upstream(demo)


@pytest.fixture
def proxy(demo: LanguageModel, upstream: Upstream) -> Iterator[str]:
    with Served(upstream.app) as behind:
        config = UpstreamConfig(behind.url, "m", retries=2)
        with Served(make_app(Proxy(config, demo.tokenizer, demo.end_ids, "proxied", 512))) as before:
            yield before.url


def ask(url: str, **more: Any) -> httpx.Response:
    message = {"role": "user", "content": "What is <|para|> good for?"}
    return httpx.post(f"{url}/chat/completions", json={"model": "proxied", "messages": [message]} | more, timeout=60)


STATISTICS = {"aspd": {"statistics": True}}


def test_an_answer_is_put_together(proxy: str, upstream: Upstream, demo: LanguageModel) -> None:
    answer = ask(proxy, temperature=0.5, top_p=0.9, top_k=20, repetition_penalty=1.25, seed=7, **STATISTICS).json()
    assert answer["choices"][0]["message"]["content"] == TEXT and answer["choices"][0]["finish_reason"] == "stop"
    assert from_json(answer["aspd"][0]["structure"]) == tuple(STRUCTURE)
    assert answer["aspd"][0]["statistics"] == {"requests": 5} and len(upstream.bodies) == 5
    assert answer["usage"]["completion_tokens"] == len(demo.codec.text.encode(TEXT))
    first, announced, one, two, last = sorted(upstream.bodies, key=lambda body: body["seed"])
    special = demo.codec.special
    assert special.parallel_start not in first["prompt"]  # typed by the user: text
    linear = demo.codec.linearise(STRUCTURE[:2]).tokens.tolist()
    assert last["prompt"] == [*first["prompt"], *linear]
    shared = linear[: linear.index(special.parallel_start) + 1]
    for body, title in ((one, "1/2 A"), (two, "2/2 B")):
        head = [special.branch_start, *demo.codec.text.encode(title), *demo.codec.form.separator]
        assert body["prompt"] == [*first["prompt"], *shared, *head] and body["stop"] == [
            "<|/branch|>",
            demo.tokenizer.eos_token,
        ]
    for body in upstream.bodies:
        assert (body["temperature"], body["top_p"], body["top_k"], body["model"]) == (0.5, 0.9, 20, "m")
        assert body["skip_special_tokens"] is False
    assert sorted(body["seed"] for body in upstream.bodies) == [7, 8, 9, 10, 11]
    assert set(first["logit_bias"]) == {str(tag) for tag in special.ids if tag != special.title_start}
    assert announced["prompt"] == [*first["prompt"], *linear[: linear.index(special.title_start) + 1]]
    assert first["repetition_penalty"] == 1.25 and "repetition_penalty" not in announced


LEADS = {
    "": "So:<|title|>never shown",
    "<|title|>": "2<|/title|><|title|>\n\n1. A:<|/title|><|title|>\n\n2. B:<|/title|><|para|><|branch|>never shown",
    "1. A:": " alpha <b><|/branch|>more",
    "2. B:": " beta is a longer one<|/branch|>",
    "<|/para|>": "\n\nBye.END",
}
PARTS = [Branch("\n\n1. A:", "\n\n1. A: alpha <b>"), Branch("\n\n2. B:", "\n\n2. B: beta is a longer one")]
IN_LEADS = (Serial("So:"), Parallel(PARTS), Serial("\n\nBye."))


def test_leads_are_part_of_the_answer(demo: LanguageModel, upstream: Upstream) -> None:
    """Check that every prompt of a branch has the number, and every branch begins with its lead."""
    upstream.script = dict(LEADS)
    codec = Codec(demo.tokenizer, titles="leads")
    more = {"temperature": 0.0, "seed": 1}
    with Served(upstream.app) as behind:
        app = make_app(
            Proxy(UpstreamConfig(behind.url, "m", retries=2), demo.tokenizer, demo.end_ids, "proxied", 512, "leads")
        )
        with Served(app) as before:
            answer = ask(before.url, **more, **STATISTICS).json()
            asked = sorted(upstream.bodies, key=lambda body: body["seed"])
            client = openai.OpenAI(base_url=before.url, api_key="none")
            pieces = client.chat.completions.create(
                model="proxied", messages=[{"role": "user", "content": "?"}], stream=True,
                extra_body={"aspd": {"stream": "branches"}},
            )  # fmt: skip
            streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
            cut = [ask(before.url, max_tokens=n).json()["choices"][0]["message"]["content"] for n in range(1, 40, 6)]
    assert from_json(answer["aspd"][0]["structure"]) == IN_LEADS
    assert answer["choices"][0]["message"]["content"] == plain_text(IN_LEADS)
    assert sorted(streamed) == sorted(plain_text(IN_LEADS))
    assert all(plain_text(IN_LEADS).startswith(text) for text in cut) and cut == sorted(cut, key=len)
    linear, special = codec.linearise(IN_LEADS[:2]).tokens.tolist(), codec.special
    assert asked[-1]["prompt"] == [*asked[0]["prompt"], *linear]
    shared = linear[: linear.index(special.parallel_start) + 1]
    for body, part in zip(asked[2:4], PARTS, strict=True):
        head = [special.branch_start, *codec.text.encode(part.title)]
        assert body["prompt"] == [*asked[0]["prompt"], *shared, *head]


@pytest.mark.parametrize(
    ("written", "leads"),
    [
        ("3<|/title|><|title|>a<|/title|><|title|>b<|/title|><|title|>a<|/title|>", ["a", "b"]),
        ("2<|/title|><|title|>a<|/title|><|title|>\nb<|/title|><|title|>c<|/title|>", ["a", "\nb"]),
        ("9<|/title|><|title|>1. Car<|/title|><|title|>2. Cat<|/title|><|title|>3. Cat.", ["1. Car", "2. Cat"]),
        ("3<|/title|><|title|>Car<|/title|><|title|>Cat<|/title|><|title|>Carts<|/title|>", ["Car", "Cat", "Carts"]),
        ("2<|/title|>x<|title|>a<|/title|>", []),
        ("two<|/title|><|title|>a<|/title|><|title|>b<|/title|>", []),
        ("99<|/title|><|title|>a<|/title|><|title|>b<|/title|>", []),
    ],
)
def test_lists_of_leads_end(written: str, leads: list[str]) -> None:
    number, found, more = read_leads(written, 16)
    assert found == leads and not more and written.startswith(number)
    if number in ("2", "3") and leads:
        whole = written.index(leads[-1] + "<|/title|>") + len(leads[-1])
        assert all(read_leads(written[:size], 16)[2] for size in range(whole)), "more may follow"
    for size in range(len(written)):
        assert leads[: len(read_leads(written[:size], 16)[1])] == read_leads(written[:size], 16)[1]


LISTS = {
    "a plan is complete": ("1/2 A<|/title|><|title|>2/2 B<|/title|><|title|>3/2 C<|/title|>", 2),
    "a title says what another said": ("1/9 A<|/title|><|title|>2/9 B<|/title|><|title|>3/9 A<|/title|>", 2),
    "a title says nothing": ("A<|/title|><|title|>B<|/title|><|title|> <|/title|><|title|>C<|/title|>", 2),
    "something else follows": ("A<|/title|><|title|>B<|/title|>\n<|title|>C<|/title|><|para|>", 2),
    "no plan": ("A<|/title|><|title|>B<|/title|><|title|>C<|/title|><|para|>", 3),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_titles_end(name: str, proxy: str, upstream: Upstream) -> None:
    announced, count = LISTS[name]
    upstream.script |= {"<|title|>": announced, ": ": "text\n<|/branch|>"}
    structure = ask(proxy, **STATISTICS).json()["aspd"][0]["structure"]
    assert len(structure[1]["branches"]) == count


def test_titles_are_as_long_as_those_of_the_engine(proxy: str, upstream: Upstream, demo: LanguageModel) -> None:
    """Check that the limit counts neither tags nor their beginnings; a longer title ends its list."""
    for tokens, count in ((MAX_TITLE_TOKENS, 3), (MAX_TITLE_TOKENS + 1, 2)):
        title = " x" * tokens
        assert len(Codec(demo.tokenizer).text.encode(title)) == tokens
        announced = f"A<|/title|><|title|>B<|/title|><|title|>{title}<|/title|><|para|>"
        upstream.script |= {"<|title|>": announced, ": ": "text\n<|/branch|>"}
        structure = ask(proxy, **STATISTICS).json()["aspd"][0]["structure"]
        assert len(structure[1]["branches"]) == count


def test_it_streams_in_both_ways(proxy: str) -> None:
    client = openai.OpenAI(base_url=proxy, api_key="none")

    def stream(**aspd: Any) -> list[Any]:
        asked: Any = {"model": "proxied", "messages": [{"role": "user", "content": "?"}], "extra_body": {"aspd": aspd}}
        return list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))

    reading = stream()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in reading if chunk.choices) == TEXT
    assert reading[-2].choices[0].finish_reason == "stop" and reading[-1].usage.completion_tokens > 0
    places = [chunk.choices[0].delta.model_extra["aspd"] for chunk in stream(stream="branches")[1:-2]]
    kinds = [place["event"] for place in places if place["event"] != "token"]
    assert kinds == ["fork", "branch", "branch", "merge"]
    assert next(place for place in places if place["event"] == "fork")["titles"] == ["1/2 A", "2/2 B"]


MALFORMED = {
    "one title": "1/2 A<|/title|><|para|>",
    "the same title twice": "A<|/title|><|title|>A<|/title|><|para|>",
    "titles without a word": " <|/title|><|title|>\n<|/title|><|para|>",
    "no end of a title": "1/2 A<|title|>2/2 B<|para|>",
    "a title that goes on in the next line": "1/2 A: alpha\n2/2 B<|/title|>" + B + "<|para|>",
    "a title without an end": "1/2 A " + "and so on " * 99 + "<|/title|>" + B + "<|para|>",
    "nothing": "",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_block_becomes_serial(name: str, proxy: str, upstream: Upstream, demo: LanguageModel) -> None:
    """Check that the tags are left out, and the model goes on without them."""
    upstream.script |= {"<|title|>": MALFORMED[name], "So:\n": "and on."}
    answer = ask(proxy, **STATISTICS).json()
    assert answer["choices"][0]["message"]["content"] == "So:\nand on."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["aspd"][0]["structure"] == [{"type": "serial", "text": "So:\nand on."}]
    assert set(upstream.bodies[-1]["logit_bias"]) == {str(i) for i in demo.codec.special.ids}


def test_its_model_and_health(proxy: str) -> None:
    """Check that no benchmark of servers takes it for `aspd serve`, whose decisions it lacks."""
    client = openai.OpenAI(base_url=proxy, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["proxied"]
    assert client.models.retrieve("proxied").owned_by == "aspd-proxy" and not Server.connect(f"p={proxy}", 60).ours
    assert httpx.get(f"{proxy.removesuffix('/v1')}/health").json() == {"status": "ready"}
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.models.retrieve("other")


def test_limits_of_its_process(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the limits that the process sets, and the addresses that need `--insecure`."""
    settings = dict[str, Any]()
    monkeypatch.setattr(uvicorn, "run", lambda app, **more: settings.update(more))
    command = ["proxy", "--upstream", "http://127.0.0.1:1/v1", "--model", "m", "--tokenizer", "demo"]
    assert not aspd.main(command) and settings["timeout_graceful_shutdown"] == 30 and settings["limit_concurrency"]
    settings.clear()
    assert aspd.main([*command, "--host", "0.0.0.0"]) == 2 and not settings
    assert "--host: expected a loopback address, got 0.0.0.0" in capsys.readouterr().err
    assert not aspd.main([*command, "--host", "0.0.0.0", "--insecure"]) and settings["host"] == "0.0.0.0"


def test_serial_mode_forbids_all_tags(proxy: str, upstream: Upstream, demo: LanguageModel) -> None:
    upstream.script = {"": "Just text."}
    assert ask(proxy, aspd={"mode": "serial"}).json()["choices"][0]["message"]["content"] == "Just text."
    assert set(upstream.bodies[0]["logit_bias"]) == {str(i) for i in demo.codec.special.ids}


def test_budgets_end_answers(proxy: str, upstream: Upstream) -> None:
    answer = ask(proxy, max_tokens=10).json()["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["content"].startswith("So:\n")


def streamed(url: str, **more: Any) -> str:
    """Return the text of a stream in reading order."""
    lines = [line.removeprefix("data: ") for line in ask(url, stream=True, **more).text.splitlines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if line != "[DONE]"]
    return "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.parametrize("stop", ["p", "a\nbeta", "\nB", "is a", "o:\na", "Bye.", ["l", "lp"]])
def test_stop_strings_end_the_text_in_reading_order(stop: Any, proxy: str, upstream: Upstream) -> None:
    upstream.script |= {"1/2 A: ": "alpha\n<|/branch|>"}
    text = "So:\nalpha\nbeta is a longer one\nBye."
    first = min(text.index(one) for one in ([stop] if isinstance(stop, str) else stop))
    answer = ask(proxy, stop=stop, **STATISTICS).json()
    assert answer["choices"][0]["message"]["content"] == text[:first] == streamed(proxy, stop=stop)
    assert plain_text(from_json(answer["aspd"][0]["structure"])) == text[:first]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.further
def test_budgets_keep_a_beginning_of_the_text(proxy: str, demo: LanguageModel) -> None:
    """Check that the text is the first tokens of the whole one in reading order, whatever the limit."""
    texts = []
    for most in range(1, 2 * len(demo.codec.text.encode(TEXT))):  # parts of an answer are encoded as they come
        answer = ask(proxy, max_tokens=most)
        text = answer.json()["choices"][0]["message"]["content"]
        assert TEXT.startswith(text) and streamed(proxy, max_tokens=most) == text
        assert answer.json()["usage"]["completion_tokens"] <= most
        texts.append(text)
    assert texts == sorted(texts, key=len) and texts[-1] == TEXT and len(set(texts)) > 12


def test_branches_share_the_budget(proxy: str, upstream: Upstream, demo: LanguageModel) -> None:
    """Check one branch that is much longer than the others; if all are, the answer ends with the first."""
    encode, long = demo.codec.text.encode, "beta goes on. " * 9
    upstream.script |= {"1/2 A: ": "alpha\n<|/branch|>", "2/2 B: ": f"{long}<|/branch|>", "<|/para|>": "END"}
    most = 9 + sum(len(encode(long[at : at + 3])) for at in range(0, len(long), 3))  # as its pieces come
    assert most < 2 * len(encode(long)), "it is more than its half of them"
    answer = ask(proxy, max_tokens=most).json()["choices"][0]
    assert answer["message"]["content"] == f"So:\nalpha\n{long}" and answer["finish_reason"] == "stop"
    upstream.delay = 0.01
    upstream.script |= {"1/2 A: ": "alpha " * 500, "2/2 B: ": "beta " * 500}
    answer = ask(proxy, max_tokens=most).json()["choices"][0]
    assert answer["finish_reason"] == "length" and "beta" not in answer["message"]["content"]
    assert abs(len(encode(answer["message"]["content"])) - most) <= 9


def test_each_piece_of_a_branch_is_counted_once(
    proxy: str, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[str]()
    count = Proxied.count
    monkeypatch.setattr(Proxied, "count", lambda self, piece: counted.append(piece) or count(self, piece))
    upstream.script |= {"2/2 B: ": "beta goes on. " * 40 + "<|/branch|>"}
    assert "beta" in ask(proxy).json()["choices"][0]["message"]["content"]
    assert 180 < len(counted) < 240, "14 * 40 / 3 pieces, and a few of titles and of the other branch"


def test_a_client_that_goes_ends_its_requests(proxy: str, upstream: Upstream) -> None:
    upstream.delay = 0.2
    upstream.script |= {"1/2 A: ": "alpha " * 500, "2/2 B: ": "beta " * 500}
    messages = [{"role": "user", "content": "?"}]
    asked = {"model": "proxied", "messages": messages, "stream": True, "aspd": {"stream": "branches"}}
    with httpx.stream("POST", f"{proxy}/chat/completions", json=asked, timeout=60) as response:
        lines = response.iter_lines()  # held, because the connection is closed with it
        next(line for line in lines if "beta" in line or "bet" in line)
        assert wait_for(lambda: upstream.open == 2)
    assert wait_for(lambda: upstream.open == 0, 10)


def test_faults_of_the_upstream(proxy: str, upstream: Upstream) -> None:
    busy = JSONResponse({"error": {"message": "busy"}}, 503)
    upstream.before = lambda number: busy if number <= 2 else None
    assert ask(proxy).json()["choices"][0]["message"]["content"] == TEXT  # waited out
    refusal = {"message": "too long", "code": "context_length_exceeded"}
    upstream.before = lambda _: JSONResponse({"error": refusal}, 400)
    refused = ask(proxy)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert "status 400" in refused.json()["error"]["message"]
    streamed = ask(proxy, stream=True).text
    assert "context_length_exceeded" in streamed and "[DONE]" not in streamed
    upstream.before = lambda _: JSONResponse({"error": {"message": "out of memory"}}, 501)
    refused = ask(proxy)
    assert refused.status_code == 502 and "status 501" in refused.json()["error"]["message"]
    upstream.before = lambda _: Response("data: {oops\n\n", media_type="text/event-stream")
    refused = ask(proxy)
    assert refused.status_code == 502 and "expected a stream of completions" in refused.json()["error"]["message"]


def test_a_connection_that_breaks_within_a_stream(proxy: str, upstream: Upstream) -> None:
    async def breaks() -> AsyncIterator[str]:
        yield upstream._chunk("So", None)
        raise RuntimeError("the upstream breaks")

    upstream.before = lambda _: StreamingResponse(breaks(), media_type="text/event-stream")
    refused = ask(proxy)
    assert refused.status_code == 502 and refused.json()["error"]["type"] == "upstream_error"


@pytest.mark.parametrize("end", ["<|/para|>", "2/2 B: "])
def test_a_stream_that_breaks_off_is_no_whole_answer(end: str, proxy: str, upstream: Upstream) -> None:
    assert ask(proxy).json()["choices"][0]["message"]["content"] == TEXT  # negative control
    upstream.cut = end
    refused = ask(proxy)
    assert refused.status_code == 502 and "without a finish_reason" in refused.json()["error"]["message"]
    streamed = ask(proxy, stream=True).text
    assert "without a finish_reason" in streamed and "[DONE]" not in streamed


@pytest.mark.parametrize(
    "more, status, message",
    [
        ({"model": "other"}, 404, "unknown model 'other'; available: 'proxied'"),
        ({"n": 2}, 400, "n: not supported by the proxy"),
        ({"frequency_penalty": 1}, 400, "frequency_penalty: not supported by the proxy"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias: not supported by the proxy"),
        ({"min_tokens": 1}, 400, "min_tokens: not supported by the proxy"),
        ({"fork_bias": 1}, 400, "fork_bias: not supported by the proxy"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "expected a last message of the user"),
        ({"messages": []}, 400, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools: not supported by the proxy"),
    ],
)
def test_what_it_does_not_have_is_refused(more: dict[str, Any], status: int, message: str, proxy: str) -> None:
    refused = ask(proxy, **more)
    assert refused.status_code == status and message in refused.json()["error"]["message"]
