"""Response formats of OpenAI's chat completions and completions."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote

from fastapi.responses import JSONResponse, Response, StreamingResponse

from aspd_jax.structure import to_json
from aspd_jax.tokens import TextCodec
from infer.answers.answer import Result, TokenLogprob, Value
from infer.answers.values import request_values
from infer.request import Request
from infer.server.deltas import Delta
from infer.server.messages import Common

MAX_NAMES = 1000  # characters of the ignored keywords that a header names
SAFE = "/#[]~!$&'()*+;=:@?"  # characters of a name that stand for themselves; the comma separates names
# A stream of lists of chunks that are sent together; an answer is a whole completion or a stream.
Chunks: TypeAlias = AsyncGenerator[list[dict[str, Any]], None]
Answer: TypeAlias = dict[str, Any] | Chunks
LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # other ends of lines are always escaped in JSON


def usage(results: Sequence[Result], answers: int, predicted: bool) -> dict[str, Any]:
    """Return OpenAI's usage object.

    Args:
        results: results, `answers` consecutive ones for each prompt.
        answers: number of answers per prompt.
        predicted: whether the request has a prediction: include its accepted and rejected tokens.
    """
    prompt = sum(result.stats.prompt_tokens for result in results[::answers])
    cached = sum(result.stats.reused_tokens for result in results[::answers])
    generated = sum(result.stats.content_tokens for result in results)
    details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": cached}}
    if predicted:
        drafted, accepted = (
            sum(getattr(r.stats, f"{name}_tokens") for r in results) for name in ("drafted", "accepted")
        )
        tokens = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        details["completion_tokens_details"] = tokens
    return token_usage(prompt, generated) | details


def token_usage(prompt: int, generated: int) -> dict[str, int]:
    """Return numbers of tokens under OpenAI's names."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def statistics(result: Result, compiled: int) -> dict[str, Any]:
    """Return the statistics and the structure of an answer.

    Args:
        compiled: number of programs that were compiled while it was decoded.
    """
    return {
        "statistics": result.stats.to_json() | {"programs_compiled": compiled},
        "structure": to_json(result.structure),
        "token_ids": result.token_ids,
    }


def finish(result: Result) -> str:
    """Return OpenAI's finish reason of a result."""
    return "length" if result.finish_reason == "length" else "stop"


def reply(answer: Answer) -> Response:
    """Return the HTTP response of an answer: JSON, or a stream that ends with `[DONE]` unless it failed."""
    return JSONResponse(answer) if isinstance(answer, dict) else stream(answer, data, "data: [DONE]\n\n")


async def name_ignored(response: Response, body: Common) -> Response:
    """Return a response whose header `X-Aspd-Ignored` names the keywords of schemas that the answer need not follow."""
    if not body.has_schemas:
        return response
    if names := [quote(name, safe=SAFE) for name in await asyncio.to_thread(body.ignored)]:
        ends = accumulate(len(name) + 2 for name in names)
        shown = [name for name, end in zip(names, ends, strict=True) if end <= MAX_NAMES]
        more = [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
        response.headers["X-Aspd-Ignored"] = ", ".join([*shown, *more])
    return response


def stream(batches: Chunks, spell: Callable[[dict[str, Any]], str], end: str = "") -> Response:
    """Return a stream of server-sent events.

    Args:
        batches: lists of chunks that are sent together; the last chunk may be an error.
        spell: formats a chunk as a server-sent event.
        end: text after the last chunk, unless it was an error.
    """

    async def events() -> AsyncIterator[str]:
        failed = False
        async with aclosing(batches):  # closing cancels the requests of a client that disconnects
            async for batch in batches:
                failed |= any("error" in value for value in batch)
                yield "".join(map(spell, batch))  # one write for all of them
        if end and not failed:
            yield end

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx sends each event at once
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def data(value: dict[str, Any]) -> str:
    """Format a value as a server-sent event.

    Characters that clients may take for the end of a line (`str.splitlines`) are escaped.
    """
    text = LINE_ENDS.sub(lambda found: json.dumps(found[0])[1:-1], json.dumps(value, ensure_ascii=False))
    return f"data: {text}\n\n"


class Form(Protocol):
    """Response format of an endpoint.

    Attributes:
        prefix: prefix of the identifiers of answers.
        whole: value of `object` in a whole answer.
        part: value of `object` in a chunk.
    """

    prefix: str
    whole: str
    part: str

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]: ...

    def opening(self, number: int) -> list[dict[str, Any]]: ...

    def delta(self, number: int, delta: Delta) -> list[dict[str, Any]]: ...

    def closing(self, number: int, result: Result, logprobs: Any) -> list[dict[str, Any]]: ...

    def logprobs(self, tokens: Sequence[TokenLogprob], codec: TextCodec, prompt: int) -> Any: ...

    def values(
        self, request: Request, result: Result, tokens: Sequence[TokenLogprob], codec: TextCodec
    ) -> list[Value] | None:
        """Return the values of an answer; None: it has none."""
        return request_values(request, result, tokens, codec)


