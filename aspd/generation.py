"""`aspd generate` and `aspd demo`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aspd.options import (
    absolute,
    command,
    draft_options,
    layer_options,
    list_options,
    mesh_of,
    model_name,
    model_options,
    positive,
    sampling_options,
    sampling_params,
)
from aspd_jax.errors import DataError, RequestError

if TYPE_CHECKING:  # these are slow to import
    from infer import Engine
    from infer.offline.batch import Job, Outcome
    from infer.request import SamplingParams


def add(commands: Any) -> None:
    """Add the commands `generate` and `demo`."""
    generate = command(commands, "generate", run_generate, "Answer a prompt, or a file of prompts.")
    model_options(generate)
    prompts = generate.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", metavar="TEXT", help="a question; the chat template is applied if the model has one"
    )
    prompts.add_argument(
        "--messages", metavar="FILE", help='JSON file with a list of {"role", "content"} messages; -: standard input'
    )
    prompts.add_argument(
        "--input", metavar="FILE",
        help='JSONL or Parquet file of {"prompt"} or {"messages"} records; also a glob, or a URL that fsspec opens',
    )  # fmt: skip
    generate.add_argument("--output", type=Path, metavar="FILE", help="JSONL file for the answers to --input")
    layer_options(generate)
    generate.add_argument(
        "--mesh", metavar="AXIS=N,…", help="devices of each axis, such as data=2,tensor=4; default: one device"
    )
    generate.add_argument("--batch", type=int, default=8, help="maximum requests of --input in a batch")
    generate.add_argument("--samples", type=int, default=1, metavar="N", help="number of answers per prompt of --input")
    generate.add_argument(
        "--instruction", default="", metavar="TEXT",
        help="text appended to every prompt of --input; output records omit it",
    )  # fmt: skip
    draft_options(generate)
    list_options(generate)
    generate.add_argument("--raw", action="store_true", help="do not apply the chat template")
    generate.add_argument(
        "--continue-final-message", action="store_true",
        help="continue the last of the --messages, which is the beginning of an answer",
    )  # fmt: skip
    generate.add_argument(
        "--mode", choices=("adaptive", "serial"), default="adaptive", help="serial: answers do not fork"
    )
    structure = generate.add_mutually_exclusive_group()
    structure.add_argument(
        "--schema", type=Path, metavar="FILE", help="JSON schema that the answer follows, instead of free text"
    )
    structure.add_argument(
        "--template", type=Path, metavar="FILE", dest="template_file",
        help="text with holes {name} or {name after other}, which are filled in parallel",
    )  # fmt: skip
    generate.add_argument(
        "--fields", choices=("serial", "parallel", "exact"), default="serial", dest="field_order",
        help="decode the fields of --schema one after the other, in parallel, or in parallel as a draft of the serial "
        "answer (exact)",
    )  # fmt: skip
    generate.add_argument("--stream", action="store_true", help="print the answer while it is decoded")
    generate.add_argument("--json", action="store_true", help="print text, structure, token ids and statistics as JSON")
    sampling_options(generate)

    demo = command(commands, "demo", run_demo, "Decode a record, a list and decisions serially and in parallel.")
    model_options(demo)


def run_generate(options: argparse.Namespace) -> None:
    """Run `aspd generate`."""
    from aspd_jax.progress import waiting
    from aspd_jax.structure import to_json

    params = sampling_params(options)
    if options.schema is not None:
        params = replace(params, json_schema=_read_text(options.schema), fields=options.field_order)
    elif options.field_order != "serial":
        raise RequestError(f"--fields {options.field_order}: expected --schema, got none")
    if options.template_file is not None:
        params = replace(params, template=_read_text(options.template_file))
    if options.input is None and options.output is not None:
        raise RequestError("--output: expected --input, got none")
    if options.input is not None and options.output is None:
        raise RequestError("--input: expected --output, got none")
    if options.continue_final_message and options.messages is None:
        raise RequestError("--continue-final-message: expected --messages, got none")
    positive(options, "batch", "samples")
    if options.samples > 1 and options.input is None:
        raise RequestError("--samples: expected --input, got none")
    if options.samples > 1 and not options.temperature:
        raise RequestError("--samples: expected a --temperature above 0, got 0, which makes all answers equal")
    if options.instruction and options.input is None:
        raise RequestError("--instruction: expected --input, got none")
    if options.raw and options.messages is not None:
        raise RequestError("--raw: expected a prompt as text, got --messages, which a chat template shows")
    if options.input is not None and (options.stream or options.json):
        raise RequestError(f"--{'stream' if options.stream else 'json'}: expected one prompt, got --input")
    prompt: Any = options.prompt if options.messages is None else _read_messages(options.messages)
    with waiting(f"loading {model_name(options)}"):
        engine = _make_engine(options)
    chat = not options.raw and bool(getattr(engine.lm.tokenizer, "chat_template", None))
    if options.input is not None:
        from infer.offline.batch import generate_file

        _print_outcome(options.output, generate_file(engine, _job(options, params, chat)))
        return
    if options.prompt is not None and chat:
        prompt = [{"role": "user", "content": options.prompt}]
    if options.continue_final_message:
        prompt = engine.encode(prompt, continue_final_message=True)
    if options.stream and not options.json:
        from infer.offline.terminal import print_growing

        print_growing(engine, prompt, params, options.mode)
        return
    with waiting("answering"):
        result = engine.generate([prompt], params, options.mode)[0]
    if result.error:
        raise RequestError(result.error)
    if not options.json:
        print(result.text)
        return
    output = {
        "text": result.text,
        "structure": to_json(result.structure),
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }
    print(json.dumps(output, ensure_ascii=False))


def _make_engine(options: argparse.Namespace) -> Engine:
    from aspd_jax import load_model
    from infer import Engine

    lm = load_model(
        model_name(options), options.dtype, mesh_of(options.mesh), options.weights, adapter=options.adapter,
        decode_attention=options.decode_attention,
    )  # fmt: skip
    batch = options.batch if options.input else 1
    return Engine(
        lm,
        max_length=options.max_length,
        max_batch=batch,
        drafts=options.drafts,
        draft_tokens=options.draft_tokens,
        lists=options.lists,
    )


def _job(options: argparse.Namespace, params: SamplingParams, chat: bool) -> Job:
    from infer.offline.batch import Job

    model = {
        "model": absolute(model_name(options)), "adapter": options.adapter and absolute(options.adapter),
        "dtype": options.dtype, "weights": options.weights, "max_length": options.max_length, "lists": options.lists,
    }  # fmt: skip
    mode, instruction, samples = options.mode, options.instruction, options.samples
    return Job(options.input, options.output, params, mode, chat, instruction, samples, model=model)


def _print_outcome(output: Path, outcome: Outcome) -> None:
    resumed = f", {outcome.resumed} of them there already" if outcome.resumed else ""
    errors = f"; {outcome.errors} hold an error" if outcome.errors else ""
    print(f"{outcome.records} records written to {output}{resumed}{errors}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: expected a text file, got: {getattr(error, 'strerror', None) or error}") from None


def _read_messages(name: str) -> list[dict[str, str]]:
    """Return the messages of a JSON file; `-` is standard input."""
    from aspd_jax.jsonl import parse_json
    from aspd_jax.sources import parse_messages

    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise RequestError(f"{name}: expected a JSON file, got: {error.strerror}") from None
    try:
        messages = [{"role": role, "content": text} for role, text, _ in parse_messages(parse_json(data), "messages")]
    except DataError as error:
        raise RequestError(f"{name}: {error}") from None
    if not messages:
        raise RequestError(f'{name}: expected a list of {{"role", "content"}} messages, got an empty list')
    return messages


def run_demo(options: argparse.Namespace) -> None:
    """Run `aspd demo`."""
    from aspd_jax.progress import waiting

    name = model_name(options)
    with waiting(f"loading {name}"):
        from aspd_jax import load_model

        lm = load_model(name, options.dtype, adapter=options.adapter)
    from infer.offline.demonstration import demonstrate

    demonstrate(lm, options.max_length)
