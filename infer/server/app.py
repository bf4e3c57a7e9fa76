"""The HTTP side: OpenAI's interface, health, metrics and the page."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from aspd_jax.errors import RequestError
from infer.answers.answer import Result
from infer.engine import Engine
from infer.request import SamplingParams
from infer.server.config import ServerConfig
from infer.server.deltas import Delta, branch_deltas, text_deltas
from infer.server.driver import Broken, Busy, Driver, Ticket
from infer.server.forms import Chat, Form, Text, statistics, usage
from infer.server.messages import ChatRequest, Common, CompletionRequest, LoadAdapter, UnloadAdapter, error_body
from infer.server.metrics import Metrics, programs_compiled

log = logging.getLogger("aspd.server")
OPEN = ("/", "/health", "/live")  # paths that need no key
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DISCONNECT_SECONDS = 0.1  # between two looks at whether a client that waits for a whole answer is still there

# Of an answer, by its number: what to send after a look at it, and how it ended, if it has.
News: TypeAlias = tuple[int, list[Delta], Result | Broken | None]


class Refused(Exception):
    """An error for the client, in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.body, self.headers = status, error_body(message, kind, code), headers


def make_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """An application around an engine, which it drives from its start to its end."""
    metrics = Metrics()
    driver = Driver(engine, config, metrics.chunk)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        yield
        await asyncio.to_thread(driver.stop)

    app = FastAPI(title="aspd", docs_url=None, redoc_url=None, lifespan=life)
    app.state.driver = driver
    server = _Server(engine, config, driver, metrics)
    app.add_middleware(_Guard, server=server)
    app.add_exception_handler(Refused, server.refused)
    app.add_exception_handler(RequestValidationError, server.invalid)
    app.add_exception_handler(HTTPException, server.http_error)
    app.add_exception_handler(Exception, server.failed)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": what}
        for status, what in (
            (400, "invalid"), (401, "no valid key"), (404, "unknown model"), (408, "late"), (411, "no length"),
            (413, "too long"), (422, "invalid"),
            (429, "busy"), (500, "failed"), (503, "not ready"), (504, "timed out"),
        )
    }  # fmt: skip
    answers = {200: {"content": {"text/event-stream": {}}}, **errors}
    app.post("/v1/chat/completions", responses=answers, response_model=None)(server.chat)
    app.post("/v1/completions", responses=answers, response_model=None)(server.complete)
    if config.adapter_folder:
        refusals: dict[int | str, dict[str, Any]] = {n: errors[n] for n in (400, 401, 404, 408, 411, 413, 422, 503)}
        app.post("/v1/load_lora_adapter", responses=refusals)(server.load_adapter)
        app.post("/v1/unload_lora_adapter", responses=refusals)(server.unload_adapter)
    app.get("/v1/models", responses={401: errors[401]})(server.models)
    app.get("/v1/models/{name}", responses={n: errors[n] for n in (401, 404)}, response_model=None)(server.model)
    app.get("/health", responses={503: {"description": "not ready"}}, response_model=None)(server.health)
    app.get("/live", responses={503: {"description": "dead"}}, response_model=None)(server.live)
    app.get("/metrics", responses={401: errors[401]}, response_class=PlainTextResponse)(server.metrics)
    app.get("/", response_class=HTMLResponse)(server.page)
    app.openapi_schema = schema = app.openapi()
    for kind in ("ChatRequest", "CompletionRequest"):
        fields = schema["components"]["schemas"][kind]["properties"]
        if not engine.lm.config.adapters:
            fields["model"]["enum"] = [config.name]
        fields["n"]["anyOf"][0]["maximum"] = config.max_choices
    return app


