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

import pytest

from aspd.generation import EngineSettings, make_worker
from aspd_jax import LanguageModel
from aspd_jax.language_model import save_model
from aspd_jax.ray_pool import RayOptions, Task, cluster, run_on_ray
from infer import Engine, SamplingParams
from infer.offline.batch import Job, generate_file, write_answers
from tests.helpers.ray_workers import descendants, ended, made, make_logged

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24)
LOCAL = RayOptions("local", 2, {"CPU": 1.0})
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


def test_kill_9_of_a_worker(model: Path, source: Path, whole: Path, tmp_path: Path) -> None:
    """Check that only prompts of the killed worker are answered again."""
    name, log, output = f"{source}/part-*.jsonl", tmp_path / "log", tmp_path / "out.jsonl"
    settings = EngineSettings(str(model), "float32", None, "float", None, 96, 1, "all", 0, False)
    make = partial(make_logged, partial(make_worker, settings, name, PARAMS, "adaptive"), log, (11, 0))
    before: list[str] = []
    fatal = (11, 0)

    def answer(tasks: Iterator[Task]) -> Iterator[Task]:
        with cluster(LOCAL) as workers:
            for key, record in run_on_ray(make, tasks, LOCAL, workers):
                if repr(fatal) not in made(log):
                    before.append(repr(key))
                yield key, record

    outcome = write_answers(answer, Job(name, output, PARAMS, "adaptive", False, progress=False))
    assert outcome == (RECORDS, 0, 2) and contents(output) == contents(whole)
    again = {key for key, times in Counter(made(log)).items() if times > 1}
    assert repr(fatal) in again and len(again) <= 2 and before and not again & set(before)


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
