"""Offline batches on a Ray cluster: the output of one process, byte for byte, also when processes are killed."""

from __future__ import annotations

import json
import re
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

import aspd
import aspd.generation
from aspd_jax import LanguageModel
from aspd_jax.language_model import save_model
from aspd_jax.ray_pool import Task, run_on_ray
from infer import Engine, SamplingParams
from infer.offline.batch import Job, generate_file
from tests.helpers.ray_workers import descendants, ended, made, make_logged

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24)
RECORDS = 24
pytestmark = pytest.mark.slow


def contents(file: Path) -> bytes:
    """Return the bytes of an output without measurements: seconds, and reused prompt tokens."""
    data, count = re.subn(rb'"seconds": \{[^}]*\}', b'"seconds": {}', file.read_bytes())
    data, reused = re.subn(rb'"reused_tokens": \d+', b'"reused_tokens": 0', data)
    assert count == reused > 0
    return data


@pytest.fixture(scope="module")
def model(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray") / "model"
    save_model(lm, folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return partitions, one of which has lines with an error."""
    folder = tmp_path_factory.mktemp("prompts")
    lines = [json.dumps({"prompt": f"Run {number}", "id": f"q{number}"}) for number in range(RECORDS)]
    lines[5], lines[9] = "no JSON", json.dumps({"prompt": "x" * 400})
    for part in range(3):
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines[part * 8 : part * 8 + 8]) + "\n")
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of one process."""
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    done = subprocess.run(command(model, f"{source}/part-*.jsonl", output), capture_output=True, text=True)
    assert f"{RECORDS} records written to {output}; 2 hold an error" in done.stdout, done.stderr
    return output


def command(model: Path, source: str, output: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "aspd", "generate", "--model", str(model), "--raw", "--input", source]
    words += ["--output", str(output), "--max-length", "96", "--batch", "1"]
    return [*words, "--max-new-tokens", "24", "--temperature", "1", *more]


def test_output_equals_that_of_one_process(model: Path, source: Path, whole: Path, tmp_path: Path) -> None:
    """Check equality, also from a URL, which the errors name."""
    url = f"file://{source}/part-*.jsonl"
    words = command(model, url, tmp_path / "out.jsonl", "--ray", "local", "--ray-workers", "2")
    done = subprocess.run(words, capture_output=True, text=True)
    assert f"{RECORDS} records written to {tmp_path / 'out.jsonl'}; 2 hold an error" in done.stdout, done.stderr
    assert contents(tmp_path / "out.jsonl").replace(b"file://", b"") == contents(whole)
    assert f"{url}, line 6: not JSON" in json.loads((tmp_path / "out.jsonl").read_text().splitlines()[5])["error"]
    assert {file.name for file in tmp_path.iterdir()} == {"out.jsonl"}
    other = subprocess.run([*words[:-4], "--seed", "1"], capture_output=True, text=True)
    assert "expected a new file" in other.stderr
    (tmp_path / "out.jsonl").unlink()
    subprocess.run([*words[:-4], "--seed", "1"], capture_output=True)
    assert contents(tmp_path / "out.jsonl").replace(b"file://", b"") != contents(whole), "negative control"


def test_kill_9_of_a_worker(
    model: Path, source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no prompt is lost, and that only prompts whose answers had not arrived are answered again."""
    log, output, fatal = tmp_path / "log", tmp_path / "out.jsonl", (11, 0)
    times = Counter[str]()  # how often an answer had been begun when it arrived

    def killing(make: Any, *rest: Any, **more: Any) -> Iterator[Task]:
        for key, record in run_on_ray(partial(make_logged, make, log, fatal), *rest, **more):
            assert repr(key) not in times, "each answer arrives once"
            times[repr(key)] = made(log).count(repr(key))
            yield key, record

    monkeypatch.setattr(aspd.generation, "run_on_ray", killing)
    words = command(model, f"{source}/part-*.jsonl", output, "--ray", "local", "--ray-workers", "2")
    assert aspd.main(words[3:]) == 0 and contents(output) == contents(whole)
    assert len(times) == RECORDS and Counter(made(log)) == times, "no answer that has arrived is begun again"
    again = {key for key, count in times.items() if count > 1}
    assert repr(fatal) in again and len(again) <= 2 and max(times.values()) == 2


def test_kill_9_of_the_driver(model: Path, source: Path, whole: Path, tmp_path: Path) -> None:
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    words = command(model, f"{source}/part-*.jsonl", output, "--ray", "local", "--ray-workers", "2")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not journal.exists() or journal.read_text().count("\n") < 4):
        time.sleep(0.001)
    processes = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists() and any("raylet" in line for line in processes.values())
    done = journal.read_text().count("\n") - 1
    assert 3 <= done < RECORDS and ended(processes), "nothing of the cluster is left"
    kept = journal.read_text().splitlines()[1 : done + 1]
    again = subprocess.run(words, capture_output=True, text=True)
    assert f"{RECORDS} records written to {output}, {done} of them there already" in again.stdout, again.stderr
    assert contents(output) == contents(whole)
    for line in kept:  # with what was measured then, so they were not made again
        record = json.loads(line)
        assert {k: v for k, v in record.items() if k != "line"} in map(json.loads, output.read_text().splitlines())


def test_parquet(model: Path, source: Path, tmp_path: Path, lm: LanguageModel) -> None:
    """Check that Parquet gets the answers of JSONL with the same records."""
    import datasets

    rows = [{"prompt": f"Run {number}", "id": f"q{number}"} for number in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "in.parquet")
    own = Engine(lm, max_length=96, max_batch=2)
    for kind in ("jsonl", "parquet"):
        generate_file(
            own, Job(tmp_path / f"in.{kind}", tmp_path / f"{kind}.out", PARAMS, "adaptive", False, progress=False)
        )
    assert contents(tmp_path / "parquet.out") == contents(tmp_path / "jsonl.out")
