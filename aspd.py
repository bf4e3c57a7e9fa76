"""The door: the `aspd` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aspd_jax.errors import AspdError, RequestError

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
if version("jaxlib").startswith("0.10.") and "ynn_fusion" not in os.environ.get("XLA_FLAGS", ""):
    # On CPU this version merges products with their surroundings in a way that doubles their time (docs/benchmarks.md).
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a mistake of the user, 130 when interrupted."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except AspdError as error:
        print(f"aspd: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="aspd", description="Adaptive serial-parallel decoding.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=about, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.set_defaults(run=run)
        return sub

    generate = command("generate", run_generate, "Answer a prompt, or a file of prompts.")
    _model_options(generate)
    asked = generate.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--prompt", metavar="TEXT", help="a question; goes through the chat template if the model has one"
    )
    asked.add_argument(
        "--messages", metavar="FILE", help='JSON file with a list of {"role", "content"} messages; - is standard input'
    )
    asked.add_argument("--input", type=Path, metavar="FILE", help='JSONL file of {"prompt"} or {"messages"} records')
    generate.add_argument("--output", type=Path, metavar="FILE", help="JSONL file for the answers to --input")
    generate.add_argument("--weights", choices=("float", "int8"), default="float", help="of the layers' kernels")
    generate.add_argument("--mesh", metavar="AXIS=N,…", help="devices for each axis: data=2,tensor=4; default: one")
    generate.add_argument("--batch", type=int, default=8, help="requests of --input that decode together")
    generate.add_argument(
        "--branch-policy", default="all", metavar="POLICY", help="all, cap:N branches, or slo:MS milliseconds a pass"
    )
    generate.add_argument(
        "--draft-tokens", type=int, default=0, help="guesses per stretch and pass, looked up in what was said before"
    )
    generate.add_argument(
        "--raw", action="store_true", help="give prompts to the model as they stand, without the chat template"
    )
    generate.add_argument("--mode", choices=("adaptive", "serial"), default="adaptive")
    generate.add_argument("--stream", action="store_true", help="print the answer as it grows")
    generate.add_argument("--json", action="store_true", help="print text, structure, token ids and statistics as JSON")
    _sampling_options(generate)

    demo = command("demo", run_demo, "Answer a few questions in both modes, and compare.")
    _model_options(demo)
    demo.add_argument("--questions", type=int, default=3, help="how many")
    demo.add_argument("--seed", type=int, default=0, help="which questions")

    train = command("train", run_train, "Fine-tune a checkpoint, or train a model from scratch on the synthetic tasks.")
    _config_options(train)
    what = train.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder of the run; a killed run goes on in it")
    what.add_argument("--plan", action="store_true", help="print the memory that each device will need, and stop")
    train.add_argument(
        "--distributed", action="store_true", help="one of several processes, which SLURM, GKE or Cloud TPU started"
    )
    train.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where nothing else tells")
    train.add_argument("--processes", type=int, help="how many, with --coordinator")
    train.add_argument("--process", type=int, help="which one this is, with --coordinator")

    ablate = command("ablate", run_ablate, "Train and evaluate every mask and position scheme on the synthetic tasks.")
    _config_options(ablate)
    ablate.add_argument("--output", required=True, type=Path, help="folder of the runs; what is done there stays done")
    ablate.add_argument("--problems", type=int, default=240, help="held-out problems for each model")
    ablate.add_argument("--batch", type=int, default=16)

    export = command("export", run_export, "Write a checkpoint of a training run as a Hugging Face folder.")
    export.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    export.add_argument("--output", required=True, type=Path, help="a new folder")
    export.add_argument("--step", type=int, help="which checkpoint; default: the last one")

    evaluate = command("eval", run_eval, "Exact match and fork decisions on held-out synthetic problems.")
    evaluate.add_argument(
        "--models", nargs="+", default=["demo", "demo-seq"], help="checkpoint folders, or embedded models"
    )
    evaluate.add_argument("--problems", type=int, default=1200)
    evaluate.add_argument("--batch", type=int, default=16)
    evaluate.add_argument("--output", type=Path, help="JSON file for every answer")

    bench = commands.add_parser("bench", help="Measure speed, baselines in the same run.")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")

    decode = kinds.add_parser("decode", help="passes by width, and whole answers in adaptive and in serial mode")
    decode.set_defaults(run=run_bench_decode)
    decode.add_argument("--model", metavar="DIR|demo", help="a checkpoint; default: a random model of --shape")
    _shape_options(decode)
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
    decode.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (.svg, .png, .pdf)")

    steps = kinds.add_parser("train", help="training steps, beside plain causal attention")
    steps.set_defaults(run=run_bench_train)
    _shape_options(steps)
    steps.add_argument("--rows", type=int, default=1, help="rows of a batch")
    steps.add_argument("--length", type=int, default=1024, help="tokens of a row")
    return parser


def _shape_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="27m", help="of a random model: 27m, 1b or 7b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each kind; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", metavar="DIR|demo", help="Hugging Face checkpoint folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of prompt and answer")


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, such as configs/embedded_aspd.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change single values: data.length=4096")


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--max-branch-tokens", type=int, default=1024)
    parser.add_argument("--stop", action="append", default=[], help="string that ends its stretch; may be repeated")
    parser.add_argument("--seed", type=int, help="of the random streams")


def run_generate(options: argparse.Namespace) -> None:
    """`aspd generate`."""
    from aspd_jax import load_model
    from aspd_jax.structure import to_json
    from infer import Engine, SamplingParams
    from infer.terminal import print_growing

    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        max_new_tokens=options.max_new_tokens,
        max_branch_tokens=options.max_branch_tokens,
        stop=tuple(options.stop),
        seed=options.seed,
    )
    if (options.input is None) != (options.output is None):
        raise RequestError("--input and --output go together")
    _positive(options, "batch")
    prompt: Any = options.prompt if options.messages is None else _read_messages(options.messages)
    lm = load_model(options.model, options.dtype, _mesh(options.mesh), options.weights)
    rows = options.batch if options.input else 1
    engine = Engine(
        lm,
        max_length=options.max_length,
        max_batch=rows,
        branch_policy=options.branch_policy,
        draft_tokens=options.draft_tokens,
    )
    chat = not options.raw and bool(getattr(lm.tokenizer, "chat_template", None))
    if options.input is not None:
        from infer.batch import generate_file

        outcome = generate_file(engine, options.input, options.output, params, options.mode, chat)
        there = f", {outcome.resumed} of them there already" if outcome.resumed else ""
        errors = f"; {outcome.errors} hold an error" if outcome.errors else ""
        print(f"{outcome.records} records written to {options.output}{there}{errors}")
        return
    if options.prompt is not None and chat:
        prompt = [{"role": "user", "content": options.prompt}]
    if options.stream and not options.json:
        print_growing(engine.stream(prompt, params, options.mode))
        return
    result = engine.generate([prompt], params, options.mode)[0]
    if not options.json:
        print(result.text)
        return
    stats = vars(result.stats) | {"ideal_speedup": result.stats.ideal_speedup}
    output = {
        "text": result.text,
        "structure": to_json(result.structure),
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": stats,
    }
    print(json.dumps(output, ensure_ascii=False))


def _mesh(text: str | None) -> Any:
    """A mesh from its axes, such as `data=2,tensor=4`."""
    if text is None:
        return None
    from aspd_jax.sharding import make_mesh

    shape = {}
    for part in text.split(","):
        axis, found, size = part.partition("=")
        if not found or not size.isdigit() or int(size) < 1:
            raise RequestError(f"--mesh takes axes and numbers of devices, such as data=2,tensor=4, got {text!r}")
        shape[axis] = int(size)
    return make_mesh(shape)


def _read_messages(name: str) -> list[dict[str, str]]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{name}: {error}") from None
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{name}, line {error.lineno}: {error.msg}") from None
    if not isinstance(messages, list) or not messages:
        raise RequestError(f'{name} must hold a list of {{"role", "content"}} messages')
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise RequestError(f"{name}, message {number}: {key!r} must be a string")
    return messages


def run_demo(options: argparse.Namespace) -> None:
    """`aspd demo`."""
    from aspd_jax import load_model
    from infer.terminal import demonstrate
    from train.tasks import KINDS, problem

    if options.questions < 1:
        raise RequestError(f"--questions must be at least 1, got {options.questions}")
    # Blocks first, and a chain that must stay serial; then the other families and kinds.
    order = [("machines", "conclusion"), ("orders", "conclusion"), ("machines", "chain"), ("machines", "parallel")]
    order += [
        (family, kind) for family in ("records", "orders", "machines") for kind in KINDS if (family, kind) not in order
    ]
    problems = [
        problem(options.seed * 1000 + number, True, *order[number % len(order)]) for number in range(options.questions)
    ]
    demonstrate(
        load_model(options.model, options.dtype),
        [(item.question, item.answer) for item in problems],
        options.max_length,
    )


def run_train(options: argparse.Namespace) -> None:
    """`aspd train`."""
    from train.config import load_config

    config = load_config(options.config, options.overrides)
    if options.plan:
        from train.plan import report

        print(report(config))
        return
    import jax

    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    elif options.distributed:
        jax.distributed.initialize()
    from train.loop import train

    train(config, options.output)
    if jax.process_index() == 0:
        print(f"model written to {options.output / 'model'}")


def run_ablate(options: argparse.Namespace) -> None:
    """`aspd ablate`."""
    from aspd_jax import load_model
    from infer.evaluate import evaluate, summarise
    from train.ablation import MAX_BRANCH_TOKENS, table, variants
    from train.config import load_config
    from train.loop import train
    from train.tasks import held_out

    problems = list(held_out(options.problems))
    outcomes: dict[str, Any] = {}
    for name, config in variants(load_config(options.config, options.overrides)).items():
        run = options.output / name
        answers = run / f"answers_{options.problems}.json"
        if not answers.exists():
            train(config, run)
            evaluated = evaluate(load_model(run / "model"), problems, options.batch, name, MAX_BRANCH_TOKENS)
            answers.write_text(json.dumps(evaluated))
        records = json.loads(answers.read_text())
        outcomes[name] = summarise(records), summarise([record for record in records if record["should_fork"]])
    text = table(outcomes)
    (options.output / "ablation.md").write_text(text + "\n")
    print(text)


def run_export(options: argparse.Namespace) -> None:
    """`aspd export`."""
    from train.loop import export

    step = export(options.folder, options.output, options.step)
    print(f"step {step} written to {options.output}")


def run_eval(options: argparse.Namespace) -> None:
    """`aspd eval`."""
    from aspd_jax import load_model
    from infer.evaluate import evaluate, table
    from train.tasks import held_out

    problems = list(held_out(options.problems))
    records = {}
    for name in options.models:
        records[name] = evaluate(load_model(name), problems, options.batch, name)
    print(table(records))
    if options.output is not None:
        options.output.write_text(json.dumps(records, indent=1))


def _where() -> str:
    import jax

    return f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"


def _positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value], default=1) < 1:
            raise RequestError(f"--{name} must be at least 1, got {value}")


def run_bench_decode(options: argparse.Namespace) -> None:
    """`aspd bench decode`."""
    from aspd_jax import load_model
    from aspd_jax.language_model import as_int8
    from aspd_jax.shapes import benchmark_model
    from infer.benchmark import (
        answer_table,
        answer_times,
        copy_bandwidth,
        logit_error,
        pass_table,
        pass_times,
        peak_bytes,
        published,
        transformers_time,
    )

    _positive(options, "context", "batch", "repeats")
    if options.widths and (options.widths[0] != 1 or any(w < 1 or w & (w - 1) for w in options.widths)):
        raise RequestError(f"--widths must be powers of two and start with 1, got {options.widths}")
    answers = []
    for text in options.answers:
        branches, found, length = text.partition("x")
        if not found or not branches.isdigit() or not length.isdigit():
            raise RequestError(f"--answers takes branches x tokens, such as 8x60, got {text!r}")
        answers.append((int(branches), int(length)))
    lm = load_model(options.model, options.dtype) if options.model else benchmark_model(options.shape, options.dtype)
    if options.weights == "int8":
        exact, lm = lm, as_int8(lm)
        error = logit_error(exact, lm)
        print(
            f"int8: logits are {error.relative:.2%} off (root mean square, of {options.dtype} ones), "
            f"the likeliest token is the same in {error.same_likeliest:.1%} of 256 places\n"
        )
        del exact
    name, where, copied = options.model or options.shape, _where(), copy_bandwidth(options.repeats)
    runs = []
    for context in options.context:
        title = f"{name}, {options.dtype}, context {context}; {where}; copy {copied / 1e9:.1f} GB/s"
        print(f"{title}\n")
        passes = pass_times(lm, options.widths, context, options.repeats) if options.widths else []
        if passes:
            print(f"Passes, batch 1, {options.repeats} runs of 16:\n\n{pass_table(passes, copied)}\n")
        pairs = []
        for batch in options.batch:
            for branches, length in answers:
                pair = answer_times(lm, branches, length, context, batch, options.repeats)
                torch = transformers_time(lm, pair[0].content, context, batch, options.repeats)
                pairs.append([*pair, torch] if torch else pair)
        if pairs:
            print(f"Answers, {options.repeats} runs of each in turn:\n\n{answer_table(pairs)}\n")
        if beside := published("" if options.model else options.shape, options.dtype, context):
            print(f"{beside}\n")
        if options.plot is not None:
            from infer.plots import plot_decoding

            file = options.plot
            several = len(options.context) > 1
            plot_decoding(passes, pairs, copied, title, file.with_stem(f"{file.stem}-{context}") if several else file)
        flat = [vars(answer) for pair in pairs for answer in pair]
        runs.append({"context": context, "passes": [vars(p) for p in passes], "answers": flat})
    print(f"peak memory {peak_bytes() / 1e9:.2f} GB")
    if options.json is not None:
        record = {
            "model": name,
            "dtype": options.dtype,
            "weights": options.weights,
            "where": where,
            "copy_bandwidth": copied,
        }
        record |= {"repeats": options.repeats, "peak_bytes": peak_bytes(), "runs": runs}
        options.json.write_text(json.dumps(record, indent=1))


def run_bench_train(options: argparse.Namespace) -> None:
    """`aspd bench train`."""
    from train.benchmark import step_times, table

    _positive(options, "rows", "length", "repeats")
    results = step_times(options.shape, options.dtype, options.rows, options.length, options.repeats)
    where = _where()
    of = f"{options.shape}, {options.dtype}, {options.rows} x {options.length} tokens, {options.repeats} steps"
    print(f"{of}; {where}\n")
    print(table(results))
    if options.json is not None:
        record = {"shape": options.shape, "dtype": options.dtype, "rows": options.rows, "length": options.length}
        options.json.write_text(json.dumps(record | {"where": where, "steps": [vars(r) for r in results]}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
