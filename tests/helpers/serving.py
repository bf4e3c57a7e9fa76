"""Servers in this process, for tests that talk to one."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn

from infer import Engine
from infer.server.app import make_app
from infer.server.config import ServerConfig
from infer.server.engine_thread import EngineThread
from tests.helpers.engine_state import engine_state
from tests.helpers.tasks import held_out

# A server of the embedded model in a process of its own, on a port that it chooses.
SERVE = (sys.executable, "-m", "aspd", "serve", "--model", "demo", "--port", "0", "--warm-up", "none")
QUESTIONS = [item for item in held_out(12) if item.forks]


class Running:
    """A server in a thread of this process."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.app = make_app(engine, config)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.address = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[self._socket]), daemon=True)

    @property
    def engine_thread(self) -> EngineThread:
        return self.app.state.engine_thread  # type: ignore[no-any-return]

    def __enter__(self) -> Running:
        self._thread.start()
        assert wait_for(lambda: self.server.started and self.engine_thread.ready.is_set())
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)


def wait_for(holds: Any, seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def serving(engine: Engine, **changes: Any) -> Iterator[Running]:
    settings: dict[str, Any] = {"name": "demo", "warm_up": "none", "max_new_tokens": 400} | changes
    with Running(engine, ServerConfig(**settings)) as running:
        yield running
        assert wait_for(lambda: running.engine_thread.occupancy == (0, 0))
    assert not any(engine_state(engine).rows)


def ask(number: int = 0, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": QUESTIONS[number].question}
    return {"model": "demo", "messages": [message], "temperature": 0} | more
