"""Stages of `make smollm2` and `make qwen05`: their order, commands and configurations."""

from __future__ import annotations

import shlex
import subprocess

import pytest

import aspd
from tests.conftest import ROOT

MODELS = ("smollm2", "qwen05")


def lines_of(target: str) -> list[str]:
    """Lines that make would run for a target if no file of a run existed."""
    made = ["make", "--dry-run", "--always-make", target, "BENCHMARKS=benchmarks"]
    shown = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return shown.replace("\\\n", "").splitlines()


def commands_of(target: str) -> list[list[str]]:
    """Words of its `aspd` commands that are lines of their own."""
    return [shlex.split(line)[1:] for line in lines_of(target) if line.startswith(".venv/bin/aspd ")]


@pytest.mark.parametrize("model", MODELS)
def test_stages_of_a_model(model: str) -> None:
    commands = commands_of(model)
    for command in commands:
        assert callable(aspd.build_parser().parse_args(command).run)
    words = [" ".join(command[:2]) for command in commands]
    assert words.index("data build") == words.count("generate --model") > 0
    assert words[-4:-2] == [f"train configs/{model}/{name}.yaml" for name in ("aspd", "seq")]
    assert words[-2:] == ["eval run", "eval run"]


def test_the_ablation_trains_every_form() -> None:
    assert any("aspd ablate configs/smollm2/ablation.yaml" in line for line in lines_of("smollm2-ablation"))


@pytest.mark.parametrize("target", MODELS)
def test_missing_benchmarks_are_named_before_anything_is_run(target: str) -> None:
    made = subprocess.run(["make", target, "BENCHMARKS=nowhere"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode and "got nowhere" in made.stdout and "aspd" not in made.stdout
