"""Middleware: request identifiers, limits of request bodies; clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import MutableHeaders

from infer.server.config import ServerConfig
from infer.server.refusals import Refused

log = logging.getLogger("aspd.server")
REQUEST_ID = "x-request-id"
DISCONNECT_SECONDS = 0.1  # interval of checking whether a client that does not stream has disconnected
T = TypeVar("T")
PROBES = ("/health", "/live")  # their 503 while the server starts is expected, and not logged
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


async def while_connected(work: Coroutine[Any, Any, T], request: Request) -> T:
    """Return the result of work for a client that does not stream; cancel it when the client disconnects.

    Raises:
        Refused: the client has disconnected.
    """
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=DISCONNECT_SECONDS))[0]:
            if await request.is_disconnected():
                raise Refused(499, "the client has disconnected", "client_closed_request")
        return task.result()
    finally:
        task.cancel()


class Guard:
    """Middleware of an application.

    Args:
        app: the application.
        max_body: maximum size of a request body in bytes.
        body_timeout: seconds within which the body must arrive.
        check: called before the body is read; raises `Refused` for a request that is refused.
        count: called with the path and the HTTP status of every response.
    """

    def __init__(
        self,
        app: Any,
        max_body: int = ServerConfig.max_body,
        body_timeout: float = ServerConfig.body_timeout,
        check: Callable[[Request], None] = lambda _: None,
        count: Callable[[str, int], None] = lambda _path, _status: None,
    ) -> None:
        self._app, self._max_body, self._body_timeout = app, max_body, body_timeout
        self._check, self._count = check, count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        client_id = request.headers.get(REQUEST_ID, "")
        identifier = client_id if _SANE_ID.fullmatch(client_id) else f"req_{secrets.token_hex(12)}"
        method, path = scope["method"], scope["path"]
        without_body = method == "HEAD"
        status = 0

        async def guarded(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = identifier
                self._count(path, status)
            elif without_body:
                message = {**message, "body": b""}
            await send(message)

        if without_body:  # HEAD is answered like GET, without the body
            scope = {**scope, "method": "GET"}
        try:
            self._check(request)
            if method == "POST":
                receive = _replay(await self._body(request, receive), receive)
            await self._app(scope, receive, guarded)
        except Refused as refused:
            await refused.response(scope, receive, guarded)
        except Exception:
            log.exception("%s %r failed (request id %s)", method, path, identifier)
            if status:
                raise
            message = f"the server failed on this request (request id {identifier})"
            await Refused(500, message, "server_error").response(scope, receive, guarded)
        if status >= 400 and not (status == 503 and path in PROBES):
            log.info("%s %r: %d (request id %s)", method, path, status, identifier)

    async def _body(self, request: Request, receive: Any) -> bytes:
        """Read a whole body, with or without a content length.

        Raises:
            Refused: the body is too large, or did not arrive in time.
        """
        length = request.headers.get("content-length", "")
        if length.isdigit():
            self._bound(int(length), f"has {length} bytes")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        break  # the client has disconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._bound(size, "has more bytes")
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            pass
        raise Refused(408, "the request did not arrive in time", "timeout", "timeout")

    def _bound(self, size: int, problem: str) -> None:
        if size > self._max_body:
            raise Refused(413, f"the request {problem}, expected at most {self._max_body}", code="request_too_large")


def _replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` function that first returns a body that was read already."""
    left = [body]

    async def replaying() -> Any:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replaying
