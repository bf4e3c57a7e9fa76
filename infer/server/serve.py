"""Entry points of the server process: listen until a signal, then drain."""

from __future__ import annotations

import logging
import signal
import socket

import uvicorn

from aspd_jax.errors import RequestError
from infer.engine import Engine
from infer.lockstep import Lockstep
from infer.server.app import make_app
from infer.server.config import MAX_CONNECTIONS, ServerConfig


def follow(engine: Engine, config: ServerConfig) -> None:
    """Execute the steps of process 0 until it has drained. Only process 0 handles signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if config.warm_up != "none":
        engine.warm_up(config.warm_up == "first", config.fields == "exact")
    Lockstep(engine).follow()


def serve(engine: Engine, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish the running requests.

    Raises:
        RequestError: the address is invalid or in use.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise RequestError(f"cannot listen on {config.host}, port {config.port}: {error.strerror}") from None
    listener.listen(2048)  # connections queue while the server starts
    host = f"[{config.host}]" if family == socket.AF_INET6 else config.host
    print(f"{config.name}: http://{host}:{listener.getsockname()[1]}/ (ready when /health says so)", flush=True)
    settings = uvicorn.Config(
        make_app(engine, config),
        log_level="warning",
        timeout_graceful_shutdown=int(config.drain) or 1,
        h11_max_incomplete_event_size=1 << 16,
        limit_concurrency=MAX_CONNECTIONS,
        server_header=False,
    )
    # uvicorn drains, then raises the signal again for the handler that was installed before.
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.Server(settings).run(sockets=[listener])
