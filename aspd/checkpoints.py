"""`aspd convert` and `aspd export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aspd.options import command


def add(commands: Any) -> None:
    """Add these commands."""
    convert = command(commands, "convert", run_convert, "Write a GGUF file as a Hugging Face folder.")
    convert.add_argument("model", help="GGUF file, or a name: smollm2")
    convert.add_argument("--output", required=True, type=Path, help="a new folder")
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of its tensors")

    export = command(
        commands,
        "export",
        run_export,
        "Write a checkpoint of a training run as a Hugging Face folder; adapters are merged.",
    )
    export.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    export.add_argument("--output", required=True, type=Path, help="a new folder")
    export.add_argument("--step", type=int, help="which checkpoint; default: the last one")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="of its tensors; default: as trained")


def run_convert(options: argparse.Namespace) -> None:
    """`aspd convert`."""
    from aspd_jax.formats import open_checkpoint
    from aspd_jax.formats.folder import convert

    checkpoint = open_checkpoint(options.model)
    convert(checkpoint, options.output, options.dtype)
    print(f"{checkpoint.source} written to {options.output}")


def run_export(options: argparse.Namespace) -> None:
    """`aspd export`."""
    from train.loop import export

    step = export(options.folder, options.output, options.step, options.dtype)
    print(f"step {step} written to {options.output}")
