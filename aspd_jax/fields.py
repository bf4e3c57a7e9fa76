"""Parallel fields: the template of the JSON objects of a schema, with a hole for every leaf.

A leaf is a value that is decoded as one segment: a string, number, boolean, enumeration, array, `anyOf`, or an object
that cannot be divided. Names and punctuation are literal text. Values that the schema determines (`const`) are, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aspd_jax.errors import RequestError
from aspd_jax.template import Hole, Part, Template

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "x-after"}
DEFINITIONS = ("$defs", "definitions")
# Keywords of an object whose members can be decoded apart; any other keyword may tie them together.
DIVISIBLE = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *DEFINITIONS, *ANNOTATIONS}
MAX_DEPTH = 32  # maximum depth of nested objects


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
    """Return the template of the objects of a JSON schema; None if its values cannot be divided.

    Every property is written, in the order of the schema, optional ones included. A property with `"x-after": [names]`
    sees the values of these properties: siblings, or dotted paths from the root.

    Raises:
        RequestError: `x-after` with an unknown name or a cycle, or a required property that no value fits.
    """
    root = json.loads(schema) if isinstance(schema, str) else schema
    tree = _node(root, root, (), (), 0)
    if tree.members is None or sum(1 for _ in tree.leaves) < 2:
        return None
    names = [leaf.name for leaf in tree.leaves]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"json_schema: expected fields with different paths, got two with {repeated!r}")
    after = _dependencies(tree)
    return Template(list(_parts(tree, "", after, root)))


def _node(schema: Any, root: Any, path: tuple[str, ...], refs: tuple[str, ...], depth: int) -> Node:
    after = tuple(schema.get("x-after", ())) if isinstance(schema, dict) else ()
    resolved, refs = _resolved(schema, root, refs)
    if resolved is None or not isinstance(resolved, dict):
        return Node(path, schema=schema, after=after)
    constant = [resolved["const"]] if "const" in resolved else resolved.get("enum", [])
    if isinstance(constant, list) and len(constant) == 1:
        return Node(path, text=json.dumps(constant[0], ensure_ascii=False), after=after)
    if not _divides(resolved, depth):
        return Node(path, schema=schema, after=after)
    members = {}
    for name, member in resolved["properties"].items():
        if member is False:
            if name in resolved.get("required", ()):
                place = ".".join((*path, name))
                raise RequestError(f"json_schema: {place}: expected a schema, because it is required, got false")
            continue
        members[name] = _node(member, root, (*path, name), refs, depth + 1)
    return Node(path, members, after=after)


def _divides(schema: Mapping[str, Any], depth: int) -> bool:
    """Return whether the members of an object can be decoded apart."""
    properties = schema.get("properties")
    return (
        schema.get("type", "object") == "object"
        and isinstance(properties, dict)
        and bool(properties)
        and DIVISIBLE.issuperset(schema)
        and set(schema.get("required", ())).issubset(properties)
        and depth < MAX_DEPTH
    )


def _resolved(schema: Any, root: Any, refs: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Return the schema that a local reference names, and the references on the way; None if it has to stay whole."""
    while isinstance(schema, dict):
        whole = schema.get("allOf", ())
        if len(whole) == 1 and set(schema) - {"allOf"} <= ANNOTATIONS:
            schema = whole[0]
            continue
        if "$ref" not in schema:
            return schema, refs
        reference, siblings = schema["$ref"], set(schema) - {"$ref", "$schema", *DEFINITIONS}
        target = _target(root, reference)
        if target is None or reference in refs or not siblings <= ANNOTATIONS:
            return None, refs
        schema, refs = target, (*refs, reference)
    return schema, refs


def _target(root: Any, reference: Any) -> Any:
    """Return the definition that `#/$defs/…` names; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    keys = [key.replace("~1", "/").replace("~0", "~") for key in reference[2:].split("/")]
    if keys[0] not in DEFINITIONS:
        return None
    value = root
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


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


def _named(name: Any, node: Node, ancestors: tuple[Node, ...], tree: Node) -> Node:
    """Return the node that `x-after` names: a sibling, a sibling of an ancestor, or a path from the root."""
    for ancestor in ancestors:
        if ancestor.members and name in ancestor.members:
            return ancestor.members[name]
    value: Node | None = tree
    for key in str(name).split("."):
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
        yield Hole(node.name, after[node.name], context.rstrip(" "), _leaf_schema(node.schema, root), node.path)
    else:
        for number, (name, member) in enumerate(node.members.items()):
            key = f"{json.dumps(name, ensure_ascii=False)}: "
            yield ("{" if not number else ", ") + key
            yield from _parts(member, f"{context}{{{key}", after, root)
        yield "}"


def _leaf_schema(schema: Any, root: Any) -> str:
    """Return the schema of a leaf as text, with the definitions that it may refer to."""
    text = json.dumps(schema)
    if not isinstance(schema, dict):
        return text
    definitions = {name: root[name] for name in DEFINITIONS if '"$ref"' in text and name in root}
    return json.dumps({**definitions, **{key: value for key, value in schema.items() if key != "x-after"}})


def value_length(text: str) -> int | None:
    """Return the characters of the JSON value that text begins with, blanks before it included.

    None: more characters may belong to the value. A number is complete when something else follows it.
    """
    blanks = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text, blanks)
    except ValueError:
        return None
    is_number = text[end - 1].isdigit()
    follows = text[end : end + 1]
    return end if not is_number or (follows and follows in " \t\r\n,]}") else None