class _Guard:
    """Looks at every request before its body is read, and counts what comes out."""

    def __init__(self, app: Any, server: _Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._server.count(scope["path"], message["status"])
            await send(message)

        refusal = self._server.check(Request(scope))
        if refusal is None and scope["method"] == "POST":
            body = await self._server.body(receive)
            if body is None:
                refusal = self._server.error(408, "the request did not arrive in time", "timeout", "timeout")
            else:
                receive = _then(body, receive)
        await (refusal or self._app)(scope, receive, counting)


def _then(body: bytes, receive: Any) -> Any:
    """A `receive` that begins with a whole body."""
    left = [body]

    async def replaying() -> Any:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replaying


class _Server:
    def __init__(self, engine: Engine, config: ServerConfig, driver: Driver, metrics: Metrics) -> None:
        self._engine, self._config, self._driver, self._metrics = engine, config, driver, metrics
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.keys]
        self._started = int(time.time())
        self._page = (files(__package__) / "page.html").read_text()

    # What every request goes through.

    def check(self, request: Request) -> Response | None:
        """Why a request is refused before it is read; None: it is not."""
        if self._keys and request.url.path not in OPEN:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            digest = hashlib.sha256(given).digest()
            # All are compared, so that the time tells nothing about which came near.
            if not max([hmac.compare_digest(digest, key) for key in self._keys]):
                return self.error(401, "a valid API key is needed", "authentication_error", "invalid_api_key")
        if request.method == "POST":
            length = request.headers.get("content-length", "")
            if not length.isdigit():
                return self.error(411, "the request needs a Content-Length", "invalid_request_error")
            if int(length) > self._config.max_body:
                message = f"the request has {length} bytes, at most {self._config.max_body} are taken"
                return self.error(413, message, "invalid_request_error")
            if not self._driver.ready.is_set():
                return self.error(503, "the server is not ready", "service_unavailable", **{"Retry-After": "5"})
        return None

    async def body(self, receive: Any) -> bytes | None:
        """All of a body; None: it did not come in time, or its client has gone."""
        parts: list[bytes] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    if not message.get("more_body"):
                        return b"".join(parts)
        return None

    def count(self, path: str, status: int) -> None:
        """Note what became of a request."""
        known = (
            path if path in {*OPEN, "/v1/models", "/v1/chat/completions", "/v1/completions", "/metrics"} else "other"
        )
        self._metrics.requests.labels(known, str(status)).inc()

    @staticmethod
    def error(status: int, message: str, kind: str, code: str | None = None, **headers: str) -> JSONResponse:
        """A response in OpenAI's form."""
        return JSONResponse(error_body(message, kind, code), status, headers)

    async def refused(self, _: Request, error: Any) -> Response:
        """A `Refused`."""
        return JSONResponse(error.body, error.status, error.headers)

    async def invalid(self, _: Request, error: Any) -> Response:
        """A body that is no such request."""
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return JSONResponse(error_body(message, "invalid_request_error", None, where or None), 400)

    async def http_error(self, _: Request, error: Any) -> Response:
        """A path or method that does not exist."""
        return JSONResponse(
            error_body(str(error.detail), "invalid_request_error"), error.status_code, getattr(error, "headers", None)
        )

    async def failed(self, _: Request, error: Exception) -> Response:
        """A mistake of ours."""
        log.error("a request failed", exc_info=error)
        return self.error(500, "the server failed on this request", "server_error")

    # The interface.

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(request, body, [message.plain for message in body.messages], Chat())

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """OpenAI's completions."""
        return await self._answer(request, body, body.text, Text())

    async def models(self) -> dict[str, Any]:
        """The model, and its adapters."""
        return {"object": "list", "data": [self._model(name) for name in self._names]}

    async def model(self, name: str) -> Any:
        """By name."""
        self._adapter(name)
        return self._model(name)

    async def load_adapter(self, body: LoadAdapter) -> dict[str, Any]:
        """Let clients ask for an adapter by its name from now on."""
        root = Path(self._config.adapter_folder).resolve()
        folder = (root / body.lora_path).resolve()
        if not folder.is_relative_to(root):
            raise Refused(
                400, f"lora_path: {body.lora_path!r} is not within the folder of adapters", "invalid_request_error"
            )
        if body.lora_name == self._config.name:
            raise Refused(400, f"lora_name: {body.lora_name!r} is the model", "invalid_request_error")
        await self._change(body.lora_name, str(folder))
        return self._model(body.lora_name)

    async def unload_adapter(self, body: UnloadAdapter) -> dict[str, Any]:
        """Let clients no longer ask for an adapter; answers under way go on with it."""
        if body.lora_name == self._config.name or body.lora_name not in self._names:
            raise self._unknown(body.lora_name)
        await self._change(body.lora_name, "")
        return {"id": body.lora_name, "object": "model", "deleted": True}

    async def _change(self, name: str, folder: str) -> None:
        if refused := await self._driver.change(name, folder):
            raise Refused(400, refused, "invalid_request_error")

    async def health(self) -> Response:
        """200 once everything is compiled, as long as the engine runs."""
        ready = self._driver.ready.is_set()
        now = self._driver.occupancy
        status = {"status": "ready" if ready else "not ready", "running": now.running, "waiting": now.waiting}
        return JSONResponse(status, 200 if ready else 503)

    async def live(self) -> Response:
        """200 as long as the engine's thread runs."""
        return JSONResponse({"alive": self._driver.alive}, 200 if self._driver.alive else 503)

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self._metrics.text(self._driver), media_type="text/plain; version=0.0.4")

    async def page(self) -> HTMLResponse:
        """A page to try it on."""
        text = self._page.replace("{{model}}", escape(self._config.name))
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    @property
    def _names(self) -> tuple[str, ...]:
        return (self._config.name, *self._engine.adapters.names)

    def _model(self, name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": self._started, "owned_by": "aspd"}
        return model if name == self._config.name else model | {"parent": self._config.name}

    def _adapter(self, name: str) -> str:
        """Of the name of a model; empty: of the base."""
        if name not in self._names:
            raise self._unknown(name)
        return "" if name == self._config.name else name

    def _unknown(self, name: str) -> Refused:
        message = f"there is no model {name!r} here, but {', '.join(map(repr, self._names))}"
        return Refused(404, message, "invalid_request_error", "model_not_found")

    async def _answer(self, request: Request, body: Any, prompt: Any, form: Form) -> Response:
        adapter = self._adapter(body.model)
        count = body.n or 1
        if count > self._config.max_choices:
            raise Refused(400, f"n: at most {self._config.max_choices} answers, got {count}", "invalid_request_error")
        try:
            jobs = await asyncio.to_thread(
                lambda: [
                    self._engine.check(prompt, self._params(body, n), body.aspd.mode, adapter) for n in range(count)
                ]
            )
        except RequestError as error:
            too_long = "leaves no room" in str(error)
            code = "context_length_exceeded" if too_long else None
            raise Refused(400, str(error), "invalid_request_error", code) from None
        except Exception as error:  # such as a chat template that refuses the order of roles
            raise Refused(400, f"the prompt cannot be encoded: {error}", "invalid_request_error") from None
        compiled_before = programs_compiled()
        try:
            tickets = self._driver.submit(jobs, body.aspd.stream if body.stream else None, body.alternatives)
        except Busy as busy:
            kind, wait = "rate_limit_exceeded", str(busy.seconds)
            raise Refused(429, str(busy), kind, "queue_full", **{"Retry-After": wait}) from None
        head = {"id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}
        deadline = time.monotonic() + self._config.timeout
        if body.stream:
            events = self._stream(body, tickets, form, head, deadline, compiled_before)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return JSONResponse(await self._whole(request, body, tickets, form, head, deadline, compiled_before))

    def _params(self, body: Common, choice: int) -> SamplingParams:
        params = body.params(self._config, choice)
        if body.aspd.content is None:
            return params
        lm = self._engine.lm
        return params.saying([*lm.codec.text.encode(body.aspd.content), *lm.end_ids[:1]])

    # A whole answer.

    async def _whole(
        self,
        request: Request,
        body: Common,
        tickets: Sequence[Ticket],
        form: Form,
        head: Any,
        deadline: float,
        compiled_before: int,
    ) -> dict[str, Any]:
        results = asyncio.create_task(self._results(tickets))
        try:
            while not results.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(results), DISCONNECT_SECONDS)
                if not results.done() and time.monotonic() > deadline:
                    raise Refused(504, f"no answer within {self._config.timeout:g} s", "timeout", "timeout")
                if not results.done() and await request.is_disconnected():
                    raise Refused(499, "the client has gone", "client_closed_request")
            found = results.result()
            logprobs = [self._logprobs(form, ticket) for ticket in tickets]
        except Broken:
            raise Refused(500, "the server failed on this request", "server_error") from None
        finally:
            results.cancel()
            for ticket in tickets:
                self._driver.cancel(ticket)
        choices = [form.choice(number, *of) for number, of in enumerate(zip(found, logprobs, strict=True))]
        answer = {**head, "object": form.whole, "choices": choices, "usage": usage(found)}
        if body.aspd.statistics:
            compiled = programs_compiled() - compiled_before
            answer["aspd"] = [statistics(result, compiled) for result in found]
        return answer

    async def _results(self, tickets: Sequence[Ticket]) -> list[Result]:
        return [await self._result(ticket) for ticket in tickets]

    async def _result(self, ticket: Ticket) -> Result:
        async for news in ticket.listen():
            if (result := news[-1].result) is not None:
                self._note(ticket, result)
                return result
        raise Broken

    # A stream.

    async def _stream(
        self, body: Common, tickets: Sequence[Ticket], form: Form, head: Any, deadline: float, compiled_before: int
    ) -> AsyncIterator[str]:
        """Server-sent events of all answers to a request, as they come."""
        news: asyncio.Queue[News] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(number, t, body, news)) for number, t in enumerate(tickets)]
        head = head | {"object": form.part}
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        results: dict[int, Result] = {}

        def sse(value: dict[str, Any]) -> str:
            return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

        try:
            for number in range(len(tickets)):
                for choice in form.opening(number):
                    yield sse({**head, "choices": [choice], **extra})
            while len(results) < len(tickets):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    number, deltas, end = await news.get()
                if isinstance(end, Broken):
                    raise end
                events = [{**head, "choices": [form.delta(number, delta)], **extra} for delta in deltas]
                if end is not None:
                    results[number] = end
                    logprobs = self._logprobs(form, tickets[number])
                    events.append({**head, "choices": [form.closing(number, end, logprobs)], **extra})
                    if body.aspd.statistics:
                        events[-1]["aspd"] = statistics(end, programs_compiled() - compiled_before)
                if events:
                    yield "".join(map(sse, events))  # in one piece: each costs a write
            if with_usage:
                every = [results[number] for number in range(len(tickets))]
                yield sse({**head, "choices": [], "usage": usage(every)})
            yield "data: [DONE]\n\n"
        except TimeoutError:
            yield sse(error_body(f"no answer within {self._config.timeout:g} s", "timeout", "timeout"))
        except Broken:
            yield sse(error_body("the server failed on this request", "server_error"))
        finally:
            for ticket in tickets:
                self._driver.cancel(ticket)
            for task in tasks:
                task.cancel()

    async def _follow(self, number: int, ticket: Ticket, body: Common, news: asyncio.Queue[News]) -> None:
        deltas_of = branch_deltas if body.aspd.stream == "branches" else text_deltas
        try:
            async for events in ticket.listen():
                if (result := events[-1].result) is not None:
                    self._note(ticket, result)
                news.put_nowait((number, deltas_of(events), result))
        except Broken as broken:
            news.put_nowait((number, [], broken))

    def _note(self, ticket: Ticket, result: Result) -> None:
        self._metrics.answer(ticket.job.mode, result.finish_reason or "cancelled", result.stats)

    def _logprobs(self, form: Form, ticket: Ticket) -> Any:
        if ticket.alternatives is None:
            return None
        if ticket.logprobs is None:
            raise Broken
        decode = self._engine.lm.codec.text.decode
        return form.logprobs(ticket.logprobs, lambda id: decode([id]))
