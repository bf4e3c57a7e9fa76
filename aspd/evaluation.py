"""Subcommands `aspd eval` and `aspd ablate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aspd.options import command, config_options, print_left_out
from aspd_jax.errors import RequestError

SYNTHETIC = 240  # default number of synthetic problems


def add(commands: Any) -> None:
    """Add the commands of this module to the parser."""
    evaluation = commands.add_parser("eval", help="Quality, structure and speed of models on benchmarks.")
    kinds = evaluation.add_subparsers(required=True, metavar="WHAT")

    run = command(kinds, "run", run_eval, "Answer the questions of all benchmarks, time answers, and report.")
    config_options(run, "configs/eval_7b.yaml", "speed.repeats=5")
    run.add_argument("--output", required=True, type=Path, help="folder of the run; an interrupted run resumes there")

    judge = command(kinds, "judge", run_judge, "Judge the answers of a run with a language model, and report.")
    judge.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    judge.add_argument(
        "overrides", nargs="*", metavar="judge.key=value", help="change single values: judge.base_url=URL"
    )

    report = command(kinds, "report", run_report, "Write the report of an existing run.")
    report.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")

    ablate = command(
        commands, "ablate", run_ablate, "Fine-tune and compare models with each mask, position scheme and data quality."
    )
    config_options(ablate, "configs/ablation.yaml", "steps=100")
    ablate.add_argument("--output", required=True, type=Path, help="folder of the runs; interrupted runs resume there")


def run_eval(options: argparse.Namespace) -> None:
    """Run `aspd eval run`."""
    from aspd_jax.configuration import read_config
    from infer.evaluation.eval_config import EvalConfig
    from infer.evaluation.evaluate import run

    config = read_config(EvalConfig, options.config, options.overrides)
    left_out: list[str] = []
    questions = _questions(config, left_out)
    print_left_out(left_out)
    run(config, questions, options.output, left_out)
    _report(options.output)


def run_judge(options: argparse.Namespace) -> None:
    """Run `aspd eval judge`."""
    from dataclasses import asdict

    from aspd_jax.configuration import change, config_from_dict
    from infer.evaluation.eval_config import EvalConfig
    from infer.evaluation.evaluate import judge_run, read_run

    for override in options.overrides:
        if not override.startswith("judge."):
            raise RequestError(
                f"overrides: expected judge.key=value, got {override!r}. Other values of a run cannot be changed."
            )
    values = asdict(read_run(options.folder)[0])
    change(values, options.overrides)
    config = config_from_dict(EvalConfig, values, str(options.folder / "config.json"))
    missing = judge_run(config, _questions(config), options.folder)
    _report(options.folder)
    if missing:
        raise RequestError("; ".join(missing) + ". Run the same command again to request them.")


def run_report(options: argparse.Namespace) -> None:
    """Run `aspd eval report`."""
    _report(options.folder)


def _report(folder: Path) -> None:
    from infer.evaluation.eval_report import write_report
    from infer.evaluation.evaluate import read_run

    config, environment = read_run(folder)
    text = write_report(config, environment, _questions(config), folder)
    print(text)
    print(f"report written to {folder / 'report.md'}, {folder / 'report.html'} and {folder / 'report.json'}")


def _questions(config: Any, left_out: list[str] | None = None) -> dict[str, Any]:
    """Return the questions of each benchmark, and append invalid lines to `left_out`."""
    from infer.evaluation.questions import read_questions

    return {
        name: synthetic_questions(section.limit or SYNTHETIC, section.kind == "synthetic-long")
        if section.synthetic
        else read_questions(section, [] if left_out is None else left_out)
        for name, section in config.benchmarks.items()
    }


def synthetic_questions(count: int, long: bool = False) -> list[Any]:
    """Return held-out problems of the synthetic tasks as questions; see `train.tasks.held_out`."""
    from infer.evaluation.questions import Question
    from train.tasks import held_out

    return [
        Question(
            id=number,
            category=f"{problem.family}, {problem.kind}",
            turns=(problem.question,),
            references=(problem.answer,),
            scoring="synthetic",
            forks=problem.forks,
        )
        for number, problem in enumerate(held_out(count, long=long))
    ]


def run_ablate(options: argparse.Namespace) -> None:
    """Run `aspd ablate`."""
    from aspd_jax import load_model
    from aspd_jax.configuration import read_config
    from aspd_jax.files import write_whole
    from infer.engine import Engine
    from infer.evaluation.ablation_table import table
    from infer.evaluation.conversations import answer_questions
    from infer.evaluation.eval_config import DecodingSection, System
    from infer.offline.journal import read_journal
    from infer.request import Mode
    from train.ablation_models import (
        MAX_BRANCH_TOKENS,
        REFERENCE,
        VARIANTS,
        AblationConfig,
        run_config,
        write_conversations,
    )  # fmt: skip
    from train.loop import train

    config = read_config(AblationConfig, options.config, options.overrides)
    questions = synthetic_questions(config.problems)

    def answers(name: str, model: Any, folder: Path, decoding: DecodingSection) -> None:
        lm = load_model(model)
        engine = Engine(lm, decoding.length(lm.context_length), max_batch=decoding.batch)
        mode: Mode = "adaptive" if name in VARIANTS and VARIANTS[name].structured else "serial"
        answer_questions(engine, System(name, name, mode), questions, decoding, folder / "answers.jsonl", folder.name)

    def decoding(positions: str) -> DecodingSection:
        branch = MAX_BRANCH_TOKENS if positions == "predict" else 1024
        return DecodingSection(max_new_tokens=1024, max_branch_tokens=branch, max_length=2048, batch=config.batch)

    ori = options.output / "ori"
    if len(read_journal(ori / "answers.jsonl")) < len(questions):
        answers("ori", config.base, ori, decoding("sequential"))
    for name in config.chosen:
        variant, folder = VARIANTS[name], options.output / name
        if len(read_journal(folder / "answers.jsonl")) < len(questions):
            file = write_conversations(options.output / "data", variant.quality, config.conversations)
            train(run_config(config, variant, file), folder)
            answers(name, folder / "model", folder, decoding(variant.positions))
    journals = {name: read_journal(options.output / name / "answers.jsonl") for name in ("ori", *VARIANTS)}
    text = table({name: records for name, records in journals.items() if len(records) == len(questions)}, REFERENCE)
    write_whole(options.output / "ablation.md", text + "\n")
    print(text)
