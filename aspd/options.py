"""Options that several commands have, and what is asked of their values.

What takes long to import is imported by the commands when they run, so that `aspd --help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aspd_jax.errors import CheckpointError, RequestError
from infer.request import BIASES, PARAMETERS, STRINGS, SamplingParams

LEFT_OUT = 10  # lines that are named one by one


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
    """Add a command."""
    sub: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    sub.set_defaults(run=run)
    return sub


def model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, and how long its answers may be."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Hugging Face folder, GGUF file, or a name: smollm2-aspd (default, where its package is installed), "
        "smollm2, demo (default elsewhere)",
    )
    parser.add_argument("--adapter", metavar="DIR", help="folder of an adapter (PEFT's format) trained on the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of prompt and answer")


def model_name(options: argparse.Namespace) -> str:
    """The model that was asked for, or the best one that is there; says so where that is not a real one."""
    from aspd_jax.formats import find_model

    if options.model:
        return str(options.model)
    try:
        find_model("smollm2-aspd")
    except CheckpointError as error:
        print(f"{error}\nUntil then the model is demo, a tiny one that knows synthetic tasks.", file=sys.stderr)
        return "demo"
    return "smollm2-aspd"


def shape_options(parser: argparse.ArgumentParser) -> None:
    """Which random model, and how often it is timed."""
    parser.add_argument("--shape", default="27m", help="of a random model: 27m, 1b, 7b, 8b or 32b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each kind; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")


def config_options(parser: argparse.ArgumentParser) -> None:
    """A configuration, and changes to it."""
    parser.add_argument("config", help="YAML file, such as configs/embedded_aspd.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change single values: data.length=4096")


def process_options(parser: argparse.ArgumentParser) -> None:
    """Whether this is one of several processes that work on one model."""
    parser.add_argument(
        "--distributed", action="store_true", help="one of several processes, which SLURM, GKE or Cloud TPU started"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where nothing else tells")
    parser.add_argument("--processes", type=int, help="how many, with --coordinator")
    parser.add_argument("--process", type=int, help="which one this is, with --coordinator")


def join_processes(options: argparse.Namespace) -> None:
    """Wait for the other processes; before anything else is done with JAX.

    Raises:
        RequestError: options that do not go together, or nobody there.
    """
    import jax

    together = (options.coordinator, options.processes, options.process)
    if any(value is not None for value in together):
        if None in together:
            raise RequestError("--coordinator, --processes and --process go together")
        if not 0 <= options.process < options.processes:
            raise RequestError(f"--process must be between 0 and {options.processes - 1}, got {options.process}")
    if options.coordinator:
        jax.distributed.initialize(*together)
    elif options.distributed:
        jax.distributed.initialize()


def sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each sampling parameter that the command line offers."""
    for name, parameter in PARAMETERS.items():
        if parameter.cli is None:
            continue
        keywords: dict[str, Any] = {"help": parameter.help, "default": parameter.cli.default}
        if parameter.kind in (STRINGS, BIASES):
            metavar = "ID=BIAS" if parameter.kind == BIASES else None
            keywords |= {"action": "append", "default": [], "metavar": metavar}
            keywords["help"] += "; may be repeated"
        else:
            keywords["type"] = parameter.kind
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Return the values of `sampling_options`.

    Raises:
        RequestError: a value is out of bounds.
    """
    values = {name: getattr(options, name) for name, parameter in PARAMETERS.items() if parameter.cli is not None}
    values |= {
        name: dict(pair.partition("=")[::2] for pair in values[name])
        for name in values
        if PARAMETERS[name].kind == BIASES
    }
    return SamplingParams(**values)


def positive(options: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1.

    Raises:
        RequestError: which option has one.
    """
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value], default=1) < 1:
            raise RequestError(f"--{name} must be at least 1, got {value}")


def print_left_out(lines: Sequence[str]) -> None:
    """Name what was left out of an input, the first few lines of it, on standard error."""
    for line in lines[:LEFT_OUT]:
        print(f"left out: {line}", file=sys.stderr)
    if len(lines) > LEFT_OUT:
        print(f"left out: {len(lines) - LEFT_OUT} more", file=sys.stderr)


def where() -> str:
    """The hardware, in words."""
    import jax

    return f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"


def mesh_of(text: str | None, devices: Sequence[Any] | None = None) -> Any:
    """A mesh from its axes, such as `data=2,tensor=4`; of these devices, or of all there are."""
    if text is None:
        return None
    from aspd_jax.sharding import make_mesh

    shape = {}
    for part in text.split(","):
        axis, found, size = part.partition("=")
        if not found or not size.isdigit() or int(size) < 1:
            raise RequestError(f"--mesh takes axes and numbers of devices, such as data=2,tensor=4, got {text!r}")
        shape[axis] = int(size)
    return make_mesh(shape, devices)


def answer_structures(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Branches, and tokens of each, from texts such as `8x60`."""
    answers = []
    for text in texts:
        branches, found, length = text.partition("x")
        if not found or not branches.isdigit() or not length.isdigit():
            raise RequestError(f"--answers takes branches x tokens, such as 8x60, got {text!r}")
        answers.append((int(branches), int(length)))
    return answers
