"""Subcommands `aspd eval` and `aspd ablate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aspd.options import command, config_options, print_left_out


def add(commands: Any) -> None:
    """Add the commands of this module to the parser."""
    evaluation = commands.add_parser("eval", help="Quality, structure and speed of models on benchmarks.")
    kinds = evaluation.add_subparsers(required=True, metavar="WHAT")

    run = command(kinds, "run", run_eval, "Answer the questions of all benchmarks, time answers, and report.")
    config_options(run, "configs/eval_7b.yaml", "speed.repeats=5")
    run.add_argument("--output", required=True, type=Path, help="folder of the run; an interrupted run resumes there")

    report = command(kinds, "report", run_report, "Write the report of an existing run.")
    report.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")

    ablate = command(
        commands,
        "ablate",
        run_ablate,
        "Fine-tune a model with every mask and position scheme, and compare the held-out losses.",
    )
    config_options(ablate, "configs/smollm2/ablation.yaml", "steps=50")
    ablate.add_argument("--output", required=True, type=Path, help="folder of the runs; interrupted runs resume there")


def run_eval(options: argparse.Namespace) -> None:
    """Run `aspd eval run`."""
    from aspd_jax.configuration import read_config
    from infer.evaluation.config import EvalConfig
    from infer.evaluation.evaluate import run

    config = read_config(EvalConfig, options.config, options.overrides)
    left_out: list[str] = []
    questions = _questions(config, left_out)
    print_left_out(left_out)
    run(config, questions, options.output, left_out)
    _report(options.output)


def run_report(options: argparse.Namespace) -> None:
    """Run `aspd eval report`."""
    _report(options.folder)


def _report(folder: Path) -> None:
    from infer.evaluation.evaluate import read_run
    from infer.evaluation.report import write_report

    config, environment = read_run(folder)
    text = write_report(config, environment, _questions(config), folder)
    print(text)
    print(f"report written to {folder / 'report.md'} and {folder / 'report.json'}")


def _questions(config: Any, left_out: list[str] | None = None) -> dict[str, Any]:
    """Return the questions of each benchmark, and append invalid lines to `left_out`."""
    from infer.evaluation.questions import read_questions

    return {
        name: read_questions(section, [] if left_out is None else left_out)
        for name, section in config.benchmarks.items()
    }


def run_ablate(options: argparse.Namespace) -> None:
    """Run `aspd ablate`."""
    from aspd_jax.configuration import read_config
    from train.ablation import ablate
    from train.config import TrainConfig

    print(ablate(read_config(TrainConfig, options.config, options.overrides), options.output))
