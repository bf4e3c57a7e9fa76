"""Subcommands of `aspd bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from aspd.options import (
    answer_structures,
    command,
    draft_options,
    dtype_option,
    layer_options,
    positive,
    print_left_out,
    where,
)
from aspd_jax.errors import RequestError
from aspd_jax.files import write_whole

ANSWERS = ("2x240", "4x120", "8x60", "16x30")  # scripted answers of `aspd bench decode`


def add(commands: Any) -> None:
    """Add the commands of this module to the parser."""
    bench = commands.add_parser("bench", help="Measure speed against baselines in the same run.")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")

    about = "Steps by width, and whole answers in adaptive and in serial mode."
    decode = command(kinds, "decode", run_bench_decode, about)
    decode.add_argument("--model", metavar="MODEL", help="checkpoint; default: a random model of --shape")
    decode.add_argument("--adapter", metavar="DIR", help="folder of an adapter for --model")
    decode.add_argument("--shape", default="27m", help="size of a random model: 27m, 1b, 7b, 8b or 32b")
    dtype_option(decode)
    decode.add_argument("--repeats", type=int, default=7, help="runs of each kind, of which the median is reported")
    decode.add_argument("--json", type=Path, metavar="FILE", help="file for the figures, as JSON")
    layer_options(decode)
    decode.add_argument("--context", type=int, nargs="+", default=[128], help="tokens of the prompt")
    decode.add_argument("--batch", type=int, nargs="+", default=[1], help="simultaneous requests")
    decode.add_argument(
        "--widths",
        type=int,
        nargs="*",
        default=[1, 2, 4, 8, 16],
        help="tokens per step: powers of two, starting with 1",
    )
    decode.add_argument(
        "--answers",
        nargs="*",
        metavar="NxT",
        help=f"branches x tokens of a branch; default: {' '.join(ANSWERS)}, and none without structure tokens",
    )
    about = "Questions about one input: one pass, a request for each, serial JSON."
    decisions = command(kinds, "decisions", run_bench_decisions, about)
    decisions.add_argument("--model", default="smollm2", metavar="MODEL", help="checkpoint")
    dtype_option(decisions)
    decisions.add_argument("--questions", type=int, nargs="+", default=[1, 4, 16, 64], help="numbers of questions")
    decisions.add_argument("--batch", type=int, default=4, help="requests that run together")
    decisions.add_argument("--repeats", type=int, default=3, help="timed runs of each")
    about = "Servers with OpenAI's interface: text, records with a JSON schema, and decisions."
    peers = command(kinds, "peers", run_bench_peers, about)
    peers.add_argument("servers", nargs="+", metavar="NAME=URL", help="servers, such as vLLM=http://127.0.0.1:8000/v1")
    peers.add_argument("--tokens", type=int, default=128, help="maximum tokens of an answer in text")
    peers.add_argument("--fields", type=int, nargs="*", default=[8, 16], help="numbers of fields of the records")
    peers.add_argument("--limit", type=int, default=10, help="maximum records of each number of fields")
    peers.add_argument("--decisions", type=int, nargs="*", default=[16], help="numbers of questions about a message")
    peers.add_argument("--repeats", type=int, default=3, help="timed runs of the decisions")
    peers.add_argument("--timeout", type=float, default=600, help="maximum seconds of a request")
    peers.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    about = "JSON fields and tool calls: serial, exact and parallel fields."
    fields = command(kinds, "fields", run_bench_fields, about)
    fields.add_argument("--model", default="smollm2", metavar="MODEL", help="checkpoint")
    fields.add_argument("--adapter", metavar="DIR", help="folder of an adapter for --model")
    dtype_option(fields)
    read = fields.add_mutually_exclusive_group()
    read.add_argument(
        "--input", type=Path, metavar="FILE",
        help='JSONL file of {"text", "schema", "gold"} records; default: the included texts and tool calls',
    )  # fmt: skip
    read.add_argument("--sob", type=Path, metavar="FILE", help="JSONL file of records of SOB")
    read.add_argument(
        "--bfcl", nargs="+", metavar="CATEGORY", help="categories of BFCL, whose package bfcl-eval has the data"
    )
    fields.add_argument(
        "--tool-choice", choices=("auto", "required"), help="tool_choice of the requests of --bfcl; default: auto"
    )
    fields.add_argument("--limit", type=int, metavar="N", help="maximum tasks, spread over all; default: all")
    draft_options(fields)
    fields.add_argument(
        "--force-drafts", action="store_true", help="draft fields and tokens also where it takes longer than it saves"
    )
    fields.add_argument("--max-new-tokens", type=int, default=400, help="maximum tokens of an answer")
    fields.add_argument("--max-length", type=int, default=1024, help="maximum tokens of a prompt and its answer")
    fields.add_argument("--output", type=Path, metavar="FILE", help="JSONL file of the answers, and a table beside it")


def run_bench_decode(options: argparse.Namespace) -> None:
    """Run `aspd bench decode`."""
    from aspd_jax import load_model
    from aspd_jax.language_model import as_int8
    from aspd_jax.progress import Bar
    from aspd_jax.shapes import benchmark_model
    from infer.bench.decoding import answer_table, answer_times
    from infer.bench.step_times import copy_bandwidth, logit_error, measure_steps, peak_bytes, step_table

    positive(options, "context", "batch", "repeats")
    if options.widths and (options.widths[0] != 1 or any(w < 1 or w & (w - 1) for w in options.widths)):
        raise RequestError(f"--widths: expected powers of two that start with 1, got {options.widths}")
    answers = answer_structures(ANSWERS if options.answers is None else options.answers)
    attention = options.decode_attention
    if options.adapter and not options.model:
        raise RequestError("--adapter: expected --model, got none")
    if options.model:
        lm = load_model(options.model, options.dtype, adapter=options.adapter, decode_attention=attention)
    else:
        lm = benchmark_model(options.shape, options.dtype, attention)
    name = options.model or options.shape
    if lm.special_tokens is not None and any(map(lm.config.is_unused, lm.special_tokens.ids)):
        if options.answers:
            raise RequestError(f"--answers: expected a model with structure tokens, got {name} without them")
        answers = []
    if options.weights == "int8":
        exact, lm = lm, as_int8(lm)
        error = logit_error(exact, lm)
        print(
            f"int8: relative error of the logits {error.relative:.2%} (root mean square, against {options.dtype}), "
            f"same likeliest token at {error.same_likeliest:.1%} of 256 positions\n"
        )
        del exact
    machine, copied = where(), copy_bandwidth(options.repeats)
    runs: list[dict[str, Any]] = []

    def note() -> None:
        """Write the results so far; an interrupted benchmark keeps them."""
        if options.json is not None:
            record = {"model": name, "dtype": options.dtype, "weights": options.weights, "where": machine}
            record |= {"decode_attention": attention}
            record |= {"copy_bandwidth": copied, "repeats": options.repeats, "peak_bytes": peak_bytes(), "runs": runs}
            write_whole(options.json, json.dumps(record, indent=1))

    for context in options.context:
        title = f"{name}, {options.dtype}, {attention}, context {context}; {machine}; copy {copied / 1e9:.1f} GB/s"
        print(f"{title}\n")
        times = measure_steps(lm, options.widths, context, options.repeats)
        if times:
            print(f"Steps, batch 1, {options.repeats} runs of 16:\n\n{step_table(times, copied)}\n", flush=True)
        runs.append({"context": context, "steps": [vars(time) for time in times], "answers": []})
        note()
        kinds = list(product(options.batch, answers))
        for batch, (branches, length) in Bar(kinds, unit="answer"):
            pair = answer_times(lm, branches, length, context, batch, options.repeats)
            first = not runs[-1]["answers"]
            title = f"Answers, {options.repeats} alternating runs of each:\n\n" * first
            print(f"{title}{answer_table(pair, head=first)}", flush=True)
            runs[-1]["answers"] += [vars(answer) for answer in pair]
            note()
        if kinds:
            print()
    print(f"peak memory {peak_bytes() / 1e9:.2f} GB")


def run_bench_decisions(options: argparse.Namespace) -> None:
    """Run `aspd bench decisions`."""
    from aspd_jax import load_model
    from aspd_jax.progress import waiting
    from infer import Engine
    from infer.bench.decisions import decision_table, decision_times

    positive(options, "questions", "batch", "repeats")
    with waiting(f"loading {options.model}"):
        lm = load_model(options.model, options.dtype)
    engine = Engine(lm, max_length=min(4096, lm.context_length), max_batch=options.batch)
    print(f"{options.model}, {options.dtype}, {options.repeats} alternating runs of each; {where()}\n", flush=True)
    for count in options.questions:
        with waiting(f"{count} questions"):
            times = decision_times(engine, count, options.repeats)
        print(decision_table(times, head=count == options.questions[0]), flush=True)


def run_bench_peers(options: argparse.Namespace) -> None:
    """Run `aspd bench peers`."""
    from aspd_jax.progress import waiting
    from infer.evaluation.extraction import read_tasks
    from infer.evaluation.peers import Server, peer_table, tasks_with, time_server

    positive(options, "tokens", "fields", "limit", "decisions", "repeats")
    included, left_out = read_tasks(None), list[str]()
    tasks = [tasks_with(included, count, options.limit) for count in options.fields]
    servers, times = [Server.connect(named, options.timeout) for named in options.servers], []
    for server in servers:
        with waiting(f"asking {server.name}"):
            times += time_server(server, options.tokens, tasks, options.decisions, options.repeats, left_out)
    print(peer_table(times))
    print_left_out(left_out)
    if options.json is not None:
        write_whole(options.json, json.dumps([asdict(one) for one in times], indent=1) + "\n")


def run_bench_fields(options: argparse.Namespace) -> None:
    """Run `aspd bench fields`."""
    from aspd_jax import load_model
    from aspd_jax.journal import resume
    from aspd_jax.progress import waiting
    from infer import Engine
    from infer.evaluation.extraction import (
        AnyTask,
        decode_tasks,
        extraction_table,
        read_tasks,
        spread,
        summarise_extraction,
    )
    from infer.evaluation.published import read_calls, read_sob

    positive(options, "max_new_tokens", "max_length", "draft_tokens")
    tasks: Sequence[AnyTask]
    if options.tool_choice and not options.bfcl:
        raise RequestError("--tool-choice: expected --bfcl, got none")
    if options.output and (options.output.exists() or options.output.suffix == ".md"):
        raise RequestError(f"--output: expected a new file, and a table beside it as .md, got {options.output}")
    if options.bfcl:
        tasks = read_calls(options.bfcl, options.tool_choice or "auto")
    else:
        tasks = read_sob(options.sob) if options.sob else read_tasks(options.input)
    if options.limit is not None:
        positive(options, "limit")
        tasks = spread(tasks, options.limit)
    names = ("model", "adapter", "dtype", "drafts", "draft_tokens", "force_drafts", "max_new_tokens", "max_length")
    settings = {name: str(getattr(options, name)) for name in names} | {"tasks": [asdict(task) for task in tasks]}
    journal = options.output and options.output.with_name(f"{options.output.name}.journal")
    if journal is not None:
        resume(journal, settings)  # refuses other settings before the model is loaded
    with waiting(f"loading {options.model}"):
        lm = load_model(options.model, options.dtype, adapter=options.adapter)
    engine = Engine(
        lm,
        max_length=min(options.max_length, lm.context_length),
        max_batch=1,
        drafts=options.drafts,
        draft_tokens=options.draft_tokens,
        force_drafts=options.force_drafts,
    )
    with waiting("compiling before the first timed task"):
        engine.warm_up(alone=True, checks=True)
    left_out: list[str] = []
    decoded = decode_tasks(engine, tasks, options.max_new_tokens, journal, settings, left_out)
    print_left_out(left_out)
    rows = summarise_extraction(decoded)
    drafts = "" if options.drafts == "none" else f"at most {options.draft_tokens} draft tokens ({options.drafts}), "
    drafts += "drafts whatever they cost, " * options.force_drafts
    title = f"{options.model}, {options.dtype}, greedy, batch 1, {drafts}{len(tasks) - len(left_out)} tasks; {where()}"
    table = f"{title}\n\n{extraction_table(rows)}\n"
    print(table)
    if options.output is not None:
        lines = [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in decoded]
        write_whole(options.output, "".join(lines))
        write_whole(options.output.with_suffix(".md"), table)
    if journal is not None:
        journal.unlink()
