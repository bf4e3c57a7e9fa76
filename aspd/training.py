"""`aspd train` and `aspd export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aspd.options import command, config_options, join_processes, process_options


def add(commands: Any) -> None:
    """Add these commands."""
    train = command(
        commands, "train", run_train, "Fine-tune a checkpoint, or train a model from scratch on the synthetic tasks."
    )
    config_options(train)
    what = train.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder of the run; a killed run goes on in it")
    what.add_argument("--plan", action="store_true", help="print the memory that each device will need, and stop")
    process_options(train)

    export = command(commands, "export", run_export, "Write a checkpoint of a training run as a Hugging Face folder.")
    export.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    export.add_argument("--output", required=True, type=Path, help="a new folder")
    export.add_argument("--step", type=int, help="which checkpoint; default: the last one")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="of its tensors; default: as trained")


def run_train(options: argparse.Namespace) -> None:
    """`aspd train`."""
    from train.config import load_config

    config = load_config(options.config, options.overrides)
    if options.plan:
        from train.plan import report

        print(report(config))
        return
    import jax

    join_processes(options)
    from train.loop import train

    train(config, options.output)
    if jax.process_index() == 0:
        print(f"model written to {options.output / 'model'}")


def run_export(options: argparse.Namespace) -> None:
    """`aspd export`."""
    from train.loop import export

    step = export(options.folder, options.output, options.step, options.dtype)
    print(f"step {step} written to {options.output}")
