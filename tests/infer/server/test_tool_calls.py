"""Tool calls: grammars beside llguidance and jsonschema, readers beside whole texts, and the server over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import cache
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken

from aspd_jax.errors import RequestError
from aspd_jax.tokens import TextCodec
from aspd_jax.tool_format import HERMES, ID, ToolFormat, read_tool_format
from infer import Engine
from infer.answers.filled import hole_text
from infer.answers.stop import repeats_an_object
from infer.control.filling import value_grammar
from infer.server.responses import ResponsesRequest, respond, respond_streaming
from infer.server.tool_calls import CallReader, Function, Piece, ToolCalls, ToolChoice, check_schemas
from infer.server.tool_requests import FunctionFields
from tests.aspd_jax.test_tokens import byte_level
from tests.helpers import tool_templates as templates
from tests.helpers.serving import Running, ask, serving

PRICE = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "kind": {"enum": ["pen", "cup"]}},
    "required": ["good", "kind"],
}
FUNCTIONS = [Function("price", "Return a price", PRICE), Function("price_all", "", {})]
FORMATS = {
    "token": templates.QWEN, "qwen": templates.QWEN, "llama": templates.LLAMA, "mistral": templates.MISTRAL,
    "plain": "",
}  # fmt: skip


@cache
def parts(name: str) -> tuple[ToolFormat, Any, Any]:
    """Return the format of a template, and the tokenizer as the project and as llguidance read it."""
    tokenizer = byte_level()
    if name == "token":  # as in Qwen, whose tags are tokens
        tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    if name == "mistral":
        tokenizer.add_special_tokens({"additional_special_tokens": ["[CALLS]"]})
    tokenizer.chat_template = FORMATS[name]
    form = read_tool_format(tokenizer) if FORMATS[name] else HERMES
    spelled = LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=[tokenizer.eos_token_id])
    return form, TextCodec(tokenizer), spelled


def tool_calls(name: str, choice: ToolChoice, schema: Any = None, functions: Any = FUNCTIONS) -> ToolCalls:
    form, codec, _ = parts(name)
    return ToolCalls(functions, choice, form, codec, schema)


def accepts(name: str, calls: ToolCalls, text: str) -> bool:
    """Return whether the grammar accepts a whole answer; special tokens are spelled in it."""
    _, codec, spelled = parts(name)
    matcher = LLMatcher(spelled, grammar_from("grammar", calls.grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = [id for part in codec.split_markers(text) for id in ([part] if isinstance(part, int) else codec.encode(part))]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def written(name: str, *called: tuple[str, str]) -> str:
    """Return the calls as the model writes them."""
    form = parts(name)[0]
    text = (form.between or "").join(function + form.middle + arguments for function, arguments in called)
    return (form.begin + text + form.end).replace(ID, "abcdefghi")


def read(reader: CallReader, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an answer that comes in pieces."""
    found: list[Piece] = [part for piece in pieces for part in reader.read(piece)] + reader.read("", final=True)
    calls = [piece for piece in found if piece.kind == "call"]
    assert [piece.call for piece in calls] == list(range(len(calls)))
    arguments = ["".join(p.text for p in found if p.kind == "arguments" and p.call == call.call) for call in calls]
    text = "".join(piece.text for piece in found if piece.kind == "text")
    return text, list(zip((call.text for call in calls), arguments, strict=True))


GOOD = ("price", '{"good": true, "kind": "pen"}')
AUTO, REQUIRED = ToolChoice(), ToolChoice("required")