class Chat(Form):
    """Format of chat completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"index": number, "message": message, "finish_reason": finish(result), "logprobs": logprobs}

    def opening(self, number: int) -> list[dict[str, Any]]:
        return [{"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def delta(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        place = {} if delta.place is None else {"aspd": delta.place}
        return [{"index": number, "delta": {"content": delta.text, **place}, "finish_reason": None}]

    def closing(self, number: int, result: Result, logprobs: Any) -> list[dict[str, Any]]:
        return [{"index": number, "delta": {}, "finish_reason": finish(result), "logprobs": logprobs}]

    def logprobs(self, tokens: Sequence[TokenLogprob], codec: TextCodec, prompt: int) -> Any:
        def entry(text: bytes, logprob: float | None) -> dict[str, Any]:
            return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text)}

        content = []
        for token in tokens:
            values = [value for _, value in token.top]
            top = [entry(text, value) for text, value in zip(token.top_texts, values, strict=True)]
            content.append(entry(token.text, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


class Text(Form):
    """Format of completions.

    Args:
        prompts: texts that the answers begin with (`echo`); empty: none.
        answers: number of answers per prompt.
        as_ids: whether log probabilities name tokens by id, as `token_id:5`, and not by text.
    """

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, prompts: Sequence[str], answers: int, as_ids: bool = False) -> None:
        self._prompts, self._answers, self._as_ids = prompts, answers, as_ids

    def _echo(self, number: int) -> str:
        return self._prompts[number // self._answers] if self._prompts else ""

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        text = self._echo(number) + result.text
        return {"index": number, "text": text, "finish_reason": finish(result), "logprobs": logprobs}

    def opening(self, number: int) -> list[dict[str, Any]]:
        return self.delta(number, Delta(self._echo(number))) if self._prompts else []

    def delta(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        place = {} if delta.place is None else {"aspd": delta.place}
        return [{"index": number, "text": delta.text, "finish_reason": None, "logprobs": None, **place}]

    def closing(self, number: int, result: Result, logprobs: Any) -> list[dict[str, Any]]:
        return [{"index": number, "text": "", "finish_reason": finish(result), "logprobs": logprobs}]

    def logprobs(self, tokens: Sequence[TokenLogprob], codec: TextCodec, prompt: int) -> Any:
        def text(id: int) -> str:
            return f"token_id:{id}" if self._as_ids else codec.shown([id])

        def top(token: TokenLogprob) -> dict[str, float] | None:
            if token.logprob is None:
                return None
            # The sampled token is included. Of several tokens with the same text, the likeliest counts.
            sampled_missing = token.top and (token.token, token.logprob) not in token.top
            pairs = [*token.top, *([(token.token, token.logprob)] if sampled_missing else [])]
            return {text(id): value for id, value in reversed(pairs)}

        ids = [token.token for token in tokens]
        offsets = text_offsets(codec, ids[:prompt], 0)
        offsets += text_offsets(codec, ids[prompt:], len(codec.decode(ids[:prompt])))
        return {
            "tokens": list(map(text, ids)),
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": list(map(top, tokens)),
            "text_offset": offsets,
        }


def text_offsets(codec: TextCodec, ids: Sequence[int], start: int) -> list[int]:
    """Return the offset of the text of each token; tokens that form one character share its offset."""
    stream, offsets = codec.stream(), []
    for token in ids:
        offsets.append(start)
        start += len(stream.decode([token]))
    return offsets
