"""What clients send, checked: OpenAI's chat completions and completions, and what this server adds to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from infer.answers.logprobs import MOST_ALTERNATIVES
from infer.request import Mode, SamplingParams
from infer.server.config import ServerConfig

Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(gt=0, le=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]


class Strict(BaseModel):
    """Unknown fields are refused, so that nobody believes in a setting that does nothing."""

    model_config = ConfigDict(extra="forbid")


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


class Part(Strict):
    """A part of a message: text is all this server reads."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As the chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Strict):
    """See OpenAI."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class Common(Strict):
    """Fields of both kinds of requests. Penalties must be 0; `repetition_penalty` is what there is."""

    model: str
    temperature: Temperature | None = 1.0
    top_p: Share | None = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    aspd: Aspd = Aspd()

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @model_validator(mode="after")
    def _content_in_serial_mode(self) -> Self:
        if self.aspd.content and (self.aspd.mode != "serial" or self.stop or self.response_format):
            raise ValueError("aspd.content needs aspd.mode: serial, and neither stop nor response_format")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have, as a client counts them: those of its text."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, config: ServerConfig, choice: int) -> SamplingParams:
        """Of one of the answers; each has its own random stream. Without `aspd.content`, which has to be encoded."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=config.max_new_tokens,
            max_content_tokens=min(self.limit or config.max_new_tokens, config.max_new_tokens),
            stop=self.stop_strings,
            seed=None if self.seed is None else (self.seed + choice) % (1 << 32),
            json_schema=schema_of(self.response_format),
            branch_schema=schema_of(self.aspd.branch_format),
        )


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: TopLogprobs | None = None
    store: StrictBool | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _alternatives_of_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        """As in `Common`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Likeliest tokens to show beside each; None: no log probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: (
        str | list[Annotated[int, Field(ge=0, lt=1 << 31)]] | Annotated[list[str], Field(min_length=1, max_length=1)]
    )
    logprobs: TopLogprobs | None = None
    echo: Literal[False] | None = False
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @property
    def alternatives(self) -> int | None:
        """As in `ChatRequest`."""
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


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """In OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