@pytest.mark.parametrize("name", FORMATS)
def test_grammars(name: str) -> None:
    one, plain = written(name, GOOD), "Hello {there} <tool"
    several = parts(name)[0].between is not None
    two = written(name, GOOD, ("price_all", "{}"))
    auto, required = tool_calls(name, AUTO), tool_calls(name, REQUIRED)
    assert accepts(name, auto, "") and accepts(name, auto, plain) and accepts(name, auto, one)
    assert accepts(name, required, one) and not accepts(name, required, plain) and not accepts(name, required, "")
    wrong = ('{"good": 1, "kind": "pen"}', '{"good": true}', '{"good": true, "kind": "pen", "x": 1}', "{}", "[1]")
    for calls in (auto, required):
        assert accepts(name, calls, two) == several
        for text in (one + "x", one[:-1], *(written(name, ("price", arguments)) for arguments in wrong)):
            assert not accepts(name, calls, text), text
        assert not accepts(name, calls, written(name, ("prize", GOOD[1])))
        assert not accepts(name, tool_calls(name, calls.choice._replace(parallel=False)), two)
    named = tool_calls(name, ToolChoice("required", "price", False))
    assert accepts(name, named, one) and not accepts(name, named, written(name, ("price_all", "{}")))
    if auto.text.trigger:
        assert accepts(name, auto, f"I look.\n{one}") and not accepts(name, auto, f"I look.\n{one[:-3]}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_response_format_beside_tools(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    if name == "llama":
        with pytest.raises(RequestError, match="got auto, because this model writes calls as bare JSON"):
            tool_calls(name, AUTO, schema)
        return
    calls = tool_calls(name, AUTO, schema)
    assert accepts(name, calls, '{"a": 1}') and accepts(name, calls, written(name, GOOD))
    assert not accepts(name, calls, "Hello")
    for text in ('{"a": "<tool_call>"}', '{"a": "<tool_call>\\n{\\"name\\": 1"}', f"{{}}{written(name, GOOD)}"):
        assert read(calls.reader(), list(text)) == (text, []) == read(calls.reader(), [text]), "no call, only text"
    visible = parts(name)[1].special.sub("", written(name, GOOD))
    assert read(calls.reader(), list(visible)) == ("", [GOOD]) == read(calls.reader(), [visible])


PROPERTY = st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "array", "items": {"type": "string"}}]
)
JSON = {
    "string": st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)
    | st.sampled_from(['"', "\\", "}", "{", "</tool_call>", '<tool_call>\n{"name": "', "é"]),
    "integer": st.integers(-99, 99),
    "boolean": st.booleans(),
}
JSON["array"] = st.lists(JSON["string"], max_size=3)


@st.composite
def called(draw: Any) -> tuple[list[Function], list[tuple[str, Any]]]:
    """Draw functions, and calls of them with valid arguments."""
    names = draw(st.lists(st.from_regex("[a-zA-Z0-9_-]{1,8}", fullmatch=True), min_size=1, max_size=3, unique=True))
    functions = []
    for name in names:
        keys = st.text('ab"\\}é ', min_size=1, max_size=4)
        properties = draw(st.dictionaries(keys, PROPERTY, max_size=3))
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        functions.append(Function(name, "", schema))
    calls = []
    for function in draw(st.lists(st.sampled_from(functions), min_size=1, max_size=3)):
        kinds = function.parameters["properties"]
        calls.append((function.name, {key: draw(JSON[kind["type"]]) for key, kind in kinds.items()}))
    return functions, calls


def repeat(calls: list[Any]) -> int:
    """Return the index of the first call that repeats an earlier one; without one, the number of calls."""
    return next((n for n in range(len(calls)) if calls[n] in calls[:n]), len(calls))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), made=called(), before=st.sampled_from(["", "So:\n", "{"]), data=st.data())
def test_any_calls_are_accepted_and_read(name: str, made: Any, before: str, data: Any) -> None:
    functions, wanted = made
    auto = tool_calls(name, AUTO, functions=functions)
    before = before if auto.text.trigger else ""
    wanted = wanted if parts(name)[0].between is not None else wanted[:1]
    for function, arguments in wanted:
        schema = next(one for one in functions if one.name == function).schema
        jsonschema.validate(arguments, schema)
    texts = [(function, json.dumps(arguments, ensure_ascii=False)) for function, arguments in wanted]
    text = before + written(name, *texts)
    codec = parts(name)[1]
    if not any(codec.split_markers(arguments) != [arguments] for _, arguments in texts):  # spelled in pieces there
        assert accepts(name, auto, text)
    shown = codec.special.sub("", text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(shown)), max_size=6)))
    pieces = [shown[a:b] for a, b in zip([0, *cuts], [*cuts, len(shown)], strict=True)]
    reader = auto.reader()
    shortened = texts[: repeat(wanted)]
    assert read(reader, pieces) == (before.rstrip(), shortened)
    assert reader.complete == reader.count == len(shortened)
    spoilt = [(function, arguments.replace("}", "]")) for function, arguments in texts]
    assert read(auto.reader(), [codec.special.sub("", written(name, *spoilt))]) != (before.rstrip(), texts)


