"""How answers look to clients of OpenAI's two interfaces."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

from fastapi.responses import JSONResponse, Response, StreamingResponse

from aspd_jax.structure import to_json
from aspd_jax.tokens import TextCodec
from infer.answers.answer import Result
from infer.answers.logprobs import TokenLogprob
from infer.server.deltas import Delta

# What is sent at a time of a stream; a whole completion, or its chunks.
Chunks: TypeAlias = AsyncGenerator[list[dict[str, Any]], None]
Answer: TypeAlias = dict[str, Any] | Chunks


def usage(results: Sequence[Result], answers: int) -> dict[str, Any]:
    """Return the tokens of the prompts, each of which has `answers` results, and of the texts of all results."""
    prompt = sum(result.stats.prompt_tokens for result in results[::answers])
    cached = sum(result.stats.reused_tokens for result in results[::answers])
    generated = sum(result.stats.content_tokens for result in results)
    return token_usage(prompt, generated) | {"prompt_tokens_details": {"cached_tokens": cached}}


def token_usage(prompt: int, generated: int) -> dict[str, int]:
    """Numbers of tokens, under OpenAI's names."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def statistics(result: Result, compiled: int) -> dict[str, Any]:
    """What an answer cost, with the programs that were compiled meanwhile, and its structure."""
    return {
        "statistics": result.stats.to_json() | {"programs_compiled": compiled},
        "structure": to_json(result.structure),
        "token_ids": result.token_ids,
    }


def finish(result: Result) -> str:
    """In OpenAI's words."""
    return "length" if result.finish_reason == "length" else "stop"


def reply(answer: Answer) -> Response:
    """Return the reply that is a completion, whole or as a stream that ends with `[DONE]` unless it failed."""
    return JSONResponse(answer) if isinstance(answer, dict) else stream(answer, data, "data: [DONE]\n\n")


def stream(batches: Chunks, spell: Callable[[dict[str, Any]], str], end: str = "") -> Response:
    """Return a stream of server-sent events.

    Args:
        batches: what is sent; the last one may be an error.
        spell: spells each as an event.
        end: what follows, unless there was an error.
    """

    async def events() -> AsyncIterator[str]:
        failed = False
        async with aclosing(batches):  # a client that goes away ends what is done for it
            async for batch in batches:
                failed |= any("error" in value for value in batch)
                yield "".join(map(spell, batch))  # in one piece: each costs a write
        if end and not failed:
            yield end

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def data(value: dict[str, Any]) -> str:
    """Spell a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


class Form(Protocol):
    """How answers of one of the two interfaces look."""

    prefix: str
    whole: str
    part: str

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]: ...

    def opening(self, number: int) -> list[dict[str, Any]]: ...

    def delta(self, number: int, delta: Delta) -> dict[str, Any]: ...

    def closing(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]: ...

    def logprobs(self, found: Sequence[TokenLogprob], codec: TextCodec, prompt: int) -> Any: ...


class Chat:
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"index": number, "message": message, "finish_reason": finish(result), "logprobs": logprobs}

    def opening(self, number: int) -> list[dict[str, Any]]:
        return [{"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def delta(self, number: int, delta: Delta) -> dict[str, Any]:
        place = {} if delta.place is None else {"aspd": delta.place}
        return {"index": number, "delta": {"content": delta.text, **place}, "finish_reason": None}

    def closing(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        return {"index": number, "delta": {}, "finish_reason": finish(result), "logprobs": logprobs}

    def logprobs(self, found: Sequence[TokenLogprob], codec: TextCodec, prompt: int) -> Any:
        def one(text: bytes, logprob: float | None) -> dict[str, Any]:
            return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text)}

        content = []
        for token in found:
            values = [value for _, value in token.top]
            top = [one(text, value) for text, value in zip(token.top_texts, values, strict=True)]
            content.append(one(token.text, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


class Text:
    """Args: prompts: texts that answers begin with, if any do; answers: of each prompt."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, prompts: Sequence[str], answers: int) -> None:
        self._prompts, self._answers = prompts, answers

    def _echo(self, number: int) -> str:
        return self._prompts[number // self._answers] if self._prompts else ""

    def choice(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        text = self._echo(number) + result.text
        return {"index": number, "text": text, "finish_reason": finish(result), "logprobs": logprobs}

    def opening(self, number: int) -> list[dict[str, Any]]:
        return [self.delta(number, Delta(self._echo(number)))] if self._prompts else []

    def delta(self, number: int, delta: Delta) -> dict[str, Any]:
        place = {} if delta.place is None else {"aspd": delta.place}
        return {"index": number, "text": delta.text, "finish_reason": None, "logprobs": None, **place}

    def closing(self, number: int, result: Result, logprobs: Any) -> dict[str, Any]:
        return {"index": number, "text": "", "finish_reason": finish(result), "logprobs": logprobs}

    def logprobs(self, found: Sequence[TokenLogprob], codec: TextCodec, prompt: int) -> Any:
        def text(id: int) -> str:
            return codec.decode([id]) or codec.spell([id])

        def top(of: TokenLogprob) -> dict[str, float] | None:
            if of.logprob is None:
                return None
            # The token itself is among them, and of several with one text the likeliest counts.
            own = of.top and (of.token, of.logprob) not in of.top
            pairs = [*of.top, *([(of.token, of.logprob)] if own else [])]
            return {text(id): value for id, value in reversed(pairs)}

        ids = [of.token for of in found]
        offsets = text_offsets(codec, ids[:prompt], 0)
        offsets += text_offsets(codec, ids[prompt:], len(codec.decode(ids[:prompt])))
        return {
            "tokens": list(map(text, ids)),
            "token_logprobs": [of.logprob for of in found],
            "top_logprobs": list(map(top, found)),
            "text_offset": offsets,
        }


def text_offsets(codec: TextCodec, ids: Sequence[int], start: int) -> list[int]:
    """Return where the text of each token begins; those of one character begin where it does."""
    stream, offsets = codec.stream(), []
    for number in range(len(ids)):
        offsets.append(start + len(stream.text))
        stream.extend(ids[: number + 1])
    return offsets
