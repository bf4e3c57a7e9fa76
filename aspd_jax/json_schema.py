"""JSON schemas as grammars take them: checked, without annotations, and with `oneOf` and dependencies stated otherwise.

llguidance follows JSON Schema 2020-12, but lacks some keywords. Those that other keywords can state exactly are stated
so (`aspd_jax.schema_logic`). Unknown formats and keywords whose value is null are annotations. Whatever remains is
refused by its JSON pointer, or ignored where the caller permits an approximation.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

from aspd_jax.errors import RequestError
from aspd_jax.grammar_limits import parser_limits
from aspd_jax.schema_formats import PATTERNS
from aspd_jax.schema_logic import UNSUPPORTED, Inexpressible, SchemaLogic, all_of

# The only form of a value (protocol, section 5): one space after each colon and comma, no other between parts.
FORM: Any = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
MAX_SCHEMAS = 100_000  # maximum schemas within a schema
MAX_DEPTH = 200  # maximum depth of nested schemas
SECONDS = 10.0  # maximum time to check a schema
TOO_SLOW = f"expected a schema that compiles within {SECONDS:g} s. Simplify it."
DEFINITIONS = ("$defs", "definitions")
PLACES = tuple(f"#/{name}/" for name in DEFINITIONS)
SINGLE = ("additionalProperties", "items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
          "unevaluatedItems", "unevaluatedProperties", "contentSchema")  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
DRAFT = re.compile(r"https?://json-schema\.org/draft[-/](?:0?([467])|(2019|2020)-\d\d)/schema#?")
CLASS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escape or a class of a regular expression
MAX_LIMITATIONS = 64  # maximum keywords that an approximation ignores because llguidance refuses their values
# Beginnings of llguidance's errors on schemas that are valid, but not supported.
LIMITATIONS = ("min/maxProperties only", "patternProperty regexes", "Unable to determine", "circular references")


class ReadSchema(NamedTuple):
    """A schema that compiles.

    Attributes:
        text: the schema, which grammars support.
        ignored: JSON pointers of annotations that may have been meant as constraints, such as unknown formats, and of
            ignored keywords.
    """

    text: str
    ignored: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema as an object."""
        schema: dict[str, Any] = json.loads(self.text)
        return schema


def read_schema(schema: str | Mapping[str, Any], approximate: bool = False) -> ReadSchema:
    """Read and check a schema.

    Args:
        schema: JSON schema of an object or of any other value, as text or as a mapping.
        approximate: ignore what grammars do not support, and take `oneOf` for `anyOf` where its branches may share
            values, instead of refusing it. The answer may then violate the schema.

    Raises:
        RequestError: the schema is malformed, no value satisfies it, it takes too long, or it is not supported.
    """
    return _read(schema if isinstance(schema, str) else json.dumps(schema), approximate)


@lru_cache(maxsize=64)
def _read(text: str, approximate: bool) -> ReadSchema:
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as broken:
        raise RequestError(f"expected a JSON schema, got: {broken}") from None
    if isinstance(root, bool):
        hint = "Write {} to permit any value" if root else "It permits no value"
        raise RequestError(f"expected the schema as an object, got {spell(root)}. {hint}.")
    if not isinstance(root, dict):
        raise RequestError(f"expected the schema as an object, got {spell(root)}")
    if "x-guidance" in root:
        raise RequestError("#/x-guidance: expected keywords of JSON Schema, got a setting of the grammar library")
    try:
        schema, ignored = _compiled(_Reader(root, approximate), approximate)
    except RecursionError:
        raise RequestError("expected a schema of lower depth") from None
    except RequestError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"expected a JSON schema, got a keyword with a value of another type ({error})") from None
    return ReadSchema(json.dumps(schema), tuple(dict.fromkeys(ignored)))


def _compiled(reader: _Reader, approximate: bool) -> tuple[Any, list[str]]:
    """Return a schema that compiles, and what it ignores."""
    for _ in range(MAX_LIMITATIONS):
        schema = reader.read_root()
        if schema is False:
            raise RequestError("expected a schema that a value satisfies, got one that none does")
        if (error := compile_error(schema)) is None:
            return schema, reader.ignored
        for where, message in reader.refusals.items():
            raise _refusal(where, message)
        where, known = reader.locate(error)
        if error.startswith("Unsatisfiable") and where.startswith(PLACES) and where.count("/") == 2:
            reader.impossible.add(where)  # llguidance refuses such a definition where it is optional, too
        elif approximate and known:
            reader.dropped.add(where)
        else:
            raise _refusal(where, reason(error))
    raise RequestError(f"expected a schema with fewer unsupported keywords, got more than {MAX_LIMITATIONS}")


