"""HTTP application: OpenAI's endpoints, health checks, metrics and the demonstration page."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware

from aspd_jax.errors import RequestError
from aspd_jax.progress import programs_compiled
from aspd_jax.tool_format import read_tool_format
from infer.answers.answer import Result
from infer.answers.events import Event
from infer.answers.values import request_values
from infer.engine import Engine
from infer.request import PromptTooLong, SamplingParams
from infer.request import Request as DecodingRequest
from infer.server.config import ServerConfig
from infer.server.decisions import DecisionsRequest, SystemOneRequest
from infer.server.deltas import branch_deltas, merged, text_deltas
from infer.server.engine_thread import EngineThread, Ticket, engine_error
from infer.server.forms import Answer, Chat, Chunks, Form, Text, ToolChat, reply, statistics, token_usage, usage
from infer.server.guard import REQUEST_ID, Guard, while_connected
from infer.server.messages import ChatRequest, Common, CompletionRequest, Conversation, LoadAdapter, UnloadAdapter
from infer.server.prometheus import Metrics
from infer.server.refusals import INVALID, Refused, add_refusals
from infer.server.responses import NOT_STORED, ResponsesRequest, reply_response
from infer.server.tool_calls import ToolCalls, ToolChoice, check_schemas

log = logging.getLogger("aspd.server")
OPEN = ("/", "/health", "/live")  # paths that need no key
COUNTED = (
    *OPEN, "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/decisions",
    "/v1/systemone",
)  # fmt: skip
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """Create an application that runs an engine from its startup to its shutdown."""
    metrics = Metrics()
    engine_thread = EngineThread(engine, config, metrics.chunk, metrics.answer)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        engine_thread.start()
        yield
        await asyncio.to_thread(engine_thread.stop)

    app = FastAPI(title="aspd", docs_url=None, redoc_url=None, lifespan=life)
    app.state.engine_thread = engine_thread
    server = _Server(engine, config, engine_thread, metrics)
    app.add_middleware(
        Guard, max_body=config.max_body, body_timeout=config.body_timeout, check=server.check, count=server.count
    )
    if config.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.origins), allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after", "x-aspd-ignored"],
        )  # fmt: skip
    add_refusals(app)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": what}
        for status, what in (
            (400, "invalid request"), (401, "no valid key"), (404, "unknown model"), (408, "body not received in time"),
            (413, "body too large"), (422, "invalid request"), (429, "too many waiting requests"),
            (500, "internal error"), (503, "not ready"), (504, "timed out"),
        )
    }  # fmt: skip
    answers = {200: {"content": {"text/event-stream": {}}}, **errors}
    app.post("/v1/chat/completions", responses=answers, response_model=None)(server.chat)
    app.post("/v1/completions", responses=answers, response_model=None)(server.complete)
    app.post("/v1/responses", responses=answers, response_model=None)(server.respond)
    app.post("/v1/decisions", responses=errors, response_model=None)(server.decide)
    app.post("/v1/systemone", responses=errors, response_model=None)(server.system_one)
    for path in ("/v1/responses/{name}", "/v1/responses/{name}/{part}"):
        app.add_api_route(path, server.stored, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    if config.adapter_folder:
        refusals: dict[int | str, dict[str, Any]] = {n: errors[n] for n in (400, 401, 404, 408, 413, 422, 503)}
        app.post("/v1/load_lora_adapter", responses=refusals)(server.load_adapter)
        app.post("/v1/unload_lora_adapter", responses=refusals)(server.unload_adapter)
    app.get("/v1/models", responses={401: errors[401]})(server.models)
    app.get("/v1/models/{name:path}", responses={n: errors[n] for n in (401, 404)}, response_model=None)(server.model)
    app.get("/health", responses={503: {"description": "not ready"}}, response_model=None)(server.health)
    app.get("/live", responses={503: {"description": "not running"}}, response_model=None)(server.live)
    app.get("/metrics", responses={401: errors[401]}, response_class=PlainTextResponse)(server.metrics)
    app.get("/", response_class=HTMLResponse)(server.page)
    app.openapi_schema = schema = app.openapi()
    for kind in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "DecisionsRequest", "SystemOneRequest"):
        fields = schema["components"]["schemas"][kind]["properties"]
        if not engine.lm.config.adapters:
            fields["model"]["enum"] = [config.name]
        if "n" in fields:
            fields["n"]["anyOf"][0]["maximum"] = config.max_choices
    return app


def _refusal(error: RequestError, param: str | None = None) -> Refused:
    """Return the response to a request that the engine refuses; `param`: field of the request."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return Refused(400, str(error), INVALID, code, param)


