"""The door: the `aspd` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from aspd_jax.errors import AspdError

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
if version("jaxlib").startswith("0.10.") and "ynn_fusion" not in os.environ.get("XLA_FLAGS", ""):
    # On CPU this version merges products with their surroundings in a way that doubles their time (docs/benchmarks.md).
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a mistake of the user, 130 when interrupted."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except AspdError as error:
        print(f"aspd: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    from aspd import answers, benchmarks, training

    parser = argparse.ArgumentParser(prog="aspd", description="Adaptive serial-parallel decoding.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (answers, training, benchmarks):
        group.add(commands)
    return parser
