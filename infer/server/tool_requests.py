"""Tools in requests: functions, the choice of calls, calls of earlier answers, and results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StrictBool, model_validator

from infer.server.neutral import FAST, FUNCTION_TOOL, PART, TOOL_CALL, Neutral, Strict, fault, spell
from infer.server.tool_calls import Function, ToolChoice

MAX_TOOLS = 512
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionFields(Strict):
    """A function in OpenAI's form."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: StrictBool = False

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if (kind := self.parameters.get("type") or "object") != "object":
            raise fault(f"expected the schema of an object, got the type {spell(kind)}", "parameters")
        return self

    @property
    def function(self) -> Function:
        """Return the function."""
        return Function(self.name, self.description, self.parameters, self.strict)


class Tool(Strict):
    """A tool, which is a function."""

    neutral: ClassVar = FUNCTION_TOOL
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise fault(f"expected 'function', got {spell(kind)}", "type")
        return data


class ChatTool(Tool):
    """A tool of chat completions."""

    function: FunctionFields


class FlatTool(Tool, FunctionFields):
    """A tool of responses."""


class FunctionName(Strict):
    """The name of a function."""

    name: str


class ChatToolName(Strict):
    """The choice of one function in chat completions."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.function.name


class FlatToolName(FunctionName):
    """The choice of one function in responses."""

    type: Literal["function"]


ToolMode = Literal["none", "auto", "required"]


def choice_of(tools: Sequence[Function], choice: str | ChatToolName | FlatToolName | None, parallel: bool) -> Any:
    """Return the `ToolChoice` of a request; None: its answers have no calls.

    Raises:
        PydanticCustomError: two functions have one name, or the choice is none of the functions.
    """
    names = [tool.name for tool in tools]
    if repeated := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise fault(f"expected functions with different names, got {repeated!r} twice", "tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise fault("expected tools beside it, got none", "tool_choice")
        return None
    if not isinstance(choice, str) and choice is not None:
        if choice.name not in names:
            raise fault(f"expected the name of one of the tools, got {spell(choice.name)}", "tool_choice")
        return ToolChoice("required", choice.name, False)
    if choice == "none":
        return None
    return ToolChoice("required" if choice == "required" else "auto", "", parallel)


class CalledFunction(Strict):
    """The function of a call, and its arguments as JSON text, which may be cut off."""

    name: str
    arguments: str = ""


class ToolCall(Strict):
    """A call in an earlier answer."""

    neutral: ClassVar = TOOL_CALL
    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """Return the call in the form of `aspd_jax.tool_format.tool_conversation`."""
        return self.model_dump()


class CallItem(CalledFunction):
    """A call among the input items of responses and decisions. The argument of a custom tool is its `input`."""

    neutral: ClassVar = {
        "id": Neutral(kinds=(str,)), "namespace": Neutral(kinds=(str,)),
        "status": Neutral(("completed", "incomplete", "in_progress")),
    }  # fmt: skip
    type: Literal["function_call", "custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _input_is_an_argument(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("type") != "custom_tool_call" or "input" not in data:
            return data
        kept = {name: value for name, value in data.items() if name != "input"}
        return kept | {"arguments": json.dumps({"input": data["input"]}, ensure_ascii=False)}

    @property
    def plain(self) -> dict[str, Any]:
        """Return the call in the form of `aspd_jax.tool_format.tool_conversation`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class OutputPart(Strict):
    """A part of a result; only text is supported."""

    neutral: ClassVar = PART
    type: Literal["input_text", "output_text", "text"]
    text: str


class OutputItem(Strict):
    """A result among the input items of responses and decisions."""

    neutral: ClassVar = CallItem.neutral
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | Annotated[list[OutputPart], FAST]

    @property
    def plain(self) -> dict[str, Any]:
        """Return the message in the form of `aspd_jax.tool_format.tool_conversation`."""
        text = self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)
        return {"role": "tool", "content": text, "tool_call_id": self.call_id}


def check_results(messages: Sequence[dict[str, Any]], places: Sequence[str], field: str) -> None:
    """Check that results of tools follow the answers whose calls they answer.

    Args:
        messages: messages in the form of the chat template.
        places: places of the messages in the request.
        field: field of the id of a call.

    Raises:
        PydanticCustomError: a result answers no call, or a call has no result.
    """
    open_calls: list[str] = []
    known: set[str] = set()
    for message, place in zip(messages, places, strict=True):
        if message["role"] == "tool":
            id = message["tool_call_id"]
            if id not in open_calls:
                expected = f"expected the id of a call of the answer before, got {spell(id)}"
                raise fault(
                    f"{expected}, which has its result already" if id in known else expected, f"{place}.{field}"
                )
            open_calls.remove(id)
            continue
        if open_calls:
            raise fault(f"expected a result of the call {spell(open_calls[0])}, got another message", place)
        open_calls = [call["id"] for call in message.get("tool_calls", ())]
        known |= set(open_calls)
        if len(set(open_calls)) < len(open_calls):
            raise fault("expected calls with different ids, got equal ones", place)
    if open_calls:
        raise fault(f"expected a result of the call {spell(open_calls[0])} at the end, got none", places[-1])