def _refusal(place: str, message: str) -> RequestError:
    return RequestError(message if place == "#" else f"{place}: {message}")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar, in llguidance's form, of a JSON value of a read schema."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=FORM)


def json_rule(schema: str | Mapping[str, Any]) -> str:
    """Return the right side of a Lark rule for a JSON value of a schema.

    Raises:
        RequestError: the schema is malformed or not supported.
    """
    return f"%json {json.dumps({**read_schema(schema).schema, 'x-guidance': FORM})}"


def compile_error(schema: Mapping[str, Any]) -> str | None:
    """Return llguidance's error on a schema; None: it compiles.

    Raises:
        RequestError: it takes too long.
    """
    from llguidance import LLMatcher

    try:
        work = _pool().submit(LLMatcher.validate_grammar, json_grammar(schema), limits=parser_limits())
        return work.result(SECONDS) or None
    except TimeoutError:
        work.cancel()
        raise RequestError(TOO_SLOW) from None


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Return the threads that compile schemas; a schema that takes too long holds one of them, and no caller."""
    return ThreadPoolExecutor(2, "schemas")


@lru_cache(maxsize=1024)
def _compiles(keyword: str, value: str) -> str | None:
    """Return llguidance's error on one keyword of strings or objects."""
    return compile_error({"type": ["string", "object"], keyword: json.loads(value)})


def reason(error: str) -> str:
    """Return the decisive line of llguidance's error."""
    lines = error.strip().splitlines()
    if "look-around" in error or "lookaround" in error:
        return "expected a regular expression without look-ahead and look-behind, got one with them"
    return lines[-1].removeprefix("error: ") if "regex parse error" in error else lines[0]


def exact_pattern(pattern: str) -> str:
    """Return a regular expression whose negated classes exclude U+0000.

    llguidance adds the quotation mark and the backslash to any class that has all control characters.
    """
    if not isinstance(pattern, str):
        return pattern
    return CLASS.sub(
        lambda found: found[0].replace("[^", r"[^\x00", 1) if found[0].startswith("[^") else found[0], pattern
    )


