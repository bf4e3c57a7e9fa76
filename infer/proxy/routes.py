"""HTTP application of the proxy: chat completions and responses in the server's format."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from aspd_jax.chat import encode_history, message_texts
from aspd_jax.errors import RequestError
from aspd_jax.layout import Titles
from aspd_jax.structure import canonical, to_json
from aspd_jax.template import Hole, Template
from aspd_jax.tokens import Codec
from aspd_jax.tool_format import uses_tools
from infer.answers.events import Event, StopFilter
from infer.proxy.answering import Proxied, exhaust, tagged_events
from infer.proxy.exact_upstream import ExactAnswering
from infer.proxy.filling_upstream import check_template, template_events
from infer.proxy.listing import list_events
from infer.proxy.upstream import Upstream, UpstreamConfig, UpstreamError
from infer.request import PARAMETERS, ListMode, SamplingParams
from infer.server.deltas import branch_deltas, text_deltas
from infer.server.forms import Answer, Chat, Chunks, reply
from infer.server.guard import Guard, while_connected
from infer.server.messages import ChatRequest, Common, Conversation
from infer.server.refusals import INVALID, Refused, add_refusals
from infer.server.responses import ResponsesRequest, reply_response


def make_app(proxy: Proxy) -> FastAPI:
    """Create the application of a proxy."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await proxy.upstream.close()

    app = FastAPI(title="aspd proxy", docs_url=None, redoc_url=None, lifespan=life)
    app.add_middleware(Guard)
    add_refusals(app)
    app.post("/v1/chat/completions", response_model=None)(proxy.chat)
    app.post("/v1/responses", response_model=None)(proxy.respond)
    app.get("/v1/models")(proxy.models)
    app.get("/v1/models/{name:path}")(proxy.model)
    app.get("/health")(proxy.health)
    return app


