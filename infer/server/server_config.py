"""What a server is told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aspd_jax.configuration import at_least
from aspd_jax.errors import ConfigError
from aspd_jax.layout import check_choice

WarmUp = Literal["none", "first", "all"]


@dataclass(frozen=True)
class ServerConfig:
    """Limits of a server, and where it listens.

    Attributes:
        host, port: where; loopback unless told otherwise. Port 0: any that is free.
        name: of the model, as clients ask for it.
        adapter_folder: whose folders clients may name as adapters that they want to ask for; empty: clients may not.
        keys: API keys, one of which every request has to bring; none: no key is asked for.
        origins: origins whose pages may read responses in a browser (CORS), `*` for all; none: only the server's own.
        max_waiting: requests that may wait for a row of the cache; further ones get 429.
        max_body: bytes of a request, which have to be there within `body_timeout` seconds.
        max_choices: answers to one request (`n`).
        max_new_tokens: of an answer; what is given to requests that ask for no number, and most that is given.
        timeout: seconds from request to last token.
        chunk: seconds between two looks at growing answers, as near as whole passes come.
        drain: seconds that requests under way have to end when the server is told to stop.
        warm_up: programs that are compiled before the server says that it is ready: `none`, those of the `first` answer
            and of all that come one at a time, or `all`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "aspd"
    adapter_folder: str = ""
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_waiting: int = 64
    max_body: int = 1 << 20
    body_timeout: float = 20.0
    max_choices: int = 8
    max_new_tokens: int = 2048
    timeout: float = 300.0
    chunk: float = 0.03
    drain: float = 30.0
    warm_up: WarmUp = "first"

    def __post_init__(self) -> None:
        check_choice("warm_up", self.warm_up, WarmUp)
        for name in ("max_body", "max_choices", "max_new_tokens"):
            at_least(name, getattr(self, name), 1)
        at_least("max_waiting", self.max_waiting, 0)
        for name in ("body_timeout", "timeout", "chunk", "drain"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if self.adapter_folder and not Path(self.adapter_folder).is_dir():
            raise ConfigError(f"adapter_folder: {self.adapter_folder} is no folder")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
                raise ConfigError(f"origins: expected * or scheme://host[:port], got {origin!r}")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
