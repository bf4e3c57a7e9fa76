"""JSON schemas as grammars take them, compared with `jsonschema` and checked with llguidance's matcher over bytes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from aspd_jax import grammar_limits, json_schema
from aspd_jax.errors import RequestError
from aspd_jax.json_schema import json_grammar, read_schema


def accepts(schema: Any, value: Any, approximate: bool = False) -> bool:
    """Return whether the grammar of a schema accepts a value as `json.dumps` writes it."""
    matcher = LLMatcher(LLTokenizer("byte"), json_grammar(read_schema(schema, approximate).schema), log_level=0)
    written = list(json.dumps(value, ensure_ascii=False).encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, all required, and no other."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


TEXT = {"type": "string"}
CAT = closed(kind={"const": "cat"}, lives={"type": "integer"})
DOG = closed(kind={"const": "dog"}, lives={"type": "integer"})
STATED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "oneOf, discriminator": (
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "lives": 1}], [{"kind": "cow", "lives": 1}, {"kind": "cat"}],
    ),
    "oneOf, closed objects": ({"oneOf": [closed(a=TEXT), closed(b=TEXT)]}, [{"a": ""}, {"b": ""}], [{}, {"a": 1}]),
    "oneOf beside anyOf": (
        {"anyOf": [{"type": "string"}, {"type": "null"}], "oneOf": [{"const": "a"}, {"type": "null"}]},
        ["a", None], ["b", 1],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}],
    ),
    "dependencies": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"a": {}, "b": {}},
            "dependencies": {"a": {"properties": {"b": {"type": "null"}}}},
        },
        [{"b": 1}, {"a": 1, "b": None}], [{"a": 1, "b": 1}],
    ),
    "a definition without values": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}, "$defs": {"no": {"type": "null", "const": 1}},
         "additionalProperties": False},
        [{}], [{"a": 1}, {"a": None}],
    ),
    "unknown keywords and null": (
        {**TEXT, "enum": None, "minLength": None, "items": None, "nullable": True, "x-order": 1}, [""], [None]
    ),
    "a class without quotes": ({**TEXT, "pattern": '^[^"\\\\]*$'}, ["a\nb", ""], ['"', "a\\"]),
    "date": ({**TEXT, "format": "date"}, ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-02-30"]),
    "date-time": ({**TEXT, "format": "date-time"}, ["2024-02-29T23:59:60Z"], ["2023-02-29T00:00:00Z"]),
    "uri-reference": ({**TEXT, "format": "uri-reference"}, ["", "a/b", "//h/x?q#f", "http://x.y"], ["://", "a b"]),
    "iri": ({**TEXT, "format": "iri"}, ["http://ñ.com/é"], ["not-an-iri"]),
    "uri-template": ({**TEXT, "format": "uri-template"}, ["http://x/{a}{?b,c*}"], ["http://x/{", "{}"]),
    "json-pointer": ({**TEXT, "format": "json-pointer"}, ["", "/a~0b/0"], ["a", "/~2"]),
    "relative-json-pointer": ({**TEXT, "format": "relative-json-pointer"}, ["0", "1#", "2/a"], ["01", "/a"]),
    "regex": ({**TEXT, "format": "regex"}, ["^a+$", "[a-z]{2,5}", "(a|b(c)*)?", "[^\"]*"], ["*", "(", "[", "a{3,2}"]),
}  # fmt: skip


def test_values_have_one_form() -> None:
    """Check white space between parts, in constants too; other forms of the same value are no texts of the grammar."""
    schema = closed(a={"type": "array"}, b={"const": {"c": [1, 2], "d": {}}}, e={"enum": [[1, "x y"], None]})
    matcher = LLMatcher(LLTokenizer("byte"), json_grammar(read_schema(schema).schema), log_level=0)
    whole = '{"a": [1, {}, []], "b": {"c": [1, 2], "d": {}}, "e": [1, "x y"]}'
    others = [whole.replace(*pair) for pair in ((": ", ":"), (", ", ","), ("{}", "{ }"), ("[1", "[ 1"), (", ", " , "))]
    assert whole == json.dumps(json.loads(whole)) and len(set(others)) == 5
    for text in (whole, *others, f" {whole}", f"{whole}\n", json.dumps(json.loads(whole), indent=1)):
        fresh, tokens = matcher.deep_copy(), list(text.encode())
        assert (fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()) == (text == whole), text


@pytest.mark.parametrize("name", STATED)
def test_keywords_are_stated_exactly(name: str) -> None:
    schema, fitting, others = STATED[name]
    assert not read_schema(schema).ignored
    assert [accepts(schema, value) for value in fitting] == [True] * len(fitting)
    assert [accepts(schema, value) for value in others] == [False] * len(others)


VALUES = [
    None, True, False, 0, 1, 2, 3.5, "", "a", "b", "ab", [], [1], ["a", 2],
    {}, {"a": 1}, {"b": "a"}, {"a": "a", "b": 2}, {"a": None, "c": 1}, {"a": {"b": 1}}, {"a": {}, "b": [1]},
]  # fmt: skip
NAMES = st.sampled_from("abc")
SIMPLE = st.one_of(
    st.booleans(),
    st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]).map(lambda t: {"type": t}),
    st.lists(st.sampled_from(["string", "number", "object"]), min_size=1, unique=True).map(lambda t: {"type": t}),
    st.lists(st.sampled_from([1, 2, "a", "b", "ab", None, True]), min_size=1, max_size=3).map(lambda v: {"enum": v}),
    st.sampled_from([0, 1, "a", False]).map(lambda value: {"const": value}),
    st.integers(0, 2).map(lambda n: {"minLength": n}),
    st.integers(0, 2).map(lambda n: {"maxItems": n}),
    st.integers(0, 2).map(lambda n: {"exclusiveMinimum": n}),
    st.lists(NAMES, max_size=2, unique=True).map(lambda names: {"required": names}),
)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    properties = st.dictionaries(NAMES, inner, max_size=2).map(lambda found: {"properties": found})
    return st.one_of(
        *(several.map(lambda found, key=key: {key: found}) for key in ("allOf", "anyOf", "oneOf")),
        inner.map(lambda found: {"not": found}),
        properties,
        st.tuples(properties, st.booleans()).map(lambda pair: {**pair[0], "additionalProperties": pair[1]}),
        st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner}),
        st.dictionaries(NAMES, inner, max_size=2).map(lambda found: {"dependentSchemas": found}),
        st.dictionaries(NAMES, st.lists(NAMES, unique=True), max_size=2).map(lambda f: {"dependentRequired": f}),
        st.tuples(inner, inner).map(lambda pair: {**as_dict(pair[0]), **as_dict(pair[1])}),
    )


def as_dict(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}


@given(st.recursive(SIMPLE, combined, max_leaves=8))
@settings(max_examples=300, deadline=None)
def test_a_read_schema_has_the_values_of_the_original(schema: Any) -> None:
    schema = as_dict(schema)
    original = jsonschema.Draft202012Validator(schema)
    try:
        read = read_schema(schema)
    except RequestError as error:
        if "none does" in str(error):
            assert not any(map(original.is_valid, VALUES))
        return
    validator = jsonschema.Draft202012Validator(read.schema)
    assert not read.ignored
    assert [validator.is_valid(value) for value in VALUES] == [original.is_valid(value) for value in VALUES]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a/b": {**TEXT, "pattern": "^(?!x)"}}}, "#/properties/a~1b/pattern: .*look-ahead and look-be"),
        ({"properties": {"a": {**TEXT, "pattern": "(a"}}}, "#/properties/a/pattern: unclosed group"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems: expected keywords that .*, got uniqueItems"),
        ({"not": {"type": "string"}}, "#/not: expected keywords that .*, got not"),
        ({"not": {}}, "#/not: expected keywords that .*, got not"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "#/if: expected keywords that .*, got if"),
        ({"oneOf": [{"minimum": 5}, {"maximum": 7}], "type": "integer"}, "#/oneOf: .*schemas with common values"),
        ({"anyOf": [{"contains": {}}, {}]}, "#/anyOf/0/contains"),
        ({"properties": {"a": {"properties": {"x": {}}, "minProperties": 2}}}, "#/properties/a/minProperties: min/max"),
        ({"properties": {"a": {"type": "objekt"}}}, "#/properties/a: Invalid type: objekt"),
        ({"properties": {"a": None}}, "#/properties/a: expected a schema, got null"),
        ({"anyOf": [{"x-guidance": {}}, 5]}, "#/anyOf/1: expected a schema, got 5"),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance: expected keywords of JSON Schema"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable schema: required prop"),
        (
            {"properties": {"a": TEXT}, "dependentRequired": {"a": [["b"]]}},
            "expected a JSON schema, got a keyword with",
        ),
        ({"properties": {"x": {"oneOf": [{"type": 5}, TEXT]}}}, "expected a JSON schema, got a keyword with a value"),
        ('{"maximum": 1e999}', "expected a JSON schema, got a keyword with a value of another type"),
        ("true", "expected the schema as an object, got true. Write {} to permit any value"),
        ("false", "expected the schema as an object, got false"),
        ("[", "expected a JSON schema, got: "),
    ],
)
def test_what_is_refused_names_its_place(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        read_schema(schema)


def test_annotations_are_ignored_and_named() -> None:
    formats = {"a": {**TEXT, "format": "password"}, "b": {**TEXT, "format": "x y"}, "c": {**TEXT, "format": "uuid"}}
    read = read_schema({"properties": formats, "$defs": {"d~": {"items": {"format": "path"}}}})
    assert read.ignored == ("#/properties/a/format", "#/properties/b/format", "#/$defs/d~0/items/format")
    assert accepts({"properties": formats}, {"a": "", "b": ""}) and not accepts({"properties": formats}, {"c": "x"})


@pytest.mark.parametrize(
    ("schema", "ignored", "value"),
    [
        ({"properties": {"a": {**TEXT, "pattern": "^(?!x)"}}}, "#/properties/a/pattern", {"a": "x"}),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", [1, 1]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "#/oneOf", 1),
        ({"not": {"pattern": "a"}}, "#/not", "a"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "#/minProperties", {}),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "#/patternProperties", {"ab": 1}),
    ],
)
def test_an_approximation_ignores_what_grammars_lack(schema: Any, ignored: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{ignored}"):
        read_schema(schema)
    assert read_schema(schema, approximate=True).ignored == (ignored,)
    assert accepts(schema, value, approximate=True)
    with pytest.raises(RequestError, match="Invalid type"):
        read_schema({**schema, "anyOf": [{"type": "objekt"}]}, approximate=True)


def test_unused_definitions_are_not_checked() -> None:
    unused = {"type": ["integer", "string"], "$defs": {"a": {**TEXT, "pattern": "(?=a)"}, "b": {"uniqueItems": True}}}
    assert accepts(unused, 1)
    with pytest.raises(RequestError, match=r"^#/\$defs/a/pattern"):
        read_schema({**unused, "anyOf": [{"$ref": "#/$defs/a"}, {}]})


def test_earlier_drafts_ignore_later_keywords() -> None:
    later = {"if": {"type": "integer"}, "then": False, "type": ["integer", "string"]}
    with pytest.raises(RequestError, match=r"^#/if"):
        read_schema(later)
    assert accepts({**later, "$schema": "http://json-schema.org/draft-04/schema#"}, 1)
    assert accepts({"$schema": "https://example.com/own", "type": "integer", "exclusiveMinimum": True, "minimum": 1}, 2)


def test_a_schema_is_checked_with_the_limits_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = closed(words={"type": "string", "pattern": r"^(\S+ ){3}$"})
    assert json_schema.compile_error(schema) is None
    monkeypatch.setattr(grammar_limits, "LIMITS", {**grammar_limits.LIMITS, "initial_lexer_fuel": 10})
    assert (
        json_schema.compile_error(schema)
        == "initial lexer configuration (grammar) too big (limit for this grammar: 10)"
    )


def test_the_time_to_check_a_schema_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "SECONDS", 0.0)
    with pytest.raises(RequestError, match="expected a schema that compiles within"):
        read_schema({"properties": {f"slow{n}": {"pattern": "a|b"} for n in range(500)}})
