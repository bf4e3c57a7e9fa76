"""`aspd serve` and `aspd proxy`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aspd.options import (
    command,
    draft_options,
    join_processes,
    layer_options,
    list_options,
    mesh_of,
    model_name,
    model_options,
    process_options,
)
from aspd_jax.errors import RequestError

if TYPE_CHECKING:  # these are slow to import
    from infer.engine import Engine


def add(commands: Any) -> None:
    """Add the commands `serve` and `proxy`."""
    serve = command(commands, "serve", run_serve, "Serve a model through OpenAI's interface, with a page to try it.")
    model_options(serve)
    serve.add_argument(
        "--mesh",
        metavar="AXES",
        help="devices of each axis, such as data=2,tensor=4; default of several processes: tensor over all devices",
    )
    layer_options(serve)
    serve.add_argument(
        "--adapters",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="adapters of one base model, selected by model name and mixed in a batch (--adapter merges one instead)",
    )
    serve.add_argument(
        "--adapter-slots", type=int, default=0, help="maximum adapters at a time; default: those of --adapters"
    )
    serve.add_argument("--adapter-rank", type=int, default=16, help="maximum rank of an adapter")
    serve.add_argument(
        "--adapter-folder", default="", metavar="DIR", help="folder from which clients may load adapters"
    )
    serve.add_argument(
        "--chat-template", default="", metavar="FILE", help="Jinja file, for a tokenizer without a template"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; a key is required unless it is loopback"
    )
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    serve.add_argument("--name", default="", help="name of the model; default: name of its folder")
    serve.add_argument("--batch", type=int, default=8, help="maximum requests in a batch")
    draft_options(serve)
    list_options(serve)
    serve.add_argument(
        "--key-file", type=Path, metavar="FILE", help="file of API keys, one per line; also: ASPD_API_KEY"
    )
    serve.add_argument("--insecure", action="store_true", help="listen on any address without a key")
    serve.add_argument(
        "--cors-origins", nargs="+", default=[], metavar="ORIGIN",
        help="origins of pages that may use the server in a browser, such as https://example.org, or *; default: none",
    )  # fmt: skip
    serve.add_argument("--max-waiting", type=int, default=64, help="maximum waiting requests; further requests get 429")
    serve.add_argument(
        "--max-new-tokens", type=int, default=1024, help="maximum tokens of an answer; requests may set less"
    )
    serve.add_argument("--max-body", type=int, default=1 << 20, help="maximum bytes of a request")
    serve.add_argument("--timeout", type=float, default=300.0, help="maximum seconds from a request to the last token")
    serve.add_argument(
        "--drain", type=float, default=30.0, help="seconds for requests in progress to end after a stop signal"
    )
    process_options(serve)
    serve.add_argument(
        "--fields", choices=("serial", "parallel", "exact"), default="exact",
        help="decode the fields of JSON schemas one after the other, in parallel, or in parallel as a draft of the "
        "serial answer (exact); requests may override it",
    )  # fmt: skip
    serve.add_argument(
        "--calibration", choices=("none", "orders", "prior"), default="orders",
        help="decisions: options in one order, in several orders, or these without the prior; requests may override it",
    )  # fmt: skip
    serve.add_argument(
        "--warm-up", nargs="?", choices=("none", "first", "all"), const="all", default="first",
        help="programs to compile before the server is ready: none, those of requests that arrive alone, or all",
    )  # fmt: skip

    proxy = command(
        commands,
        "proxy",
        run_proxy,
        "Serve a checkpoint with branches through a server without branches, such as vLLM or llama.cpp's.",
    )
    proxy.add_argument("--upstream", required=True, metavar="URL", help="address of OpenAI's interface, up to /v1")
    proxy.add_argument("--model", required=True, help="name of the model at the upstream")
    proxy.add_argument("--tokenizer", required=True, metavar="MODEL", help="the same checkpoint: folder, GGUF or name")
    proxy.add_argument(
        "--chat-template", default="", metavar="FILE", help="Jinja file, for a tokenizer without a template"
    )
    proxy.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; clients need no key, so it has to be loopback"
    )
    proxy.add_argument("--insecure", action="store_true", help="listen on any address")
    proxy.add_argument("--port", type=int, default=8001, help="port to listen on; 0: any free port")
    proxy.add_argument("--name", default="", help="name of the model for clients; default: --model")
    proxy.add_argument("--concurrency", type=int, default=32, help="maximum requests to the upstream at a time")
    proxy.add_argument(
        "--max-new-tokens", type=int, default=1024, help="maximum tokens of an answer; requests may set less"
    )
    proxy.add_argument("--timeout", type=float, default=120.0, help="maximum seconds between two pieces of an answer")
    list_options(proxy)


def run_proxy(options: argparse.Namespace) -> None:
    """Run `aspd proxy`."""
    import uvicorn

    from aspd_jax.chat import with_end_of_turn
    from aspd_jax.configuration import at_least, check_port
    from aspd_jax.formats import open_checkpoint
    from aspd_jax.language_model import read_template
    from aspd_jax.tokens import TAGS, add_special_tokens
    from infer.proxy.routes import Proxy, make_app
    from infer.proxy.upstream import UpstreamConfig
    from infer.server.config import MAX_CONNECTIONS, ServerConfig

    at_least("--max-new-tokens", options.max_new_tokens, 1)
    check_port("--port", options.port)
    _check_host(options, "", "Clients of the proxy need no key: pass --insecure to permit all.")
    config = UpstreamConfig(
        options.upstream.rstrip("/"), options.model, os.environ.get("OPENAI_API_KEY", ""),
        options.concurrency, timeout=options.timeout,
    )  # fmt: skip
    checkpoint = open_checkpoint(options.tokenizer)
    tokenizer = checkpoint.tokenizer
    read_template(tokenizer, options.tokenizer, options.chat_template)
    end_ids = with_end_of_turn(tokenizer, checkpoint.end_ids)
    if not end_ids or tokenizer.chat_template is None:
        raise RequestError(
            f"--tokenizer: expected a chat template and an end of text, got {options.tokenizer}. Set --chat-template."
        )
    forks = set(TAGS.values()) <= set(tokenizer.get_vocab())
    add_special_tokens(tokenizer)
    name = options.name or options.model
    proxy = Proxy(config, tokenizer, end_ids, name, options.max_new_tokens, checkpoint.titles, forks, options.lists)
    uvicorn.run(
        make_app(proxy), host=options.host, port=options.port, log_level="warning", server_header=False,
        limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=int(ServerConfig.drain),
    )  # fmt: skip


def run_serve(options: argparse.Namespace) -> None:
    """Run `aspd serve`."""
    import jax

    from aspd_jax.formats import NAMES, find_model
    from aspd_jax.progress import waiting
    from infer.server.config import ServerConfig
    from infer.server.serve import follow, serve

    keys = _keys(options.key_file)
    if not keys:
        _check_host(options, " or API keys", "Set --key-file or ASPD_API_KEY, or pass --insecure.")
    model = model_name(options)
    name = options.name or (model if model in NAMES else find_model(model).name)
    values = {item.name: getattr(options, item.name) for item in fields(ServerConfig) if hasattr(options, item.name)}
    config = ServerConfig(**values | {"name": name, "keys": keys, "origins": tuple(options.cors_origins)})
    if config.name in _named(options.adapters):
        raise RequestError(
            f"--adapters: expected names other than the model's, got {config.name}. Change it, or set --name."
        )
    options.model = model
    join_processes(options)
    several = jax.process_count() > 1
    mesh = options.mesh or (f"tensor={jax.device_count()}" if several else None)
    if several and mesh_of(mesh).size != jax.device_count():
        raise RequestError(f"--mesh: expected all {jax.device_count()} devices of the processes, got {options.mesh}")
    with waiting(f"loading {options.model}", jax.process_index() == 0):
        engine = make_engine(options, mesh)
    if jax.process_index() == 0:
        serve(engine, config)
    else:
        follow(engine, config)


def make_engine(options: argparse.Namespace, mesh: str | None) -> Engine:
    """Return the engine of `aspd serve` with its adapters.

    Args:
        options: options of the command.
        mesh: devices of each axis; None: one device.

    Raises:
        AspdError: an option is not valid, or a checkpoint cannot be read.
    """
    from aspd_jax.language_model import for_conversations, load_model
    from infer.engine import Engine

    adapters = _named(options.adapters)
    slots = max(options.adapter_slots, len(adapters), int(bool(options.adapter_folder)))
    rank = options.adapter_rank if slots else 0
    lm = load_model(
        options.model, options.dtype, mesh_of(mesh), options.weights, rank, adapter=options.adapter, adapters=slots,
        decode_attention=options.decode_attention,
    )  # fmt: skip
    for_conversations(lm, options.model, options.chat_template)
    engine = Engine(
        lm, options.max_length, max_batch=options.batch, drafts=options.drafts, draft_tokens=options.draft_tokens,
        lists=options.lists,
    )  # fmt: skip
    for name, folder in adapters.items():
        engine.adapters.put(name, folder)
    return engine


def _check_host(options: argparse.Namespace, others: str, advice: str) -> None:
    """Check that a server without keys is reached from this machine only, or is `--insecure`.

    Raises:
        RequestError: it is not; the message permits `others`, too, and ends with advice.
    """
    if options.host not in ("127.0.0.1", "::1", "localhost") and not options.insecure:
        raise RequestError(f"--host: expected a loopback address{others}, got {options.host}. {advice}")


def _named(adapters: Sequence[str]) -> dict[str, str]:
    """Return the folders of `--adapters` by name.

    Raises:
        RequestError: an entry has another form, or a name occurs twice.
    """
    named = dict(one.partition("=")[::2] for one in adapters)
    if len(named) < len(adapters) or not all(name and folder for name, folder in named.items()):
        raise RequestError(f"--adapters: expected NAME=DIR with distinct names, got {' '.join(adapters)}")
    return named


def _keys(file: Path | None) -> tuple[str, ...]:
    """Return the API keys of a file and of the environment.

    Raises:
        RequestError: the file cannot be read, or holds no key.
    """
    keys = [os.environ.get("ASPD_API_KEY", "")]
    if file is not None:
        try:
            keys += file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--key-file: expected a text file, got: {error}") from None
        if not any(keys):
            raise RequestError(f"--key-file: expected at least one key in {file}, got none")
    return tuple(key for key in keys if key)