class _Server:
    def __init__(self, engine: Engine, config: ServerConfig, engine_thread: EngineThread, metrics: Metrics) -> None:
        self._engine, self._config, self._thread, self._metrics = engine, config, engine_thread, metrics
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.keys]
        self._started = int(time.time())
        self._page = (files(__package__) / "page.html").read_text()

    # Checks of every request.

    def check(self, request: Request) -> None:
        """Check a request before its body is read.

        Raises:
            Refused: the request has no valid key, or the server is not ready.
        """
        if self._keys and request.scope["path"] not in OPEN:
            key = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
            digest = hashlib.sha256(key).digest()
            # Comparing with all keys makes the duration independent of the key that matches.
            if not max([hmac.compare_digest(digest, valid) for valid in self._keys]):
                raise Refused(401, "expected a valid API key", "authentication_error", "invalid_api_key")
        if request.method == "POST" and not self._thread.ready.is_set():
            raise Refused(503, "the server is not ready", "service_unavailable", headers={"Retry-After": "5"})

    def count(self, path: str, status: int) -> None:
        """Count a response by path and HTTP status."""
        known = path if path in COUNTED else "other"
        self._metrics.requests.labels(known, str(status)).inc()

    # Endpoints.

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a request for OpenAI's chat completions."""
        return reply(body, await self._converse(request, body))

    async def respond(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a request for OpenAI's responses."""
        return reply_response(body, await self._converse(request, body))

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Answer a request for OpenAI's completions."""
        decode, prompts = self._engine.lm.codec.text.decode, body.task.prompts
        texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts] if body.echo else []
        form = Text(texts, body.task.choices, body.return_tokens_as_token_ids)
        return reply(body, await self._answer(request, body, form))

    async def decide(self, request: Request, body: DecisionsRequest) -> Response:
        """Answer a request for OpenAI's decisions."""
        return await self._decide(request, body)

    async def system_one(self, request: Request, body: SystemOneRequest) -> Response:
        """Answer a request for decisions in the form of System One models."""
        return await self._decide(request, body)

    async def stored(self, name: str) -> None:
        """Refuse a request for a stored response."""
        raise Refused(404, f"unknown response {name!r}: {NOT_STORED}", code="response_not_found")

    async def models(self) -> dict[str, Any]:
        """List the model and its adapters."""
        return {"object": "list", "data": [self._model(name) for name in self._names]}

    async def model(self, name: str) -> Any:
        """Return a model or an adapter by name."""
        self._adapter(name)
        return self._model(name)

    async def load_adapter(self, body: LoadAdapter) -> dict[str, Any]:
        """Load an adapter, which clients then select by its name."""
        root = Path(self._config.adapter_folder).resolve()
        folder = root if "\0" in body.lora_path else (root / body.lora_path).resolve()
        if not folder.is_relative_to(root) or "\0" in body.lora_path:
            raise Refused(
                400,
                f"lora_path: expected a folder inside the adapter folder, got {body.lora_path!r}",
                param="lora_path",
            )
        if body.lora_name == self._config.name:
            raise Refused(
                400, f"lora_name: expected a name other than the model's, got {body.lora_name!r}", param="lora_name"
            )
        await self._change(body.lora_name, str(folder))
        return self._model(body.lora_name)

    async def unload_adapter(self, body: UnloadAdapter) -> dict[str, Any]:
        """Unload an adapter. Answers that use it run to their end."""
        if body.lora_name == self._config.name or body.lora_name not in self._names:
            raise self._unknown(body.lora_name)
        await self._change(body.lora_name, "")
        return {"id": body.lora_name, "object": "model", "deleted": True}

    async def _change(self, name: str, folder: str) -> None:
        if refused := await self._thread.change_adapter(name, folder):
            raise Refused(400, refused)

    async def health(self) -> Response:
        """Return 200 when the server is ready: warm-up has ended and the engine runs."""
        ready = self._thread.ready.is_set()
        running, waiting = self._thread.occupancy
        status = {"status": "ready" if ready else "not ready", "running": running, "waiting": waiting}
        return JSONResponse(status, 200 if ready else 503)

    async def live(self) -> Response:
        """Return 200 while the engine's thread runs."""
        return JSONResponse({"alive": self._thread.alive}, 200 if self._thread.alive else 503)

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self._metrics.text(self._thread), media_type="text/plain; version=0.0.4")

    async def page(self) -> HTMLResponse:
        """Return the demonstration page."""
        text = self._page.replace("{{model}}", escape(self._config.name))
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    @property
    def _names(self) -> tuple[str, ...]:
        return (self._config.name, *self._engine.adapters.names)

    def _model(self, name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": self._started, "owned_by": "aspd"}
        return model if name == self._config.name else model | {"parent": self._config.name}

    def _adapter(self, name: str) -> str:
        """Return the adapter that a model name selects; empty for the base model.

        Raises:
            Refused: the name is unknown.
        """
        if name not in self._names:
            raise self._unknown(name)
        return "" if name == self._config.name else name

    def _unknown(self, name: str) -> Refused:
        message = f"unknown model {name!r}; available: {', '.join(map(repr, self._names))}"
        return Refused(404, message, INVALID, "model_not_found", "model")

    async def _converse(self, request: Request, body: Conversation) -> Answer:
        """Answer a request for the next message of a conversation, which may call tools.

        Raises:
            Refused: a schema is not supported, or the format of the model's calls cannot be read.
        """
        if body.task.calling is None:
            return await self._answer(request, body, Chat())
        try:
            calls = await asyncio.to_thread(self._read_calls, body, body.task.calling)
        except RequestError as error:
            raise Refused(400, str(error), param="tools") from None
        return await self._answer(request, body, ToolChat(calls))

    def _read_calls(self, body: Conversation, choice: ToolChoice) -> ToolCalls:
        lm = self._engine.lm
        if getattr(lm.tokenizer, "chat_template", None) is None:
            raise RequestError("tools: expected a model with a chat template, got one without")
        check_schemas(body.task.functions, body.schema_place)
        form = read_tool_format(lm.tokenizer)
        return ToolCalls(body.task.functions, choice, form, lm.codec.text, body.constraint().get("json_schema"))

    async def _answer(self, request: Request, body: Common, form: Form) -> Answer:
        adapter, calls = self._adapter(body.model), form.calls if isinstance(form, ToolChat) else None
        prompts, count, limit = body.task.prompts, body.task.choices, self._config.max_choices
        if count > limit:
            raise Refused(400, f"n: expected at most {limit} answers, got {count}", param="n")
        capacity = self._engine.max_batch + self._config.max_waiting
        if len(prompts) * count > capacity:
            expected = f"at most {capacity // count} prompts with {count} answers each"
            raise Refused(400, f"prompt: expected {expected}, got {len(prompts)}", param="prompt")
        try:
            requests = await asyncio.to_thread(self._requests, body, adapter, calls)
        except RequestError as error:
            raise _refusal(error) from None
        except Exception as error:  # such as a chat template that refuses the order of roles
            raise Refused(400, f"the prompt cannot be encoded: {error}") from None
        stream = body.aspd.stream if body.stream else None
        details: dict[str, Any] = {
            "stream": stream, "alternatives": body.task.alternatives, "echo": body.task.echo
        }  # fmt: skip
        tickets = self._thread.submit([replace(request, **details) for request in requests])
        head = {"id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}
        if body.stream:
            return self._stream(body, tickets, form, head)
        return await self._whole(request, body, tickets, form, head)

    def _requests(self, body: Common, adapter: str, calls: ToolCalls | None) -> list[DecodingRequest]:
        """Return the requests of all prompts, one for each answer."""
        requests: list[DecodingRequest] = []
        task, own, tools = body.task, body.aspd, [] if calls is None else [f.tool for f in calls.functions]
        details = (own.mode, adapter, task.continues, task.variables, tools, own.lists)
        for number, prompt in enumerate(task.prompts):
            try:
                for choice in range(task.choices):
                    requests.append(self._engine.check(prompt, self._params(body, choice, calls), *details))
            except RequestError as error:
                told = str(error)
                if body.aspd.content is not None:  # it is the script of its answer
                    told = told.replace("script: ", "aspd.content: ", 1)
                raise type(error)(f"prompt[{number}]: {told}" if len(task.prompts) > 1 else told) from None
        return requests

    def _params(self, body: Common, choice: int, calls: ToolCalls | None) -> SamplingParams:
        params = body.params(self._config, choice)
        if calls is not None:
            fields = body.aspd.fields or self._config.fields
            in_branches = body.stream and body.aspd.stream == "branches"
            if fields == "parallel" and in_branches and calls.template is not None:  # a call is read in its order
                raise RequestError("aspd.stream: expected text for arguments in parallel, got branches")
            return calls.params(params, fields)
        if body.aspd.content is None:
            return params
        lm = self._engine.lm
        return params.saying([*lm.codec.text.encode_exactly(body.aspd.content), *lm.end_ids[:1]])

    # Whole answers.

    async def _decide(self, request: Request, body: DecisionsRequest | SystemOneRequest) -> Response:
        adapter, calibration = self._adapter(body.model), body.aspd.calibration or self._config.calibration
        try:
            asked = await asyncio.to_thread(self._engine.ask, *body.asked, calibration, adapter)
        except RequestError as error:
            raise _refusal(error, "questions" if str(error).startswith("questions") else body.input_field) from None
        tickets = self._thread.submit([one.request for one in asked.asked])
        results = await self._results(request, tickets)
        decisions = self._engine.read_decisions(asked, [result.scores for result in results])
        return JSONResponse(body.response(decisions, results))

    async def _results(self, request: Request, tickets: Sequence[Ticket]) -> list[Result]:
        """Return the results of tickets.

        Raises:
            Refused: the client has disconnected, or see `Ticket.stream`.
        """

        async def results() -> list[Result]:
            return [await ticket.result() for ticket in tickets]

        try:
            return await while_connected(results(), request)
        finally:
            for ticket in tickets:
                ticket.cancelled = True

    async def _whole(
        self, request: Request, body: Common, tickets: Sequence[Ticket], form: Form, head: Any
    ) -> dict[str, Any]:
        results = await self._results(request, tickets)
        pairs = list(zip(tickets, results, strict=True))
        choices = [
            form.choice(number, result, self._logprobs(form, ticket)) for number, (ticket, result) in enumerate(pairs)
        ]
        answer = {**head, "object": form.whole, "choices": choices, "usage": usage(body.task, results)}
        if body.aspd.statistics:
            answer["aspd"] = [self._extension(form, *pair) for pair in pairs]
        return answer

    # Streams.

    async def _stream(self, body: Common, tickets: Sequence[Ticket], form: Form, head: Any) -> Chunks:
        """Yield the chunks of all answers to a request as they are decoded; the last one may be an error."""
        head = head | {"object": form.part}
        extra: dict[str, Any] = {"usage": None} if body.with_usage else {}
        make_deltas = branch_deltas if body.aspd.stream == "branches" else text_deltas
        results: dict[int, Result] = {}
        tokens = [0] * len(tickets)

        async def numbered(number: int, ticket: Ticket) -> AsyncGenerator[tuple[int, list[Event]], None]:
            async for events in ticket.stream():
                yield number, events

        try:
            yield [
                {**head, "choices": [choice], **extra}
                for number in range(len(tickets))
                for choice in form.opening(number)
            ]
            async with aclosing(merged([numbered(*pair) for pair in enumerate(tickets)])) as news:
                async for number, events in news:
                    result = events[-1].result
                    tokens[number] += sum(len(event.token_ids) for event in events if event.kind == "token")
                    choices = [choice for delta in make_deltas(events) for choice in form.delta(number, delta)]
                    if result is not None:
                        results[number], tokens[number] = result, result.stats.content_tokens
                        choices += form.closing(number, result, self._logprobs(form, tickets[number]))
                    if body.with_growing_usage:
                        prompts = sum(len(ticket.request.prompt) for ticket in tickets[:: body.task.choices])
                        extra = {"usage": token_usage(prompts, sum(tokens))}
                    chunks = [{**head, "choices": [choice], **extra} for choice in choices]
                    if result is not None and body.aspd.statistics:
                        chunks[-1]["aspd"] = self._extension(form, tickets[number], result)
                    if chunks:
                        yield chunks
            if body.with_usage:
                finished = [results[number] for number in range(len(tickets))]
                yield [{**head, "choices": [], "usage": usage(body.task, finished)}]
        except Refused as refused:
            yield [refused.body]
        except Exception:
            log.exception("the stream of answer %s", head["id"])
            yield [engine_error().body]
        finally:
            for ticket in tickets:
                ticket.cancelled = True

    def _logprobs(self, form: Form, ticket: Ticket) -> Any:
        if ticket.request.alternatives is None or ticket.logprobs is None:
            return None
        prompt = len(ticket.request.prompt) if ticket.request.echo else 0
        tokens = [token.first(ticket.request.alternatives) for token in ticket.logprobs]
        return form.logprobs(tokens, self._engine.lm.codec.text, prompt)

    def _extension(self, form: Form, ticket: Ticket, result: Result) -> dict[str, Any]:
        """Return the statistics of an answer, and with log probabilities of a JSON answer those of its values."""
        found = statistics(result, programs_compiled() - ticket.programs)
        if ticket.logprobs is None:
            return found
        find = form.values if isinstance(form, ToolChat) else request_values
        values = find(ticket.request, result, ticket.logprobs, self._engine.lm.codec.text)
        return found if values is None else found | {"values": [value.to_json() for value in values]}
