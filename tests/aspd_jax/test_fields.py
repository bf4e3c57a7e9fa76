"""Templates and the templates of JSON schemas: what is literal, what is a hole, and which holes see which."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax.errors import RequestError
from aspd_jax.fields import MAX_VALUES, fields_template, listed_values, value_length
from aspd_jax.json_schema import read_schema
from aspd_jax.template import Hole, Template

ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/Address"},
        "kind": {"const": "order"},
        "reason": {"type": "string", "x-after": ["address", "name"]},
        "next": {"$ref": "#/$defs/Tree"},
    },
    "required": ["name"],
    "$defs": {
        "Address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "integer"}}},
        "Tree": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "below": {"$ref": "#/$defs/Tree", "title": "Below"}},
        },
    },
}


def test_a_template_is_literal_text_and_holes() -> None:
    """Parts join to the text; braces are doubled; the text before the first hole is divided at its last line."""
    template = Template("Of {{it}}\n\nPros:{pros}\n\nCons:{cons}\n\nVerdict:{verdict after pros, cons}\nEnd.")
    assert [hole.name for hole in template.holes] == ["pros", "cons", "verdict"]
    assert [[hole.name for hole in stage] for stage in template.stages] == [["pros", "cons"], ["verdict"]]
    assert template.opening == "Of {it}"
    assert [template.lead(hole) for hole in template.holes] == ["\n\nPros:", "\n\nCons:", "\n\nVerdict:"]
    assert [template.following(hole) for hole in template.holes] == ["\n\nCons:", "\n\nVerdict:", "\nEnd."]
    values = {"pros": " a", "cons": " b", "verdict": " c"}
    assert template.fill(values) == "Of {it}\n\nPros: a\n\nCons: b\n\nVerdict: c\nEnd."
    assert template.fill({"pros": " a"}) == "Of {it}\n\nPros: a\n\nCons:"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("one\nx {a", r"line 2, column 3: expected .*, got a single '{'"),
        ("a } b", r"line 1, column 3: expected .*, got a single '}'"),
        ("{}", r"line 1, column 1: expected \{name\}"),
        ("{a b}", r"column 1: expected \{name\} or \{name after other, …\}, got \{a b\}"),
        ("{a after }", r"column 1: expected"),
        ("none", "expected at least one hole"),
        ("{a}{a}", "hole 'a': expected different names"),
        ("{a after b}{b after a}", "do not depend on each other, got a, b"),
        ("{a after a}", "do not depend on each other, got a"),
        ("{a after z}", "hole 'a': after: expected names of holes, got 'z'"),
        ("".join(f" {{h{number}}}" for number in range(2049)), "expected at most 2048 holes, got 2049"),
    ],
)
def test_templates_that_are_refused(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Template(source)


@given(st.lists(st.one_of(st.text(max_size=9), st.sampled_from("abcdef").map(Hole)), max_size=9))
def test_a_template_reads_what_it_is_written_as(parts: list[Any]) -> None:
    """Opening, leads and following text account for every literal character, whatever the text is."""
    names = [part.name for part in parts if isinstance(part, Hole)]
    if not names or len(set(names)) < len(names):
        return
    written = "".join(
        f"{{{part.name}}}" if isinstance(part, Hole) else part.replace("{", "{{").replace("}", "}}") for part in parts
    )
    template = Template(written)
    assert template == Template(parts)
    values = {name: f"<{name}>" for name in names}
    whole = "".join(values[part.name] if isinstance(part, Hole) else part for part in parts)
    holes = template.holes
    leads = "".join(template.lead(hole) + values[hole.name] for hole in holes)
    assert template.fill(values) == whole == template.opening + leads + template.following(holes[-1])


def test_fields_of_a_schema() -> None:
    """Every leaf is a hole with its path as context; constants are literal; a recursive definition stays whole."""
    template = fields_template(ORDER)
    assert template is not None
    holes = {hole.name: hole for hole in template.holes}
    assert list(holes) == ["name", "address.street", "address.zip", "reason", "next.value", "next.below"]
    assert holes["address.zip"].context == '{"address": {"zip": '
    assert holes["reason"].after == ("address.street", "address.zip", "name")
    assert json.loads(holes["next.below"].schema or "")["$ref"] == "#/$defs/Tree"
    assert "$defs" not in (holes["name"].schema or "")
    text = template.fill({name: str(number) for number, name in enumerate(holes)})
    assert json.loads(text) == {
        "name": 0, "address": {"street": 1, "zip": 2}, "kind": "order", "reason": 3, "next": {"value": 4, "below": 5}
    }  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}},
        {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "null"}]},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"enum": ["x"]}}},
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["c"]},
        {"type": "object", "properties": {"a": {}, "b": {}}, "patternProperties": {"x": {}}},
        {"properties": {"a": {}, "b": {"type": "array", "items": {"$ref": "#"}}}},
        {"properties": {"a": {}, "b": {"anyOf": [{"$ref": "#/properties/a"}]}}},
        {"properties": {"a": {}, "b": {"$id": "other", "items": {"$ref": "#/$defs/A"}}}, "$defs": {"A": {}}},
        {"properties": {"a": {}, "b": {}}, "required": 5},
        {"properties": {"a": {}, "b": {}}, "required": [["a"]]},
        {"properties": {"a": {}, "b": {}}, "allOf": 5},
    ],
)
def test_schemas_that_are_not_divided(schema: dict[str, Any]) -> None:
    assert fields_template(schema) is None


def test_x_after_names_fields() -> None:
    """A sibling, a sibling of an enclosing object, or a path; unknown names and cycles are refused."""

    def after(name: Any) -> tuple[str, ...]:
        inner = {"type": "object", "properties": {"p": {}, "q": {"x-after": [name]}}}
        template = fields_template({"type": "object", "properties": {"a": {}, "b": inner, "c": {}}})
        assert template is not None
        return next(hole.after for hole in template.holes if hole.name == "b.q")

    assert after("p") == after("b.p") == ("b.p",) and after("a") == ("a",)
    with pytest.raises(RequestError, match=r'b\.q: "x-after": unknown field \'z\'; expected one of p, q'):
        after("z")
    with pytest.raises(RequestError, match=r"^json_schema: .* depend on each other"):
        after("b")
    for names in ("p", 5, [["p"]], {"p": 1}):
        with pytest.raises(RequestError, match=r'^json_schema: b\.q: "x-after": expected a list of names of fields'):
            fields_template(
                {"properties": {"b": {"properties": {"p": {}, "q": {"x-after": names}}}}},
            )


@pytest.mark.parametrize(("name", "message"), [("z", "unknown field 'z'"), ("a", "depend on each other")])
def test_x_after_is_checked_for_a_single_field_too(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"^json_schema: .*{message}"):
        fields_template({"properties": {"a": {"x-after": [name]}}})
    assert fields_template({"properties": {"a": {}}}) is None


def test_x_after_of_a_definition_applies_to_the_properties_that_refer_to_it() -> None:
    later = {"type": "string", "x-after": ["a"]}
    for schema in ({"$ref": "#/$defs/Later"}, {"allOf": [{"$ref": "#/$defs/Later"}], "title": "b"}, later):
        template = fields_template({"properties": {"a": {}, "b": schema}, "$defs": {"Later": later}})
        assert template is not None and [hole.after for hole in template.holes] == [(), ("a",)]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": "x", "type": "string", "title": "T"}, '"x"'),
        ({"enum": [None], "type": ["integer", "null"]}, "null"),
        ({"const": 5, "type": "number"}, "5"),
        ({"const": 5, "type": "string"}, None),
        ({"const": True, "type": "integer"}, None),
        ({"enum": ["long"], "maxLength": 2}, None),
        ({"const": 1, "enum": [2]}, None),
        ({"enum": []}, None),
        (False, None),
        ({"type": "integer", "enum": ["1", "2"]}, None),
        ({"type": "object", "properties": {"d": {}, "e": False}, "required": ["e"]}, None),
        ({"type": "object", "properties": {"d": {"$ref": "#/$defs/none"}, "f": {}}, "required": ["d"]}, None),
    ],
)
def test_a_literal_value_fits_its_schema(schema: Any, text: str | None) -> None:
    """Check that an optional property without any value is left out, and that a required one is refused."""
    properties = {"a": {}, "b": {}, "c": schema}
    whole = {"type": "object", "properties": properties, "$defs": {"none": {"type": "string", "const": 5}}}
    template = fields_template(whole)
    assert template is not None and len(template.holes) == 2
    filled = template.fill({"a": "0", "b": "0"})
    assert filled == '{"a": 0, "b": 0' + ("}" if text is None else f', "c": {text}}}')
    jsonschema.validate(json.loads(filled), whole)
    required = whole | {"required": ["c"]}
    assert (fields_template(required) is None) == (text is None)
    if text is None:
        with pytest.raises(RequestError, match="nsatisfiable"):
            read_schema(required)


def test_a_value_that_two_keywords_determine_is_a_leaf() -> None:
    template = fields_template({"properties": {"a": {}, "c": {"const": 1, "enum": [1, 2]}}})
    assert template is not None and len(template.holes) == 2


def test_definitions_within_a_leaf_hide_none_of_the_schema() -> None:
    """Check that `#/$defs/A` of a leaf is that of the whole schema."""
    leaf = {"type": "array", "items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"type": "null"}}}
    schema = {"properties": {"a": leaf, "b": {}}, "$defs": {"A": {"type": "integer"}}}
    template = fields_template(schema)
    assert template is not None
    own = json.loads(template.holes[0].schema or "")
    for value, fits in (([1], True), ([None], False)):
        assert jsonschema.Draft202012Validator(schema).is_valid({"a": value}) == fits
        assert jsonschema.Draft202012Validator(own).is_valid(value) == fits


def test_definitions_that_multiply_are_decoded_serially() -> None:
    """Check that 30 definitions with 2 ** 30 leaves are not divided, which is known at once; a few are divided."""

    def doubled(levels: int) -> dict[str, Any]:
        two = {
            f"D{n}": {"properties": {k: {"$ref": f"#/$defs/D{n + 1}"} for k in "ab"}} if n < levels else {}
            for n in range(levels + 1)
        }
        return {"$ref": "#/$defs/D0", "$defs": two}

    template = fields_template(doubled(5))
    assert template is not None and len(template.holes) == 32
    assert fields_template(doubled(30)) is None


@pytest.mark.parametrize("count", [MAX_VALUES - 1, MAX_VALUES])
def test_many_values_are_decoded_serially(count: int) -> None:
    """Check the largest schema that is divided (its object is a value, too), and a larger one."""
    template = fields_template({"properties": {f"v{number}": {"type": "null"} for number in range(count)}})
    assert (template is None) == (count == MAX_VALUES)


def test_equal_dotted_paths_are_decoded_serially() -> None:
    inner = {"properties": {"b": {"type": "integer"}}}
    assert fields_template({"properties": {"a": inner, "a.b": {"type": "integer"}}}) is None
    assert fields_template({"properties": {"a": inner, "a.c": {"type": "integer"}}}) is not None


LEAVES: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "string": ({"type": "string"}, st.text(max_size=8)),
    "integer": ({"type": "integer"}, st.integers()),
    "number": ({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False)),
    "boolean": ({"type": "boolean"}, st.booleans()),
    "choice": ({"enum": ["a", 1, None]}, st.sampled_from(["a", 1, None])),
    "array": ({"type": "array", "items": {"type": "integer"}}, st.lists(st.integers(), max_size=3)),
    "optional": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, st.none() | st.integers()),
}


NAMES = st.text(min_size=1, max_size=4).filter(lambda name: "." not in name)


@st.composite
def objects(draw: Any, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """A schema of an object, and an instance with every property."""
    schema: dict[str, Any] = {}
    value: dict[str, Any] = {}
    for name in draw(st.lists(NAMES, unique=True, min_size=1, max_size=4)):
        if depth < 3 and draw(st.integers(0, 3)) == 0:
            schema[name], value[name] = draw(objects(depth + 1))
        elif draw(st.integers(0, 4)) == 0:
            value[name] = draw(st.integers(0, 9))
            schema[name] = {"const": value[name]}
        else:
            schema[name], values = LEAVES[draw(st.sampled_from(sorted(LEAVES)))]
            value[name] = draw(values)
    required = draw(st.lists(st.sampled_from(sorted(schema)), unique=True))
    return {"type": "object", "properties": schema, "required": required, "additionalProperties": False}, value


@settings(max_examples=200)
@given(objects(), st.sampled_from([",", "}", ", ", " }", "\n", ',"x']))
def test_filled_templates_are_instances(pair: tuple[dict[str, Any], Any], behind: str) -> None:
    """Filled with the leaves of an instance, each cut where it ends, the template is the instance."""
    schema, value = pair
    template = fields_template(schema)
    if template is None:
        return
    found = {}
    for hole in template.holes:
        leaf = value
        context, _ = json.JSONDecoder(object_pairs_hook=list).raw_decode(f"{hole.context}null{'}' * 5}")
        while context is not None:
            ((name, context),) = context
            leaf = leaf[name]
        text = " " + json.dumps(leaf)
        jsonschema.validate(leaf, json.loads(hole.schema or ""))
        assert value_length(text + behind) == len(text)
        assert all((value_length(text[:cut]) or cut) == cut for cut in range(1, len(text)))
        found[hole.name] = text.strip()
    assert json.loads(template.fill(found)) == value


def test_a_value_of_great_depth_has_no_length() -> None:
    assert value_length("[" * 100_000) is None and value_length("[[1]] ") == 5


def test_long_schemas_of_many_values_stay_whole() -> None:
    """Check that a definition that many values share is not copied without bound; negative control: a few values."""
    long = {"type": "string", "description": "x" * 300_000}

    def template(count: int) -> Template | None:
        properties = {f"f{number}": {"$ref": "#/$defs/long"} for number in range(count)}
        return fields_template({"type": "object", "properties": properties, "$defs": {"long": long}})

    few = template(5)
    assert few is not None and len(few.holes) == 5 and template(20) is None


@pytest.mark.parametrize(
    ("schema", "path", "listed"),
    [
        ({"type": "boolean"}, "", ("true", "false")),
        ({"type": ["null", "boolean"]}, "", ("null", "true", "false")),
        ({"enum": ["a", "größe", 7, None, True]}, "", ('"a"', '"größe"', "7", "null", "true")),
        ({"type": ["string", "null"], "enum": ["a", 7, None]}, "", ('"a"', "null")),
        ({"anyOf": [{"const": "x"}, {"type": "null"}]}, "", ('"x"', "null")),
        ({"anyOf": [{"const": "x"}, {"type": "string"}]}, "", ()),
        ({"enum": [[1], [2]]}, "", ()),
        ({"const": "x"}, "", ()),
        ({"type": "string"}, "", ()),
        (True, "", ()),
        ({"properties": {"a": {"items": {"type": "boolean"}}}}, "a 3", ("true", "false")),
        ({"properties": {"a": {"prefixItems": [{"enum": [1, 2]}], "items": False}}}, "a 0", ("1", "2")),
        ({"properties": {"a": {"type": "boolean"}}}, "b", ()),
        ({"$defs": {"k": {"enum": ["x", "y"]}}, "properties": {"a": {"$ref": "#/$defs/k"}}}, "a", ('"x"', '"y"')),
        ({"$defs": {"k": {"anyOf": [{"$ref": "#/$defs/k"}]}}, "$ref": "#/$defs/k"}, "", ()),
    ],
)
def test_listed_values(schema: Any, path: str, listed: tuple[str, ...]) -> None:
    assert listed_values(schema, path.split()) == listed
