"""Request fields without an effect that clients send by default, and the values that are accepted for them.

Null means the default of any field. A value that would have an effect is refused with the name of its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

FAST: Any = Field(fail_fast=True)  # of a list: its first error is shown, and collecting half a million takes seconds


def fault(message: str, field: str = "") -> PydanticCustomError:
    """Return an error about `field` of the object that is validated, or about the object if `field` is empty."""
    return PydanticCustomError("request", "{message}", {"message": message, "field": field})


def spell(value: Any) -> str:
    """Return a value of a request as error messages show it."""
    if isinstance(value, list):
        return "a list" if value else "[]"
    if isinstance(value, dict):
        return "an object" if value else "{}"
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


class Neutral(NamedTuple):
    """Values of a field that have no effect.

    Attributes:
        values: accepted values.
        kinds: JSON types of which every value is accepted.
        reason: explanation for the error.
    """

    values: tuple[Any, ...] = ()
    kinds: tuple[type, ...] = ()
    reason: str = ""

    def accepts(self, value: Any) -> bool:
        """Return whether a value is accepted; true and 1 differ."""
        return type(value) in self.kinds or any(
            other == value and isinstance(other, bool) == isinstance(value, bool) for other in self.values
        )

    def refusal(self, value: Any) -> str:
        """Return the error message for a value that is not accepted."""
        expected = [*map(spell, self.values), *(_KINDS[kind] for kind in self.kinds), "null"]
        reason = f"{self.reason}; " if self.reason else ""
        return f"{reason}expected {' or '.join(expected)}, got {spell(value)}"


_KINDS: Mapping[type, str] = {str: "a string", dict: "an object", bool: "true or false", int: "an integer"}
_TOOLS = "tool calls are for chat completions and responses"
_LEGACY = "the field is tools"
_AUDIO = "only text is supported"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "default")

_ANY_TEXT = Neutral(kinds=(str,))
_ANY_OBJECT = Neutral(kinds=(dict,))
_EITHER = Neutral(kinds=(bool,))
_FALSE, _TRUE = Neutral((False,)), Neutral((True,))
_ZERO, _ONE = Neutral((0,)), Neutral((1,))
_NO_LIST, _NO_OBJECT = Neutral(([],)), Neutral(({},))

# Fields of all endpoints: OpenAI's, then those that clients of other servers send.
REQUEST: Mapping[str, Neutral] = {
    "tools": Neutral(([],), reason=_TOOLS),
    "tool_choice": Neutral(("none", "auto"), reason=_TOOLS),
    "parallel_tool_calls": _EITHER,
    "functions": Neutral(([],), reason=_LEGACY),
    "function_call": Neutral(("none", "auto"), reason="the field is tool_choice"),
    "max_tool_calls": Neutral(kinds=(int,)),
    "service_tier": Neutral(("auto", "default")),
    "reasoning_effort": Neutral(_EFFORTS),
    "verbosity": Neutral(("low", "medium", "high")),
    "prompt_cache_key": _ANY_TEXT,
    "prompt_cache_retention": _ANY_TEXT,
    "prompt_cache_options": _ANY_OBJECT,
    "client_metadata": _ANY_OBJECT,
    "safety_identifier": _ANY_TEXT,
    "user": _ANY_TEXT,
    "metadata": _ANY_OBJECT,
    "store": Neutral((False,), reason="answers are not stored"),
    "prediction": Neutral(reason="chat completions have it"),
    "modalities": Neutral((["text"], []), reason=_AUDIO),
    "audio": Neutral(reason=_AUDIO),
    "web_search_options": Neutral(reason="web search is not supported"),
    "moderation": Neutral(reason="moderation is not supported"),
    "request_id": _ANY_TEXT,
    "priority": _ZERO,
    "best_of": _ONE,
    "use_beam_search": _FALSE,
    "length_penalty": _ONE,
    "early_stopping": _FALSE,
    "skip_special_tokens": Neutral((True,), reason="special tokens are never part of the text"),
    "spaces_between_special_tokens": _EITHER,
    "include_stop_str_in_output": _FALSE,
    "no_stop_trim": _FALSE,
    "stop_token_ids": _NO_LIST,
    "allowed_token_ids": _NO_LIST,
    "bad_words": _NO_LIST,
    "logits_processors": _NO_LIST,
    "detokenize": _TRUE,
    "truncate_prompt_tokens": Neutral(reason="prompts are not truncated"),
    "prompt_logprobs": Neutral(reason="log probabilities of prompts are not supported"),
    "return_tokens_as_token_ids": _FALSE,
    "return_token_ids": _FALSE,
    "return_dict": _EITHER,
    "documents": _NO_LIST,
    "chat_template": Neutral(reason="the server's own template is used"),
    "mm_processor_kwargs": _NO_OBJECT,
    "vllm_xargs": _NO_OBJECT,
    "kv_transfer_params": _NO_OBJECT,
    "cache_salt": _ANY_TEXT,
    "include_reasoning": _EITHER,
    "separate_reasoning": _EITHER,
    "cache_prompt": _EITHER,
    "cache_control": _ANY_OBJECT,
    "typical_p": _ONE,
    "tfs_z": _ONE,
    "top_a": _ZERO,
    "mirostat": _ZERO,
    "repeat_penalty": Neutral((1,), reason="the field is repetition_penalty"),
    "provider": _NO_OBJECT,
    "transforms": _NO_LIST,
    "plugins": _NO_LIST,
    "extra_body": _NO_OBJECT,
}

# Fields of completions that vLLM has replaced.
GUIDED: Mapping[str, Neutral] = {
    f"guided_{name}": Neutral(reason=f"the field is structured_outputs.{name}")
    for name in ("json", "regex", "choice", "grammar")
}

# Fields of messages and of input items of `/v1/responses`: clients send whole answers back.
MESSAGE: Mapping[str, Neutral] = {
    "id": _ANY_TEXT,
    "type": Neutral(("message",)),
    "status": Neutral(("completed", "incomplete", "in_progress")),
    "phase": _ANY_TEXT,
    "name": _ANY_TEXT,
    "cache_control": _ANY_OBJECT,
    "provider_specific_fields": Neutral(({}, {"refusal": None})),
    "refusal": Neutral(("",)),
    "annotations": _NO_LIST,
    "tool_calls": Neutral(([],), reason="calls are items of type function_call"),
    "tool_call_id": Neutral(("",), reason="results of tools are items of type function_call_output"),
    "function_call": Neutral(reason="the field is tool_calls"),
    "audio": Neutral(reason=_AUDIO),
    "images": Neutral(([],), reason=_AUDIO),
    "reasoning": Neutral(("",), reason="thoughts are not part of a conversation"),
    "reasoning_content": Neutral(("",), reason="thoughts are not part of a conversation"),
    "reasoning_details": _NO_LIST,
    "thinking_blocks": _NO_LIST,
}

PART: Mapping[str, Neutral] = {
    "id": _ANY_TEXT,
    "cache_control": _ANY_OBJECT,
    "prompt_cache_breakpoint": _ANY_OBJECT,
    "annotations": _NO_LIST,
    "logprobs": Neutral(kinds=(list,)),
}

FUNCTION_TOOL: Mapping[str, Neutral] = {
    "cache_control": _ANY_OBJECT,
    "defer_loading": _FALSE,
}

TOOL_CALL: Mapping[str, Neutral] = {
    "index": Neutral(kinds=(int,)),
    "cache_control": _ANY_OBJECT,
    "provider_specific_fields": _NO_OBJECT,
}


class Strict(BaseModel):
    """A JSON object of a request. Unknown fields are refused, because a setting without effect misleads its user.

    Attributes:
        neutral: fields without an effect, and fields with further values that mean the default.
    """

    model_config = ConfigDict(extra="forbid")
    neutral: ClassVar[Mapping[str, Neutral]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        """Drop nulls and neutral values, and refuse unknown fields."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in data.items():
            neutral = cls.neutral.get(name)
            if value is None or (neutral is not None and neutral.accepts(value)):
                continue
            if name not in known:
                raise fault("unknown field" if neutral is None else neutral.refusal(value), name)
            kept[name] = value
        return kept
