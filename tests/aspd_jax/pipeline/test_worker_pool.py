"""Runs with several processes, killed processes, and the division of a source into parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspd_jax.errors import RequestError
from aspd_jax.pipeline import entries, worker_pool
from aspd_jax.pipeline.build import build
from aspd_jax.pipeline.data_config import DataConfig, SelectSection
from aspd_jax.pipeline.work import Shard, Work
from aspd_jax.sources import read_records
from aspd_jax.store import Row, Store
from tests.conftest import ROOT
from tests.helpers.killed_workers import dies_before_a_result, dies_within_a_result
from tests.helpers.pipeline_data import CHAIN, LIST, NO_TEACHER, PROSE, SMALL

FILES = ("structured.jsonl", "plain.jsonl", "rejected.jsonl", "report.md", "report.json")
BAD = 150  # line of the record that is no JSON


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


def rows_of(folder: Path) -> list[Row]:
    store = Store(folder / "work.sqlite")
    try:
        return store.rows(range(1, 1000))
    finally:
        store.close()


def command(file: Path, output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "aspd", "data", "build", str(file), "--output", str(output), *options]


BEST = DataConfig(select=replace(SMALL, per_question=1))  # compares records of different parts


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "in.jsonl")


@pytest.fixture(scope="module")
def alone(many: Path) -> Path:
    """The run of one process."""
    build(BEST, str(many), many.parent / "alone", progress=False)
    return many.parent / "alone"


def test_three_workers_write_what_one_does(many: Path, alone: Path, tmp_path: Path) -> None:
    outcome = build(BEST, str(many), tmp_path / "out", progress=False, workers=3)
    assert outputs(tmp_path / "out") == outputs(alone) and rows_of(tmp_path / "out") == rows_of(alone)
    assert len(rows_of(alone)) == 2 * 299 and outcome.report.left_out["question"] == 100
    (left_out,) = outcome.report.unreadable
    assert left_out.startswith(f"{many}, line {BAD}: not JSON")
    build(DataConfig(), str(many), tmp_path / "other", progress=False)  # negative control: other settings, other files
    assert outputs(tmp_path / "other")["rejected.jsonl"] != outputs(alone)["rejected.jsonl"]


def test_the_results_of_each_record_are_computed_once(
    many: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ended after some parts computes only the others, and a run after a whole one computes nothing."""
    calls: list[str] = []
    propose = entries.propose_by_rules

    def counted(work: Work, answer: Any) -> Any:
        calls.append(answer.key)
        return propose(work, answer)

    def fails_later(work: Work, part: worker_pool.Part) -> worker_pool.Processed:
        if part.rows[0].number > 2 * worker_pool.PART:
            raise KeyboardInterrupt
        return process(work, part)

    process = worker_pool.process
    monkeypatch.setattr(entries, "propose_by_rules", counted)
    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "process", fails_later)
        with pytest.raises(KeyboardInterrupt):
            build(BEST, str(many), tmp_path / "out", progress=False)
    assert len(calls) == 2 * worker_pool.PART
    assert not (tmp_path / "out" / "structured.jsonl").exists()
    build(BEST, str(many), tmp_path / "out", progress=False)
    assert len(calls) == len(set(calls)) == 299
    build(BEST, str(many), tmp_path / "out", progress=False)
    assert len(calls) == 299 and outputs(tmp_path / "out") == outputs(alone)


