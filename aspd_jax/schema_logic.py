"""Exclusion of JSON schemas: a `oneOf` whose branches share no value is an `anyOf`.

Schemas here are normalised (`aspd_jax.json_schema`): they have no keywords of `UNSUPPORTED`. A *context* is a list of
schemas that the value satisfies in any case; results hold for such values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Types that share no value: a number is an integer or a fraction.
ATOMS: Mapping[str, frozenset[str]] = {
    "integer": frozenset({"integer"}), "number": frozenset({"integer", "fraction"}),
} | {name: frozenset({name}) for name in ("null", "boolean", "string", "array", "object")}  # fmt: skip
ALL_TYPES = frozenset().union(*ATOMS.values())
NUMERIC = ATOMS["number"]
# Pairs of a lower and an upper bound, and the type they apply to.
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
MAX_STEPS = 5000  # maximum schemas that one comparison visits


class Inexpressible(Exception):
    """The result needs a keyword that grammars lack; the text names what cannot be stated."""


class SchemaLogic:
    """Exclusion of the schemas of one document.

    Args:
        resolve: function from a reference to its normalised schema; None if there is none.
    """

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self._resolve, self._steps = resolve, 0

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

    def _exclude(self, one: list[Any], other: list[Any]) -> bool:
        self._count()
        both = types_of(one) & types_of(other)
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


def types_of(schemas: Iterable[Any]) -> frozenset[str]:
    """Return the types (`ALL_TYPES`) that all of some schemas permit by `type`, `const` and `enum`."""
    types = ALL_TYPES
    for schema in schemas:
        if not isinstance(schema, dict):
            continue
        if "type" in schema:
            names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            types &= frozenset().union(*(ATOMS.get(name, frozenset()) for name in names))
        if (values := _values(schema)) is not None:
            types &= frozenset(map(_type, values))
    return types


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
