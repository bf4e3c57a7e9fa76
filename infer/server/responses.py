"""OpenAI's `/v1/responses`: its requests, and chat completions in its format. Responses are not stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from functools import cached_property
from itertools import accumulate, count
from typing import Annotated, Any, ClassVar, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import Discriminator, Field, Tag

from infer.server.forms import Answer, Chunks, data, name_ignored, response_usage, stream
from infer.server.messages import (
    Conversation,
    JsonObject,
    Limit,
    Message,
    NamedSchema,
    PlainText,
    Task,
    TopLogprobs,
    joined,
    schema_of,
)
from infer.server.neutral import FAST, REQUEST, Neutral, Strict
from infer.server.tool_requests import (
    MAX_TOOLS,
    CallItem,
    FlatTool,
    FlatToolName,
    OutputItem,
    ToolMode,
    choice_of,
)

NOT_STORED = "responses are not stored; send the whole conversation as input"
KINDS = {
    "function_call": "call", "custom_tool_call": "call",
    "function_call_output": "output", "custom_tool_call_output": "output",
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


class FlatSchema(NamedSchema):
    """A JSON schema for structured output, on the same level as its name."""

    type: Literal["json_schema"]


class TextSettings(Strict):
    """Format of the text."""

    neutral: ClassVar = {"verbosity": REQUEST["verbosity"]}
    format: Annotated[PlainText | JsonObject | FlatSchema, Field(discriminator="type")] = PlainText(type="text")


def kind_of_item(item: Any) -> str:
    """Return the kind of an input item: `call`, `output` or `said`."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return KINDS.get(kind if isinstance(kind, str) else "", "said")


