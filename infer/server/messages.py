"""What clients send, checked: OpenAI's chat completions and completions, and what this server adds to them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BeforeValidator, Field, StrictBool, model_validator

from infer.answers.logprobs import MOST_ALTERNATIVES
from infer.request import Mode, SamplingParams
from infer.server.config import ServerConfig
from infer.server.neutral import MESSAGE, PART, REQUEST, Neutral, Strict, fault


def _whole(value: Any) -> Any:
    """A number such as 5.0, as some clients write integers, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole), pydantic.Strict()]  # neither "5" nor true
Float = Annotated[float, pydantic.Strict()]
Temperature = Annotated[Float, Field(ge=0, le=2)]
Share = Annotated[Float, Field(gt=0, le=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TopLogprobs = Annotated[Int, Field(ge=0, le=MOST_ALTERNATIVES)]
Limit = Annotated[Int, Field(ge=1, lt=1 << 31)]


class PlainText(Strict):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Strict):
    """JSON mode: any object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A schema as OpenAI's clients send it; it is always kept to, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class JsonSchema(Strict):
    """Structured outputs."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


def schema_of(form: PlainText | JsonObject | JsonSchema | None) -> dict[str, Any] | None:
    """The JSON schema that a format asks for."""
    if isinstance(form, JsonSchema):
        return form.json_schema.schema_
    return {"type": "object"} if isinstance(form, JsonObject) else None


class Aspd(Strict):
    """What this server adds.

    Attributes:
        mode: `adaptive`: the model decides when to fork; `serial`: it never does.
        stream: `text`: deltas in reading order; `branches`: as they come, with block and branch numbers.
        statistics: send what the answer cost, and its structure, with its end.
        branch_format: as `response_format`, of the text of every branch.
        content: the text of the answer, which serial mode then decodes as if it had chosen it: what it costs.
    """

    mode: Mode = "adaptive"
    stream: Literal["text", "branches"] = "text"
    statistics: StrictBool = False
    branch_format: ResponseFormat | None = None
    content: Annotated[str, Field(min_length=1)] | None = None


PART_KINDS = {
    "image_url": "image", "input_image": "image", "image": "image", "input_audio": "audio", "audio_url": "audio",
    "file": "file", "input_file": "file", "video_url": "video", "refusal": "refusal",
}  # fmt: skip


class Part(Strict):
    """A part of a message: text is all this server reads."""

    neutral = PART
    type: Literal["text", "input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind in PART_KINDS:
            raise fault(f"{PART_KINDS[kind]} parts are not supported")
        return data


class Message(Strict):
    """A message of a conversation."""

    neutral = MESSAGE
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_no_tools(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") in ("tool", "function"):
            raise fault(f"{data['role']} messages are not supported")
        return data

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise fault("expected a string or a list of parts, got null", "content")
        return self

    @property
    def plain(self) -> dict[str, str]:
        """As the chat template takes it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Strict):
    """See OpenAI; `continuous_usage_stats`, which is vLLM's, sends the usage so far with every chunk."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Common(Strict):
    """Fields of all kinds of requests. Penalties must be 0; `repetition_penalty` is what there is."""

    neutral: ClassVar = {**REQUEST, "top_k": Neutral((-1,))}
    model: str
    temperature: Temperature | None = 1.0
    top_p: Share | None = 1.0
    top_k: Annotated[Int, Field(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[Float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Float, Field(gt=0, le=10)] = 1.0
    frequency_penalty: Annotated[Float, Field(ge=0, le=0)] | None = 0.0
    presence_penalty: Annotated[Float, Field(ge=0, le=0)] | None = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    seed: Annotated[Int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    aspd: Aspd = Aspd()

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("needs stream: true", "stream_options")
        return self

    @model_validator(mode="after")
    def _content_in_serial_mode(self) -> Self:
        if self.aspd.content and (self.aspd.mode != "serial" or self.stop or self.answer_schema):
            raise fault("content needs mode: serial, and neither stop nor response_format beside it", "aspd")
        return self

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """Tokens that the answer may have, as a client counts them: those of its text."""

    @property
    @abstractmethod
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer has to follow."""

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Likeliest tokens to show beside each; None: no log probabilities are wanted."""

    @property
    def with_growing_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def choices(self) -> int:
        """Answers to the request."""
        return 1

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, config: ServerConfig, choice: int) -> SamplingParams:
        """Of one of the answers; each has its own random stream. Without `aspd.content`, which has to be encoded."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=config.max_new_tokens,
            max_content_tokens=min(self.limit or config.max_new_tokens, config.max_new_tokens),
            stop=tuple(stop),
            seed=None if self.seed is None else (self.seed + choice) % (1 << 32),
            json_schema=self.answer_schema,
            branch_schema=schema_of(self.aspd.branch_format),
        )


class Completion(Common):
    """Fields of both kinds of completions."""

    max_tokens: Limit | None = None
    n: Annotated[Int, Field(ge=1)] | None = 1
    response_format: ResponseFormat | None = None

    @property
    def limit(self) -> int | None:
        """As in `Common`."""
        return self.max_tokens

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """As in `Common`."""
        return schema_of(self.response_format)

    @property
    def choices(self) -> int:
        """As in `Common`."""
        return self.n or 1


class ChatRequest(Completion):
    """`POST /v1/chat/completions`."""

    neutral = Common.neutral | {
        "add_generation_prompt": Neutral((True,)),
        "add_special_tokens": Neutral((False,)),
        "continue_final_message": Neutral((False,)),
        "echo": Neutral((False,)),
        "top_logprobs": Neutral((0,)),
    }
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: StrictBool | None = False
    top_logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _alternatives_of_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise fault("needs logprobs: true", "top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        """As in `Common`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """As in `Common`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Completion):
    """`POST /v1/completions`."""

    neutral = Common.neutral | {
        "add_special_tokens": Neutral((True,)),
        "logprobs": Neutral((False,)),
        "suffix": Neutral(("",), reason="text between a prompt and a suffix is not supported"),
    }
    prompt: (
        str | list[Annotated[Int, Field(ge=0, lt=1 << 31)]] | Annotated[list[str], Field(min_length=1, max_length=1)]
    )
    logprobs: TopLogprobs | None = None
    echo: Literal[False] | None = False

    @property
    def alternatives(self) -> int | None:
        """As in `Common`."""
        return self.logprobs

    @property
    def text(self) -> Any:
        """The prompt, as the engine takes it."""
        if isinstance(self.prompt, list) and len(self.prompt) == 1 and isinstance(self.prompt[0], str):
            return self.prompt[0]
        return self.prompt


class LoadAdapter(Strict):
    """`POST /v1/load_lora_adapter`, as vLLM has it; the path is within the folder that the server was given."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]


class UnloadAdapter(Strict):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
