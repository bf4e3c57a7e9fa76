"""`aspd compile`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aspd.options import answer_structures, config_options, mesh_of, positive
from aspd_jax.files import write_whole


def add(commands: Any) -> None:
    """Add these commands."""
    kinds = commands.add_parser(
        "compile", help="Check programs for accelerators that are not there: memory, traffic, collectives, time."
    ).add_subparsers(required=True, metavar="WHAT")
    decode = kinds.add_parser("decode", help="passes by width and slots, and the speed-up to expect")
    decode.set_defaults(run=run_compile_decode)
    _topology_options(decode)
    which = decode.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="MODEL", help="a checkpoint, of which only the configuration is read")
    which.add_argument("--shape", default="7b", help="of a random model: 27m, 1b, 7b, 8b or 32b (default: 7b)")
    decode.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    decode.add_argument("--weights", choices=("float", "int8"), default="float", help="of the layers' kernels")
    decode.add_argument(
        "--decode-attention", default="decode", metavar="NAME", help="back end: decode, flash_decode or reference"
    )
    decode.add_argument("--mesh", metavar="AXES", help="spread the model, such as tensor=8 or data=2,tensor=4")
    decode.add_argument("--batch", type=int, nargs="+", default=[1], help="requests at a time")
    decode.add_argument("--widths", type=int, nargs="+", default=[1, 8, 16], help="tokens of each row in a pass")
    decode.add_argument("--slots", type=int, nargs="+", default=[2048], help="of a row of the cache, all in use")
    decode.add_argument(
        "--answers", nargs="*", default=[], metavar="NxT", help="branches x tokens of each, as in `aspd bench decode`"
    )
    train = kinds.add_parser("train", help="a training step")
    train.set_defaults(run=run_compile_train)
    config_options(train)
    _topology_options(train)


def _topology_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", required=True, metavar="NAME", help="v6e:1x1, v5e:2x4, v5p:2x2x2, tpu7x:2x2x1, h100:1x1x8, …"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")


def _write(file: Path | None, record: dict[str, Any]) -> None:
    from aspd.aot.aot_report import NOT_MEASURED

    if file is not None:
        write_whole(file, json.dumps({"figures": NOT_MEASURED, **record}, indent=1) + "\n")


def run_compile_decode(options: argparse.Namespace) -> None:
    """`aspd compile decode`."""
    from itertools import product

    from tqdm import tqdm

    from aspd.aot.abstract import abstract_model, configuration
    from aspd.aot.aot_report import NOT_MEASURED, collective_table
    from aspd.aot.decode import CompiledPass, answer_table, compile_pass, expected_answer, pass_table
    from aspd.aot.topology import topology

    positive(options, "batch", "widths", "slots")
    answers = answer_structures(options.answers)
    on = topology(options.topology)
    mesh = mesh_of(options.mesh, on.devices)
    config = configuration(options.model, options.shape, options.dtype, options.weights, options.decode_attention)
    lm = abstract_model(config, on, mesh)
    name = options.model or options.shape
    title = f"{name}, {options.dtype}, {options.weights}; {on.name}, mesh {options.mesh or 'none'}; {NOT_MEASURED}"
    record: dict[str, Any] = {"model": name, "dtype": options.dtype, "weights": options.weights}
    record |= {"topology": on.name, "chip": asdict(on.chip), "mesh": options.mesh}
    record |= {"decode_attention": options.decode_attention}
    kinds = list(product(options.slots, options.batch, options.widths))
    passes: list[CompiledPass] = []
    progress = tqdm(kinds, unit="program", disable=None)
    for slots, batch, width in progress:
        progress.set_postfix(slots=slots, batch=batch, width=width)
        passes.append(compile_pass(lm, on, batch, width, slots))
        _write(options.json, record | {"passes": [_plain(of) for of in passes]})
    print(f"{title}\n\n{pass_table(passes)}\n")
    if mesh is not None:
        widest = max(passes, key=lambda of: of.figures.collective_bytes or 0)
        print(f"Collectives at width {widest.width}, batch {widest.batch}:\n\n{collective_table(widest.figures)}\n")
    expected = []
    for slots, batch in product(options.slots, options.batch) if answers else ():
        alike = [of for of in passes if (of.slots, of.batch) == (slots, batch)]
        found = [answer for kind in answers if (answer := expected_answer(alike, *kind))]
        print(f"Answers to expect, batch {batch}, {slots} slots; {NOT_MEASURED}:\n\n{answer_table(found)}\n")
        expected += [{"slots": slots, "batch": batch, **asdict(of), "speed_up": of.speed_up} for of in found]
    _write(options.json, record | {"passes": [_plain(of) for of in passes], "answers": expected})


def _plain(of: Any) -> dict[str, Any]:
    """A compiled pass for JSON, with the names of all fields."""
    plain = asdict(of)
    plain["bucket"] = of.bucket._asdict()
    return plain | {"figures": _plain_figures(of.figures)}


def _plain_figures(of: Any) -> dict[str, Any]:
    memory = None if of.memory is None else of.memory._asdict()
    return asdict(of) | {"memory": memory, "collectives": [said._asdict() for said in of.collectives]}


def run_compile_train(options: argparse.Namespace) -> None:
    """`aspd compile train`."""
    from aspd.aot.aot_report import NOT_MEASURED, collective_table
    from aspd.aot.topology import topology
    from aspd.aot.train import compile_step, step_table
    from train.train_config import load_config

    config, on = load_config(options.config, options.overrides), topology(options.topology)
    print(f"{options.config} for {on.name}; {NOT_MEASURED}; compiling", flush=True)
    read, planned = compile_step(config, on)
    print(f"\n{step_table(read, planned)}\n\n{collective_table(read)}")
    record = {"config": config.as_dict(), "topology": on.name, "chip": asdict(on.chip)}
    _write(options.json, record | {"plan": asdict(planned), "step": _plain_figures(read)})
