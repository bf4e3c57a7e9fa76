"""Stages of `make smollm2` and `make qwen05`: their order, commands and configurations."""

from __future__ import annotations

import shlex
import subprocess

import pytest

import aspd
from tests.conftest import ROOT

MODELS = ("smollm2", "qwen05")


def commands_of(target: str) -> list[list[str]]:
    """Words of the `aspd` commands that make would run for a target if no file of a run existed."""
    made = ["make", "--dry-run", "--always-make", target, "BENCHMARKS=benchmarks"]
    lines = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", "")
    return [shlex.split(line)[1:] for line in lines.splitlines() if line.startswith(".venv/bin/aspd ")]


@pytest.mark.parametrize("model", MODELS)
def test_stages_of_a_model(model: str) -> None:
    commands = commands_of(model)
    for command in commands:
        assert callable(aspd.build_parser().parse_args(command).run)
    words = [" ".join(command[:2]) for command in commands]
    assert words[0] == "data questions" and words.index("data build") == 1 + words.count("generate --model")
    assert words[-4:-2] == [f"train configs/{model}/{name}.yaml" for name in ("aspd", "seq")]
    assert words[-2:] == ["eval run", "eval run"]
