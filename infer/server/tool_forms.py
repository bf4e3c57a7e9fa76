"""Format of chat completions whose answers may call tools."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from aspd_jax.tokens import TextCodec
from infer.answers.answer import Result, TokenLogprob, Value
from infer.answers.values import answer_values, request_values
from infer.request import Request
from infer.server.deltas import Delta
from infer.server.forms import Chat, chunk, finish
from infer.server.tool_calls import CallReader, Piece, ToolCalls


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
