"""Killed runs: they resume, process no finished record again, and give the same files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aspd_jax.pipeline.build
from aspd_jax.errors import RequestError
from aspd_jax.files import Log, exclusive
from aspd_jax.pipeline.build import build
from aspd_jax.pipeline.data_config import DataConfig
from aspd_jax.pipeline.entries import entry_of
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


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the records that are processed, in chunks of 16."""
    numbers: list[int] = []
    monkeypatch.setattr(aspd_jax.pipeline.build, "CHUNK", 16)
    monkeypatch.setattr(
        aspd_jax.pipeline.build,
        "entry_of",
        lambda select, count, record: numbers.append(record.number) or entry_of(select, count, record),
    )
    return numbers


def run(file: Path, output: Path, **changes: Any) -> dict[str, bytes]:
    """Files of a run, which leaves no others."""
    build(DataConfig(select=replace(SMALL, per_question=1, **changes)), str(file), output, progress=False)
    assert {file.name for file in output.iterdir()} == set(FILES)
    return outputs(output)


def interrupted(file: Path, output: Path, size: int) -> list[bytes]:
    """End a run when its journal has a number of bytes, or at the end of all records; return the lines of the journal.

    The last line is cut off, as when a process is killed while it writes.
    """
    write = Log.write

    def limited(log: Log, text: str) -> None:
        if (left := size - journal.stat().st_size) < len(text.encode()):
            with journal.open("ab") as lines:
                lines.write(text.encode()[:left])
            raise KeyboardInterrupt
        write(log, text)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    journal = output / "entries.journal"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Log, "write", limited)
        patch.setattr(aspd_jax.pipeline.build, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            run(file, output)
    assert [file.name for file in output.iterdir()] == ["entries.journal"]
    return journal.read_bytes().split(b"\n")


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("size", [100_000, 100, 10_000_000])
def test_an_interrupted_run_goes_on(size: int, tmp_path: Path, processed: list[int]) -> None:
    """Check runs that end in an entry, in the first line of the journal, and before the results are written."""
    file, out = write_many(tmp_path / "in.jsonl"), tmp_path / "out"
    expected = run(file, tmp_path / "undisturbed")
    assert processed == list(range(1, 301))
    *lines, rest = interrupted(file, out, size)
    done = max(0, len(lines) - 1)
    assert done == {100: 0, 10_000_000: 300}.get(size, done) and (0 < done < 300) == bool(lines and rest)
    processed.clear()
    assert run(file, out) == expected and processed == list(range(done + 1, 301))
    processed.clear()
    assert run(file, out) == expected and len(processed) == 300, "a finished run leaves nothing to resume"


@pytest.mark.further
def test_entries_of_other_runs_are_refused(tmp_path: Path, processed: list[int]) -> None:
    file, out = write_many(tmp_path / "in.jsonl"), tmp_path / "out"
    interrupted(file, out, 100_000)
    processed.clear()
    for name, value in (("serial_ratio", 0.5), ("serial_kinds", ("x",))):
        with pytest.raises(RequestError, match=rf"journal: expected .* the same select\.{name}, got others"):
            run(file, out, **{name: value})
    text = file.read_text()
    file.write_text(text.replace("Question 7?", "Question 8?"))
    with pytest.raises(RequestError, match=r"entries\.journal: expected records with the same source, got others"):
        run(file, out)
    assert not processed
    file.rename(tmp_path / "moved.jsonl").write_text(text)
    assert run(tmp_path / "moved.jsonl", out) and 0 < len(processed) < 300, "the records count, not the file"


@pytest.mark.further
def test_kill_9(tmp_path: Path, processed: list[int]) -> None:
    file, out = write_many(tmp_path / "in.jsonl", 3_000), tmp_path / "out"
    journal = out / "entries.journal"
    command = [sys.executable, "-m", "aspd", "data", "build", str(file)]
    command += ["select.min_tokens=20", "select.per_question=1"]
    process = subprocess.Popen(
        [*command, "--output", str(out)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 500):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert not [file.name for file in out.iterdir() if file.name in FILES]
    done = journal.read_bytes().count(b"\n") - 1
    resumed = run(file, out)
    assert 500 <= done + 1 < 3_000 and processed == list(range(done + 1, 3_001))
    assert resumed == run(file, tmp_path / "undisturbed")


@pytest.mark.further
def test_a_run_waits_for_another_one(tmp_path: Path, processed: list[int]) -> None:
    """Two runs with one journal would append every entry twice."""
    file, out = write_many(tmp_path / "in.jsonl"), tmp_path / "out"
    with ThreadPoolExecutor() as pool:
        with exclusive(out / "entries.journal"):
            later = pool.submit(run, file, out)
            time.sleep(0.5)
            assert not processed and not later.done()
        assert later.result(60) == run(file, tmp_path / "undisturbed")


def test_the_pipeline_imports_no_jax() -> None:
    """JAX takes seconds to import; Markdown is the control."""
    code = "import sys, aspd_jax.pipeline.build; print('jax' in sys.modules, 'markdown_it' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).stdout == b"False True\n"
