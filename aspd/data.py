"""Subcommands of `aspd data`."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from aspd.options import command, positive, print_left_out


def add(commands: Any) -> None:
    """Add the commands of this module to the parser."""
    data = commands.add_parser("data", help="Find and verify parallel structure in ordinary answers.")
    kinds = data.add_subparsers(required=True, metavar="WHAT")

    build = command(kinds, "build", run_build, "Turn records of questions and answers into training data.")
    build.add_argument("source", help="JSONL, JSON or Parquet file, folder, or name of a dataset; also a glob or URL")
    build.add_argument("overrides", nargs="*", metavar="key=value", help="change single values: select.min_tokens=64")
    build.add_argument("--config", metavar="FILE", help="YAML file, such as configs/data.yaml")
    build.add_argument("--output", required=True, type=Path, help="folder of the sets and the report")

    show = command(kinds, "show", run_show, "Print structured records.")
    show.add_argument("file", type=Path, help="structured.jsonl")
    show.add_argument("--records", type=int, default=20, help="number of records")
    show.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page instead of printing")


def run_build(options: argparse.Namespace) -> None:
    """Run `aspd data build`."""
    from aspd_jax.configuration import read_config
    from aspd_jax.pipeline.build import build
    from aspd_jax.pipeline.data_config import DataConfig
    from aspd_jax.sources import no_record

    config = read_config(DataConfig, options.config, options.overrides)
    report = build(config, options.source, options.output)
    left_out = report.unreadable
    if len(left_out) == report.records:
        raise no_record(options.source, left_out)
    print_left_out(left_out)
    print(report.markdown())


def run_show(options: argparse.Namespace) -> None:
    """Run `aspd data show`."""
    from rich.console import Console

    from aspd_jax.files import write_whole
    from aspd_jax.pipeline.show import read_structured, records_page, show
    from aspd_jax.sources import no_record

    positive(options, "records")
    left_out: list[str] = []
    records = list(islice(read_structured(options.file, left_out), options.records))
    if not records:
        raise no_record(str(options.file), left_out)
    print_left_out(left_out)
    if options.html is not None:
        write_whole(options.html, records_page(records, options.file.name))
        return
    console = Console()
    for record in records:
        console.rule(str(record.get("id", "")))
        show(record, console)