@pytest.mark.parametrize("name", FORMATS)
@given(
    text=st.lists(st.sampled_from(["<tool", "_call", ">", " ", "\n", '{"na', 'me": ', "[", "a"]), max_size=8).map(
        "".join
    )
)
def test_text_without_calls_is_kept(name: str, text: str) -> None:
    calls = tool_calls(name, AUTO)
    trigger = calls.text.trigger
    if (trigger and trigger in text) or text.lstrip().startswith(calls.text.begin):
        return
    assert read(calls.reader(), list(text)) == (text, []) == read(calls.reader(), [text])


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_after_calls(name: str) -> None:
    """Check that answers may end after white space, and that calls on their own may be separated by any of it."""
    one, more = written(name, GOOD), written(name, ("price_all", "{}"))
    form = parts(name)[0]
    assert form.separate == (name in ("token", "qwen", "plain"))
    for calls in (tool_calls(name, AUTO), tool_calls(name, REQUIRED)):
        for blank in ("", " ", "\n", "\n\n"):
            assert accepts(name, calls, one + blank)
            assert accepts(name, calls, one + blank + more) == form.separate
            if form.separate:
                assert read(calls.reader(), list(one + blank + more)) == ("", [GOOD, ("price_all", "{}")])
        assert not accepts(name, calls, one + 9 * "\n"), "white space is bounded, so that an answer ends"
        assert not accepts(name, calls, one + "\nx")


def bare(draw: Any, calls: Sequence[tuple[str, str]]) -> str:
    """Return calls as JSON without the tags of the format, in one of the ways in which models write them."""

    def one(name: str, arguments: str) -> str:
        blank, inner = draw(st.sampled_from(["", " ", "\n  "])), draw(st.sampled_from(["", " "]))
        key = draw(st.sampled_from(["arguments", "parameters"]))
        return f'{{{blank}"name":{inner}"{name}",{blank}"{key}":{inner}{arguments}{blank}}}'

    objects = [one(*call) for call in calls]
    text = draw(st.sampled_from([", ".join(objects).join("[]"), ",\n".join(objects), "\n".join(objects)]))
    fence = draw(st.sampled_from(["", "```\n", "```json\n"]))
    return f"{fence}{text}" + ("\n```" if fence else "") + str(draw(st.sampled_from(["", "\n"])))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["token", "qwen", "plain"]), made=called(), data=st.data())
def test_bare_calls(name: str, made: Any, data: Any) -> None:
    """Check answers that are calls without the tags of the format, in pieces of any size."""
    functions, wanted = made
    texts = [(function, json.dumps(arguments, ensure_ascii=False)) for function, arguments in wanted]
    text = bare(data.draw, texts)
    auto = tool_calls(name, AUTO, functions=functions)
    if not any(parts(name)[1].split_markers(arguments) != [arguments] for _, arguments in texts):
        assert accepts(name, auto, text), text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(auto.reader(), pieces) == ("", texts[: repeat(wanted)])


HEAD = '```json\n{"name": "price", "arguments": '


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_bare_call(name: str) -> None:
    """Check the limits: known functions, valid arguments, nothing before and after, `auto`, and formats with tags."""
    call = f"{HEAD}{GOOD[1]}}}\n```"
    auto, tags = tool_calls(name, AUTO), name in ("token", "qwen", "plain")
    assert read(auto.reader(), [call]) == (("", [GOOD]) if tags else (call, []))
    others = (call.replace("price", "prize"), call.replace("arguments", "argument"), f"So:\n{call}", "```json\n{}\n```")
    for text in others:
        assert accepts(name, auto, text) and read(auto.reader(), list(text)) == (text, []), text
    assert accepts(name, auto, f"{call} Yes.") == accepts(name, auto, call.replace("true", "1")) == (not tags)
    assert accepts(name, tool_calls(name, ToolChoice(parallel=False)), call)
    several = call.replace("}\n`", "}\n" + call[8:-4] + "\n`")
    assert accepts(name, auto, several) and accepts(name, tool_calls(name, ToolChoice(parallel=False)), several) != tags
    without = [tool_calls(name, REQUIRED)]
    without += [] if name == "llama" else [tool_calls(name, AUTO, {"type": "object", "required": ["name"]})]
    for calls in without:
        assert not accepts(name, calls, call) and read(calls.reader(), [call]) == (call, [])


