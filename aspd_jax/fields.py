"""Parallel fields: the template of the JSON objects of a schema, with a hole for every leaf.

A leaf is a value that is decoded as one segment: a string, number, boolean, enumeration, array, `anyOf`, or an object
that cannot be divided. Names and punctuation are literal text. Values that the schema determines (`const`) are, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import Any

from aspd_jax.errors import RequestError
from aspd_jax.json_schema import DEFINITIONS, PLACES, compile_error, resolve
from aspd_jax.template import Hole, Part, Template

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "x-after"}
# Keywords of an object whose members can be decoded apart; any other keyword may tie them together.
DIVISIBLE = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *DEFINITIONS, *ANNOTATIONS}
MAX_DEPTH = 32  # maximum depth of nested objects
MAX_CHARACTERS = 1 << 22  # maximum characters of the schemas of all values of a template
MAX_VALUES = 2048  # maximum values of a template; a few definitions may refer to each other very often
# Keywords beside `const` or `enum` that are checked here; other keywords are left to the grammar of a leaf.
DETERMINED = {"const", "enum", "type", "$schema", *DEFINITIONS, *ANNOTATIONS}
TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), NoneType: ("null",),
    list: ("array",), dict: ("object",),
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A value of the template: an object with members, or a leaf, or known text.

    Attributes:
        path: names from the root.
        members: nodes of an object by name; None: no object.
        text: JSON text of a value that the schema determines; None: unknown.
        schema: schema of a leaf.
        after: `x-after` of the property, names as they are written.
    """

    path: tuple[str, ...]
    members: Mapping[str, Node] | None = None
    text: str | None = None
    schema: Any = None
    after: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the dotted path."""
        return ".".join(self.path)

    @property
    def leaves(self) -> Iterator[Node]:
        """Return the leaves of the node in the order of the text."""
        if self.members is None:
            yield from () if self.text is not None else (self,)
        else:
            for member in self.members.values():
                yield from member.leaves


def fields_template(schema: str | Mapping[str, Any]) -> Template | None:
    """Return the template of the objects of a JSON schema; None if its values have to be decoded serially.

    They have to where they cannot be divided, are more than `MAX_VALUES`, have schemas of more than `MAX_CHARACTERS`
    together, or have equal dotted paths.

    Every property that a value fits is written, in the order of the schema, optional ones included. A property with
    `"x-after": [names]` sees the values of these properties: siblings, or dotted paths from the root.

    Args:
        schema: JSON schema, as text or as a mapping, read by `aspd_jax.json_schema`.

    Raises:
        RequestError: `x-after` that is no list of known names, or has a cycle.
    """
    root = json.loads(schema) if isinstance(schema, str) else schema
    try:
        tree = _node(root, root, (), (), _Room()) if _is_self_contained(root) else Node(())
    except _TooLarge:
        return None
    leaves = [leaf.name for leaf in tree.leaves]
    if tree.members is None or not leaves or len(set(leaves)) < len(leaves):
        return None
    parts = list(_parts(tree, "", _dependencies(tree), root))
    try:  # a schema with one leaf is decoded serially, and checked, too
        template = Template(parts)
    except RequestError as error:
        raise RequestError(f"json_schema: {error}") from None
    return template if len(leaves) > 1 else None


class _TooLarge(Exception):
    """A schema has more than `MAX_VALUES` values, or they have more than `MAX_CHARACTERS`."""


@dataclass
class _Room:
    """Values, and characters of their schemas, that a template may still have."""

    values: int = MAX_VALUES
    characters: int = MAX_CHARACTERS

    def take(self, values: int = 0, characters: int = 0) -> None:
        """Take values or characters."""
        self.values, self.characters = self.values - values, self.characters - characters
        if min(self.values, self.characters) < 0:
            raise _TooLarge


def _is_self_contained(root: Any) -> bool:
    """Return whether all references of a schema name its definitions, so that they have one meaning in every leaf."""
    bases = [value for value in _objects(root) if value is not root and isinstance(value.get("$id"), str)]
    return not bases and all(name.startswith(PLACES) for name in _references(root))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _references(value: Any) -> Iterator[str]:
    """Yield all references in a schema."""
    for found in _objects(value):
        yield from (found[name] for name in ("$ref", "$dynamicRef") if isinstance(found.get(name), str))


def _node(schema: Any, root: Any, path: tuple[str, ...], refs: tuple[str, ...], room: _Room) -> Node:
    """Return the node of a value; `room`: of the whole template."""
    room.take(values=1)
    resolved, refs, after = _resolved(schema, root, path, refs)
    if resolved is None or not isinstance(resolved, dict):
        return Node(path, schema=schema, after=after)
    if (text := _determined(resolved)) is not None:
        return Node(path, text=text, after=after)
    if not _divides(resolved, len(path)):
        return Node(path, schema=schema, after=after)
    members = {}
    for name, member in resolved["properties"].items():
        node, fits = _node(member, root, (*path, name), refs, room), True
        if node.members is None and node.text is None:
            leaf = _leaf_schema(member, root)
            room.take(characters=len(leaf))
            fits = not _fits_no_value(leaf)
        if fits:
            members[name] = node
        elif name in resolved.get("required", ()):
            return Node(path, schema=schema, after=after)  # no value fits the object either
    return Node(path, members, after=after) if members else Node(path, schema=schema, after=after)


def _determined(schema: Mapping[str, Any]) -> str | None:
    """Return the JSON text of the only value of a schema; None: it has several, or the grammar has to decide."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) != 1 or not DETERMINED.issuperset(schema):
        return None
    own = TYPES[type(values[0])]
    types = schema.get("type", own[0])
    fits = any(name in own for name in (types if isinstance(types, list) else [types]))
    fits = fits and ("enum" not in schema or schema["enum"] == values)
    return json.dumps(values[0], ensure_ascii=False) if fits else None


