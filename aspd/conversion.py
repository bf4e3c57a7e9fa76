"""Subcommands `aspd convert` and `aspd export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aspd.options import command


def add(commands: Any) -> None:
    """Add the commands of this module to the parser."""
    convert = command(
        commands,
        "convert",
        run_convert,
        "Write a model, optionally with a merged adapter, as a Hugging Face folder.",
    )
    convert.add_argument("model", help="GGUF file, Hugging Face folder, or name such as smollm2")
    convert.add_argument("--adapter", metavar="DIR", help="folder of an adapter for the model")
    convert.add_argument("--output", required=True, type=Path, help="new folder")
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the tensors")

    export = command(
        commands,
        "export",
        run_export,
        "Write a checkpoint of a training run as a Hugging Face folder; adapters are merged.",
    )
    export.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    export.add_argument("--output", required=True, type=Path, help="new folder")
    export.add_argument("--step", type=int, help="step of the checkpoint; default: the last one")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the tensors; default: as trained")


def run_convert(options: argparse.Namespace) -> None:
    """Run `aspd convert`."""
    from aspd_jax.formats import open_checkpoint
    from aspd_jax.formats.folder import convert
    from aspd_jax.language_model import load_model, save_model

    checkpoint = open_checkpoint(options.model)
    if options.adapter or checkpoint.adapter:
        save_model(load_model(options.model, options.dtype, adapter=options.adapter), options.output)
    else:
        convert(checkpoint, options.output, options.dtype)
    print(f"{checkpoint.source} written to {options.output}")


def run_export(options: argparse.Namespace) -> None:
    """Run `aspd export`."""
    from train.loop import export

    step = export(options.folder, options.output, options.step, options.dtype)
    print(f"step {step} written to {options.output}")