PIECES = ["`", "```", "json", "\n", " ", "[", "{", '"name"', ":", '"price"', '"prize"', ",", '"arguments"', "}", "x"]
BEGINNINGS = ("", HEAD, f"{HEAD}{GOOD[1]}")


@pytest.mark.parametrize("name", FORMATS)
@given(head=st.sampled_from(BEGINNINGS), rest=st.lists(st.sampled_from(PIECES), max_size=10).map("".join))
def test_streams_equal_whole_answers(name: str, head: str, rest: str) -> None:
    """Check that nothing that was streamed as text becomes a call, whatever the text."""
    calls = tool_calls(name, AUTO)
    assert read(calls.reader(), list(head + rest)) == read(calls.reader(), [head + rest])


def test_repeated_calls() -> None:
    """Check which calls repeat an earlier one; that ends the answer, also while it is decoded."""
    calls = tool_calls("qwen", REQUIRED)
    assert calls.repeats is not None
    pattern = re.compile(calls.repeats)
    other = ("price", '{"good": true, "kind": "cup"}')
    for texts, left in (
        ([GOOD, other, ("price_all", "{}"), GOOD, other], 3),
        ([GOOD, ("price", '{"kind" : "pen","good":true}')], 1),
        ([("price_all", "{}"), GOOD, ("price_all", "{ }")], 2),
        ([GOOD, ("price_all", GOOD[1]), other], 3),
    ):
        text, reader = written("qwen", *texts), calls.reader()
        assert read(reader, list(text)) == ("", texts[:left]) and reader.count == reader.complete == left
        assert repeats_an_object(text, pattern) == (left < len(texts))
        if left < len(texts):
            whole = text.index(texts[left][1], text.index(texts[left - 1][1])) + len(texts[left][1])
            assert repeats_an_object(text[:whole], pattern) and not repeats_an_object(text[: whole - 1], pattern)
    for single in (tool_calls("qwen", ToolChoice("required", parallel=False)), tool_calls("llama", AUTO)):
        assert single.repeats is None
    auto = tool_calls("qwen", AUTO)
    assert auto.repeats is not None and repeats_an_object(f"{HEAD}{{}}}}\n{HEAD[8:]}{{}}", re.compile(auto.repeats))


@pytest.mark.parametrize("name", FORMATS)
def test_equal_examples_in_a_text_are_no_repeated_calls(name: str) -> None:
    """Check JSON in the form of calls after other text: it is text, and does not end the answer."""
    repeats = tool_calls(name, AUTO).repeats
    if repeats is None:
        return
    example, visible = f"{HEAD}{GOOD[1]}}}\n```\n", parts(name)[1].special.sub("", written(name, GOOD, GOOD))
    assert not repeats_an_object(f"So:\n{example}Or:\n{example}", re.compile(repeats))
    assert repeats_an_object(visible, re.compile(repeats)), "negative control"


def test_a_repeated_call_is_held() -> None:
    """Check that a call of a function that was called before is shown as soon as it differs, or is cut off."""
    reader = tool_calls("qwen", AUTO).reader()
    reader.read(written("qwen", GOOD) + "\n")
    begun = written("qwen", ("price", '{"good": true'))
    assert reader.read(begun[: begun.index("}")]) == [] and reader.count == 1
    cut = reader.read("", final=True)
    assert [piece.kind for piece in cut] == ["call", "arguments"] and (reader.count, reader.complete) == (2, 1)


