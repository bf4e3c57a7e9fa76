"""Requests of clients: OpenAI's chat completions and completions, with the fields that this server adds."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BeforeValidator, Field, StrictBool, model_validator

from aspd_jax.errors import RequestError
from aspd_jax.json_schema import ReadSchema, read_schema
from infer.request import (
    BIASES,
    MAX_ALTERNATIVES,
    PARAMETERS,
    STRINGS,
    Fields,
    ListMode,
    Mode,
    Offer,
    Parameter,
    SamplingParams,
)
from infer.server.config import ServerConfig
from infer.server.neutral import FAST, GUIDED, MESSAGE, PART, REQUEST, Neutral, Strict, fault, spell
from infer.server.tool_calls import Function, ToolChoice
from infer.server.tool_requests import (
    MAX_TOOLS,
    ChatTool,
    ChatToolName,
    ToolCall,
    ToolMode,
    check_results,
    choice_of,
)

MAX_STOPS = 64  # stop strings; OpenAI allows 4, but evaluation harnesses send more


def _whole(value: Any) -> Any:
    """Return a number such as 5.0 as an integer, because some clients write integers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole), pydantic.Strict()]  # neither "5" nor true
Float = Annotated[float, pydantic.Strict()]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[Int, Field(ge=0, lt=1 << 31)]
Pattern = Annotated[str, Field(min_length=1)]  # a regular expression or a grammar
TokenIds = Annotated[list[TokenId], FAST]
TopLogprobs = Annotated[Int, Field(ge=0, le=MAX_ALTERNATIVES)]
Limit = Annotated[Int, Field(ge=1, lt=1 << 31)]


class PlainText(Strict):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Strict):
    """JSON mode: the answer is any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A schema in OpenAI's form. `strict: false` permits an approximation of the schema (`aspd_jax.json_schema`)."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class JsonSchema(Strict):
    """Structured outputs."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


def schema_of(form: Any) -> tuple[dict[str, Any] | None, bool]:
    """Return the JSON schema of a response format, None for plain text, and whether it may be approximated."""
    named = form.json_schema if isinstance(form, JsonSchema) else form
    if isinstance(named, NamedSchema):
        return named.schema_, named.strict is False
    return {"type": "object"} if isinstance(form, JsonObject) else None, False


class StructuredOutputs(Strict):
    """Constraint of an answer in vLLM's form: one of these fields.

    Attributes:
        json_: JSON schema, as text or as an object.
        json_object: whether the answer is any JSON object.
        regex: regular expression (Rust's syntax).
        choice: strings, one of which is the answer.
        grammar: Lark or GBNF grammar.
    """

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: StrictBool | None = None
    regex: Pattern | None = None
    choice: Annotated[list[str], Field(min_length=1), FAST] | None = None
    grammar: Pattern | None = None


class Aspd(Strict):
    """Fields of a request that this server adds.

    Attributes:
        mode: `adaptive`: the model decides when to fork; `serial`: the answer does not fork.
        stream: `text`: deltas in reading order; `branches`: every delta at once, with block and branch numbers.
        statistics: return the cost of the answer, its structure and its `token_ids`. A later request that sends these
            as `aspd.token_ids` of the message continues after the blocks of the answer.
        fields: how the fields of the response format's JSON schema are decoded: `parallel`; `serial`: one after the
            other; `exact`: the answer of `serial`, drafted in parallel. Default: the server's.
        lists: `parallel`: in adaptive mode, lists of a chat model without tags are decoded in parallel; `serial`: one
            item after the other. Default: the server's.
        template: literal text with holes `{name}`, which are filled in parallel (`aspd_jax.template.Template`); with
            `fields: exact`, as a draft of the text that is filled from left to right.
        content: text of the answer, which serial mode decodes as if the model had chosen it, to measure its cost.
    """

    mode: Mode = "adaptive"
    stream: Literal["text", "branches"] = "text"
    statistics: StrictBool = False
    fields: Fields | None = None
    lists: ListMode | None = None
    template: Annotated[str, Field(min_length=1)] | None = None
    content: Annotated[str, Field(min_length=1)] | None = None


PART_KINDS = {
    "image_url": "image", "input_image": "image", "image": "image", "input_audio": "audio", "audio_url": "audio",
    "file": "file", "input_file": "file", "video_url": "video",
}  # fmt: skip
MAX_DEPTH, MAX_VALUES, MAX_BYTES = 32, 10_000, 256 << 10  # OpenAI's limits of a part with JSON