def children_of(process: int) -> list[int]:
    """Return the worker processes of a process, without the one that tracks its resources."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text()
        except OSError:
            continue
        if parent == process and "spawn_main" in words:
            children.append(int(folder.name))
    return children


def wait_for(condition: Any, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_many(tmp_path / "large.jsonl", 8_000)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("target", ["worker", "parent"])
def test_a_killed_process_loses_nothing(target: str, large: Path, tmp_path: Path) -> None:
    """A killed worker is named in one line; workers of a killed parent end; the next run resumes in both cases."""
    out = tmp_path / "out"
    run = subprocess.Popen(
        command(large, out, "--workers", "2"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    workers = wait_for(lambda: len(found := children_of(run.pid)) == 2 and found)
    wait_for(lambda: (out / "work.sqlite-wal").exists() and (out / "work.sqlite-wal").stat().st_size > 200_000)
    os.kill(workers[0] if target == "worker" else run.pid, signal.SIGKILL)
    errors = run.communicate(timeout=60)[1]
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    if target == "worker":
        assert run.returncode == 2 and "Traceback" not in errors
        assert errors.splitlines()[-1].startswith("aspd: --workers: expected running worker processes")
    else:
        assert run.returncode == -signal.SIGKILL
    assert {file.name for file in out.iterdir()} <= {f"work.sqlite{end}" for end in ("", "-wal", "-shm")}
    store = Store(out / "work.sqlite")
    before = store.rows(range(1, 8_001))
    store.close()
    assert 0 < len(before) < 2 * 7_999 and len(before) % 2 == 0
    assert subprocess.run(command(large, out, "--workers", "2"), cwd=ROOT, capture_output=True).returncode == 0
    build(DataConfig(), str(large), tmp_path / "undisturbed", progress=False)
    assert outputs(out) == outputs(tmp_path / "undisturbed")


@pytest.mark.parametrize("worker", [dies_within_a_result, dies_before_a_result])
def test_a_worker_killed_at_any_time_ends_the_run(
    worker: Any, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no lock or file of a killed worker keeps the run waiting, and that the next run resumes."""
    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "_process", worker)
        with pytest.raises(RequestError, match="--workers: expected running worker processes"):
            build(BEST, str(many), tmp_path / "out", progress=False, workers=2)
    assert not children_of(os.getpid()) and not (tmp_path / "out" / "structured.jsonl").exists()
    report = build(BEST, str(many), tmp_path / "out", progress=False, workers=2).report
    assert report.left_out["question"] == 100


def test_workers_import_no_jax() -> None:
    """JAX takes seconds to import; Markdown is the control."""
    code = "import sys, aspd_jax.pipeline.worker_pool; print('jax' in sys.modules, 'markdown_it' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).stdout == b"False True\n"


def test_workers_may_not_be_none(many: Path, tmp_path: Path) -> None:
    done = subprocess.run(command(many, tmp_path / "out", "--workers", "0"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--workers" in done.stderr and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store") / "work.sqlite")
    yield store
    store.close()


@given(count=st.integers(0, 200), size=st.integers(1, 70), of=st.integers(1, 4), data=st.data())
def test_parts_hold_every_record_once_with_its_results(
    count: int, size: int, of: int, data: Any, store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Check the parts against the records of the shard, with blank and bad lines and equal record numbers."""
    file = tmp_path_factory.getbasetemp() / "parts.jsonl"
    kinds = data.draw(st.lists(st.sampled_from(['{"question": "a", "answer": "b"}', "", "{bad"]), max_size=count))
    file.write_text("\n".join(kinds))
    shard = Shard(data.draw(st.integers(0, of - 1)), of)
    expected = [record.number for place, record in enumerate(read_records(str(file))) if place % of == shard.number]
    store.put_all([Row(f"{n}/{place}", "propose", "hash", f"[{n}]") for n in range(1, 201) for place in (1, 3)])
    work = Work(NO_TEACHER, str(file), shard, store, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "PART", size)
        parts = list(worker_pool.parts_of(work, store))
    assert [row.number for part in parts for row in part.rows] == expected
    assert all(len(part.rows) == size for part in parts[:-1]) and all(part.rows for part in parts)
    for part in parts:
        keys = [f"{row.number}/{place}" for row in part.rows for place in (1, 3)]
        assert [row.answer for row in part.stored] == keys


def test_a_worker_that_raises_is_no_killed_one(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an error of a setting is equal with workers, and is not reported as a lost process."""
    (tmp_path / "empty").mkdir()
    config = DataConfig(select=SelectSection(tokenizer=str(tmp_path / "empty")))
    for workers in (1, 2):
        with pytest.raises(Exception, match="expected a tokenizer") as caught:
            build(config, str(many), tmp_path / "out", progress=False, workers=workers)
        assert not isinstance(caught.value, RequestError)


def test_results_in_a_transaction_are_stored_together(tmp_path: Path) -> None:
    store = Store(tmp_path / "work.sqlite")
    try:
        good = Row("1/1", "propose", "hash", "1")
        with pytest.raises(Exception, match="binding"):
            store.put_all([good, Row("2/1", "propose", "hash", object())])  # type: ignore[arg-type]
        assert store.rows([1, 2]) == []
        store.put_all([good])
        assert store.rows([1, 2, 11]) == [good] and store.get("1/1", "propose", "hash") == 1
        assert store.get("1/1", "propose", "other hash") is None
    finally:
        store.close()
