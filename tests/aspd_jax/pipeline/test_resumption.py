"""Killed runs: every score is computed once, and no file is half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aspd_jax import LanguageModel
from aspd_jax.likelihood import Rise
from aspd_jax.pipeline.build import build
from aspd_jax.pipeline.data_config import DataConfig, LikelihoodSection
from tests.conftest import ROOT
from tests.helpers.pipeline_data import CHAIN, LIST, PROSE, SMALL

FILES = ("structured.jsonl", "plain.jsonl", "rejected.jsonl", "report.md", "report.json")
BAD = 150  # line of the record that is no JSON


def write_many(file: Path, count: int = 300) -> Path:
    """Many records, several answers to some questions, and a bad line in the middle."""
    texts = (LIST, PROSE, CHAIN, LIST.replace("\n\n2.", "\n2."))
    rows = [
        json.dumps({"id": f"r{n}", "question": f"Question {n % 200}?", "answer": f"{texts[n % 4]} ({n})"})
        for n in range(1, count + 1)
    ]
    rows[BAD - 1] = '{"question": "broken'
    file.write_text("\n".join(rows) + "\n")
    return file


def outputs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def command(file: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "aspd", "data", "build", str(file), "--output", str(output)]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "in.jsonl")


def test_scores_are_computed_once(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm: LanguageModel
) -> None:
    """A run that ended while it scored computes only the scores that are missing, and a whole one none."""
    seen: list[int] = []
    fails_after = 10

    def scored(lm: LanguageModel, rows: Any, size: int) -> Any:
        if len(seen) == fails_after:
            raise KeyboardInterrupt
        seen.append(len(rows))
        return [[Rise(0.3, 1.0)] * int(row.branch.max()) for row in rows]

    monkeypatch.setattr("aspd_jax.language_model.load_model", lambda name: lm)
    monkeypatch.setattr("aspd_jax.likelihood.nll_increases", scored)
    config = DataConfig(select=SMALL, likelihood=LikelihoodSection(model="demo"))
    with pytest.raises(KeyboardInterrupt):
        build(config, str(many), tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "structured.jsonl").exists()
    seen.clear()
    fails_after = -1
    build(config, str(many), tmp_path / "out", progress=False)
    left = len(seen)
    seen.clear()
    build(config, str(many), tmp_path / "out", progress=False)
    stricter = LikelihoodSection(model="demo", mean_rise=0.1)
    none = build(replace(config, likelihood=stricter), str(many), tmp_path / "out", progress=False)
    assert not seen and none.statistics()["with_block"] == 0, "thresholds score nothing again"
    build(config, str(many), tmp_path / "alone", progress=False)
    assert len(seen) == left + 10 and outputs(tmp_path / "alone")["rejected.jsonl"]
    build(config, str(many), tmp_path / "out", progress=False)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "alone")


def test_a_killed_process_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    large, out = write_many(tmp_path / "large.jsonl", 8_000), tmp_path / "out"
    run = subprocess.Popen(command(large, out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not out.exists():
        assert time.monotonic() < end and run.poll() is None, "it begins"
        time.sleep(0.01)
    time.sleep(1)
    os.kill(run.pid, signal.SIGKILL)
    run.wait(60)
    assert not list(out.iterdir()) and run.returncode == -signal.SIGKILL
    assert subprocess.run(command(large, out), cwd=ROOT, capture_output=True).returncode == 0
    build(DataConfig(), str(large), tmp_path / "undisturbed", progress=False)
    assert outputs(out) == outputs(tmp_path / "undisturbed")


def test_the_pipeline_imports_no_jax() -> None:
    """JAX takes seconds to import; Markdown is the control."""
    code = "import sys, aspd_jax.pipeline.build; print('jax' in sys.modules, 'markdown_it' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).stdout == b"False True\n"
