"""Configuration of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from aspd_jax.configuration import Check, Count, Natural, Section, check_port
from aspd_jax.errors import ConfigError
from infer.decisions import Calibration
from infer.request import Fields

MAX_CONNECTIONS = 4096  # further ones get 503
WarmUp = Literal["none", "first", "all"]
Seconds = Annotated[float, Check("more than 0 seconds", lambda value: value > 0)]


@dataclass(frozen=True)
class ServerConfig(Section):
    """Address and limits of a server.

    Attributes:
        host, port: address to listen on. Port 0: any free port.
        name: name of the model in requests.
        adapter_folder: folder from which clients may load adapters; empty: none.
        keys: valid API keys; empty: requests need no key.
        origins: origins whose pages may read responses in a browser (CORS); `*`: all; empty: only the server's own.
        max_waiting: maximum requests that wait for a cache row; further requests get 429.
        max_body: maximum size of a request body in bytes.
        body_timeout: seconds within which the body must arrive.
        max_choices: maximum answers per request (`n`).
        max_new_tokens: default and maximum tokens of an answer.
        timeout: maximum seconds from request to last token.
        chunk: streaming interval in seconds, rounded to whole steps.
        drain: seconds that running requests have to finish when the server stops.
        fields: how fields of JSON schemas are decoded where a request does not say: `serial`, `parallel` or `exact`.
        calibration: how questions of decisions are asked where a request does not say (`Engine.decide`).
        warm_up: programs that are compiled before the server is ready: `none`, `first` (those of single requests), or
            `all`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "aspd"
    adapter_folder: str = ""
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_waiting: Natural = 64
    max_body: Count = 1 << 20
    body_timeout: Seconds = 20.0
    max_choices: Count = 8
    max_new_tokens: Count = 2048
    timeout: Seconds = 300.0
    chunk: Seconds = 0.03
    drain: Seconds = 30.0
    fields: Fields = "exact"
    calibration: Calibration = "orders"
    warm_up: WarmUp = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter_folder and not Path(self.adapter_folder).is_dir():
            raise ConfigError(f"adapter_folder: expected a folder, got {self.adapter_folder}.")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
                raise ConfigError(f"origins: expected * or scheme://host[:port], got {origin!r}")
        check_port("port", self.port)
