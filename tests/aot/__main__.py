"""Compile programs of decoding or training for a target chip, and print memory and minimum time.

python -m tests.aot decode --topology v6e:1x1 --shape 7b --widths 1 8 16 --slots 2048 32768
python -m tests.aot train configs/vicuna_7b.yaml --topology v5p:2x2x2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import aspd  # noqa: F401 (import first: it sets environment variables)
from aspd.options import HelpFormatter, config_options, mesh_of, positive
from aspd_jax.configuration import read_config
from aspd_jax.errors import AspdError
from aspd_jax.files import write_whole
from aspd_jax.progress import Bar
from tests.aot import topology
from tests.aot.abstract import abstract_model, configuration
from tests.aot.decode import CompiledStep, compile_decode_step, step_table
from tests.aot.report import NOT_MEASURED
from tests.aot.train import compile_step, train_table
from train.config import TrainConfig
from train.plan import check_named_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0, or 2 for a user error."""
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    decode = kinds.add_parser("decode", help="decoding steps", formatter_class=HelpFormatter)
    decode.set_defaults(run=run_decode)
    _topology_options(decode)
    which = decode.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="MODEL", help="checkpoint, of which only the configuration is read")
    which.add_argument("--shape", default="7b", help="shape of a random model: 27m, 1b, 7b, 8b or 32b")
    decode.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="dtype of activations")
    decode.add_argument("--weights", choices=("float", "int8"), default="float", help="format of the layers' kernels")
    decode.add_argument(
        "--decode-attention", default="decode", metavar="NAME",
        help="attention back end: decode, flash_decode or reference",
    )  # fmt: skip
    decode.add_argument("--mesh", metavar="AXES", help="mesh of the model, such as tensor=8 or data=2,tensor=4")
    decode.add_argument("--batch", type=int, nargs="+", default=[1], help="simultaneous requests")
    decode.add_argument("--widths", type=int, nargs="+", default=[1, 8, 16], help="tokens of each row per step")
    decode.add_argument("--slots", type=int, nargs="+", default=[2048], help="slots of a cache row, all in use")
    decode.add_argument(
        "--draft-heads", type=int, default=0, metavar="K",
        help="number of draft heads; each step feeds and computes their tokens (counted in --widths)",
    )  # fmt: skip
    train = kinds.add_parser("train", help="a training step", formatter_class=HelpFormatter)
    train.set_defaults(run=run_train)
    config_options(train, "configs/lora_7b.yaml")
    _topology_options(train)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except AspdError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _topology_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", required=True, metavar="NAME",
        help="target devices: v6e:1x1, v5e:2x4, v5p:2x2x2, tpu7x:2x2x1, h100:1x1x8, …",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file of the results")


def _write(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        write_whole(file, json.dumps({"figures": NOT_MEASURED, **record}, indent=1) + "\n")


def run_decode(options: argparse.Namespace) -> None:
    """Compile decoding steps by width and cache slots."""
    positive(options, "batch", "widths", "slots")
    target = topology.open_topology(options.topology)
    mesh = mesh_of(options.mesh, target.devices)
    config = configuration(options.model, options.shape, options.dtype, options.weights, options.decode_attention)
    config = replace(config, draft_heads=options.draft_heads)
    lm = abstract_model(config, target, mesh)
    name = options.model or options.shape
    title = f"{name}, {options.dtype}, {options.weights}; {target.name}, mesh {options.mesh or 'none'}; {NOT_MEASURED}"
    record: dict[str, Any] = {"model": name, "dtype": options.dtype, "weights": options.weights}
    record |= {"topology": target.name, "chip": asdict(target.chip), "mesh": options.mesh}
    record |= {"decode_attention": options.decode_attention}
    kinds = list(product(options.slots, options.batch, options.widths))
    steps: list[CompiledStep] = []
    progress = Bar(kinds, unit="program")
    for slots, batch, width in progress:
        progress.set_postfix(slots=slots, batch=batch, width=width)
        steps.append(compile_decode_step(lm, target, batch, width, slots))
        _write(options.json, record | {"steps": [_plain(compiled) for compiled in steps]})
    print(f"{title}\n\n{step_table(steps)}\n")


def _plain(compiled: Any) -> dict[str, Any]:
    """Return a compiled step as JSON values with the names of all fields."""
    return vars(compiled) | {"bucket": compiled.bucket._asdict(), "program": compiled.program.to_json()}


def run_train(options: argparse.Namespace) -> None:
    """Compile the training step of a configuration."""
    config = read_config(TrainConfig, options.config, options.overrides)
    target = topology.open_topology(options.topology)
    check_named_checkpoint(config, options.overrides)
    print(f"{options.config} for {target.name}; {NOT_MEASURED}; compiling", flush=True)
    compiled, planned = compile_step(config, target)
    print(f"\n{train_table(compiled, planned)}")
    record = {"config": asdict(config), "topology": target.name, "chip": asdict(target.chip)}
    _write(options.json, record | {"plan": asdict(planned), "step": compiled.to_json()})


if __name__ == "__main__":
    sys.exit(main())