def conversation(items: str | Sequence[Message | CallItem | OutputItem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of input items, and the place of each; calls join the answer before them."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}], ["input"]
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for number, item in enumerate(items):
        if not isinstance(item, CallItem):
            messages.append(item.plain)
            places.append(f"input[{number}]")
            continue
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
            places.append(f"input[{number}]")
        messages[-1].setdefault("tool_calls", []).append(item.plain)
        messages[-1].pop("token_ids", None)
    return messages, places


InputItem = Annotated[
    Annotated[Message, Tag("said")] | Annotated[CallItem, Tag("call")] | Annotated[OutputItem, Tag("output")],
    Discriminator(kind_of_item),
]


class ResponsesRequest(Conversation):
    """Body of `POST /v1/responses`."""

    neutral = Conversation.neutral | {
        "background": Neutral((False,), reason="responses are not stored"),
        "context_management": Neutral(([],)),
        "conversation": Neutral(reason=NOT_STORED),
        "max_completion_tokens": Neutral(reason="the field is max_output_tokens"),
        "max_tokens": Neutral(reason="the field is max_output_tokens"),
        "messages": Neutral(reason="the field is input"),
        "metadata": Neutral(),
        "n": Neutral((1,)),
        "previous_response_id": Neutral(reason=NOT_STORED),
        "prompt": Neutral(reason="the fields are input and instructions"),
        "reasoning": Neutral(kinds=(dict,)),
        "response_format": Neutral(reason="the field is text.format"),
        "truncation": Neutral(("disabled",), reason="prompts are not truncated"),
    }
    schema_place, format_field, id_field = "tools[{}].parameters", "text.format", "call_id"
    input: str | Annotated[list[InputItem], Field(min_length=1), FAST]
    instructions: str | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolMode | FlatToolName | None = None
    max_output_tokens: Limit | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    text: TextSettings = TextSettings()
    top_logprobs: TopLogprobs | None = None
    include: Annotated[
        list[
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
        ],
        FAST,
    ] = Field(default_factory=list)

    @property
    def turns(self) -> tuple[list[dict[str, Any]], list[str]]:
        """See `Conversation`."""
        return conversation(self.input)

    @cached_property
    def task(self) -> Task:
        """See `Common`."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        functions, (schema, approximate) = [tool.function for tool in self.tools], schema_of(self.text.format)
        return Task(
            prompts=[joined([*first, *self.turns[0]])],
            limit=self.max_output_tokens,
            grammar={} if schema is None else {"json_schema": schema},
            approximate=approximate,
            alternatives=self.top_logprobs or 0 if _LOGPROBS in self.include else None,
            functions=functions,
            calling=choice_of(functions, self.tool_choice, self.parallel_tool_calls),
            variables=self.chat_template_kwargs,
        )

    @property
    def with_usage(self) -> bool:
        """See `Common`: all streams of this endpoint end with their usage."""
        return True


class Translation:
    """Translation of a chat completion to the events of a response: items open with their first delta, one at a time.

    Args:
        body: the request.
        head: mapping with `id`, `created` and `model` of the chat completion.
    """

    def __init__(self, body: ResponsesRequest, head: dict[str, Any]) -> None:
        self._body, self._events, self._number = body, count(), head["id"].rpartition("-")[2]
        self._output: list[dict[str, Any]] = []
        self._text: str | None = None  # of the message, once it is open
        self._calls: list[dict[str, Any]] = []
        self._open = False  # whether the last item is open
        form = body.text.format.model_dump(by_alias=True)
        choice = body.tool_choice or "auto"
        self._base = {
            "id": f"resp_{self._number}", "object": "response", "created_at": head["created"], "model": head["model"],
            "background": False, "completed_at": None, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "max_tool_calls": None,
            "metadata": body.metadata, "output": [], "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "service_tier": "default",
            "status": "in_progress", "store": False, "temperature": body.temperature, "text": {"format": form},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools], "top_logprobs": body.task.alternatives or 0,
            "top_p": body.top_p, "truncation": "disabled", "usage": None,
        }  # fmt: skip

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the first events."""
        yield self._event("created", response=self._base)
        yield self._event("in_progress", response=self._base)
        if self._body.task.calling is None:
            yield from self._open_message()

    def delta(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a delta, or of the whole message, of the chat completion."""
        place = {name: delta[name] for name in ("aspd",) if name in delta}
        if (new := delta.get("content")) or (place and new is not None):
            if self._text is None:
                yield from self._open_message()
            self._text = f"{self._text}{new}"
            yield self._event("output_text.delta", **self._place, delta=new, logprobs=[], **place)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._close("completed", None)
                self._calls.append({"id": call["id"], "function": dict(call["function"])})
                yield from self._add(self._call("in_progress"))
                continue
            new = call["function"]["arguments"]
            self._calls[-1]["function"]["arguments"] += new
            yield self._event("function_call_arguments.delta", **self._item_place, delta=new, **place)

    def end(self, finish: str, logprobs: Any, usage: dict[str, Any], more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the last events; the very last one has the response.

        Args:
            finish, logprobs, usage: those of the chat completion.
            more: further fields of the response.
        """
        if not self._output:
            yield from self._open_message()
        cut = finish == "length"
        status = "incomplete" if cut else "completed"
        yield from self._close(status, logprobs)
        if self._calls and self._text is not None and logprobs is not None:  # those of the text are known only now
            self._output[0] = self._message("completed", [self._part(self._text, self._text_logprobs(logprobs))])
        cached = usage.get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
        response = self._base | {
            "status": status, "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()), "output": self._output,
            "usage": response_usage(usage["prompt_tokens"], cached, usage["completion_tokens"]),
        }  # fmt: skip
        yield self._event(status, response=response | more)

    def failure(self, error: dict[str, Any]) -> dict[str, Any]:
        """Return the last event of a failed answer."""
        code = "server_error" if error["code"] is None else error["code"]
        failed = {"status": "failed", "error": {"code": code, "message": error["message"]}}
        return self._event("failed", response=self._base | failed)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event with the next number."""
        return {"type": f"response.{kind}", "sequence_number": next(self._events), **fields}

    @property
    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    @property
    def _place(self) -> dict[str, Any]:
        return self._item_place | {"content_index": 0}

    def _text_logprobs(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Return the log probabilities of the text; the tokens after it are those of the calls."""
        tokens, size = logprobs["content"], len((self._text or "").encode())
        starts = accumulate((len(token["bytes"]) for token in tokens), initial=0)
        return {"content": [token for token, start in zip(tokens, starts, strict=False) if start < size]}

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": f"msg_{self._number}", "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    @staticmethod
    def _part(text: str, logprobs: Any) -> dict[str, Any]:
        """Return the only part of a message."""
        tokens = [] if logprobs is None else logprobs["content"]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}

    def _call(self, status: str) -> dict[str, Any]:
        """Return the item of the last call."""
        call = self._calls[-1]
        return {
            "id": f"fc_{self._number}{len(self._calls) - 1}", "type": "function_call", "status": status,
            "call_id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"],
        }  # fmt: skip

    def _add(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._output.append(item)
        self._open = True
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=item)

    def _open_message(self) -> Iterator[dict[str, Any]]:
        self._text = ""
        yield from self._add(self._message("in_progress", []))
        yield self._event("content_part.added", **self._place, part=self._part("", None))

    def _close(self, status: str, logprobs: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of the end of the last item, if it is open."""
        if not self._open:
            return
        self._open = False
        if self._calls:
            item = self._call(status)
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **self._item_place, **named)
        else:
            part = self._part(self._text or "", logprobs)
            item = self._message(status, [part])
            yield self._event("output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
            yield self._event("content_part.done", **self._place, part=part)
        self._output[-1] = item
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)


def reply_response(body: ResponsesRequest, answer: Answer) -> Response:
    """Return the HTTP response for a chat completion: JSON or a stream of events."""
    if isinstance(answer, dict):
        return name_ignored(JSONResponse(respond(body, answer)), body)
    events = respond_streaming(body, answer)
    return name_ignored(stream(events, lambda event: f"event: {event['type']}\n{data(event)}"), body)


def respond(body: ResponsesRequest, completion: dict[str, Any]) -> dict[str, Any]:
    """Translate a whole chat completion to a response, that of the last event."""
    (choice,) = completion["choices"]
    translation = Translation(body, completion)
    more = {name: completion[name] for name in ("aspd",) if name in completion}
    events = [
        *translation.begin(),
        *translation.delta(choice["message"]),
        *translation.end(choice["finish_reason"], choice["logprobs"], completion["usage"], more),
    ]
    response: dict[str, Any] = events[-1]["response"]
    return response


async def respond_streaming(body: ResponsesRequest, batches: Chunks) -> Chunks:
    """Yield the events of a response.

    Args:
        body: the request.
        batches: lists of chunks of a chat completion; the last chunk has its usage.
    """
    translation: Translation | None = None
    finish, logprobs = "", None
    usage: dict[str, Any] = {}
    statistics: dict[str, Any] = {}
    async with aclosing(batches):
        async for batch in batches:
            events: list[dict[str, Any]] = []
            for chunk in batch:
                if translation is None:
                    translation = Translation(body, chunk)
                    events += translation.begin()
                if "error" in chunk:
                    yield [*events, translation.failure(chunk["error"])]
                    return
                usage = chunk.get("usage") or usage
                statistics |= {name: chunk[name] for name in ("aspd",) if name in chunk}
                for choice in chunk["choices"]:
                    finish, logprobs = choice["finish_reason"] or finish, choice.get("logprobs") or logprobs
                    events += translation.delta(choice["delta"])
            if events:
                yield events
    assert translation is not None, "a stream begins with a chunk"
    yield list(translation.end(finish, logprobs, usage, statistics))
