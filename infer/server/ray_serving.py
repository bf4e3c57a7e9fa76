"""Replicas of the server behind one address, on Ray Serve (an optional package).

Requests reach an ingress, which reads the body and chooses a replica by the conversation (`prefix_router`). A replica
runs the application of `infer.server.app`, and its responses are relayed message by message.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aspd_jax.errors import RequestError
from aspd_jax.ray_pool import RayOptions, cluster
from infer.engine import Engine
from infer.server.app import make_app
from infer.server.config import ServerConfig
from infer.server.prefix_router import PrefixRouter, conversation_key
from infer.server.refusals import Refused

log = logging.getLogger("aspd.server")
NAME = "aspd"  # name of the application on the cluster
REPLICA = b"x-aspd-replica"  # header that names the replica of a response
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")


class Replicas(NamedTuple):
    """Number of replicas; between these, Ray Serve follows the number of requests in progress."""

    minimum: int
    maximum: int

    @staticmethod
    def parse(text: str) -> Replicas:
        """Parse `N` or `MIN:MAX`.

        Raises:
            RequestError: the text has another form.
        """
        first, separator, last = text.partition(":")
        numbers = (first, last if separator else first)
        if not all(number.isdigit() and number.isascii() for number in numbers):
            raise RequestError(f"--replicas: expected N or MIN:MAX, got {text!r}")
        replicas = Replicas(*map(int, numbers))
        if not 1 <= replicas.minimum <= replicas.maximum:
            raise RequestError(f"--replicas: expected MIN from 1 to MAX, got {text!r}")
        return replicas


class EngineReplica:
    """Deployment: one engine and its application.

    Args:
        make: function that makes the engine.
        config: limits of the server.
    """

    def __init__(self, make: Callable[[], Engine], config: ServerConfig) -> None:
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        self._app = make_app(make(), config)
        self._thread = self._app.state.engine_thread
        self._thread.start()
        while not self._thread.ready.wait(1):
            self.check_health()

    def check_health(self) -> None:
        """Check that the engine's thread runs; Ray Serve replaces a replica that fails.

        Raises:
            RuntimeError: the thread has ended.
        """
        if not self._thread.alive:
            raise RuntimeError("the engine's thread has ended")

    async def __del__(self) -> None:
        """Stop the engine after the last request."""
        await asyncio.to_thread(self._thread.stop)

    async def answer(self, _key: str, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of the response to a request.

        Args:
            _key: key of the conversation, for the router.
            scope: ASGI scope of the request.
            body: body of the request.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        left = [body]

        async def receive() -> Message:
            if left:
                return {"type": "http.request", "body": left.pop(), "more_body": False}
            await asyncio.Event().wait()  # a client that disconnects ends the whole call
            raise AssertionError

        async def run() -> None:
            try:
                await self._app(scope, receive, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (REPLICA, self._name.encode())]}
                yield message
            await task
        finally:
            task.cancel()


class Ingress:
    """Deployment: receives requests, and relays them to replicas.

    Args:
        replicas: handle of the replicas.
        config: limits of the server.
    """

    def __init__(self, replicas: Any, config: ServerConfig) -> None:
        self._replicas, self._config = replicas.options(stream=True, method_name="answer"), config

    async def __call__(self, request: Request) -> Response:
        """Return the response of the replica that holds the conversation."""
        try:
            async with asyncio.timeout(self._config.body_timeout):
                body = await self._body(request)
        except TimeoutError:
            return _Refusal(Refused(408, "the request did not arrive in time", "timeout", "timeout"))
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        scope |= {"asgi": {"version": "3.0"}, "root_path": "", "headers": list(request.scope["headers"])}
        # Requests that belong to no conversation go to any replica.
        key = conversation_key(body) if body else secrets.token_hex(8)
        return _Relay(self._replicas.remote(key, scope, body))

    async def _body(self, request: Request) -> bytes:
        """Return the body, but not more than one byte beyond the limit: the replica refuses such a body."""
        limit, parts, size = self._config.max_body + 1, list[bytes](), 0
        async for part in request.stream():
            parts.append(part[: limit - size])
            size += len(parts[-1])
            if size == limit:
                break
        return b"".join(parts)


class _Relay(Response):
    """Response that relays the messages of a replica."""

    def __init__(self, messages: Any) -> None:
        super().__init__()
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError

        begun = False
        try:
            async for message in self._messages:
                begun = True
                await send(message)
        except BackPressureError:
            busy = Refused(
                429, "too many requests wait; try again in 1 s", "rate_limit_exceeded", "queue_full",
                headers={"Retry-After": "1"},
            )  # fmt: skip
            await _Refusal(busy)(scope, receive, send)
        except RayError as error:
            if begun:
                raise
            log.warning("a replica failed on a request: %s", type(error).__name__)
            await _Refusal(Refused(500, "the server failed on this request", "server_error"))(scope, receive, send)
        except asyncio.CancelledError:
            self._messages.cancel()
            raise


class _Refusal(Response):
    """Response with OpenAI's form of an error."""

    def __init__(self, refused: Refused) -> None:
        super().__init__()
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._refused.response(scope, receive, send)


