"""Requests generated from the server's own schema: every response conforms to it."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from aspd_jax import load_model
from infer import Engine
from tests.helpers.serving import serving

pytestmark = pytest.mark.further

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def drop_tools(body: Any) -> None:
    """Remove tools from a request, because few tools and results made from the schema alone fit each other."""
    if not isinstance(body, dict):
        return
    for name in ("tools", "tool_choice"):
        body.pop(name, None)
    for message in body["messages"] if isinstance(body.get("messages"), list) else ():
        if isinstance(message, dict):
            message.pop("tool_calls", None)
            message.pop("tool_call_id", None)
            message["role"] = "user" if message.get("role") == "tool" else message.get("role")


def test_whatever_the_schema_allows() -> None:
    engine = Engine(load_model("demo"), max_length=1024, max_batch=2)
    seen: Counter[tuple[str, int]] = Counter()
    numbers = count()
    with serving(engine, max_new_tokens=4, max_waiting=100) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()

            # The same cases each time: how many of so few reach the engine would be chance.
            @settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def ask(case: Any) -> None:
                if next(numbers) % 2:
                    drop_tools(case.body)
                reply = case.call(timeout=300)
                seen[case.operation.path, reply.status_code] += 1
                case.validate_response(reply, checks=CHECKS)

            ask()
    assert seen["/v1/chat/completions", 200] > 2 and seen["/v1/completions", 200] > 2, "they reach the engine"
    assert all(seen[f"/v1/{name}", 200] for name in ("responses", "decisions", "systemone")), seen
    assert {path for path, _ in seen} >= {"/", "/health", "/live", "/metrics", "/v1/models", "/v1/models/{name}"}


def test_the_checks_would_tell() -> None:
    """Check that a status outside the schema is found (negative control)."""
    engine = Engine(load_model("demo"), max_length=1024, max_batch=2)
    with serving(engine) as server:
        del server.app.openapi_schema["paths"]["/v1/models/{name}"]["get"]["responses"]["404"]
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        case = schema["/v1/models/{name}"]["GET"].Case(path_parameters={"name": "other"})
        with pytest.raises(BaseExceptionGroup, match="Undocumented status code"):
            case.call_and_validate(checks=CHECKS)
