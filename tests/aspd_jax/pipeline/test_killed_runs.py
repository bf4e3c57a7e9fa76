"""Killed runs: no file is half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from aspd_jax.pipeline.build import build
from aspd_jax.pipeline.data_config import DataConfig
from tests.conftest import ROOT
from tests.helpers.pipeline_data import CHAIN, LIST, PROSE

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
