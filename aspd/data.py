"""Subcommands of `aspd data`."""

from __future__ import annotations

import argparse
import json
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
    build.add_argument(
        "--shard", default="0/1", metavar="I/N", help="process only every N-th record, starting at the I-th"
    )

    show = command(kinds, "show", run_show, "Print structured records.")
    show.add_argument("file", type=Path, help="structured.jsonl")
    show.add_argument("--id", help="id of the record to show; default: the first records")
    show.add_argument("--records", type=int, default=20, help="number of records without --id")
    show.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page instead of printing")

    stats = command(kinds, "stats", run_stats, "Print statistics of structured records over all files.")
    stats.add_argument("files", type=Path, nargs="+", help="structured.jsonl of a run or of all its shards")
    stats.add_argument(
        "--tokenizer", metavar="DIR", default="", help="tokenizer for counting tokens; default: an estimate"
    )
    stats.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_build(options: argparse.Namespace) -> None:
    """Run `aspd data build`."""
    from aspd_jax.configuration import read_config
    from aspd_jax.pipeline.build import build
    from aspd_jax.pipeline.data_config import DataConfig
    from aspd_jax.pipeline.work import Shard
    from aspd_jax.sources import no_record

    config = read_config(DataConfig, options.config, options.overrides)
    shard = Shard.parse(options.shard)
    report = build(config, options.source, options.output, shard)
    left_out = report.unreadable
    if len(left_out) == report.records and (left_out or shard.total == 1):
        raise no_record(options.source, left_out)
    print_left_out(left_out)
    print(report.markdown())


def run_show(options: argparse.Namespace) -> None:
    """Run `aspd data show`."""
    from rich.console import Console

    from aspd_jax.files import write_whole
    from aspd_jax.pipeline.show import find, read_structured, records_page, show
    from aspd_jax.sources import no_record

    positive(options, "records")
    left_out: list[str] = []
    if options.id is not None:
        records = [find(options.file, options.id, left_out)]
    else:
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


def run_stats(options: argparse.Namespace) -> None:
    """Run `aspd data stats`."""
    from aspd_jax.blocks.measures import measure
    from aspd_jax.blocks.spans import form_of_titles, spans_of
    from aspd_jax.pipeline.data_report import statistics, statistics_table
    from aspd_jax.pipeline.show import read_structured
    from aspd_jax.pipeline.work import counter
    from aspd_jax.sources import no_record
    from aspd_jax.structure import plain_text

    count, left_out = counter(options.tokenizer), list[str]()
    measures = [
        measure(plain_text(structure), spans_of(structure, form_of_titles(structure)), count)
        for file in options.files
        for record in read_structured(file, left_out)
        for _, structure in record["answers"]
    ]
    if left_out and not measures:
        raise no_record(", ".join(map(str, options.files)), left_out)
    print_left_out(left_out)
    values = statistics(measures)
    print(json.dumps(values, indent=1) if options.json else "\n".join(statistics_table(values)))