def test_a_call_that_is_cut() -> None:
    calls = tool_calls("qwen", AUTO)
    whole = f"Yes.\n{written('qwen', GOOD)}"
    for end in range(len(whole)):
        reader = calls.reader()
        text, found = read(reader, [whole[:end]])
        assert "<tool_call>" not in text and whole.startswith(text)
        assert not found or (found[0][0] == "price" and GOOD[1].startswith(found[0][1]))
        assert reader.complete == (end >= whole.index(GOOD[1]) + len(GOOD[1]))


def test_schemas_of_arguments() -> None:
    assert FUNCTIONS[0].schema["additionalProperties"] is False and FUNCTIONS[1].schema["properties"] == {}
    assert "additionalProperties" not in Function("f", "", {"anyOf": [{"required": ["a"]}]}).schema
    with pytest.raises(RequestError, match="Expected string for 'required' item"):
        assert Function("f", "", {"properties": {}, "required": [["a"]]}).arguments
    assert Function("f", "", {"additionalProperties": {"type": "string"}}).schema["additionalProperties"]
    check_schemas(FUNCTIONS, "tools[{}]")
    unsupported = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    check_schemas([Function("f", "", unsupported)], "tools[{}]")
    for function in (
        Function("f", "", unsupported, strict=True),
        Function("f", "", {"properties": {"a": {"type": 5}}}),
    ):
        with pytest.raises(RequestError, match=r"^tools\[1\].parameters: "):
            check_schemas([FUNCTIONS[0], function], "tools[{}].parameters")


def test_a_pattern_of_zod() -> None:
    """Check that look-ahead is ignored and named without `strict`, and refused with a reason otherwise."""
    email = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    parameters = {"properties": {"to": {"type": "string", "format": "email", "pattern": email}}}
    loose, strict = Function("send", "", parameters), Function("send", "", parameters, strict=True)
    check_schemas([loose], "tools[{}]")
    assert loose.arguments.ignored == ("#/properties/to/pattern",)
    with pytest.raises(RequestError, match=r"^tools\[0\]: #/properties/to/pattern: .*look-ahead"):
        check_schemas([strict], "tools[{}]")


@pytest.mark.parametrize("name", ["qwen", "llama", "mistral"])
def test_the_template_of_one_call(name: str) -> None:
    """Check which answers are one call of a known function; only their arguments are decoded in parallel."""
    several = parts(name)[0].between is not None
    for functions, choice, known in (
        (FUNCTIONS, ToolChoice("required", "price", False), True),
        (FUNCTIONS[:1], ToolChoice("required", "", False), True),
        (FUNCTIONS[:1], ToolChoice("required", "", True), not several),
        (FUNCTIONS[:1], ToolChoice("auto", "", False), False),
        (FUNCTIONS, ToolChoice("required", "", False), False),
        (FUNCTIONS, ToolChoice("required", "price_all", False), False),
    ):
        calls = tool_calls(name, choice, functions=functions)
        if name == "mistral":  # its calls have special tokens
            assert calls.template is None
            continue
        assert (calls.template is not None) == known, (functions, choice)
        if calls.template is not None:
            filled = calls.template.fill({"good": "true", "kind": '"pen"'})
            assert filled == written(name, GOOD) and accepts(name, calls, filled)


def test_unsupported_keywords_in_parallel() -> None:
    """Check that they are ignored where they are ignored serially, and refused with `strict`."""
    several = {"properties": {"a": {"type": "array", "uniqueItems": True}, "b": {}}}
    choice = ToolChoice("required", "f", False)
    template = tool_calls("qwen", choice, functions=[Function("f", "", several)]).template
    assert template is not None
    grammar = value_grammar(hole_text(template, template.holes[0])) or ""
    assert not LLMatcher.validate_grammar(grammar_from("grammar", grammar))
    with pytest.raises(RequestError, match="uniqueItems"):
        _ = tool_calls("qwen", choice, functions=[Function("f", "", several, True)]).template


def test_parameters_of_go_servers() -> None:
    """Check that keywords with the value null mean nothing."""
    text = {"type": "string", "enum": None, "pattern": None, "items": None}
    function = Function("f", "", {"properties": {"a": text}, "required": None, "additionalProperties": None}, True)
    assert function.schema == Function("f", "", {"properties": {"a": text}}).schema
    check_schemas([function], "tools[{}]")
    accepted = FunctionFields(name="f", parameters={"type": None, "properties": None, "required": None})
    check_schemas([accepted.function], "tools[{}]")
    assert FunctionFields(name="f", parameters=None).function.schema["properties"] == {}


