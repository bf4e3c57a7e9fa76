"""Errors for clients in OpenAI's format, which name the field of the request."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from math import isinf
from typing import Any, NoReturn

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException

from infer.server.neutral import spell

INVALID = "invalid_request_error"


class Refused(HTTPException):
    """An error for the client.

    Args:
        status: HTTP status.
        message: text of the error.
        kind: OpenAI's error type.
        code: OpenAI's error code; None: none.
        param: field of the request; None: none.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        failed = {"x-should-retry": "false"} if status in (500, 504) else {}  # OpenAI's clients would send it again
        super().__init__(status, message, {**failed, **(headers or {})})
        self.body = error_body(message, kind, code, param)

    @property
    def response(self) -> JSONResponse:
        """HTTP response with this error."""
        return JSONResponse(self.body, self.status_code, self.headers)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    message = message.encode(errors="replace").decode()  # a text in the request may have unpaired surrogates
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_refusals(app: FastAPI) -> None:
    """Make an application return errors in OpenAI's format. Call it before routes are added."""

    async def http_error(_: Request, error: Any) -> Response:
        if isinstance(error, Refused):
            return error.response
        return JSONResponse(error_body(str(error.detail), INVALID), error.status_code, error.headers)

    async def invalid(_: Request, error: Any) -> Response:
        where, message = describe(error.errors(), error.body)
        text = f"{where or 'the request'}: {message}"
        return Refused(400, text, INVALID, "invalid_value", where or None).response

    app.router.route_class = _JsonRoute
    app.add_exception_handler(StarletteHTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class _JsonRoute(APIRoute):
    """A route whose bodies are parsed by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler


def read_json(raw: bytes) -> Any:
    """Parse a body.

    Raises:
        Refused: the body is not JSON, or contains an unpaired surrogate.
    """
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=_constant, parse_float=_number)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the request: expected UTF-8, got byte {raw[error.start]:#04x} at {error.start}") from None
    except RecursionError:
        raise Refused(400, "the request: expected JSON, got objects or lists nested too deep") from None
    except ValueError as error:
        raise Refused(400, f"the request: expected JSON: {str(error).partition(';')[0]}") from None
    if b"\\" in raw:  # only an escape spells a surrogate
        for where, text in _strings(value, ()):
            try:
                text.encode()
            except UnicodeEncodeError:
                path = _spell_path(where)
                message = f"{path or 'the request'}: expected Unicode text, got an unpaired surrogate"
                raise Refused(400, message, INVALID, "invalid_value", path or None) from None
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _number(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(f"{text:.20} is too large for a number of 64 bits")
    return number


def _strings(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield all strings with their paths; the name of a field has the path of its object."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _strings(item, (*where, number))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield where, name
            yield from _strings(item, (*where, name))


def describe(errors: Sequence[Any], body: Any) -> tuple[str, str]:
    """Return the path and the description of the first error of a request.

    If a value has alternatives, the errors of the alternative that matches furthest count.

    Args:
        errors: pydantic's errors, each with `type`, `loc`, `input` and `ctx`.
        body: the request.
    """
    located = [(_path(error, body), error) for error in errors]
    first = located[0][0]
    path = max((path for path, _ in located if path[: len(first)] == first), key=len)
    candidates = [error for where, error in located if where == path]
    # An alternative of the right type says more than those of other types.
    candidates = [error for error in candidates if not error["type"].endswith("_type")] or candidates
    value = candidates[0]["input"]
    exact = [error["ctx"]["message"] for error in candidates if error["type"] == "request"]
    if exact:
        return _spell_path(path), exact[0]
    if candidates[0]["type"] == "missing":
        return _spell_path(path), "a value is required"
    if isinstance(value, bytes):
        return "", "expected a JSON object with the header Content-Type: application/json"
    expected = dict.fromkeys(_expected(error["type"], error.get("ctx", {})) for error in candidates)
    return _spell_path(path), f"expected {' or '.join(expected)}, got {spell(value)}"


def _path(error: Any, body: Any) -> tuple[Any, ...]:
    """Return the path of an error in the request. Parts that the request lacks name an alternative and are dropped."""
    location = error["loc"][1:]  # after "body"
    path: list[Any] = []
    for number, part in enumerate(location, 1):
        absent = error["type"] == "missing" and number == len(location)
        if isinstance(body, dict) and (part in body or absent):
            path.append(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            path.append(part)
            body = body[part]
    field = error.get("ctx", {}).get("field") if error["type"] == "request" else ""
    return (*path, *([field] if field else []))


def _spell_path(path: Sequence[Any]) -> str:
    """Spell a path as in `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


_EXPECTED: Mapping[str, str] = {
    "string": "a string",
    "int": "an integer",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "literal_error": "{expected}",
    "union_tag_invalid": "an object with a type of {expected_tags}",
    "union_tag_not_found": "an object with a type",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_short": "at least {min_length} character",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} entry",
    "too_long": "at most {max_length} entries",
}


def _expected(kind: str, context: Mapping[str, Any]) -> str:
    """Return the description of the expected value for a kind of pydantic error."""
    phrase = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0]) or "another value"
    return phrase.format_map({name: f"{v:g}" if isinstance(v, float) else v for name, v in context.items()})
