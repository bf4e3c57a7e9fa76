"""The proxy's HTTP side: chat completions with branches in the stream, as the server has them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from aspd_jax.chat import encode_history
from aspd_jax.structure import canonical, to_json
from aspd_jax.tokens import Codec
from infer.answers.events import Event, StopFilter
from infer.proxy.answering import Answering, Proxied, usage
from infer.proxy.upstream import Upstream, UpstreamConfig, UpstreamError
from infer.request import PARAMETERS, SamplingParams
from infer.server.deltas import Delta, branch_deltas, text_deltas
from infer.server.forms import Answer, Chunks, reply
from infer.server.guard import add_guard
from infer.server.messages import ChatRequest, Common
from infer.server.refusals import INVALID, Refused, add_refusals, error_body
from infer.server.responses import ResponsesRequest, reply_response

MAX_BYTES, BODY_SECONDS = 1 << 20, 20.0  # of a request, and for it


def make_app(config: UpstreamConfig, tokenizer: Any, end_ids: tuple[int, ...], name: str, most: int) -> FastAPI:
    """An application in front of an upstream.

    Args:
        tokenizer: of the checkpoint that the upstream serves, with its chat template and special tokens.
        end_ids: ids that end an answer.
        name: of the model, as clients ask for it.
        most: tokens of an answer for requests that ask for no number.
    """
    codec = Codec(tokenizer)
    upstream = Upstream(config)
    ends = [str(tokenizer.convert_ids_to_tokens(end)) for end in end_ids]
    proxy = _Proxy(Answering(upstream, codec, ends), codec, tokenizer, end_ids, name, most)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await upstream.close()

    app = FastAPI(title="aspd proxy", docs_url=None, redoc_url=None, lifespan=life)

    add_guard(app, MAX_BYTES, BODY_SECONDS)
    add_refusals(app)
    app.post("/v1/chat/completions", response_model=None)(proxy.chat)
    app.post("/v1/responses", response_model=None)(proxy.respond)
    app.get("/v1/models")(proxy.models)
    app.get("/v1/models/{name:path}")(proxy.model)
    app.get("/health")(proxy.health)
    return app


class _Proxy:
    def __init__(
        self, answering: Answering, codec: Codec, tokenizer: Any, end_ids: tuple[int, ...], name: str, most: int
    ) -> None:
        self._answering, self._codec, self._tokenizer, self._ends = answering, codec, tokenizer, end_ids
        self._name, self._most, self._started = name, most, int(time.time())

    async def health(self) -> dict[str, str]:
        """The proxy runs; whether the upstream does, a request will tell."""
        return {"status": "ready"}

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [await self.model(self._name)]}

    async def model(self, name: str) -> dict[str, Any]:
        """The model, by its name."""
        if name != self._name:
            raise Refused(
                404, f"there is no model {name!r} here, but {self._name!r}", INVALID, "model_not_found", "model"
            )
        return {"id": self._name, "object": "model", "created": self._started, "owned_by": "aspd"}

    async def chat(self, body: ChatRequest) -> Response:
        """OpenAI's chat completions."""
        return reply(await self._answer(body, [message.plain for message in body.messages]))

    async def respond(self, body: ResponsesRequest) -> Response:
        """OpenAI's responses."""
        return reply_response(body, await self._answer(body, body.messages))

    async def _answer(self, body: ChatRequest | ResponsesRequest, messages: list[dict[str, str]]) -> Answer:
        await self.model(body.model)
        values = body.sampling_values()
        for field, given in (
            ("n", body.choices > 1),
            ("logprobs", body.alternatives is not None),
            ("response_format", bool(body.grammar)),
            *((name, values[name] != PARAMETERS[name].default) for name in values if PARAMETERS[name].proxy is None),
            ("ignore_eos", body.ignore_eos),
            ("continue_final_message", isinstance(body, ChatRequest) and body.continue_final_message),
            ("aspd.branch_format", body.aspd.branch_format is not None),
            ("aspd.content", body.aspd.content is not None),
            ("stream_options.continuous_usage_stats", body.with_growing_usage),
        ):
            if given:
                raise Refused(400, f"{field}: the proxy does not have it", param=field)
        prompt = await asyncio.to_thread(self._encode, messages, body.chat_template_kwargs)
        forwarded = {name: value for name, value in values.items() if PARAMETERS[name].proxy is not None}
        sampling = SamplingParams(**forwarded)
        answer = Proxied()
        most, stop = min(body.limit or self._most, self._most), body.stop_strings
        in_order = bool(stop) or body.aspd.stream == "text"
        growing = self._answering.events(prompt, most, sampling, body.aspd.mode == "adaptive", answer, in_order)
        events = _until(growing, stop, answer)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._name}
        if body.stream:
            return self._stream(body, prompt, events, answer, head | {"object": "chat.completion.chunk"})
        try:
            async for _ in events:
                pass
        except UpstreamError as error:
            raise Refused(502, str(error), "upstream_error") from None
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage(prompt, answer, self._codec)}
        return whole | ({"aspd": [self._statistics(answer)]} if body.aspd.statistics else {})

    def _encode(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise Refused(400, "the last message is an answer; a prompt ends with a message of the user")
        try:
            (ids, *segments), answers = encode_history(
                self._tokenizer, self._codec.text, self._ends, messages, variables=variables
            )
        except Exception as error:  # such as a chat template that refuses the order of roles
            raise Refused(400, f"the prompt cannot be encoded: {error}") from None
        for said, after in zip(answers, segments, strict=True):
            ids = [*ids, *self._codec.text.encode(said), *after]
        return ids

    def _statistics(self, answer: Proxied) -> dict[str, Any]:
        return {"statistics": {"requests": answer.requests}, "structure": to_json(canonical(answer.items))}

    async def _stream(
        self,
        body: Common,
        prompt: list[int],
        events: AsyncGenerator[Event, None],
        answer: Proxied,
        head: dict[str, Any],
    ) -> Chunks:
        def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}

        deltas_of = branch_deltas if body.aspd.stream == "branches" else text_deltas
        yield [chunk({"role": "assistant", "content": ""})]
        try:
            async with aclosing(events):  # a client that goes away ends what the upstream does for it
                async for event in events:
                    if deltas := deltas_of([event]):
                        yield [chunk(_placed(delta)) for delta in deltas]
        except UpstreamError as error:
            yield [error_body(str(error), "upstream_error")]
            return
        last = chunk({}, answer.finish_reason)
        yield [last | ({"aspd": self._statistics(answer)} if body.aspd.statistics else {})]
        if body.with_usage:
            yield [{**head, "choices": [], "usage": usage(prompt, answer, self._codec)}]


async def _until(
    events: AsyncGenerator[Event, None], stop: Sequence[str], answer: Proxied
) -> AsyncGenerator[Event, None]:
    """Yield the events before the first stop string, and end the answer there."""
    passing = StopFilter(stop)
    async with aclosing(events):
        async for event in events:
            for one in passing.take([event], ended=False):
                yield one
            if passing.matched:
                break
    for one in passing.take([], ended=True):
        yield one
    answer.end_before(stop)


def _placed(delta: Delta) -> dict[str, Any]:
    return {"content": delta.text} | ({} if delta.place is None else {"aspd": delta.place})