def test_formats_without_text() -> None:
    codec = parts("mistral")[1]
    with pytest.raises(RequestError, match="special tokens alone"):
        ToolCalls(FUNCTIONS, AUTO, ToolFormat("[CALLS]", "x", None, ""), codec)


# The server. The template of the embedded model has no tools, so that these calls have the Hermes format.

TOOLS = [
    {"type": "function", "function": {"name": "price", "description": "Return a price", "parameters": PRICE}},
    {"type": "function", "function": {"name": "stop"}},
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
ONLY_PRICE = {"type": "function", "function": {"name": "price"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "price", "arguments": '{"good": true, "kind": "pen"}'}}


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with serving(engine, max_new_tokens=200) as running:
        yield running


def asking(**more: Any) -> dict[str, Any]:
    return ask(tools=TOOLS, **more)


@pytest.mark.further
def test_whole_calls(server: Running) -> None:
    client = server.client()
    named = client.chat.completions.create(**asking(tool_choice=ONLY_PRICE, n=2, temperature=1.0, seed=3))
    for choice in named.choices:
        (call,) = choice.message.tool_calls or ()
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert call.type == "function" and call.id.startswith("call_") and call.function.name == "price"
        jsonschema.validate(json.loads(call.function.arguments), PRICE | {"additionalProperties": False})
    assert len({choice.message.tool_calls[0].id for choice in named.choices if choice.message.tool_calls}) == 2
    one = client.chat.completions.create(**asking(tool_choice="required", parallel_tool_calls=False))
    assert len(one.choices[0].message.tool_calls or ()) == 1
    cut = client.chat.completions.create(**asking(tool_choice=ONLY_PRICE, max_tokens=50))
    assert cut.choices[0].finish_reason == "length"


def test_streamed_calls(server: Running) -> None:
    """Check that the pieces are those of the whole call, in OpenAI's order."""
    client, asked = server.client(), asking(tool_choice=ONLY_PRICE, extra_body={"aspd": {"fields": "serial"}})
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    first, *rest = deltas
    assert first.id and first.type == "function" and first.index == 0 and first.function is not None
    assert (first.function.name, first.function.arguments) == ("price", "")
    assert len(rest) > 1 and all(call.id is None and call.index == 0 for call in rest)
    arguments = "".join(call.function.arguments or "" for call in rest if call.function)
    assert arguments == whole[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


@pytest.mark.further
def test_no_calls(server: Running) -> None:
    """Check that an answer is text without tools, with `none`, and if the model does not call."""
    client = server.client()
    plain = client.chat.completions.create(**ask())
    none = client.chat.completions.create(**asking(tool_choice="none"))
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage is not None and plain.usage is not None and none.usage.prompt_tokens == plain.usage.prompt_tokens
    auto = client.chat.completions.create(**asking())
    assert auto.choices[0].message.tool_calls is None and auto.choices[0].finish_reason == "stop"
    assert auto.usage is not None and auto.usage.prompt_tokens > plain.usage.prompt_tokens
    chunks = client.chat.completions.create(**asking(), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == auto.choices[0].message.content


@pytest.mark.parametrize("arguments", [CALL["function"]["arguments"], '{"n": '])  # type: ignore[index]
def test_results_of_tools(server: Running, arguments: str) -> None:
    """A call that a limit cut off can be sent back, too."""
    call = {**CALL, "function": {"name": "price", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20 <|end|>"}]}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    client, messages = server.client(), [*ask()["messages"], called, result]
    chat = client.chat.completions.create(**asking() | {"messages": messages})
    items = [
        *ask()["messages"],
        {"type": "function_call", "call_id": "call_1", **call["function"]},  # type: ignore[dict-item]
        {"type": "function_call_output", "call_id": "call_1", "output": "20 <|end|>"},
    ]
    response = client.responses.create(model="demo", input=items, tools=FLAT, temperature=0)  # type: ignore[call-overload]
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None and response.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.further
def test_calls_in_responses(server: Running) -> None:
    client = server.client()
    asked: Any = {"model": "demo", "input": "3 pens at $20", "temperature": 0, "tools": FLAT}
    asked |= {"tool_choice": {"type": "function", "name": "price"}}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    for response in (whole, final):
        (item,) = response.output
        assert item.type == "function_call" and item.name == "price" and item.status == "completed"
        assert item.call_id.startswith("call_") and item.id.startswith("fc_")
        jsonschema.validate(json.loads(item.arguments), PRICE)
    assert whole.output[0].arguments == final.output[0].arguments
    assert list(dict.fromkeys(kinds)) == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip


def test_log_probabilities_of_text_before_a_call() -> None:
    """Check that a response, also the last one of a stream, has those of its text, and not those of its calls."""
    tokens = [
        {"token": text, "bytes": list(text.encode()), "logprob": -1.0, "top_logprobs": list[Any]()}
        for text in ("Sí", ".\n", "<tool_call>", "{}")
    ]
    for calls, left in (([CALL], 2), ([], 4)):
        message = {"content": "Sí.", "tool_calls": calls}
        choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": tokens}}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        whole = {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        body = ResponsesRequest.model_validate({"model": "m", "input": "x", "metadata": {"of": "me"}})
        response = openai.types.responses.Response.model_validate(respond(body, whole), strict=True)
        (part,) = response.output[0].content  # type: ignore[union-attr]
        assert part.logprobs is not None and len(part.logprobs) == left  # type: ignore[union-attr]
        assert response.usage is not None and response.usage.input_tokens_details.cache_write_tokens == 0
        assert response.metadata == {"of": "me"}
        head = {name: whole[name] for name in ("id", "created", "model")}
        first = head | {"choices": [{"delta": message, "finish_reason": None}]}
        last = head | {"choices": [choice | {"delta": {}}], "usage": usage}
        assert last_event(body, [[first], [last]])["response"]["output"] == respond(body, whole)["output"]


def last_event(body: ResponsesRequest, batches: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the last event of a streamed response."""

    async def stream() -> AsyncGenerator[list[dict[str, Any]], None]:
        for batch in batches:
            yield batch

    async def read() -> list[dict[str, Any]]:
        return [event async for events in respond_streaming(body, stream()) for event in events]

    return asyncio.run(read())[-1]


def test_a_native_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check calls in the form of the chat template."""
    tokenizer = server.engine.lm.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", templates.LLAMA.replace("<|s|>", "<|user|>"))
    done = server.client().chat.completions.create(**asking(tool_choice=ONLY_PRICE))
    (call,) = done.choices[0].message.tool_calls or ()
    jsonschema.validate(json.loads(call.function.arguments), PRICE)
    monkeypatch.setattr(tokenizer, "chat_template", templates.XML.replace("<|s|>", "<|user|>"))
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=asking(), timeout=60)
    assert (
        refused.status_code == 400
        and "calls as name and JSON, and their results, got other calls" in refused.json()["error"]["message"]
    )


USER = {"role": "user", "content": "a"}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "20"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice: expected the name of one of"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: expected tools beside it, got none"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: expected functions with different names, got 'price' twice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: expected 'function', got 'web_search'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name: expected a str"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters: expected the schema of an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}}}}]},
            "tools[0].function.parameters: ",
        ),
        ({"structured_outputs": {"regex": "a"}}, "tools: expected no constraint but response_format"),
        ({"functions": [{"name": "f"}]}, "functions: the field is tools"),
        ({"messages": [USER, RESULT]}, "messages[1].tool_call_id: expected the id of a call"),
        ({"messages": [USER, CALLED, RESULT, RESULT]}, "messages[3].tool_call_id: expected the id of a call"),
        ({"messages": [USER, CALLED]}, "messages[1]: expected a result of the call 'call_1' at the end, got none"),
        ({"messages": [USER, CALLED, USER]}, "messages[2]: expected a result of the call 'call_1'"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls: expected a message of the assistant"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]: expected system, developer, user"),
    ],
)  # fmt: skip
def test_mistakes(server: Running, more: dict[str, Any], said: str) -> None:
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=asking() | more, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(said), refused.text
