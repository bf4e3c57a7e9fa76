"""The data pipeline on a Ray cluster: the files of one process, byte for byte, also when processes are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aspd_jax.pipeline.worker_pool
from aspd_jax.pipeline.build import build
from aspd_jax.ray_pool import RayOptions, Task, run_on_ray
from tests.helpers.pipeline_data import CHAIN, LIST, NO_TEACHER, PROSE, faithful, teacher
from tests.helpers.ray_workers import descendants, ended, made, make_logged
from tests.helpers.teacher_server import TeacherServer

LOCAL = RayOptions("local", 2, {"CPU": 1.0})
FILES = ("structured.jsonl", "plain.jsonl", "rejected.jsonl", "report.md", "report.json")
RECORDS = 1000
pytestmark = pytest.mark.slow


def contents(folder: Path, source: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes().replace(source.encode(), b"SOURCE") for name in FILES}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partitions of records, some of which cannot be read."""
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("parts")
    lines = [
        json.dumps(
            {"id": f"r{number}", "question": f"Question {number}?", "answer": text.replace("eight", f"{number}")}
        )
        for number in range(RECORDS)
        for text in ((LIST, PROSE, CHAIN)[number % 3],)
    ]
    lines[100], lines[900] = "{broken", json.dumps({"no": "answer"})
    for part in range(4):
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines[part * 250 : part * 250 + 250]) + "\n")
    return folder


@pytest.fixture(scope="module")
def whole(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of one process."""
    source, output = f"{parts}/part-*.jsonl", tmp_path_factory.mktemp("whole")
    report = build(NO_TEACHER, source, output, progress=False).report
    assert report.records == RECORDS and report.left_out["read"] == 2 and report.statistics()["with_block"] > 300
    return contents(output, source)


@pytest.mark.parametrize("kind", ["url", "parquet"])
def test_files_equal_those_of_one_process(parts: Path, whole: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    if kind == "url":
        source = f"file://{parts}/part-*.jsonl"
        expected = whole
    else:
        import datasets

        for part in range(2):
            rows = [json.loads(line) for line in (parts / f"part-{part + 1}.jsonl").read_text().splitlines()]
            datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"part-{part}.parquet")
        source = f"{tmp_path}/part-*.parquet"
        build(NO_TEACHER, source, tmp_path / "one", progress=False)
        expected = contents(tmp_path / "one", source)
        assert expected["plain.jsonl"].count(b"\n") == 500
    build(NO_TEACHER, source, tmp_path / "out", progress=False, ray=LOCAL)
    assert contents(tmp_path / "out", source) == expected


def test_kill_9_of_a_worker(parts: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: Any) -> None:
    """Check that no call is repeated, and that only partitions of the killed worker are processed again."""
    log, source = tmp_path / "log", f"{parts}/part-*.jsonl"

    def killing(make: Any, *rest: Any, **more: Any) -> Iterator[Task]:
        return run_on_ray(partial(make_logged, make, log, 7), *rest, **more)

    with TeacherServer(faithful) as server:
        build(teacher(server), source, tmp_path / "one", progress=False)
        calls = sum(server.seen.values())
        monkeypatch.setattr(aspd_jax.pipeline.worker_pool, "run_on_ray", killing)
        build(teacher(server), source, tmp_path / "out", progress=False, ray=LOCAL)
        assert calls > RECORDS and sum(server.seen.values()) == 2 * calls and set(server.seen.values()) == {2}
    assert contents(tmp_path / "out", source) == contents(tmp_path / "one", source)
    times = Counter(made(log))
    assert set(times) == {repr(number) for number in range((RECORDS + 63) // 64)}
    again = {key for key, count in times.items() if count > 1}
    assert "7" in again and len(again) <= aspd_jax.pipeline.worker_pool.AHEAD and max(times.values()) == 2
    log.unlink()
    build(NO_TEACHER, source, tmp_path / "rules", progress=False, ray=LOCAL)
    assert contents(tmp_path / "rules", source) == whole != contents(tmp_path / "out", source)


def test_kill_9_of_the_driver(parts: Path, tmp_path: Path) -> None:
    """The run resumes from the store: no call is made twice, and the files are those of one process."""
    source = f"{parts}/part-0.jsonl"
    with TeacherServer(faithful) as server:
        build(teacher(server), source, tmp_path / "one", progress=False)
        calls = Counter(server.seen)
        words = [sys.executable, "-m", "aspd", "data", "build", source, "--output", str(tmp_path / "out")]
        words += ["--ray", "local", "--ray-workers", "2", "rules=false", "select.min_tokens=20", "teacher.model=m"]
        words += [f"teacher.base_url={server.url}", "teacher.candidates=1", "teacher.votes=1", "teacher.retries=2"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any("ray::_Actor" in line for line in descendants(process.pid).values()):
            time.sleep(0.01)
        processes = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "out" / "structured.jsonl").exists()
        assert any("raylet" in line for line in processes.values()) and ended(processes)
        assert Counter(server.seen) == calls + calls
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert Counter(server.seen) == calls + calls, "all replies were stored"
    assert contents(tmp_path / "out", source) == contents(tmp_path / "one", source)