def _divides(schema: Mapping[str, Any], depth: int) -> bool:
    """Return whether the members of an object can be decoded apart."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        schema.get("type", "object") == "object"
        and isinstance(properties, dict)
        and bool(properties)
        and DIVISIBLE.issuperset(schema)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and depth < MAX_DEPTH
    )


def _resolved(
    schema: Any, root: Any, path: tuple[str, ...], refs: tuple[str, ...]
) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Return the schema that a local reference names, the references on the way, and all `x-after`.

    The schema is None if the value has to stay whole.
    """
    after: tuple[str, ...] = ()
    while isinstance(schema, dict):
        after = (*after, *_after(schema, path))
        whole = schema.get("allOf")
        if isinstance(whole, list) and len(whole) == 1 and set(schema) - {"allOf"} <= ANNOTATIONS:
            schema = whole[0]
            continue
        if "$ref" not in schema:
            return schema, refs, after
        reference, siblings = schema["$ref"], set(schema) - {"$ref", "$schema", *DEFINITIONS}
        target = resolve(root, reference) if isinstance(reference, str) and reference.startswith(PLACES) else None
        if target is None or reference in refs or not siblings <= ANNOTATIONS:
            return None, refs, after
        schema, refs = target, (*refs, reference)
    return schema, refs, after


