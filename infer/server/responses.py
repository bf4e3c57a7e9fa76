"""OpenAI's `/v1/responses`: its requests, and chat completions in its format. Responses are not stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import Field

from infer.server.forms import Answer, Chunks, data, stream
from infer.server.messages import Common, JsonObject, Limit, Message, NamedSchema, PlainText, TopLogprobs
from infer.server.neutral import REQUEST, Neutral, Strict

NOT_STORED = "responses are not stored; send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"


class FlatSchema(NamedSchema):
    """A JSON schema for structured output, on the same level as its name."""

    type: Literal["json_schema"]


class TextSettings(Strict):
    """Format of the text."""

    neutral: ClassVar = {"verbosity": REQUEST["verbosity"]}
    format: Annotated[PlainText | JsonObject | FlatSchema, Field(discriminator="type")] = PlainText(type="text")


class ResponsesRequest(Common):
    """Body of `POST /v1/responses`."""

    neutral = Common.neutral | {
        "background": Neutral((False,), reason="responses are not stored"),
        "context_management": Neutral(([],)),
        "conversation": Neutral(reason=NOT_STORED),
        "max_completion_tokens": Neutral(reason="the field is max_output_tokens"),
        "max_tokens": Neutral(reason="the field is max_output_tokens"),
        "messages": Neutral(reason="the field is input"),
        "n": Neutral((1,)),
        "previous_response_id": Neutral(reason=NOT_STORED),
        "prompt": Neutral(reason="the fields are input and instructions"),
        "reasoning": Neutral(kinds=(dict,)),
        "response_format": Neutral(reason="the field is text.format"),
        "truncation": Neutral(("disabled",), reason="prompts are not truncated"),
    }
    input: str | Annotated[list[Message], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    text: TextSettings = TextSettings()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    top_logprobs: TopLogprobs | None = None
    include: list[
        Literal[
            "message.output_text.logprobs",
            # Accepted without effect: responses have none of these.
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "message.input_image.image_url",
            "reasoning.encrypted_content",
            "web_search_call.action.sources",
            "web_search_call.results",
        ]
    ] = Field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Conversation in the form of the chat template."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return [*first, *(message.plain for message in self.input)]

    @property
    def template_variables(self) -> dict[str, Any]:
        """See `Common`."""
        return self.chat_template_kwargs

    @property
    def limit(self) -> int | None:
        """See `Common`."""
        return self.max_output_tokens

    @property
    def grammar(self) -> dict[str, Any]:
        """See `Common`."""
        form = self.text.format
        if form.type == "text":
            return {}
        return {"json_schema": form.schema_ if isinstance(form, FlatSchema) else {"type": "object"}}

    @property
    def alternatives(self) -> int | None:
        """See `Common`."""
        return self.top_logprobs or 0 if _LOGPROBS in self.include else None

    @property
    def with_usage(self) -> bool:
        """See `Common`: all streams of this endpoint end with their usage."""
        return True


class Translation:
    """Translation of a chat completion to a response.

    Args:
        body: the request.
        head: mapping with `id`, `created` and `model` of the chat completion.
    """

    def __init__(self, body: ResponsesRequest, head: dict[str, Any]) -> None:
        number = head["id"].rpartition("-")[2]
        self._item_id = f"msg_{number}"
        form = body.text.format.model_dump(by_alias=True)
        self._base = {
            "id": f"resp_{number}", "object": "response", "created_at": head["created"], "model": head["model"],
            "background": False, "completed_at": None, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "max_tool_calls": None,
            "metadata": {}, "output": [], "parallel_tool_calls": True, "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None}, "service_tier": "default", "status": "in_progress",
            "store": False, "temperature": body.temperature, "text": {"format": form},
            "tool_choice": "auto", "tools": [], "top_logprobs": body.alternatives or 0, "top_p": body.top_p,
            "truncation": "disabled", "usage": None,
        }  # fmt: skip

    @property
    def begun(self) -> dict[str, Any]:
        """Response before its first text."""
        return dict(self._base)

    def ended(self, text: str, finish: str, logprobs: Any, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the finished response.

        Args:
            text: text of the chat completion.
            finish: finish reason of the chat completion.
            logprobs: log probabilities of the chat completion; None: none.
            usage: usage of the chat completion.
        """
        cut = finish == "length"
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        return self._base | {
            "status": status, "incomplete_details": details, "completed_at": None if cut else int(time.time()),
            "output": [self.item(status, [self.part(text, logprobs)])],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage.get("prompt_tokens_details", {"cached_tokens": 0}),
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """Return the response of a failed answer."""
        code = "server_error" if error["code"] is None else error["code"]
        return self._base | {"status": "failed", "error": {"code": code, "message": error["message"]}}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the only item of the output."""
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    @staticmethod
    def part(text: str, logprobs: Any) -> dict[str, Any]:
        """Return the only part of the item."""
        tokens = [] if logprobs is None else logprobs["content"]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}

    @property
    def place(self) -> dict[str, Any]:
        """Identifiers and indices of the item and the part."""
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}


def reply_response(body: ResponsesRequest, answer: Answer) -> Response:
    """Return the HTTP response for a chat completion: JSON or a stream of events."""
    if isinstance(answer, dict):
        return JSONResponse(respond(body, answer))
    return stream(respond_streaming(body, answer), lambda event: f"event: {event['type']}\n{data(event)}")


def respond(body: ResponsesRequest, completion: dict[str, Any]) -> dict[str, Any]:
    """Translate a whole chat completion to a response."""
    (choice,) = completion["choices"]
    translation = Translation(body, completion)
    text, finish = choice["message"]["content"], choice["finish_reason"]
    response = translation.ended(text, finish, choice["logprobs"], completion["usage"])
    return response | {name: completion[name] for name in ("aspd",) if name in completion}


async def respond_streaming(body: ResponsesRequest, batches: Chunks) -> Chunks:
    """Yield the events of a response.

    Args:
        body: the request.
        batches: lists of chunks of a chat completion; the last chunk has its usage.
    """
    numbers = count()

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

    translation: Translation | None = None
    text, finish, logprobs = "", "", None
    usage: dict[str, Any] = {}
    statistics: dict[str, Any] = {}

    def begin(begun: Translation) -> Iterator[dict[str, Any]]:
        yield event("created", response=begun.begun)
        yield event("in_progress", response=begun.begun)
        yield event("output_item.added", output_index=0, item=begun.item("in_progress", []))
        yield event("content_part.added", **begun.place, part=begun.part("", None))

    def end(ended: Translation) -> Iterator[dict[str, Any]]:
        response = ended.ended(text, finish, logprobs, usage) | statistics
        (item,) = response["output"]
        (part,) = item["content"]
        yield event("output_text.done", **ended.place, text=text, logprobs=part["logprobs"])
        yield event("content_part.done", **ended.place, part=part)
        yield event("output_item.done", output_index=0, item=item)
        yield event(response["status"], response=response)

    async with aclosing(batches):
        async for batch in batches:
            events: list[dict[str, Any]] = []
            for chunk in batch:
                if "error" in chunk:
                    assert translation is not None, "a stream begins with a chunk"
                    events.append(event("failed", response=translation.failed(chunk["error"])))
                    yield events
                    return
                if translation is None:
                    translation = Translation(body, chunk)
                    events += begin(translation)
                usage = chunk.get("usage") or usage
                statistics |= {name: chunk[name] for name in ("aspd",) if name in chunk}
                for choice in chunk["choices"]:
                    finish, logprobs = choice["finish_reason"] or finish, choice.get("logprobs") or logprobs
                    delta = choice["delta"]
                    place = {name: delta[name] for name in ("aspd",) if name in delta}
                    if (new := delta.get("content")) or place:
                        text += new
                        events.append(event("output_text.delta", **translation.place, delta=new, logprobs=[], **place))
            if events:
                yield events
    assert translation is not None, "a stream begins with a chunk"
    yield list(end(translation))