def spell(value: Any) -> str:
    """Return a JSON value as text for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def pointer(place: str, *keys: str | int) -> str:
    """Return the JSON pointer of a member."""
    return "/".join([place, *(str(key).replace("~", "~0").replace("/", "~1") for key in keys)])


def resolve(root: Any, reference: str) -> Any:
    """Return the value that a reference within the document names (`#` or `#/…`); None: there is none."""
    value = root
    for key in [key.replace("~1", "/").replace("~0", "~") for key in reference[1:].split("/")[1:]]:
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return None
    return value


class _Reader:
    """Reader of one document.

    Args:
        root: the whole schema.
        approximate: see `read_schema`.

    Attributes:
        ignored: see `ReadSchema`.
        refusals: JSON pointers of unsupported keywords, and the messages about them.
        dropped: JSON pointers of keywords to ignore.
        impossible: JSON pointers of definitions that no value satisfies.
    """

    def __init__(self, root: Mapping[str, Any], approximate: bool) -> None:
        self.ignored: list[str] = []
        self.refusals: dict[str, str] = {}
        self.dropped, self.impossible = set[str](), set[str]()
        self._root, self._approximate = root, approximate
        found = DRAFT.fullmatch(str(root.get("$schema", "")))
        self._draft = int(found[1] or found[2]) if found else 2020
        self._known_draft = found is not None
        self._deadline = time.monotonic() + SECONDS
        self._read_schemas = 0
        self._targets: dict[str, Any] = {}
        self._logic = SchemaLogic(self._target)

    def read_root(self) -> Any:
        """Return the whole schema; see `read`."""
        self.ignored, self._targets, self._read_schemas = [], {}, 0
        return self.read(self._root, "#")

    def read(self, schema: Any, place: str) -> Any:
        """Return a schema without annotations, and with supported keywords only.

        Args:
            schema: the schema.
            place: its JSON pointer.

        Raises:
            RequestError: it is malformed, or not supported.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise RequestError(f"{place}: expected a schema, got {spell(schema)}")
        self._read_schemas += 1
        if time.monotonic() > self._deadline:
            raise RequestError(TOO_SLOW)
        if self._read_schemas > MAX_SCHEMAS or place.count("/") > MAX_DEPTH:
            raise RequestError(f"{place}: expected at most {MAX_SCHEMAS} schemas of depth {MAX_DEPTH}, got more")
        result: dict[str, Any] = {}
        for key, value in schema.items():
            for name, read in self._read_keyword(key, value, schema, pointer(place, key)):
                result[name] = read
        constraints = list(self._constraints(schema, result, place))
        if False in [part for part in constraints if isinstance(part, bool)] or (
            "$ref" in result and self._target(result["$ref"]) is False
        ):
            return False
        if constraints:
            own = result.pop("allOf", [])
            result["allOf"] = [*own, *constraints]
        return {key: value for key, value in result.items() if value is not ...}

    def _read_keyword(self, key: str, value: Any, schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
        """Yield the keywords that state one keyword; `...` holds the place of a later one."""
        if place in self.dropped:
            self.ignored.append(place)
        elif (value is None and key not in ("const", "default")) or key in ("default", "examples", "example"):
            pass
        elif key == "$schema":
            if self._known_draft:
                yield key, value
        elif key == "format":
            if not isinstance(value, str) or (value not in PATTERNS and _compiles(key, json.dumps(value)) is not None):
                self.ignored.append(place)
            elif value not in PATTERNS:
                yield key, value
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            bound = "minimum" if key == "exclusiveMinimum" else "maximum"
            if value and bound in schema:
                yield key, schema[bound]
        elif key in UNSUPPORTED:
            if key == "oneOf" and "anyOf" not in schema:
                yield "anyOf", ...  # keeps the order of properties
            elif self._draft < UNSUPPORTED[key]:
                yield key, value
        elif key == "pattern":
            if self._is_pattern(value, place, "pattern"):
                yield key, exact_pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            kept = [name for name in value if self._is_pattern(name, pointer(place, name), key)]
            yield key, {exact_pattern(name): self.read(value[name], pointer(place, name)) for name in kept}
        elif key in MAPS and isinstance(value, dict):
            yield key, {name: self.read(item, pointer(place, name)) for name, item in value.items()}
        elif key in LISTS and isinstance(value, list):
            yield key, [self.read(item, pointer(place, number)) for number, item in enumerate(value)]
        elif key in SINGLE:
            yield key, self.read(value, place)
        else:
            yield key, value

    def _constraints(self, schema: Mapping[str, Any], result: dict[str, Any], place: str) -> Iterator[Any]:
        """Yield schemas that state the unsupported keywords of a schema, except a `oneOf` that becomes its `anyOf`."""
        context = [{key: value for key, value in result.items() if value is not ...}]
        if isinstance(name := schema.get("format"), str) and name in PATTERNS:
            yield {"pattern": exact_pattern(PATTERNS[name])}
        for key in schema:
            where = pointer(place, key)
            if self._draft < UNSUPPORTED.get(key, 9999) or schema[key] is None or where in self.dropped:
                continue
            try:
                stated = self._statement(key, schema, place, context)
            except Inexpressible as error:
                told = f"{key} ({error} cannot be stated)" if str(error) else key
                self._refuse(where, f"expected keywords that grammars support, got {told}")
                read = self._branches(schema[key], where) if key == "oneOf" else []
                if not self._approximate:  # llguidance does not reach every part, and knows more about `oneOf`
                    result[key] = read or schema[key]
                    if result.get("anyOf") is ...:
                        del result["anyOf"]
                    continue
                stated = {"anyOf": read} if read else True
            if key == "oneOf" and result.get("anyOf") is ... and isinstance(stated, dict) and set(stated) == {"anyOf"}:
                result["anyOf"] = stated["anyOf"]
            elif stated is not True:
                yield stated

    def _statement(self, key: str, schema: Mapping[str, Any], place: str, context: list[Any]) -> Any:
        """Return a schema that states an unsupported keyword of a schema.

        Raises:
            Inexpressible: there is no exact one.
        """
        value, where = schema[key], pointer(place, key)
        if key == "oneOf":
            return self._exactly_one(self._branches(value, where), context)
        if key in ("dependencies", "dependentRequired", "dependentSchemas"):
            return self._dependencies(value, where)
        most = schema.get("maxItems")
        has_no_effect = {
            "not": value is False, "if": "then" not in schema and "else" not in schema,
            "then": True, "else": True,  # nothing without `if`
            "uniqueItems": value is False or (isinstance(most, int) and most <= 1),
            "minContains": "contains" not in schema, "maxContains": "contains" not in schema,
        }.get(key, key != "contains" and value in (True, {}))  # fmt: skip
        if not has_no_effect:
            raise Inexpressible
        return True

    def _branches(self, branches: Any, place: str) -> list[Any]:
        if not isinstance(branches, list):
            raise RequestError(f"{place}: expected a list of schemas, got {spell(branches)}")
        return [self.read(branch, pointer(place, number)) for number, branch in enumerate(branches)]

    def _exactly_one(self, read: list[Any], context: list[Any]) -> Any:
        for number, branch in enumerate(read):
            if time.monotonic() > self._deadline:
                raise RequestError(TOO_SLOW)
            if not all(self._logic.exclude(branch, later, context) for later in read[number + 1 :]):
                raise Inexpressible("that one of schemas with common values holds")
        return {"anyOf": read}

    def _dependencies(self, value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise RequestError(f"{place}: expected an object, got {spell(value)}")
        stated = []
        for name, needed in value.items():
            needed = [needed] if isinstance(needed, str) else needed
            if isinstance(needed, list):
                present: Any = {"required": list(dict.fromkeys([name, *needed]))}
            else:
                present = all_of([{"required": [name]}, self.read(needed, pointer(place, name))])
            absent = {"properties": {name: False}}
            stated.append(absent if present is False else {"anyOf": [absent, present]})
        return all_of(stated)

    def _is_pattern(self, value: Any, place: str, key: str) -> bool:
        """Return whether a regular expression is supported, and ignore it otherwise."""
        error = _compiles(key, json.dumps(value if key == "pattern" else {value: True}))
        if error is None:
            return True
        self._refuse(place, reason(error))
        return not self._approximate

    def _refuse(self, place: str, message: str) -> None:
        """Ignore a keyword, or note the reason why the schema is refused if llguidance needs the keyword."""
        if self._approximate:
            self.ignored.append(place)
        else:
            self.refusals.setdefault(place, message)

    def _target(self, reference: Any) -> Any:
        """Return the read schema that a reference within the document names; None: there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference in self.impossible:
            return False
        if reference not in self._targets:
            self._targets[reference] = None  # a schema that refers to itself
            if isinstance(value := resolve(self._root, reference), (dict, bool)):
                before = list(self.ignored)
                self._targets[reference] = self.read(value, reference)
                self.ignored = before  # reading the definition itself names them
        return self._targets[reference]

    def locate(self, error: str) -> tuple[str, bool]:
        """Return the JSON pointer of the schema or keyword with an error, and whether it is a limitation.

        Args:
            error: error of the whole schema.
        """
        place, schema = "#", self._root
        line, deadline = error.splitlines()[0], time.monotonic() + SECONDS / 4
        before = list(self.ignored)

        def fails(part: Any, where: str) -> bool:
            if not isinstance(part, dict) or time.monotonic() > deadline:
                return False
            definitions = {key: self._root[key] for key in ("$schema", *DEFINITIONS) if key in self._root}
            try:
                read = self.read(part, where)
                found = compile_error({**self.read(definitions, "#"), **read}) if isinstance(read, dict) else None
            except RequestError:
                return False
            return found is not None and found.splitlines()[0] == line

        while inner := next((pair for pair in schemas_in(schema, place) if fails(*pair)), None):
            schema, place = inner
        known = line.startswith(LIMITATIONS)
        if known:
            without = ((key, {k: v for k, v in schema.items() if k != key}) for key in reversed(list(schema)))
            keys = [key for key, rest in without if not fails(rest, place)]
            place = pointer(place, keys[0]) if keys else place
        self.ignored = before
        return place, known and place != "#"


def schemas_in(schema: Mapping[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Yield the schemas directly within a schema, definitions first, and their JSON pointers."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in DEFINITIONS):
        where = pointer(place, key)
        if key in MAPS and isinstance(value, dict):
            yield from ((item, pointer(where, name)) for name, item in value.items())
        elif key in LISTS and isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((item, pointer(where, number)) for number, item in enumerate(value))
        elif key in SINGLE:
            yield value, where