def _after(schema: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the names in `x-after` of a schema."""
    names = schema.get("x-after", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        place = ".".join(path)
        raise RequestError(f'json_schema: {place}: "x-after": expected a list of names of fields, got {names!r}')
    return names


def _dependencies(tree: Node) -> dict[str, tuple[str, ...]]:
    """Return the names of the leaves that each leaf sees."""
    found: dict[str, list[str]] = {leaf.name: [] for leaf in tree.leaves}

    def visit(node: Node, ancestors: tuple[Node, ...]) -> None:
        for name in node.after:
            others = [leaf.name for leaf in _named(name, node, ancestors, tree).leaves]
            for leaf in node.leaves:
                found[leaf.name] += [other for other in others if other not in found[leaf.name]]
        for member in (node.members or {}).values():
            visit(member, (node, *ancestors))

    visit(tree, ())
    return {name: tuple(others) for name, others in found.items()}


def _named(name: str, node: Node, ancestors: tuple[Node, ...], tree: Node) -> Node:
    """Return the node that `x-after` names: a sibling, a sibling of an ancestor, or a path from the root."""
    for ancestor in ancestors:
        if ancestor.members and name in ancestor.members:
            return ancestor.members[name]
    value: Node | None = tree
    for key in name.split("."):
        value = (value.members or {}).get(key) if value else None
    if value is None:
        known = ", ".join(ancestors[0].members or ()) if ancestors else ""
        raise RequestError(f'json_schema: {node.name}: "x-after": unknown field {name!r}; expected one of {known}')
    return value


def _parts(node: Node, context: str, after: Mapping[str, tuple[str, ...]], root: Any) -> Iterator[Part]:
    """Return literal text and holes of a node.

    Args:
        context: what a branch that begins inside the node sees before it: the objects that are open there.
    """
    if node.text is not None:
        yield node.text
    elif node.members is None:
        schema = _leaf_schema(node.schema, root)
        yield Hole(node.name, after[node.name], context, schema, node.path)
    else:
        for number, (name, member) in enumerate(node.members.items()):
            key = f"{json.dumps(name, ensure_ascii=False)}: "
            yield ("{" if not number else ", ") + key
            yield from _parts(member, f"{context}{{{key}", after, root)
        yield "}"


def _leaf_schema(schema: Any, root: Any) -> str:
    """Return the schema of a leaf as text, with the definitions that it may refer to."""
    if not isinstance(schema, dict):
        return "{}" if schema is True else json.dumps(schema)
    own = {key: value for key, value in schema.items() if key not in ("x-after", *DEFINITIONS)}
    draft = {"$schema": root["$schema"]} if "$schema" in root else {}
    return json.dumps({**draft, **_definitions(own, root), **own})


def _definitions(schema: Any, root: Any) -> dict[str, dict[str, Any]]:
    """Return the definitions of the root that a schema needs."""
    needed: dict[str, dict[str, Any]] = {}
    waiting = [schema]
    while waiting:
        for reference in _references(waiting.pop()):
            place, _, rest = reference.removeprefix("#/").partition("/")
            name = rest.partition("/")[0].replace("~1", "/").replace("~0", "~")
            if place in DEFINITIONS and name in root.get(place, {}) and name not in needed.get(place, {}):
                needed.setdefault(place, {})[name] = root[place][name]
                waiting.append(root[place][name])
    return needed


@lru_cache(maxsize=256)
def _fits_no_value(schema: str) -> bool:
    """Return whether no value satisfies the schema of a leaf; other errors appear when the leaf is compiled."""
    value = json.loads(schema)
    error = compile_error(value) if isinstance(value, dict) else None
    return value is False or (error or "").startswith("Unsatisfiable schema")


def listed_values(schema: Any, path: Sequence[str]) -> tuple[str, ...]:
    """Return the values that a schema lists at a path, as JSON text: of `enum`, and true, false and null.

    Empty: another value may be there, or fewer than two are listed.

    Args:
        schema: JSON schema.
        path: names of members, and numbers of items.
    """
    root = schema
    for key in path:
        schema, _, _ = _resolved(schema, root, (), ())
        if not isinstance(schema, dict):
            return ()
        if isinstance(properties := schema.get("properties"), dict) and key in properties:
            schema = properties[key]
            continue
        first, rest = schema.get("prefixItems", []), schema.get("items")
        schema = first[int(key)] if key.isdecimal() and int(key) < len(first) else rest
    found = _listed(schema, root, ())
    return () if found is None or len(found) < 2 else tuple(dict.fromkeys(found))


def _listed(schema: Any, root: Any, refs: tuple[str, ...]) -> list[str] | None:
    """Return all values of a schema as JSON text; None: there may be others. `refs`: references on the way."""
    schema, refs, _ = _resolved(schema, root, (), refs)
    if not isinstance(schema, dict):
        return None
    types = schema.get("type")
    named = types if isinstance(types, list) else [types]
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        fitting = [value for value in values if types is None or set(named) & set(TYPES[type(value)])]
        if any(isinstance(value, list | dict) for value in fitting):
            return None
        return [json.dumps(value, ensure_ascii=False) for value in fitting]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schemas := schema.get(keyword), list):
            parts = [_listed(one, root, refs) for one in schemas]
            return None if None in parts else [text for part in parts for text in part or ()]
    if set(named) <= {"boolean", "null"}:
        return [text for name in named for text in (("true", "false") if name == "boolean" else ("null",))]
    return None


def value_length(text: str) -> int | None:
    """Return the characters of the JSON value that text begins with, blanks before it included.

    None: more characters may belong to the value, or its depth is too great. A number is complete when something else
    follows it.
    """
    blanks = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text, blanks)
    except (ValueError, RecursionError):
        return None
    is_number = text[end - 1].isdigit()
    follows = text[end : end + 1]
    return end if not is_number or (follows and follows in " \t\r\n,]}") else None
