"""Subcommand `aspd train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aspd.options import command, config_options, join_processes, process_options


def add(commands: Any) -> None:
    """Add the commands of this module to the parser."""
    train = command(commands, "train", run_train, "Fine-tune a checkpoint on conversations.")
    config_options(train, "configs/lora_7b.yaml")
    action = train.add_mutually_exclusive_group(required=True)
    action.add_argument("--output", type=Path, help="folder of the run; an interrupted run resumes there")
    action.add_argument("--plan", action="store_true", help="print the estimated memory of each device, and stop")
    process_options(train)


def run_train(options: argparse.Namespace) -> None:
    """Run `aspd train`."""
    from aspd_jax.configuration import read_config
    from train.config import TrainConfig

    config = read_config(TrainConfig, options.config, options.overrides)
    if options.plan:
        from train.plan import check_named_checkpoint, report

        check_named_checkpoint(config, options.overrides)
        print(report(config))
        return
    import jax

    join_processes(options)
    from train.loop import result_name, train

    result = options.output / result_name(config)
    complete = result.exists()
    train(config, options.output)
    if jax.process_index() == 0:
        print(f"{result} exists already: the run is complete" if complete else f"{result.name} written to {result}")
