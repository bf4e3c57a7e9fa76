"""Options of several commands, and checks of their values.

Commands import slow libraries when they run, so that `aspd --help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aspd_jax.errors import CheckpointError, RequestError
from infer.request import BIASES, PARAMETERS, STRINGS, SamplingParams

LEFT_OUT = 10  # lines of an input that are listed


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or action.default is False or action.default in ("", [])
        return action.help if empty else super()._get_help_string(action)


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: subparsers of `aspd`.
        name: name of the command.
        run: function that runs the command with its options.
        about: description of the command.
    """
    sub: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, formatter_class=HelpFormatter
    )
    sub.set_defaults(run=run)
    return sub


def model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a model and its maximum length."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Hugging Face folder, GGUF file, or a name: smollm2-aspd (default, where its package is installed), "
        "smollm2, demo (default elsewhere)",
    )
    parser.add_argument("--adapter", metavar="DIR", help="folder of an adapter of the model, in PEFT's format")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="dtype of parameters and activations; auto: float32 on CPU, else the checkpoint's",
    )  # fmt: skip
    parser.add_argument(
        "--max-length",
        type=int,
        help="maximum tokens of prompt and answer; default: 2048, or the model's context length if that is less",
    )


def dtype_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--dtype` of a benchmark."""
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of parameters and activations"
    )


def layer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the layers of a model that decodes."""
    parser.add_argument("--weights", choices=("float", "int8"), default="float", help="format of the layers' kernels")
    parser.add_argument(
        "--decode-attention", choices=("decode", "flash_decode"), default="decode",
        help="attention of steps over the cache: plain XLA, or the kernel for NVIDIA GPUs",
    )  # fmt: skip


def list_options(parser: argparse.ArgumentParser) -> None:
    """Add the option of lists."""
    parser.add_argument(
        "--lists", choices=("parallel", "serial"), default="parallel",
        help="how adaptive mode decodes the lists of chat models without fine-tuning",
    )  # fmt: skip


def draft_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of speculation."""
    parser.add_argument(
        "--drafts", choices=("none", "lookup", "heads"), default="none",
        help="source of draft tokens: the text so far, or draft heads of the model",
    )  # fmt: skip
    parser.add_argument("--draft-tokens", type=int, default=4, help="maximum draft tokens of a segment in a step")


def model_name(options: argparse.Namespace) -> str:
    """Return the model of the options, or the best installed model; print a notice if that is the demo model."""
    from aspd_jax.formats import find_model

    if options.model:
        return str(options.model)
    try:
        find_model("smollm2-aspd")
    except CheckpointError as error:
        print(f"{error}\nUntil then the model is demo, a tiny one that knows synthetic tasks.", file=sys.stderr)
        return "demo"
    return "smollm2-aspd"


def config_options(parser: argparse.ArgumentParser, file: str, override: str = "data.length=4096") -> None:
    """Add the arguments that name a configuration and changes to it.

    Args:
        parser: parser of the command.
        file: example of a configuration of the command.
        override: example of a changed value.
    """
    parser.add_argument("config", help=f"YAML file, such as {file}")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help=f"changes of single values, such as {override}"
    )


def process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a process that shares one model with other processes."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="run as one of several processes that SLURM, GKE or Cloud TPU has started",
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0, if the cluster does not provide it"
    )
    parser.add_argument("--processes", type=int, help="number of processes, with --coordinator")
    parser.add_argument("--process", type=int, help="number of this process, from 0, with --coordinator")


def join_processes(options: argparse.Namespace) -> None:
    """Connect to the other processes. JAX requires this before its first computation.

    Raises:
        RequestError: options are missing or do not agree, or no cluster has started the process.
    """
    import jax

    together = (options.coordinator, options.processes, options.process)
    if any(value is not None for value in together):
        if None in together:
            names = [
                f"--{name}" for name in ("coordinator", "processes", "process") if getattr(options, name) is not None
            ]
            raise RequestError(f"--coordinator, --processes, --process: expected all or none, got {', '.join(names)}")
        if not 0 <= options.process < options.processes:
            raise RequestError(f"--process: expected 0 to {options.processes - 1}, got {options.process}")
    if options.coordinator:
        jax.distributed.initialize(*together)
    elif options.distributed:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise RequestError(
                f"--distributed: expected a process of SLURM, GKE or Cloud TPU, got: {error} "
                "Set --coordinator, --processes and --process."
            ) from None


def absolute(name: str) -> str:
    """Return the absolute path of a file or folder, or another name unchanged."""
    from aspd_jax.formats import NAMES

    return str(Path(name).resolve()) if name and name not in NAMES and Path(name).exists() else name


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
    """Check that options are at least 1.

    Args:
        options: options of a command.
        names: names of options that hold a number or a list of numbers.

    Raises:
        RequestError: a number is below 1; the message names its option.
    """
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value], default=1) < 1:
            raise RequestError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")


def print_left_out(lines: Sequence[str]) -> None:
    """Print the lines that were left out of an input to standard error: the first of them, and the number of others."""
    for line in lines[:LEFT_OUT]:
        print(f"left out: {line}", file=sys.stderr)
    if len(lines) > LEFT_OUT:
        print(f"left out: {len(lines) - LEFT_OUT} more", file=sys.stderr)


def where() -> str:
    """Describe the devices and the version of JAX."""
    import jax

    return f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"


def mesh_of(text: str | None, devices: Sequence[Any] | None = None) -> Any:
    """Return the device mesh of `--mesh`; None: one device.

    Args:
        text: axes and their sizes, such as `data=2,tensor=4`.
        devices: devices of the mesh; None: all devices.

    Raises:
        RequestError: the text has another form.
    """
    if text is None:
        return None
    from aspd_jax.sharding import make_mesh

    shape = {}
    for part in text.split(","):
        axis, found, size = part.partition("=")
        if not found or not size.isdigit() or int(size) < 1:
            raise RequestError(f"--mesh: expected axes and numbers of devices, such as data=2,tensor=4, got {text!r}")
        shape[axis] = int(size)
    return make_mesh(shape, devices)


def answer_structures(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the number of branches and the tokens of each branch, from texts such as `8x60`.

    Raises:
        RequestError: a text has another form.
    """
    answers = []
    for text in texts:
        branches, found, length = text.partition("x")
        if not found or not branches.isdigit() or not length.isdigit():
            raise RequestError(f"--answers: expected branches x tokens, such as 8x60, got {text!r}")
        answers.append((int(branches), int(length)))
    return answers