class Proxy:
    """Routes of a proxy.

    Args:
        config: configuration of the upstream.
        tokenizer: tokenizer of the upstream's checkpoint, with its chat template and special tokens.
        end_ids: ids of the tokens that end an answer.
        name: name of the model in requests.
        max_new_tokens: default and maximum tokens of an answer.
        titles: form of the titles.
        forks: whether the checkpoint has the special tokens; without them, lists, fields and templates have branches.
        lists: how lists of a checkpoint without the special tokens are decoded in adaptive mode.

    Attributes:
        upstream: client of the upstream.
    """

    def __init__(
        self,
        config: UpstreamConfig,
        tokenizer: Any,
        end_ids: tuple[int, ...],
        name: str,
        max_new_tokens: int,
        titles: Titles = "names",
        forks: bool = True,
        lists: ListMode = "parallel",
    ) -> None:
        codec = self._codec = Codec(tokenizer, titles=titles)
        tags = codec.special.ids if forks else ()
        self.upstream = Upstream(config, [str(tokenizer.convert_ids_to_tokens(end)) for end in end_ids], tags)
        self._exact = ExactAnswering(codec.text, end_ids)
        self._tokenizer, self._forks, self._lists = tokenizer, forks, lists
        self._name, self._max_new_tokens, self._started = name, max_new_tokens, int(time.time())

    async def health(self) -> dict[str, str]:
        """Return that the proxy runs; the upstream is not checked."""
        return {"status": "ready"}

    async def models(self) -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [await self.model(self._name)]}

    async def model(self, name: str) -> dict[str, Any]:
        """Return the model by its name."""
        if name != self._name:
            message = f"unknown model {name!r}; available: {self._name!r}"
            raise Refused(404, message, INVALID, "model_not_found", "model")
        return {"id": self._name, "object": "model", "created": self._started, "owned_by": "aspd-proxy"}

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a request for OpenAI's chat completions."""
        return reply(body, await self._answer(request, body))

    async def respond(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a request for OpenAI's responses."""
        return reply_response(body, await self._answer(request, body))

    async def _answer(self, request: Request, body: Conversation) -> Answer:
        await self.model(body.model)
        _check_support(body)
        with _refusals():
            answer, events = await asyncio.to_thread(self._read, body)
        events = _until_stop(answer, events)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._name}
        if body.stream:
            return self._stream(body, events, answer, head | {"object": "chat.completion.chunk"})
        with _refusals():
            await while_connected(exhaust(events), request)
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": answer.usage}
        return whole | ({"aspd": [self._statistics(answer)]} if body.aspd.statistics else {})

    def _read(self, body: Conversation) -> tuple[Proxied, AsyncGenerator[Event, None]]:
        """Return the answer to a request, and its events.

        Raises:
            Refused: the messages cannot be encoded.
            RequestError: the schema or the template cannot be filled.
        """
        (messages,) = body.task.prompts
        prompt = self._encode(messages, body.task.variables)
        values = {name: value for name, value in body.sampling_values().items() if PARAMETERS[name].proxy is not None}
        fields = body.aspd.fields or "serial"
        sampling = SamplingParams(**values, **body.constraint(), fields=fields, template=body.aspd.template)
        limit = min(body.task.limit or self._max_new_tokens, self._max_new_tokens)
        answer = Proxied(self.upstream, self._codec, prompt, limit, sampling)
        if fields == "exact":
            self._exact.check(sampling)
            return answer, self._exact.events(answer)
        in_order = bool(sampling.stop) or body.aspd.stream == "text"
        template = sampling.known_text
        if constrained := template is None and sampling.json_schema is not None:
            template, in_order = Template([Hole("", context="", schema=str(sampling.json_schema))]), True
        if template is None:
            adaptive = body.aspd.mode == "adaptive"
            if adaptive and not self._forks and (body.aspd.lists or self._lists) == "parallel":
                return answer, list_events(answer, message_texts(messages))
            return answer, tagged_events(answer, adaptive, in_order)
        check_template(answer, template)
        answer.prompt = [*prompt, *self._codec.text.encode_exactly(template.opening)]
        return answer, template_events(answer, template, in_order, constrained)

    def _encode(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise Refused(400, "messages: expected a last message of the user, got one of the assistant.")
        try:
            return encode_history(self._tokenizer, self._codec.text, messages, variables=variables)
        except Exception as error:  # such as a chat template that refuses the order of roles
            raise Refused(400, f"the prompt cannot be encoded: {error}") from None

    def _statistics(self, answer: Proxied) -> dict[str, Any]:
        return {"statistics": {"requests": answer.requests}, "structure": to_json(canonical(answer.items))}

    async def _stream(
        self, body: Common, events: AsyncGenerator[Event, None], answer: Proxied, head: dict[str, Any]
    ) -> Chunks:
        form, make_deltas = Chat(), branch_deltas if body.aspd.stream == "branches" else text_deltas
        yield [{**head, "choices": form.opening(0)}]
        try:
            with _refusals():
                async with aclosing(events):  # closing cancels the upstream's requests when the client disconnects
                    async for event in events:
                        if deltas := make_deltas([event]):
                            yield [{**head, "choices": form.delta(0, delta)} for delta in deltas]
        except Refused as refused:
            yield [refused.body]
            return
        last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": None}
        yield [{**head, "choices": [last]} | ({"aspd": self._statistics(answer)} if body.aspd.statistics else {})]
        if body.with_usage:
            yield [{**head, "choices": [], "usage": answer.usage}]


def _check_support(body: Conversation) -> None:
    """Check that a request needs nothing that the proxy does not have.

    Raises:
        Refused: it does; the message names the field.
    """
    values, task = body.sampling_values(), body.task
    for field, is_set in (
        ("tools", bool(task.functions)),
        ("tool_calls", uses_tools(task.prompts[0], ())),
        ("n", task.choices > 1),
        ("logprobs", task.alternatives is not None),
        ("structured_outputs", bool(set(task.grammar) - {"json_schema"})),
        *((name, values[name] != PARAMETERS[name].default) for name in values if PARAMETERS[name].proxy is None),
        ("ignore_eos", body.ignore_eos),
        ("prediction", task.predicted is not None),
        ("continue_final_message", task.continues),
        ("aspd.content", body.aspd.content is not None),
        ("stream_options.continuous_usage_stats", body.with_growing_usage),
    ):
        if is_set:
            raise Refused(400, f"{field}: not supported by the proxy", param=field)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise errors of an answer as `Refused`."""
    try:
        yield
    except UpstreamError as error:
        raise Refused(error.status, str(error), "upstream_error", error.code) from None
    except RequestError as error:
        raise Refused(400, str(error)) from None


async def _until_stop(answer: Proxied, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yield the events before the first stop string, and truncate the answer there."""
    stop_filter = StopFilter(answer.sampling.stop)
    async with aclosing(events):
        async for event in events:
            for passed in stop_filter.take([event], final=False):
                yield passed
            if stop_filter.matched:
                break
    for passed in stop_filter.take([], final=True):
        yield passed
    answer.end_before_stop()