class Part(Strict):
    """A part of a message: text, a refusal, or JSON, which is shown as compact text."""

    neutral = PART
    type: Literal["text", "input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind in PART_KINDS:
            raise fault(f"expected a text part, got one of kind {PART_KINDS[kind]}")
        if kind == "refusal" and "refusal" in data:
            return {name: data[name] for name in data if name != kind} | {"type": "text", "text": data[kind]}
        if kind == "input_json" and "data" in data:
            shown = {"type": "text", "text": _json_text(data["data"])}
            return {name: data[name] for name in data if name != "data"} | shown
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            raise fault(f"expected 'text', 'input_text' or 'output_text', got {spell(kind)}", "type")
        return data


def _json_text(data: Any) -> str:
    """Return the data of a part as text; OpenAI permits objects and lists of objects, and limits their size."""
    if not (isinstance(data, dict) or (isinstance(data, list) and all(isinstance(one, dict) for one in data))):
        raise fault(f"expected an object or a list of objects, got {spell(data)}", "data")
    depth, values, level = 0, 0, [data]
    while level and depth <= MAX_DEPTH and values <= MAX_VALUES:
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        depth, values = depth + bool(inner), values + len(level)
        level = [one for some in inner for one in some]
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if depth > MAX_DEPTH or values > MAX_VALUES or len(text.encode()) > MAX_BYTES:
        raise fault(f"expected at most {MAX_DEPTH} levels, {MAX_VALUES} values and {MAX_BYTES} bytes, got more", "data")
    return text


class Decoded(Strict):
    """Field of an assistant's message that this server adds.

    Attributes:
        token_ids: tokens of the answer as it was decoded, blocks included.
    """

    token_ids: TokenIds | None = None


class Message(Strict):
    """A message of a conversation."""

    neutral: ClassVar[Mapping[str, Neutral]] = MESSAGE
    roles: ClassVar[tuple[str, ...]] = ()  # roles of tools
    instead: ClassVar[str] = "results of tools are items of type function_call_output"
    aspd: Decoded = Decoded()
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], FAST]

    @model_validator(mode="before")
    @classmethod
    def _is_message(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if (role := data.get("role")) in ("tool", "function") and role not in cls.roles:
                raise fault(f"expected system, developer, user or assistant, got {role}; {cls.instead}")
            if isinstance(kind := data.get("type"), str) and kind != "message":
                raise fault(f"expected a message, got an item of type {spell(kind)}")
            if data.get("role") == "assistant" and data.get("content") is None:  # of a refusal, or of calls
                return {name: data[name] for name in data if name != "refusal"} | {"content": data.get("refusal") or ""}
        return data

    @model_validator(mode="after")
    def _was_decoded(self) -> Self:
        if self.aspd.token_ids is not None and self.role != "assistant":
            raise fault(f"token_ids: expected a message of the assistant, got one of {self.role}", "aspd")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """Return the message in the form of the chat template."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({} if self.aspd.token_ids is None else self.aspd.model_dump())


def joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with successive system messages as one, because some chat templates refuse a second."""
    result: list[dict[str, Any]] = []
    for message in messages:
        if result and result[-1]["role"] == message["role"] == "system":
            result[-1] = {**message, "content": f"{result[-1]['content']}\n\n{message['content']}"}
        else:
            result.append(message)
    return result


class ChatMessage(Message):
    """A message of chat completions, which may call tools or hold the result of a call."""

    neutral: ClassVar = {**MESSAGE, "tool_calls": Neutral(([],)), "tool_call_id": Neutral(("",))}
    roles = ("tool",)
    instead = "the role of results is tool"
    role: Literal["system", "developer", "user", "assistant", "tool"]  # type: ignore[assignment]
    tool_calls: Annotated[list[ToolCall], FAST] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_fields_of_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise fault(f"expected a message of the assistant, got one of {self.role}", "tool_calls")
        if self.tool_calls and self.aspd.token_ids is not None:
            raise fault("token_ids: expected none beside tool_calls, got some", "aspd")
        if (self.role == "tool") != (self.tool_call_id is not None):
            message = "a value is required" if self.role == "tool" else f"expected the role tool, got {self.role}"
            raise fault(message, "tool_call_id")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """Return the message in the form of the chat template."""
        calls = {"tool_calls": [call.plain for call in self.tool_calls]} if self.tool_calls else {}
        answers = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return super().plain | calls | answers


class Prediction(Strict):
    """A text that most of the answer equals."""

    type: Literal["content"]
    content: Annotated[str, Field(min_length=1)] | Annotated[list[Part], Field(min_length=1), FAST]

    @property
    def text(self) -> str | None:
        """Return the text; None: it is empty."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return "".join(parts) or None


class StreamOptions(Strict):
    """Options of a stream in OpenAI's form; `continuous_usage_stats` (vLLM) adds the usage so far to every chunk."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False
    continuous_usage_stats: StrictBool = False


def _sampling_fields() -> dict[str, Any]:
    """Return the type and the default of each field of a request that is a sampling parameter, by name."""
    offered = ((name, parameter, parameter.http) for name, parameter in PARAMETERS.items())
    return {name: _sampling_field(parameter, offer) for name, parameter, offer in offered if offer is not None}


def _sampling_field(parameter: Parameter, offer: Offer) -> tuple[Any, Any]:
    bounds = offer.bounds
    if parameter.kind == BIASES:
        kind: Any = dict[str, Annotated[Float, Field(**bounds.limits)]]
        return kind, Field(default_factory=dict, description=parameter.help)
    if parameter.kind == STRINGS:
        kind = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
    else:
        kind = Annotated[{int: Int, float: Float}[parameter.kind], Field(**bounds.limits)]
    if offer.nullable or offer.default is None:
        kind = kind | None
    return kind, Field(offer.default, description=parameter.help)


SamplingFields: Any = pydantic.create_model("SamplingFields", __base__=Strict, **_sampling_fields())


@dataclass(frozen=True)
class Task:
    """What a request asks for, in the form that all endpoints share.

    Attributes:
        prompts: texts, token ids, or conversations in the form of the chat template.
        limit: maximum tokens of the text of an answer; None: the limit of the server.
        grammar: constraint of the answer: a field of `SamplingParams` and its value; empty: none.
        approximate: whether the schema of the answer may be approximated.
        alternatives: number of likeliest tokens to list at each token; None: no log probabilities.
        choices: number of answers to each prompt.
        predicted: text that the answer may have; None: there is none.
        functions: functions that the model may call.
        calling: calls that an answer may or must have; None: none.
        variables: variables of the chat template.
        continues: whether an answer continues the last message.
        echo: whether an answer begins with its prompt.
    """

    prompts: list[Any]
    limit: int | None
    grammar: dict[str, Any]
    approximate: bool
    alternatives: int | None
    choices: int = 1
    predicted: str | None = None
    functions: Sequence[Function] = ()
    calling: ToolChoice | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    echo: bool = False


class Common(SamplingFields):
    """Fields of all kinds of requests, with the sampling parameters that HTTP offers."""

    neutral: ClassVar = {**REQUEST, "top_k": Neutral((-1,))}
    schema_place: ClassVar[str] = ""  # place of the schema of a function; `{}` is its number
    model: str
    ignore_eos: StrictBool = False
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    aspd: Aspd = Aspd()

    @model_validator(mode="before")
    @classmethod
    def _one_penalty(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("repeat_penalty") == data.get("repetition_penalty"):  # names of one
            return {name: data[name] for name in data if name != "repeat_penalty"}
        return data

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("expected none without stream: true, got one", "stream_options")
        task, own = self.task, self.aspd
        if own.content and (own.mode != "serial" or self.stop or task.grammar):
            raise fault("content: expected mode: serial, no stop and no response_format, got others", "aspd")
        fields, has_template = own.fields or "serial", own.template is not None
        has_fields = "json_schema" in task.grammar or task.functions
        if fields != "serial" and not has_fields and not (fields == "exact" and has_template):
            raise fault(f"fields: expected a schema, tools or (for exact) a template beside {fields}, got none", "aspd")
        if has_template and (task.grammar or own.content):
            raise fault("template: expected neither response_format nor content beside it, got one", "aspd")
        return self

    @property
    @abstractmethod
    def task(self) -> Task:
        """Return the request in the form that all endpoints share."""

    @property
    def with_growing_usage(self) -> bool:
        """Return whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def with_usage(self) -> bool:
        """Return whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_values(self, choice: int = 0) -> dict[str, Any]:
        """Return the sampling parameters that have a field of their name, by name.

        Args:
            choice: number of the answer, from 0; each answer has its own random streams.
        """
        values = {name: getattr(self, name) for name, parameter in PARAMETERS.items() if parameter.http is not None}
        seed = None if self.seed is None else (self.seed + choice) % (1 << 32)
        return values | {"seed": seed}

    @cached_property
    def answer_schema(self) -> ReadSchema | None:
        """Return the schema of the answer; None: it has none.

        Raises:
            RequestError: the schema is malformed or not supported.
        """
        if "json_schema" not in self.task.grammar:
            return None
        try:
            return read_schema(self.task.grammar["json_schema"], self.task.approximate)
        except RequestError as error:
            raise RequestError(f"json_schema: {error}") from None

    @property
    def ignored(self) -> list[str]:
        """Return the keywords that answers need not follow: the field of each schema, and a JSON pointer."""
        schemas = {} if self.answer_schema is None else {"json_schema": self.answer_schema}
        if self.task.calling is not None:
            schemas |= {self.schema_place.format(n): f.arguments for n, f in enumerate(self.task.functions)}
        return [f"{place}{pointer}" for place, read in schemas.items() for pointer in read.ignored]

    def constraint(self) -> dict[str, Any]:
        """Return the grammar of the answer, by its field of `SamplingParams`.

        Raises:
            RequestError: a schema is malformed or not supported.
        """
        return self.task.grammar if self.answer_schema is None else {"json_schema": self.answer_schema.text}

    def params(self, config: ServerConfig, choice: int) -> SamplingParams:
        """Return the parameters of an answer, without `aspd.content`, which has to be encoded.

        Args:
            config: limits of the server.
            choice: number of the answer, from 0.
        """
        limit = config.max_new_tokens if self.task.limit is None else min(self.task.limit, config.max_new_tokens)
        values = self.sampling_values(choice) | self.constraint()
        if self.ignore_eos:
            values["min_tokens"] = limit
        if "json_schema" in values:
            values["fields"] = self.aspd.fields or config.fields
        elif self.aspd.template is not None:
            values["fields"] = self.aspd.fields or "serial"
        return SamplingParams(
            max_new_tokens=config.max_new_tokens,
            max_content_tokens=limit,
            template=self.aspd.template,
            prediction=self.task.predicted,
            **values,
        )


class Conversation(Common):
    """Fields of requests for the next message of a conversation, which may call tools.

    Attributes:
        format_field: field of the response format, which is the only grammar that tools allow.
        id_field: field of the id of a call.
    """

    neutral: ClassVar = Common.neutral | {"tool_choice": Neutral(), "parallel_tool_calls": Neutral()}
    format_field: ClassVar[str]
    id_field: ClassVar[str]
    tool_choice: Any = None
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_idle_choice(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("tools"):
            return data
        idle = {"tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False)}  # they change nothing then
        return {
            name: value
            for name, value in data.items()
            if not (name in idle and isinstance(value, (str, bool)) and value in idle[name])
        }

    @property
    @abstractmethod
    def turns(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the messages in the form of the chat template, and the place of each in the request."""

    @model_validator(mode="after")
    def _calls_are_possible(self) -> Self:
        if self.task.calling is not None:
            none = "expected no tools beside it, or tool_choice: none, got tools"
            if self.aspd.content:
                raise fault(f"content: {none}", "aspd")
            if self.aspd.template is not None:
                raise fault(f"template: {none}", "aspd")
            if self.task.predicted is not None:
                raise fault(none, "prediction")
            if set(self.task.grammar) - {"json_schema"}:
                only = f"expected no constraint but {self.format_field} beside tools"
                raise fault(f"{only}, or tool_choice: none, got one", "tools")
        check_results(*self.turns, self.id_field)
        return self


class Completion(Common):
    """Fields of both kinds of completions."""

    neutral: ClassVar = {**Common.neutral, **GUIDED}
    max_tokens: Limit | None = None
    n: Annotated[Int, Field(ge=1)] | None = 1
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar(self) -> dict[str, Any]:
        """Return the constraint of the answer: a field of `SamplingParams` and its value; empty: none.

        Raises:
            PydanticCustomError: there are several.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        fields = {
            "response_format": ("json_schema", schema_of(self.response_format)[0]),
            "structured_outputs.json": ("json_schema", outputs.json_),
            "structured_outputs.json_object": ("json_schema", {"type": "object"} if outputs.json_object else None),
            "structured_outputs.regex": ("regex", outputs.regex),
            "structured_outputs.choice": ("choices", outputs.choice),
            "structured_outputs.grammar": ("grammar", outputs.grammar),
        }
        named = [name for name, (_, value) in fields.items() if value is not None]
        if len(named) > 1:
            raise fault(f"expected one of {' and '.join(named)}, got {len(named)}", named[-1].partition(".")[0])
        return dict(fields[name] for name in named)


class ChatRequest(Completion, Conversation):
    """`POST /v1/chat/completions`."""

    schema_place, format_field, id_field = "tools[{}].function.parameters", "response_format", "tool_call_id"
    neutral = {**GUIDED, **Conversation.neutral} | {
        "add_special_tokens": Neutral((False,)),
        "max_tokens": Neutral((-1,)),  # clients of local servers mean no limit
        "max_completion_tokens": Neutral((-1,)),
        "echo": Neutral((False,)),
        "top_logprobs": Neutral((0,)),
        "prediction": Neutral(),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1), FAST]
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolMode | ChatToolName | None = None
    continue_final_message: StrictBool = False
    add_generation_prompt: StrictBool = True
    max_completion_tokens: Limit | None = None
    logprobs: StrictBool | None = False
    top_logprobs: TopLogprobs | None = None
    prediction: Prediction | None = None

    @property
    def turns(self) -> tuple[list[dict[str, Any]], list[str]]:
        """See `Conversation`."""
        return [message.plain for message in self.messages], [f"messages[{n}]" for n in range(len(self.messages))]

    @cached_property
    def task(self) -> Task:
        """See `Common`."""
        functions = [tool.function.function for tool in self.tools]
        return Task(
            prompts=[joined(self.turns[0])],
            choices=self.n or 1,
            limit=self.max_completion_tokens or self.max_tokens,
            grammar=self.grammar,
            approximate=schema_of(self.response_format)[1],
            alternatives=(self.top_logprobs or 0) if self.logprobs else None,
            predicted=None if self.prediction is None else self.prediction.text,
            functions=functions,
            calling=choice_of(functions, self.tool_choice, self.parallel_tool_calls),
            variables=self.chat_template_kwargs,
            continues=self.continue_final_message,
        )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            role = self.messages[-1].role
            raise fault(f"expected a last message of the assistant, got one of {role}", "continue_final_message")
        if self.continue_final_message == self.add_generation_prompt:
            expected = str(not self.continue_final_message).lower()
            beside = str(self.continue_final_message).lower()
            message = f"expected {expected} beside continue_final_message: {beside}, got {beside}"
            raise fault(message, "add_generation_prompt")
        if self.top_logprobs is not None and not self.logprobs:
            raise fault("expected none without logprobs: true, got one", "top_logprobs")
        return self


class CompletionRequest(Completion):
    """`POST /v1/completions`."""

    neutral = Completion.neutral | {
        "add_special_tokens": Neutral((True,)),
        "chat_template_kwargs": Neutral(kinds=(dict,)),  # prompts have no template
        "logprobs": Neutral((False,)),
        "suffix": Neutral(("",), reason="text between a prompt and a suffix is not supported"),
    }
    prompt: str | TokenIds | Annotated[list[str], FAST] | Annotated[list[TokenIds], FAST]
    max_tokens: Annotated[Int, Field(ge=0, lt=1 << 31)] = 16
    logprobs: TopLogprobs | None = None
    echo: StrictBool = False
    return_tokens_as_token_ids: StrictBool = False

    @cached_property
    def task(self) -> Task:
        """See `Common`."""
        several = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return Task(
            prompts=list(self.prompt) if several else [self.prompt],
            choices=self.n or 1,
            limit=self.max_tokens,
            grammar=self.grammar,
            approximate=schema_of(self.response_format)[1],
            alternatives=self.logprobs,
            echo=self.echo,
        )


class UnloadAdapter(Strict):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapter(UnloadAdapter):
    """`POST /v1/load_lora_adapter` in vLLM's form; the path is relative to `--adapter-folder`."""

    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]
