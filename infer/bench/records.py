"""Requests for records, which are JSON objects of a schema, and runs without compilation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aspd_jax.progress import programs_compiled
from infer.engine import Engine

Run = TypeVar("Run")


def record_prompt(text: str, schema: Mapping[str, Any]) -> str:
    """Return the request for a record that is read from a text."""
    return f"Read the text and write one JSON object with these fields: {describe_fields(schema)}.\n\nText: {text}"


def describe_fields(schema: Mapping[str, Any]) -> str:
    """Return the names of the fields of a schema, with the values of enumerations and booleans."""
    return ", ".join(f"{name}{_hint(field)}" for name, field in schema["properties"].items())


def _hint(schema: Any) -> str:
    if not isinstance(schema, Mapping):  # `true`: any value
        return ""
    if "enum" in schema:
        return f" ({' or '.join(map(str, schema['enum']))})"
    return " (true or false)" if schema.get("type") == "boolean" else ""


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of an answer; None: it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def run_compiled(engine: Engine, run: Callable[[], Run]) -> tuple[Run, float]:
    """Run with an empty prefix cache, again if a program was compiled meanwhile; return the result and its seconds."""
    while True:
        engine.reset_cache()
        compiled, begun = programs_compiled(), time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begun
        if programs_compiled() == compiled:
            return result, seconds
