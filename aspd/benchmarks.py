"""`aspd bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from aspd.options import answer_structures, positive, print_left_out, shape_options, where
from aspd_jax.errors import RequestError
from aspd_jax.files import write_whole

SERVED_ROWS = 8
SERVED_WAITING = 4096


def add(commands: Any) -> None:
    """Add these commands."""
    bench = commands.add_parser("bench", help="Measure speed, baselines in the same run.")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")

    decode = kinds.add_parser("decode", help="passes by width, and whole answers in adaptive and in serial mode")
    decode.set_defaults(run=run_bench_decode)
    decode.add_argument("--model", metavar="MODEL", help="a checkpoint; default: a random model of --shape")
    decode.add_argument("--adapter", metavar="DIR", help="folder of an adapter for --model")
    decode.add_argument(
        "--adapters", type=int, default=0, metavar="N",
        help="also time passes with room for N adapters that requests choose among, of --adapter-rank each",
    )  # fmt: skip
    decode.add_argument("--adapter-rank", type=int, default=16, help="ranks of an adapter among --adapters")
    shape_options(decode)
    decode.add_argument("--weights", choices=("float", "int8"), default="float", help="of the layers' kernels")
    decode.add_argument("--context", type=int, nargs="+", default=[128], help="prompt tokens")
    decode.add_argument("--batch", type=int, nargs="+", default=[1], help="requests at a time")
    decode.add_argument("--widths", type=int, nargs="*", default=[1, 2, 4, 8, 16], help="powers of two, 1 first")
    decode.add_argument(
        "--answers",
        nargs="*",
        default=["2x240", "4x120", "8x60", "16x30"],
        metavar="NxT",
        help="branches x tokens of each",
    )
    decode.add_argument(
        "--draft-tokens", type=int, default=0, help="also time answers with guesses; all answers then copy the prompt"
    )
    decode.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (.svg, .png, .pdf)")

    served = kinds.add_parser("serve", help="a server under load, in serial and in adaptive mode")
    served.set_defaults(run=run_bench_serve)
    served.add_argument(
        "--url", help="of a server, such as http://127.0.0.1:8000/v1; default: one of --model is started"
    )
    served.add_argument("--model", default="demo", metavar="MODEL", help="a checkpoint, or the name at --url")
    served.add_argument(
        "--batch", type=int, nargs="+", metavar="N",
        help=f"rows of the server that is started; of several numbers, a server each (default: {SERVED_ROWS})",
    )  # fmt: skip
    served.add_argument(
        "--max-waiting", type=int, metavar="N",
        help=f"requests that may wait for a row of that server; further ones get 429 (default: {SERVED_WAITING})",
    )  # fmt: skip
    served.add_argument("--questions", type=Path, metavar="FILE", help="FastChat's JSONL; default: the synthetic tasks")
    served.add_argument(
        "--long", action="store_true", help="of the synthetic tasks, those with long branches (letters)"
    )
    served.add_argument(
        "--least-branches", type=int, default=3, metavar="N", help="of right answers to the synthetic tasks: 3 to 8"
    )
    served.add_argument("--rates", type=float, nargs="+", default=[1, 4, 16], help="requests per second")
    served.add_argument("--seconds", type=float, default=20.0, help="during which requests arrive, for each rate")
    served.add_argument(
        "--repeats", type=int, default=3, help="rounds of each load, the modes in turn; the median round counts"
    )
    served.add_argument("--target", type=float, default=1.0, help="seconds to the last token that are in time")
    served.add_argument("--max-new-tokens", type=int, default=800)
    served.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    served.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (.svg, .png, .pdf)")

    steps = kinds.add_parser("train", help="training steps, beside plain causal attention")
    steps.set_defaults(run=run_bench_train)
    shape_options(steps)
    steps.add_argument("--rows", type=int, default=1, help="rows of a batch")
    steps.add_argument("--length", type=int, default=1024, help="tokens of a row")


def run_bench_decode(options: argparse.Namespace) -> None:
    """`aspd bench decode`."""
    from tqdm import tqdm

    from aspd_jax import load_model
    from aspd_jax.language_model import as_int8
    from aspd_jax.shapes import benchmark_model
    from infer.bench.decoding import ANSWER_HEAD, answer_rows, answer_times, published_speeds, transformers_time
    from infer.bench.passes import copy_bandwidth, logit_error, pass_table, pass_times, peak_bytes

    positive(options, "context", "batch", "repeats")
    if options.widths and (options.widths[0] != 1 or any(w < 1 or w & (w - 1) for w in options.widths)):
        raise RequestError(f"--widths must be powers of two and start with 1, got {options.widths}")
    if options.adapters and not options.model:
        raise RequestError("--adapters needs a --model to put them on")
    answers = answer_structures(options.answers)
    if options.model:
        lm = load_model(options.model, options.dtype, adapter=options.adapter)
    else:
        lm = benchmark_model(options.shape, options.dtype)
    if options.weights == "int8":
        exact, lm = lm, as_int8(lm)
        error = logit_error(exact, lm)
        print(
            f"int8: logits are {error.relative:.2%} off (root mean square, of {options.dtype} ones), "
            f"the likeliest token is the same in {error.same_likeliest:.1%} of 256 places\n"
        )
        del exact
    roomy = []
    if options.adapters:
        roomy.append(
            load_model(options.model, options.dtype, lora_rank=options.adapter_rank, adapters=options.adapters)
        )
    name, machine, copied = options.model or options.shape, where(), copy_bandwidth(options.repeats)
    runs: list[dict[str, Any]] = []

    def note() -> None:
        """What is known so far: a benchmark may be ended before its end."""
        if options.json is not None:
            record = {"model": name, "dtype": options.dtype, "weights": options.weights, "where": machine}
            record |= {"copy_bandwidth": copied, "repeats": options.repeats, "peak_bytes": peak_bytes(), "runs": runs}
            write_whole(options.json, json.dumps(record, indent=1))

    for context in options.context:
        title = f"{name}, {options.dtype}, context {context}; {machine}; copy {copied / 1e9:.1f} GB/s"
        print(f"{title}\n")
        timed = pass_times([lm, *roomy], options.widths, context, options.repeats) if options.widths else [[]]
        passes = timed[0]
        if passes:
            print(f"Passes, batch 1, {options.repeats} runs of 16:\n\n{pass_table(passes, copied)}\n", flush=True)
            for with_room in timed[1:]:
                print(f"The same in turn, with room for {options.adapters} adapters of rank {options.adapter_rank}:\n")
                print(f"{pass_table(with_room, copied, passes)}\n", flush=True)
        runs.append({"context": context, "passes": [vars(p) for p in passes], "answers": []})
        runs[-1] |= {"with_adapters": [vars(p) for p in timed[1]]} if roomy else {}
        note()
        pairs = []
        kinds = list(product(options.batch, answers))
        for batch, (branches, length) in tqdm(kinds, unit="answer", disable=None):
            pair = answer_times(lm, branches, length, context, batch, options.repeats, options.draft_tokens)
            torch = transformers_time(lm, pair[0].content, context, batch, options.repeats)
            pairs.append([*pair, torch] if torch else pair)
            if len(pairs) == 1:
                print(f"Answers, {options.repeats} runs of each in turn:\n\n{ANSWER_HEAD}")
            print(answer_rows(pairs[-1]), flush=True)
            runs[-1]["answers"] += [vars(answer) for answer in pairs[-1]]
            note()
        if pairs:
            print()
        if beside := published_speeds("" if options.model else options.shape, options.dtype, context):
            print(f"{beside}\n")
        if options.plot is not None:
            from infer.plots import plot_decoding

            file = options.plot
            several = len(options.context) > 1
            plot_decoding(passes, pairs, copied, title, file.with_stem(f"{file.stem}-{context}") if several else file)
    print(f"peak memory {peak_bytes() / 1e9:.2f} GB")


def run_bench_train(options: argparse.Namespace) -> None:
    """`aspd bench train`."""
    from train.throughput import step_times, table

    positive(options, "rows", "length", "repeats")
    results = step_times(options.shape, options.dtype, options.rows, options.length, options.repeats)
    machine = where()
    of = f"{options.shape}, {options.dtype}, {options.rows} x {options.length} tokens, {options.repeats} steps"
    print(f"{of}; {machine}\n")
    print(table(results))
    if options.json is not None:
        record = {"shape": options.shape, "dtype": options.dtype, "rows": options.rows, "length": options.length}
        write_whole(
            options.json, json.dumps(record | {"where": machine, "steps": [vars(r) for r in results]}, indent=1)
        )


def run_bench_serve(options: argparse.Namespace) -> None:
    """`aspd bench serve`."""
    import asyncio
    import os
    from dataclasses import replace
    from functools import partial
    from itertools import count, islice

    from aspd_jax.configuration import at_least
    from infer.bench.load import Load, load, median_round, undisturbed
    from infer.evaluation.eval_config import BenchmarkSection
    from infer.evaluation.questions import read_questions
    from infer.request import Mode
    from train.tasks import FAMILIES, LONG_FAMILY, problem

    if min(options.rates) <= 0 or options.seconds <= 0:
        raise RequestError("--rates and --seconds must be more than 0")
    if options.url is not None and (options.batch, options.max_waiting) != (None, None):
        raise RequestError("--batch and --max-waiting are of a server that is started; leave them out, or --url")
    batches = options.batch or [SERVED_ROWS]
    for rows in batches:
        at_least("--batch", rows, 1)
    waiting = SERVED_WAITING if options.max_waiting is None else options.max_waiting
    at_least("--max-waiting", waiting, 0)
    if not 3 <= options.least_branches <= 8:
        raise RequestError("--least-branches must be between 3 and 8")
    if options.questions is not None and (options.long or options.least_branches > 3):
        raise RequestError(
            "--long and --least-branches choose among the synthetic tasks; leave them out, or --questions"
        )
    positive(options, "repeats")
    if options.questions is None:
        families = (LONG_FAMILY,) if options.long else FAMILIES
        kinds = [(family, kind) for family in families for kind in ("parallel", "conclusion")]
        problems = (problem(n, True, *kinds[n % len(kinds)]) for n in count())
        questions = [p.question for p in islice((p for p in problems if p.branches >= options.least_branches), 48)]
    else:
        left_out: list[str] = []
        section = BenchmarkSection(file=str(options.questions))
        questions = [question.turns[0] for question in read_questions(section, left_out)]
        print_left_out(left_out)
    modes: tuple[Mode, ...] = ("serial", "adaptive")
    key = os.environ.get("ASPD_API_KEY", "")
    found = []

    def measure(url: str, rows: int | None) -> None:
        def send(rate: float, mode: Mode) -> Load:
            sent = load(
                url, key, options.model, questions, mode, rate, options.seconds, options.target, options.max_new_tokens
            )
            return replace(asyncio.run(sent), rows=rows)

        for rate in options.rates:
            rounds = [
                [undisturbed(partial(send, rate, mode), url, key) for mode in modes] for _ in range(options.repeats)
            ]
            for of in map(median_round, zip(*rounds, strict=True)):
                found.append(of)
                print(f"{of.title}: {1000 * of.last[0]:.0f} ms to the last token", flush=True)

    if options.url is not None:
        measure(options.url, None)
    else:
        for rows in batches:
            with _server(options.model, rows, waiting, options.max_new_tokens) as url:
                measure(url, rows)
    print(
        f"\n{options.model}; {where()}; open loop, Poisson, {options.seconds:g} s a round, "
        f"the median of {options.repeats} rounds\n"
    )
    _print_loads(found, options)
    if options.plot:
        from infer.plots import plot_load

        plot_load(found, options.target, f"{options.model}; {where()}", options.plot)


def _print_loads(found: Any, options: argparse.Namespace) -> None:
    """Tables of loads, and their file."""
    from infer.bench.load import best_goodput, load_table, to_json

    print(load_table(found, options.target))
    print(f"\n{best_goodput(found, options.target)}")
    if options.json:
        write_whole(options.json, json.dumps(to_json(found), indent=1) + "\n")


@contextmanager
def _server(model: str, rows: int, waiting: int, max_new_tokens: int) -> Iterator[str]:
    """A server of its own process, so that it and the load do not wait for each other; gives its address."""
    import re
    import subprocess
    import sys
    import time
    from urllib.error import URLError
    from urllib.request import urlopen

    command = [sys.executable, "-m", "aspd", "serve", "--model", model, "--name", model, "--port", "0"]
    command += ["--batch", str(rows), "--max-waiting", str(waiting), "--max-new-tokens", str(max_new_tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://\S+:\d+", process.stdout.readline())
            if address is None:
                raise RequestError("the server did not start; see above")
            while process.poll() is None:
                try:
                    with urlopen(f"{address[0]}/health", timeout=5):
                        break
                except (URLError, OSError):
                    time.sleep(0.5)
            else:
                raise RequestError("the server ended; see above")
            yield f"{address[0]}/v1"
        finally:
            process.terminate()
