"""`aspd serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aspd.options import command, join_processes, mesh_of, model_name, model_options, process_options
from aspd_jax.errors import RequestError


def add(commands: Any) -> None:
    """Add these commands."""
    serve = command(
        commands, "serve", run_serve, "Serve a model to clients of OpenAI's interface, with a page to try it on."
    )
    model_options(serve)
    serve.add_argument(
        "--mesh",
        metavar="AXES",
        help="spread the model over devices, such as data=2,tensor=4; several processes: tensor over all",
    )
    serve.add_argument("--weights", choices=("float", "int8"), default="float", help="int8: kernels of the layers")
    serve.add_argument(
        "--adapters",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="adapters on one base, which clients ask for as models, mixed in a batch (--adapter merges one instead)",
    )
    serve.add_argument("--adapter-places", type=int, default=0, help="most adapters at a time; default: those given")
    serve.add_argument("--adapter-rank", type=int, default=16, help="most ranks of an adapter among --adapters")
    serve.add_argument(
        "--adapter-folder", default="", metavar="DIR", help="clients may load adapters from here, and unload them"
    )
    serve.add_argument("--chat-template", default="", metavar="FILE", help="Jinja, for a tokenizer that has none")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a key")
    serve.add_argument("--port", type=int, default=8000, help="0: any that is free")
    serve.add_argument("--name", default="", help="of the model; default: the folder's name")
    serve.add_argument("--batch", type=int, default=8, help="requests that are decoded together")
    serve.add_argument(
        "--branch-policy", default="all", help="which branches of a loaded batch wait: all, cap:N or slo:MS"
    )
    serve.add_argument("--draft-tokens", type=int, default=0, help="guesses per segment and pass")
    serve.add_argument("--key-file", type=Path, metavar="FILE", help="API keys, one a line; also: ASPD_API_KEY")
    serve.add_argument("--insecure", action="store_true", help="listen on other addresses than loopback without a key")
    serve.add_argument(
        "--cors-origins", nargs="+", default=[], metavar="ORIGIN",
        help="origins whose pages may use the server from a browser, such as https://example.org, or *; default: none",
    )  # fmt: skip
    serve.add_argument("--max-waiting", type=int, default=64, help="requests that may wait; further ones get 429")
    serve.add_argument("--max-new-tokens", type=int, default=1024, help="of an answer; requests may ask for fewer")
    serve.add_argument("--max-body", type=int, default=1 << 20, help="bytes of a request")
    serve.add_argument("--body-timeout", type=float, default=20.0, help="seconds in which a request has to be there")
    serve.add_argument("--max-choices", type=int, default=8, help="answers to one request (n)")
    serve.add_argument("--timeout", type=float, default=300.0, help="seconds from request to last token")
    serve.add_argument("--chunk", type=float, default=0.03, help="seconds between two looks at growing answers")
    serve.add_argument("--drain", type=float, default=30.0, help="seconds for requests under way when told to stop")
    process_options(serve)
    serve.add_argument(
        "--warm-up", nargs="?", choices=("none", "first", "all"), const="all", default="first",
        help="programs to compile before the server is ready: none, those of requests that come one at a time, or all",
    )  # fmt: skip

    proxy = command(
        commands,
        "proxy",
        run_proxy,
        "Serve a checkpoint with branches by way of a server that knows nothing of them, such as vLLM or llama.cpp's.",
    )
    proxy.add_argument("--upstream", required=True, metavar="URL", help="of OpenAI's interface, up to /v1")
    proxy.add_argument("--model", required=True, help="name of the checkpoint at the upstream")
    proxy.add_argument("--tokenizer", required=True, metavar="MODEL", help="the same checkpoint: folder, GGUF or name")
    proxy.add_argument("--chat-template", default="", metavar="FILE", help="Jinja, for a tokenizer that has none")
    proxy.add_argument("--host", default="127.0.0.1", help="address to listen on; it asks nobody for a key")
    proxy.add_argument("--port", type=int, default=8001, help="0: any that is free")
    proxy.add_argument("--name", default="", help="of the model for clients; default: --model")
    proxy.add_argument("--concurrency", type=int, default=32, help="requests to the upstream at a time")
    proxy.add_argument("--max-new-tokens", type=int, default=1024, help="of an answer; requests may ask for fewer")
    proxy.add_argument("--timeout", type=float, default=120.0, help="seconds between two pieces of an answer")


def run_proxy(options: argparse.Namespace) -> None:
    """`aspd proxy`."""
    import uvicorn

    from aspd_jax.configuration import at_least
    from aspd_jax.formats import open_checkpoint
    from aspd_jax.language_model import read_template
    from aspd_jax.tokens import add_special_tokens
    from infer.proxy.routes import make_app
    from infer.proxy.upstream import UpstreamConfig

    at_least("--max-new-tokens", options.max_new_tokens, 1)
    config = UpstreamConfig(
        options.upstream.rstrip("/"), options.model, os.environ.get("OPENAI_API_KEY", ""),
        options.concurrency, timeout=options.timeout,
    )  # fmt: skip
    checkpoint = open_checkpoint(options.tokenizer)
    tokenizer = checkpoint.tokenizer
    read_template(tokenizer, options.tokenizer, options.chat_template)
    if not checkpoint.end_ids or tokenizer.chat_template is None:
        raise RequestError(f"{options.tokenizer} needs a chat template and an end of text; see --chat-template")
    add_special_tokens(tokenizer)
    app = make_app(config, tokenizer, checkpoint.end_ids, options.name or options.model, options.max_new_tokens)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", server_header=False)


def run_serve(options: argparse.Namespace) -> None:
    """`aspd serve`."""
    import jax

    from aspd_jax.formats import NAMES, find_model
    from aspd_jax.language_model import for_conversations, load_model
    from infer.engine import Engine
    from infer.server.serve import follow, serve
    from infer.server.server_config import ServerConfig

    keys = _keys(options.key_file)
    local = options.host in ("127.0.0.1", "::1", "localhost")
    if not (local or keys or options.insecure):
        raise RequestError(
            f"--host {options.host} is open to others; name a --key-file, set ASPD_API_KEY, or say --insecure"
        )
    model = model_name(options)
    config = ServerConfig(
        host=options.host,
        port=options.port,
        name=options.name or (model if model in NAMES else find_model(model).name),
        keys=keys,
        origins=tuple(options.cors_origins),
        adapter_folder=options.adapter_folder,
        max_waiting=options.max_waiting,
        max_body=options.max_body,
        body_timeout=options.body_timeout,
        max_choices=options.max_choices,
        max_new_tokens=options.max_new_tokens,
        timeout=options.timeout,
        chunk=options.chunk,
        drain=options.drain,
        warm_up=options.warm_up,
    )
    join_processes(options)
    several = jax.process_count() > 1
    mesh = mesh_of(options.mesh or (f"tensor={jax.device_count()}" if several else None))
    if several and mesh.size != jax.device_count():
        raise RequestError(f"--mesh {options.mesh}: the processes have {jax.device_count()} devices, and all take part")
    given = _named(options.adapters)
    places = max(options.adapter_places, len(given), int(bool(options.adapter_folder)))
    rank = options.adapter_rank if places else 0
    lm = load_model(model, options.dtype, mesh, options.weights, rank, adapter=options.adapter, adapters=places)
    for_conversations(lm, model, options.chat_template)
    engine = Engine(
        lm, options.max_length, max_batch=options.batch, branch_policy=options.branch_policy,
        draft_tokens=options.draft_tokens,
    )  # fmt: skip
    for name, folder in given.items():
        if name == config.name:
            raise RequestError(f"--adapters: {name} is the model's name; choose another, or a --name")
        engine.adapters.put(name, folder)
    if jax.process_index() == 0:
        serve(engine, config)
    else:
        follow(engine, config)


def _named(adapters: Sequence[str]) -> dict[str, str]:
    """Folders of adapters by name."""
    named = dict(one.partition("=")[::2] for one in adapters)
    if len(named) < len(adapters) or not all(name and folder for name, folder in named.items()):
        raise RequestError(f"--adapters takes NAME=DIR, each name once; got {' '.join(adapters)}")
    return named


def _keys(file: Path | None) -> tuple[str, ...]:
    """API keys of a file and of the environment."""
    keys = [os.environ.get("ASPD_API_KEY", "")]
    if file is not None:
        try:
            keys += file.read_text().split()
        except OSError as error:
            raise RequestError(f"--key-file: {error}") from None
        if not any(keys):
            raise RequestError(f"--key-file: {file} holds no key")
    return tuple(key for key in keys if key)
