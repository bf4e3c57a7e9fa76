"""The `aspd` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import aspd.environment  # noqa: F401 (first: it configures libraries that are imported later)
from aspd_jax import __version__
from aspd_jax.errors import AspdError
from aspd_jax.files import refusal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0, 2 for a user error, 130 when interrupted."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest:  # argparse does not accept positional `key=value` after options
        if not hasattr(options, "overrides") or any(word.startswith("-") or "=" not in word for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.overrides = [*options.overrides, *rest]
    try:
        options.run(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except AspdError as error:
        print(f"aspd: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if refusal(error) is None:
            raise
        print(f"aspd: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    from aspd import benchmarks, conversion, data, evaluation, generation, serving, training

    parser = argparse.ArgumentParser(prog="aspd", description="Adaptive serial-parallel decoding.")
    parser.add_argument("--version", action="version", version=f"aspd-jax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (generation, serving, data, training, conversion, evaluation, benchmarks):
        group.add(commands)
    return parser
