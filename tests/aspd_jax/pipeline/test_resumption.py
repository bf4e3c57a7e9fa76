"""Killed runs: every result is computed once, and results of one part are stored together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aspd_jax.pipeline import build as building
from aspd_jax.pipeline import entries
from aspd_jax.pipeline.build import PART, build
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.store import Store
from aspd_jax.pipeline.work import Work
from tests.conftest import ROOT
from tests.helpers.pipeline_data import CHAIN, LIST, PROSE, SMALL

FILES = ("structured.jsonl", "plain.jsonl", "rejected.jsonl", "report.md", "report.json")
BAD = 150  # line of the record that is no JSON
BEST = DataConfig(select=replace(SMALL, per_question=1))  # compares records of different parts


def write_many(file: Path, count: int = 300) -> Path:
    """Records of more than one part, several answers to some questions, and a bad line in the middle."""
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


def test_the_results_of_each_record_are_computed_once(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ended within a part computes only that part and the others again, and a whole one nothing."""
    report = build(BEST, str(many), tmp_path / "alone", progress=False)
    assert report.left_out["question"] == 100
    (left_out,) = report.unreadable
    assert left_out.startswith(f"{many}, line {BAD}: not JSON")
    calls: list[str] = []
    propose, entry_of = entries.propose_by_rules, building.entry_of

    def counted(work: Work, answer: Any) -> Any:
        calls.append(answer.key)
        return propose(work, answer)

    def fails_later(work: Work, record: Any) -> entries.Entry:
        if record.number > 2 * PART + 10:
            raise KeyboardInterrupt
        return entry_of(work, record)

    monkeypatch.setattr(entries, "propose_by_rules", counted)
    with monkeypatch.context() as patch:
        patch.setattr(building, "entry_of", fails_later)
        with pytest.raises(KeyboardInterrupt):
            build(BEST, str(many), tmp_path / "out", progress=False)
    assert len(calls) == 2 * PART + 10
    assert not (tmp_path / "out" / "structured.jsonl").exists()
    build(BEST, str(many), tmp_path / "out", progress=False)
    assert len(calls) == 299 + 10 and len(set(calls)) == 299
    build(BEST, str(many), tmp_path / "out", progress=False)
    assert len(calls) == 299 + 10 and outputs(tmp_path / "out") == outputs(tmp_path / "alone")
    build(DataConfig(), str(many), tmp_path / "other", progress=False)  # negative control: other settings, other files
    assert outputs(tmp_path / "other")["rejected.jsonl"] != outputs(tmp_path / "alone")["rejected.jsonl"]


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    large, out = write_many(tmp_path / "large.jsonl", 8_000), tmp_path / "out"
    run = subprocess.Popen(command(large, out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, end = out / "work.sqlite-wal", time.monotonic() + 60
    while not (log.exists() and log.stat().st_size > 200_000):
        assert time.monotonic() < end and run.poll() is None, "it stores results"
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGKILL)
    run.wait(60)
    assert {file.name for file in out.iterdir()} <= {f"work.sqlite{end}" for end in ("", "-wal", "-shm")}
    assert subprocess.run(command(large, out), cwd=ROOT, capture_output=True).returncode == 0
    build(DataConfig(), str(large), tmp_path / "undisturbed", progress=False)
    assert outputs(out) == outputs(tmp_path / "undisturbed")


def fails_after_a_result(store: Store) -> None:
    store.put("1/1", "propose", "hash", 1)
    store.put("2/1", "propose", "hash", object())  # no JSON


def test_results_in_a_transaction_are_stored_together(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "work.sqlite")) as store:
        with pytest.raises(TypeError), store.together():
            fails_after_a_result(store)
        assert store.get("1/1", "propose", "hash") is None
        with store.together():
            store.put("1/1", "propose", "hash", 1)
        assert store.get("1/1", "propose", "hash") == 1 and store.get("1/1", "propose", "other hash") is None


def test_the_pipeline_imports_no_jax() -> None:
    """JAX takes seconds to import; Markdown is the control."""
    code = "import sys, aspd_jax.pipeline.build; print('jax' in sys.modules, 'markdown_it' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).stdout == b"False True\n"
