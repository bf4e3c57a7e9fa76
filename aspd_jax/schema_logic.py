"""Negation and exclusion of JSON schemas, which state `not`, `oneOf`, `if` and dependencies by `allOf` and `anyOf`.

Schemas here are normalised (`aspd_jax.json_schema`): they have none of these keywords. A *context* is a list of schemas
that the value satisfies in any case; results hold for such values only. Results are exact, or `Inexpressible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

# Types that share no value: a number is an integer or a fraction.
ATOMS: Mapping[str, frozenset[str]] = {
    "integer": frozenset({"integer"}), "number": frozenset({"integer", "fraction"}),
} | {name: frozenset({name}) for name in ("null", "boolean", "string", "array", "object")}  # fmt: skip
ALL_TYPES = frozenset().union(*ATOMS.values())
NUMERIC = ATOMS["number"]
# Pairs of a lower and an upper bound, with the keyword that states the opposite of each, and the types they apply to.
BOUNDS = (
    ("minimum", "maximum", "exclusiveMaximum", "exclusiveMinimum"),
    ("exclusiveMinimum", "exclusiveMaximum", "maximum", "minimum"),
)
SIZES = {
    ("minLength", "maxLength"): "string",
    ("minItems", "maxItems"): "array",
    ("minProperties", "maxProperties"): "object",
}
# Keywords that grammars lack, and the draft that introduced them; earlier drafts ignore them.
UNSUPPORTED: Mapping[str, int] = {
    "not": 4, "oneOf": 4, "dependencies": 4, "uniqueItems": 4, "contains": 6, "propertyNames": 6, "if": 7, "then": 7,
    "else": 7, "dependentRequired": 2019, "dependentSchemas": 2019, "minContains": 2019, "maxContains": 2019,
    "unevaluatedItems": 2019, "unevaluatedProperties": 2019, "$recursiveRef": 2019, "$dynamicRef": 2020,
}  # fmt: skip
MAX_STEPS = 5000  # maximum schemas that one negation or comparison visits
MAX_CHARACTERS = 4000  # maximum characters of excluded strings


class Inexpressible(Exception):
    """The result needs a keyword that grammars lack; the text names what cannot be stated."""


class SchemaLogic:
    """Negation and exclusion of the schemas of one document.

    Args:
        resolve: function from a reference to its normalised schema; None if there is none.
    """

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self._resolve, self._steps = resolve, 0

    def negation(self, schema: Any, context: Sequence[Any]) -> Any:
        """Return a schema of the values of a context that do not satisfy `schema`.

        Raises:
            Inexpressible: there is no exact one.
        """
        self._steps = 0
        return self._negation(schema, self._flat(context))

    def exclude(self, one: Any, other: Any, context: Sequence[Any]) -> bool:
        """Return whether two schemas certainly share no value of a context."""
        self._steps = 0
        try:
            flat = self._flat(context)
            return self._exclude([*flat, *self._flat([one])], [*flat, *self._flat([other])])
        except Inexpressible:
            return False

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Inexpressible("a schema of this size")

    def _flat(self, schemas: Iterable[Any]) -> list[Any]:
        """Return the schemas of a conjunction, without `allOf` and references."""
        found: list[Any] = []
        for schema in schemas:
            self._count()
            found.append(schema)
            if isinstance(schema, dict):
                found += self._flat(schema.get("allOf", ()))
                if "$ref" in schema and (target := self._resolve(schema["$ref"])) is not None:
                    found += self._flat([target])
        return found

    def _negation(self, schema: Any, context: list[Any]) -> Any:
        self._count()
        if isinstance(schema, bool):
            return not schema
        types = types_of(context)
        outside, inside = types - types_of([schema]), types & types_of([schema])
        parts = [typed(outside)] if outside else []
        for key, value in schema.items():
            parts += self._negated_keyword(key, value, schema, inside, context)
        return any_of(parts)

    def _negated_keyword(
        self, key: str, value: Any, schema: Mapping[str, Any], types: frozenset[str], context: list[Any]
    ) -> Iterator[Any]:
        """Yield schemas of the values, of some types, that a keyword excludes."""
        if key == "$ref":
            target = self._resolve(value)
            if target is None:
                raise Inexpressible("a reference that names no definition")
            yield self._negation(target, context)
        elif key == "allOf":
            yield from (self._negation(item, context) for item in value)
        elif key == "anyOf":
            yield all_of([self._negation(item, context) for item in value])
        elif key in ("const", "enum"):
            yield from other_values([value] if key == "const" else value, types)
        elif key in APPLIES_TO and not APPLIES_TO[key] & types:
            return
        elif key == "required":
            yield from ({"type": "object", "properties": {name: False}} for name in value)
        elif key == "properties":
            for name, member in value.items():
                negated = self._negation(member, self._flat(members(context, name)))
                if negated is not False:
                    yield {"type": "object", "required": [name], "properties": {name: negated}}
        elif key == "additionalProperties" and value is False and not schema.get("patternProperties"):
            yield from self._further_names(schema, context)
        elif key in ("items", "additionalProperties", "patternProperties", "prefixItems", "additionalItems"):
            parts = value.values() if key == "patternProperties" else value if isinstance(value, list) else [value]
            if any(part not in (True, {}) for part in parts):
                raise Inexpressible(f"the opposite of {key}")
        elif key in UNSUPPORTED or key in ("pattern", "format", "multipleOf"):
            raise Inexpressible(f"the opposite of {key}")
        else:
            yield from _negated_bound(key, value, types)

    def _further_names(self, schema: Mapping[str, Any], context: list[Any]) -> Iterator[Any]:
        """Yield schemas of objects that have a property which a closed schema does not name."""
        closed = [
            set(other.get("properties", ()))
            for other in context
            if isinstance(other, dict)
            and other.get("additionalProperties") is False
            and not other.get("patternProperties")
        ]
        if not closed:
            raise Inexpressible("the opposite of additionalProperties")
        names = sorted(set.intersection(*closed) - set(schema.get("properties", ())))
        yield from ({"type": "object", "required": [name]} for name in names)

    def _exclude(self, one: list[Any], other: list[Any]) -> bool:
        self._count()
        both = types_of(one, True) & types_of(other, True)
        if not both or False in [schema for schema in (*one, *other) if isinstance(schema, bool)]:
            return True
        if _values_exclude(one, other) or _bounds_exclude([*one, *other], both):
            return True
        for first, second in ((one, other), (other, one)):
            for number, schema in enumerate(first):
                if isinstance(schema, dict) and "anyOf" in schema:
                    rest = [*first[:number], {k: v for k, v in schema.items() if k != "anyOf"}, *first[number + 1 :]]
                    if all(self._exclude([*rest, *self._flat([item])], second) for item in schema["anyOf"]):
                        return True
        if not both <= {"object"}:
            return False
        required = {name for s in (*one, *other) if isinstance(s, dict) for name in s.get("required", ())}
        return any(
            self._exclude(self._flat(members(one, name)), self._flat(members(other, name))) for name in sorted(required)
        )


_OBJECT_KEYWORDS = (
    "required", "properties", "patternProperties", "additionalProperties", "minProperties", "maxProperties",
)  # fmt: skip
APPLIES_TO: Mapping[str, frozenset[str]] = (
    dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ATOMS["string"])
    | dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), ATOMS["array"])
    | dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMERIC)
    | dict.fromkeys(_OBJECT_KEYWORDS, ATOMS["object"])
)


def types_of(schemas: Iterable[Any], with_values: bool = False) -> frozenset[str]:
    """Return the types (`ALL_TYPES`) that all of some schemas permit by `type`, and by `const` and `enum`.

    Args:
        with_values: whether the types of listed values count.
    """
    types = ALL_TYPES
    for schema in schemas:
        if not isinstance(schema, dict):
            continue
        if "type" in schema:
            names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            types &= frozenset().union(*(ATOMS.get(name, frozenset()) for name in names))
        if with_values and (values := _values(schema)) is not None:
            types &= frozenset(map(_type, values))
    return types


def typed(types: frozenset[str]) -> dict[str, Any]:
    """Return the schema of all values of some types (`ALL_TYPES`).

    Raises:
        Inexpressible: fractions without integers.
    """
    if "fraction" in types and "integer" not in types:
        raise Inexpressible("numbers that are not integers")
    names = sorted(types - {"fraction"} if "fraction" not in types else types - NUMERIC | {"number"})
    return {"type": names[0] if len(names) == 1 else names}


def any_of(schemas: Iterable[Any]) -> Any:
    """Return the schema of values that satisfy one or more schemas."""
    parts = [schema for schema in schemas if schema is not False]
    if not parts or True in [part for part in parts if isinstance(part, bool)]:
        return bool(parts)
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def all_of(schemas: Iterable[Any]) -> Any:
    """Return the schema of values that satisfy all of some schemas."""
    parts = [schema for schema in schemas if schema is not True]
    if not parts or False in [part for part in parts if isinstance(part, bool)]:
        return not parts
    return parts[0] if len(parts) == 1 else {"allOf": parts}


def members(schemas: Iterable[Any], name: str) -> list[Any]:
    """Return the schemas of a property; a schema with `patternProperties` is taken to permit any value."""
    found: list[Any] = []
    for schema in schemas:
        if not isinstance(schema, dict):
            continue
        if name in (properties := schema.get("properties", {})):
            found.append(properties[name])
        elif not schema.get("patternProperties"):
            found.append(schema.get("additionalProperties", True))
    return found


def other_values(values: Sequence[Any], types: frozenset[str]) -> Iterator[Any]:
    """Yield schemas of all values of some types except `values`.

    Raises:
        Inexpressible: arrays or objects are excluded, or numbers where only fractions are permitted.
    """
    kinds = frozenset(map(_type, values))
    numeric = types & NUMERIC if kinds & NUMERIC else frozenset()
    if rest := types - kinds - numeric:
        yield typed(rest)
    if kinds & types & {"array", "object"}:
        raise Inexpressible("the opposite of an array or object")
    if "string" in kinds & types:
        yield {"type": "string", "pattern": other_strings([value for value in values if isinstance(value, str)])}
    if "boolean" in kinds & types:
        excluded = [value for value in values if isinstance(value, bool)]
        yield from ({"const": value} for value in (True, False) if value not in excluded)
    if numeric:
        numbers = sorted({value for value in values if _type(value) in NUMERIC})
        edges = [None, *numbers, None]
        for below, above in pairwise(edges):
            bounds = {"exclusiveMinimum": below, "exclusiveMaximum": above}
            yield typed(numeric) | {key: value for key, value in bounds.items() if value is not None}


def other_strings(strings: Iterable[str]) -> str:
    """Return a regular expression for all strings except some.

    Raises:
        Inexpressible: the strings are too long.
    """
    strings = set(strings)
    if sum(map(len, strings)) > MAX_CHARACTERS or max(map(len, strings)) > 200:
        raise Inexpressible("the opposite of strings of this length")

    def other(suffixes: set[str]) -> str:
        """Return the expression for all strings except these suffixes."""
        following: dict[str, set[str]] = {}
        for suffix in sorted(suffixes - {""}):
            following.setdefault(suffix[0], set()).add(suffix[1:])
        ends = [] if "" in suffixes else [""]
        if not following:
            return f"(?:{ANY})" if ends else f"(?:{ANY_CHARACTER}{ANY})"
        first = "".join(map(_character, following))
        further = [_character(character) + other(rest) for character, rest in following.items()]
        return "(?:" + "|".join([rf"[^\x00{first}]{ANY}", *further, *ends]) + ")"

    return f"^{other(strings)}$"


ANY_CHARACTER = r"(?s:.)"
ANY = r"(?s:.*)"


def _character(character: str) -> str:
    return character if character.isalnum() and character.isascii() else f"\\x{{{ord(character):x}}}"


def _type(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}.get(type(value), "null")


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _negated_bound(key: str, value: Any, types: frozenset[str]) -> Iterator[Any]:
    for lower, upper, below, above in BOUNDS:
        if key in (lower, upper):
            yield typed(types & NUMERIC) | {below if key == lower else above: value}
    for (lower, upper), kind in SIZES.items():
        if key == lower and value > 0:
            yield {"type": kind, upper: value - 1}
        elif key == upper:
            yield {"type": kind, lower: value + 1}


def _values_exclude(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether two conjunctions list values, and share none."""

    def listed(schemas: Iterable[Any]) -> list[list[tuple[bool, Any]]]:
        found = (_values(schema) for schema in schemas if isinstance(schema, dict))
        return [[(isinstance(value, bool), value) for value in values] for values in found if values is not None]

    return any(not any(value in second for value in first) for first in listed(one) for second in listed(other))


def _bounds_exclude(schemas: Sequence[Any], types: frozenset[str]) -> bool:
    """Return whether a lower bound exceeds an upper bound, where all types have this bound."""
    dicts = [schema for schema in schemas if isinstance(schema, dict)]

    def bounds(key: str) -> list[Any]:
        return [schema[key] for schema in dicts if isinstance(schema.get(key), (int, float))]

    if types <= NUMERIC:
        lower = [(value, key) for key in ("minimum", "exclusiveMinimum") for value in bounds(key)]
        upper = [(value, key) for key in ("maximum", "exclusiveMaximum") for value in bounds(key)]
        inclusive = {"minimum", "maximum"}
        return any(a > b or (a == b and not {low, high} <= inclusive) for a, low in lower for b, high in upper)
    return any(
        types <= {kind} and max(bounds(lower), default=0) > min(bounds(upper), default=float("inf"))
        for (lower, upper), kind in SIZES.items()
    )
