"""Formats of tool calls, read from chat templates, and conversations with tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aspd_jax.chat import encode_history
from aspd_jax.errors import ConversationError
from aspd_jax.tokens import Codec
from aspd_jax.tool_format import HERMES, ID, ToolFormat, read_tool_format, tool_conversation
from tests.aspd_jax.test_tokens import byte_level
from tests.conftest import shared
from tests.helpers import tool_templates as templates

TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [
    {"id": f"call_{n}", "type": "function", "function": {"name": "price", "arguments": f'{{"n": {n}}}'}} for n in (1, 2)
]
CONVERSATION = [
    {"role": "user", "content": "How much?"},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "content": "20", "tool_call_id": "call_1"},
    {"role": "tool", "content": "30", "tool_call_id": "call_2"},
]


def tokenizer_with(template: str) -> Any:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            templates.QWEN,
            ToolFormat(HERMES.begin, HERMES.middle, HERMES.between, HERMES.end),
        ),
        (
            templates.TEXT_ARGUMENTS,
            ToolFormat(HERMES.begin, HERMES.middle, HERMES.between, HERMES.end, text_arguments=True),
        ),
        (templates.LLAMA, ToolFormat('{"name": "', '", "parameters": ', None, "}")),
        (
            templates.MISTRAL,
            ToolFormat(
                '[CALLS] [{"name": "', '", "arguments": ', f', "id": "{ID}"}}, {{"name": "', f', "id": "{ID}"}}]',
                short_ids=True,
            ),
        ),
        (templates.PLAIN, HERMES),
    ],
)  # fmt: skip
def test_formats(template: str, expected: ToolFormat) -> None:
    assert read_tool_format(tokenizer_with(template)) == expected


@pytest.mark.parametrize("template", [templates.XML, templates.NO_RESULTS])
def test_formats_that_cannot_be_read(template: str) -> None:
    with pytest.raises(ConversationError, match="tools: expected a chat_template that writes calls"):
        read_tool_format(tokenizer_with(template))


def test_a_real_template() -> None:
    config = json.loads(shared("data", "tokenizers", "minimind_tokenizer_config.json").read_text())
    found = read_tool_format(tokenizer_with(config["chat_template"]))
    assert (found.begin, found.middle, found.between, found.end) == (
        HERMES.begin, HERMES.middle, HERMES.between, HERMES.end,
    )  # fmt: skip
    assert found.native


def rendered(template: str, messages: list[dict[str, Any]], tools: Any = ()) -> str:
    """Return the prompt of a conversation as the project encodes it."""
    tokenizer = tokenizer_with(template)
    codec = Codec(tokenizer)
    shown, given = tool_conversation(tokenizer, messages, tools)
    return str(tokenizer.decode(encode_history(tokenizer, codec.text, shown, tools=given)))


@pytest.mark.parametrize("template", [templates.QWEN, templates.TEXT_ARGUMENTS])
def test_the_prompt_is_that_of_the_template(template: str) -> None:
    """The prompt equals the rendering of `transformers`, with arguments in the form that the template takes."""
    tokenizer = tokenizer_with(template)
    objects = template == templates.QWEN
    given = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in CALLS
    ]
    messages = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": given if objects else CALLS}, *CONVERSATION[2:]]
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert rendered(template, CONVERSATION, TOOLS) == expected and '{"n": 2}' in expected
    assert rendered(template, CONVERSATION) != expected, "negative control"


def test_the_prompt_of_a_template_without_tools() -> None:
    text = rendered(templates.PLAIN, CONVERSATION, TOOLS)
    assert json.dumps(TOOLS[0]) in text.partition("How much?")[0]
    called = "".join(f'\n<tool_call>\n{{"name": "price", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in (1, 2))
    results = "\n".join(f"<tool_response>\n{n}\n</tool_response>" for n in (20, 30))
    assert f"assistant\nI look.{called}<|end|>\n<|s|>user\n{results}<|end|>\n<|s|>assistant\n" in text
    plain = [{"role": "system", "content": "Be brief."}, CONVERSATION[0]]
    assert tool_conversation(tokenizer_with(templates.PLAIN), plain, ()) == (plain, ())


def test_short_ids() -> None:
    one = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": CALLS[:1]}, CONVERSATION[2]]
    text = rendered(templates.MISTRAL, one, TOOLS)
    id = text.partition('"id": "')[2].partition('"')[0]
    assert len(id) == 9 and f"[RESULT]{id} 20[/RESULT]" in text


@pytest.mark.parametrize("template", [templates.QWEN, templates.PLAIN, templates.MISTRAL])
def test_special_tokens_in_tools_are_text(template: str) -> None:
    """Check descriptions, names of properties, arguments and results."""

    def ends(spelt: str) -> int:
        tokenizer = tokenizer_with(template)
        codec = Codec(tokenizer)
        schema = {"type": "object", "properties": {spelt: {"type": "string", "enum": [spelt]}}}
        tools = [{"type": "function", "function": {"name": "f", "description": spelt, "parameters": schema}}]
        arguments = json.dumps({spelt: [spelt]})
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": spelt, "tool_call_id": "call_1"},
        ]
        shown, given = tool_conversation(tokenizer, messages, tools)
        return encode_history(tokenizer, codec.text, shown, tools=given).count(tokenizer.eos_token_id)

    assert ends("<|end|>") == ends("plain") > 0


@pytest.mark.parametrize("arguments", ['{"n": ', "[1", "null", "no JSON"])
def test_arguments_that_are_no_object_are_text(arguments: str) -> None:
    """A call that was cut off is shown as it was written; templates that take objects get a string."""
    cut = {**CALLS[0], "function": {"name": "price", "arguments": arguments}}
    messages = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [cut]}, CONVERSATION[2]]
    assert f'"arguments": {arguments}}}\n</tool_call>' in rendered(templates.PLAIN, messages, TOOLS)
    assert f'"arguments": {arguments}}}\n</tool_call>' in rendered(templates.TEXT_ARGUMENTS, messages, TOOLS)
    for template in (templates.QWEN, templates.LLAMA, templates.MISTRAL):
        assert json.dumps(arguments) in rendered(template, messages, TOOLS)


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + templates.PLAIN
ALTERNATING = (  # Gemma 2, Mistral 7B Instruct v0.1
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% endfor %}" + templates.PLAIN
)
DROPPED = templates.PLAIN.replace("in messages %}", "in messages if m.role != 'system' %}")


@pytest.mark.parametrize("template", [NO_SYSTEM, ALTERNATING, DROPPED])
def test_tools_of_a_template_without_a_system_role(template: str) -> None:
    """Tools are a part of the first message of the user, and roles alternate where they have to."""
    then = [*CONVERSATION, {"role": "user", "content": "And then?"}]
    text = rendered(template, then, TOOLS)
    first, _, rest = text.partition("<|end|>")
    assert first.startswith("<|s|>user\n") and json.dumps(TOOLS[0]) in first and first.endswith("\n\nHow much?")
    assert rest.count("<|s|>user\n") == (1 if template == ALTERNATING else 2) and "And then?" in rest
    assert "<|s|>system" not in text and "<|s|>system" in rendered(templates.PLAIN, then, TOOLS)
