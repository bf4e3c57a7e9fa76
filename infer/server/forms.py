"""Response formats of OpenAI's chat completions, with or without calls of tools, and completions."""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any, TypeAlias
from urllib.parse import quote

from fastapi.responses import JSONResponse, Response, StreamingResponse

from aspd_jax.structure import to_json
from aspd_jax.tokens import TextCodec
from infer.answers.answer import Result, TokenLogprob, Value
from infer.answers.values import answer_values, request_values
from infer.request import Request
from infer.server.deltas import Delta
from infer.server.messages import Common, Task
from infer.server.tool_calls import CallReader, Piece, ToolCalls

MAX_NAMES = 1000  # characters of the ignored keywords that a header names
SAFE = "/#[]~!$&'()*+;=:@?"  # characters of a name that stand for themselves; the comma separates names
# A stream of lists of chunks that are sent together; an answer is a whole completion or a stream.
Chunks: TypeAlias = AsyncGenerator[list[dict[str, Any]], None]
Answer: TypeAlias = dict[str, Any] | Chunks
LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # other ends of lines are always escaped in JSON


def usage(task: Task, results: Sequence[Result]) -> dict[str, Any]:
    """Return OpenAI's usage object, with the accepted and the rejected tokens of a prediction.

    Args:
        task: the request.
        results: its results, those of the answers to one prompt after each other.
    """
    prompt = sum(result.stats.prompt_tokens for result in results[:: task.choices])
    cached = sum(result.stats.reused_tokens for result in results[:: task.choices])
    generated = sum(result.stats.content_tokens for result in results)
    details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": cached}}
    if task.predicted is not None:
        drafted = sum(result.stats.drafted_tokens for result in results)
        accepted = sum(result.stats.accepted_tokens for result in results)
        tokens = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        details["completion_tokens_details"] = tokens
    return token_usage(prompt, generated) | details


def token_usage(prompt: int, generated: int) -> dict[str, int]:
    """Return numbers of tokens under OpenAI's names."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def response_usage(prompt: int, cached: int, generated: int) -> dict[str, Any]:
    """Return numbers of tokens under the names of OpenAI's responses; `cached`: reused ones of the prompt."""
    return {
        "input_tokens": prompt, "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": cached},
        "output_tokens": generated, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }  # fmt: skip


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


def reply(body: Common, answer: Answer) -> Response:
    """Return the HTTP response of an answer: JSON, or a stream that ends with `[DONE]` unless it failed."""
    response = JSONResponse(answer) if isinstance(answer, dict) else stream(answer, data, "data: [DONE]\n\n")
    return name_ignored(response, body)


def name_ignored(response: Response, body: Common) -> Response:
    """Return a response whose header `X-Aspd-Ignored` names the keywords of schemas that the answer need not follow."""
    if names := [quote(name, safe=SAFE) for name in body.ignored]:
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


def chunk(number: int, new: dict[str, Any], delta: Delta | None = None) -> dict[str, Any]:
    """Return a choice of a chunk of a chat completion, with the place of `delta`, from which it is made."""
    place = {} if delta is None or delta.place is None else {"aspd": delta.place}
    return {"index": number, "delta": new | place, "finish_reason": None}


class Chat:
    """Format of chat completions.

    Attributes:
        prefix: prefix of the identifiers of answers.
        whole: value of `object` in a whole answer.
        part: value of `object` in a chunk.
    """

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"index": number, "message": message, "finish_reason": finish(result), "logprobs": logprobs}

    def opening(self, number: int) -> list[dict[str, Any]]:
        return [chunk(number, {"role": "assistant", "content": ""})]

    def delta(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        return [chunk(number, {"content": delta.text}, delta)]

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


class ToolChat(Chat):
    """Format of chat completions with `tool_calls`.

    Attributes:
        calls: the calls that an answer may have.
    """

    def __init__(self, calls: ToolCalls) -> None:
        self.calls = calls
        self._readers = defaultdict[int, CallReader](calls.reader)

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        reader = self.calls.reader()
        text, called = reader.read_whole(result.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if called:
            message |= {"content": text or None, "tool_calls": [_call(*one) for one in called]}
        reason = finish_reason(reader, result)
        return {"index": number, "message": message, "finish_reason": reason, "logprobs": logprobs}

    def delta(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        pieces = self._readers[number].read(delta.text)
        if delta.place is not None and not delta.text:
            return super().delta(number, delta)
        return [chunk(number, _part(piece), delta) for piece in pieces]

    def closing(self, number: int, result: Result, logprobs: Any) -> list[dict[str, Any]]:
        reader = self._readers[number]
        rest = [chunk(number, _part(piece)) for piece in reader.read("", final=True)]
        reason = finish_reason(reader, result)
        return [*rest, {"index": number, "delta": {}, "finish_reason": reason, "logprobs": logprobs}]

    def values(
        self, request: Request, result: Result, tokens: Sequence[TokenLogprob], codec: TextCodec
    ) -> list[Value] | None:
        """Return the values of the arguments of all calls; their pointers lead to them in the message."""
        (_, called), values, at = self.calls.reader().read_whole(result.text), list[Value](), 0
        schemas = {function.name: function.arguments.schema for function in self.calls.functions}
        if not called:
            return request_values(request, result, tokens, codec)
        for call, (name, arguments) in enumerate(called):
            place = ("tool_calls", str(call), "function", "arguments")
            if request.template is not None:  # of one call
                return request_values(request, result, tokens, codec, place)
            if arguments:
                at = result.text.index(arguments, at)
                values += answer_values(result.text, tokens, schemas.get(name, True), at, place)
                at += len(arguments)
        return values


def finish_reason(reader: CallReader, result: Result) -> str:
    """Return OpenAI's finish reason of an answer that may have calls."""
    reason = finish(result)
    return "tool_calls" if reason == "stop" and reader.count and reader.complete == reader.count else reason


def _call(name: str, arguments: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _part(piece: Piece) -> dict[str, Any]:
    """Return the delta of a piece in OpenAI's form."""
    if piece.kind == "text":
        return {"content": piece.text}
    call = _call(piece.text) if piece.kind == "call" else {"function": {"arguments": piece.text}}
    return {"tool_calls": [{"index": piece.call, **call}]}


class Text:
    """Format of completions; its attributes and methods are those of `Chat`.

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


Form: TypeAlias = Chat | Text


def text_offsets(codec: TextCodec, ids: Sequence[int], start: int) -> list[int]:
    """Return the offset of the text of each token; tokens that form one character share its offset."""
    stream, offsets = codec.stream(), []
    for token in ids:
        offsets.append(start)
        start += len(stream.decode([token]))
    return offsets