def make_application(
    make: Callable[[], Engine], config: ServerConfig, options: RayOptions, replicas: Replicas, batch: int
) -> Any:
    """Return the application for `ray.serve.run`.

    Args:
        make: function that makes an engine, and that can be pickled.
        config: limits of the server.
        options: resources of a replica.
        replicas: number of replicas.
        batch: rows of an engine. A replica takes twice as many requests; further ones go to the next replica of their
            conversation, and wait in the ingress if all are full.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    scaling: dict[str, Any] = {"num_replicas": replicas.minimum}
    if replicas.maximum > replicas.minimum:
        limits = {"min_replicas": replicas.minimum, "max_replicas": replicas.maximum, "target_ongoing_requests": batch}
        scaling = {"autoscaling_config": limits}
    engines = serve.deployment(EngineReplica).options(
        name="engine",
        max_ongoing_requests=2 * batch,
        max_queued_requests=config.max_waiting or 1,
        ray_actor_options=options.actor_options(),
        graceful_shutdown_timeout_s=config.drain,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        **scaling,
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        max_ongoing_requests=replicas.maximum * 2 * batch + config.max_waiting + 16,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return ingress.bind(engines.bind(make, config), config)


def serve_on_ray(
    make: Callable[[], Engine], config: ServerConfig, options: RayOptions, replicas: Replicas, batch: int
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in progress; see `make_application`.

    Raises:
        RequestError: the cluster cannot be reached, the address is in use, or the replicas do not start.
    """
    stopped = threading.Event()
    local = options.address == "local"
    port = _free_port(config) if local or not config.port else config.port
    with cluster(options):
        from ray import serve

        location = "HeadOnly" if local else "EveryNode"
        try:
            serve.start(http_options={"host": config.host, "port": port, "location": location})
            serve.run(make_application(make, config, options, replicas, batch), name=NAME, route_prefix="/")
        except RuntimeError as error:
            serve.shutdown()
            raise RequestError(f"--ray: expected replicas that start at {options.address}, got: {error}") from None
        for number in (signal.SIGTERM, signal.SIGINT):  # in place of Ray's handlers, which end the process
            signal.signal(number, lambda *_: stopped.set())
        host = f"[{config.host}]" if ":" in config.host else config.host
        print(f"{config.name}: http://{host}:{port}/ (ready)", flush=True)
        stopped.wait()
        serve.delete(NAME)  # returns when the replicas have finished their answers
        serve.shutdown()


def _free_port(config: ServerConfig) -> int:
    """Return the port of a configuration, or any free one for port 0.

    Raises:
        RequestError: the address is invalid or in use.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with closing(socket.socket(family)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            raise RequestError(f"cannot listen on {config.host}, port {config.port}: {error.strerror}") from None
        return int(listener.getsockname()[1])
