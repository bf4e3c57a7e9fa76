"""`aspd train`, `aspd ablate`, `aspd export` and `aspd eval`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aspd.options import command, config_options


def add(commands: Any) -> None:
    """Add these commands."""
    train = command(
        commands, "train", run_train, "Fine-tune a checkpoint, or train a model from scratch on the synthetic tasks."
    )
    config_options(train)
    what = train.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder of the run; a killed run goes on in it")
    what.add_argument("--plan", action="store_true", help="print the memory that each device will need, and stop")
    train.add_argument(
        "--distributed", action="store_true", help="one of several processes, which SLURM, GKE or Cloud TPU started"
    )
    train.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where nothing else tells")
    train.add_argument("--processes", type=int, help="how many, with --coordinator")
    train.add_argument("--process", type=int, help="which one this is, with --coordinator")

    ablate = command(
        commands, "ablate", run_ablate, "Train and evaluate every mask and position scheme on the synthetic tasks."
    )
    config_options(ablate)
    ablate.add_argument("--output", required=True, type=Path, help="folder of the runs; what is done there stays done")
    ablate.add_argument("--problems", type=int, default=240, help="held-out problems for each model")
    ablate.add_argument("--batch", type=int, default=16)

    export = command(commands, "export", run_export, "Write a checkpoint of a training run as a Hugging Face folder.")
    export.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    export.add_argument("--output", required=True, type=Path, help="a new folder")
    export.add_argument("--step", type=int, help="which checkpoint; default: the last one")

    evaluate = command(commands, "eval", run_eval, "Exact match and fork decisions on held-out synthetic problems.")
    evaluate.add_argument(
        "--models", nargs="+", default=["demo", "demo-seq"], help="checkpoint folders, or embedded models"
    )
    evaluate.add_argument("--problems", type=int, default=1200)
    evaluate.add_argument("--batch", type=int, default=16)
    evaluate.add_argument("--output", type=Path, help="JSON file for every answer")


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
