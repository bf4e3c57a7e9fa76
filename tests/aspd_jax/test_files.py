from __future__ import annotations

import json
import os
import resource
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aspd
from aspd_jax import LanguageModel, save_model
from aspd_jax.errors import CheckpointError, OutputError
from aspd_jax.files import Log, refusal, replacing, write_folder, write_whole
from aspd_jax.formats import open_checkpoint
from aspd_jax.formats.folder import convert
from aspd_jax.journal import append, read_journal
from aspd_jax.language_model import save_adapter
from tests.aspd_jax.formats.test_gguf_tokenizer import known_tokenizer
from tests.aspd_jax.formats.test_peft_adapters import CASES, as_if_trained, base_folder
from tests.conftest import ROOT
from train.checkpoints import Checkpoints
from train.metrics import open_metrics

KILLED = """
import os, sys
from pathlib import Path
from aspd_jax.files import replacing
with replacing(Path(sys.argv[1])) as out:
    out.write("new " * 100_000)
    out.flush()
    os.kill(os.getpid(), 9)
"""


def test_a_file_is_replaced_when_all_is_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "file.txt"
    write_whole(file, "old\n")
    with replacing(file) as out:
        out.write("é")
        out.flush()
        assert file.read_text() == "old\n"
    assert file.read_text(encoding="utf-8") == "é"
    assert list(file.parent.iterdir()) == [file]


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_whole(file, "old")
    with pytest.raises(ValueError, match="half-way"), replacing(file) as out:  # noqa: PT012
        out.write("new")
        raise ValueError("half-way")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_so_does_a_process_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_whole(file, "old")
    assert subprocess.run([sys.executable, "-c", KILLED, str(file)], cwd=ROOT).returncode == -9
    assert file.read_text() == "old"
    write_whole(file, "new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file], "and the next one clears up"


SLOW = """
import sys
from pathlib import Path
from aspd_jax.files import replacing, write_folder
path, text = Path(sys.argv[1]), sys.argv[3]
with (replacing if sys.argv[2] == "file" else write_folder)(path) as made:
    out = made if sys.argv[2] == "file" else (made / text).open("w")
    print(text * 100_000, file=out, flush=True)
    print("writing", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_two_processes_one_waits(kind: str, tmp_path: Path) -> None:
    """Check that neither process changes or deletes what the other one writes."""
    path = tmp_path / "path"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first, second = (
        subprocess.Popen([sys.executable, "-c", SLOW, str(path), kind, text], cwd=ROOT, text=True, **pipes)
        for text in "ab"
    )
    for line in (first.stdout, second.stdout):
        assert line is not None
    with selectors.DefaultSelector() as ready:
        for process in (first, second):
            ready.register(process.stdout, selectors.EVENT_READ, process)
        ((key, _),) = ready.select()
        ready.unregister(key.fileobj)
        assert not ready.select(timeout=1), "the other one waits"
    writer = key.data
    waiter = second if writer is first else first
    whole = {first: "a", second: "b"}
    assert writer.communicate("\n") == ("writing\n", "") and writer.returncode == 0
    out, error = waiter.communicate("\n")
    if kind == "file":
        assert out == "writing\n" and waiter.returncode == 0
        assert path.read_text() == whole[waiter] * 100_000 + "\n"
    else:
        assert not out and "expected a new or empty folder" in error
        assert (path / whole[writer]).read_text() == whole[writer] * 100_000 + "\n"
        assert len(list(path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """As on a full disk, no file grows beyond `size` bytes (the error is `EFBIG`)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = base_folder(tmp_path_factory.mktemp("base"), CASES["tied"])
    known_tokenizer().save_pretrained(folder)
    return as_if_trained(folder)


def write_metrics(path: Path, lm: LanguageModel) -> None:
    with open_metrics(path.parent, 0) as log:
        for step in range(100):
            append(log, {"step": step, "loss": 1.0})


@pytest.mark.parametrize("damaged", ["not json", "", "\0\0", '{"loss": 1}', "[1]"])
def test_damaged_metrics_stop_no_run(tmp_path: Path, damaged: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 2}}\n{{"step": 3}}\n{{"st')
    with open_metrics(tmp_path, 2) as log:
        append(log, {"step": 3})
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]


def write_journal(path: Path, lm: LanguageModel) -> None:
    with Log(path) as log:
        for number in range(100):
            append(log, {"line": number})


def write_checkpoint_of_run(path: Path, lm: LanguageModel) -> None:
    with Checkpoints(path) as checkpoints:
        checkpoints.save(1, {"weights": np.random.default_rng(0).standard_normal(10000)}, {})  # type: ignore[arg-type]


def write_converted(path: Path, lm: LanguageModel) -> None:
    convert(open_checkpoint("demo"), path, "float32")


WRITERS: dict[str, Callable[[Path, LanguageModel], Any]] = {
    "text": lambda path, lm: write_whole(path, "x" * 5000),
    "folder": lambda path, lm: save_model(lm, path),
    "converted": write_converted,
    "adapter": lambda path, lm: save_adapter(lm, path, "tiny"),
    "metrics.jsonl": write_metrics,
    "journal": write_journal,
    "checkpoints": write_checkpoint_of_run,
}
REASONS = "(File too large|Input/output|No space)"
GROWING = ("metrics.jsonl", "journal")  # what was written before stays, in whole lines


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named_and_leaves_nothing_half_written(
    name: str, tmp_path: Path, trained: LanguageModel
) -> None:
    with (
        room_for(1000),
        pytest.raises(OutputError, match=f"{name} cannot be written: {REASONS}"),
    ):
        WRITERS[name](tmp_path / name, trained)
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    if name in GROWING:
        assert left == {name} and 0 < len(list(read_journal(tmp_path / name))) < 100
        assert (tmp_path / name).read_bytes().endswith(b"}\n")
    else:
        assert not {file for file in left if not file.startswith("checkpoints/")}, left
        assert not list(tmp_path.rglob("*tmp*"))
    WRITERS[name](tmp_path / name, trained)  # with room: the same call works, beside what the first one has left
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", WRITERS)
def test_a_path_that_cannot_be_is_named(name: str, tmp_path: Path, trained: LanguageModel) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    with pytest.raises(OutputError, match=r"cannot be written: (Not a directory|File exists)"):
        WRITERS[name](tmp_path / "file" / "deeper" / name, trained)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_files_in_a_folder_are_readable_by_all(tmp_path: Path) -> None:
    with write_folder(tmp_path / "made") as folder:
        (folder / "inside").mkdir()
        for file in (folder / "one", folder / "inside" / "two"):
            file.touch(0o600)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "made").rglob("*")}
    assert modes["one"] == modes["two"] == 0o644 and modes["inside"] & 0o111, "a folder can be entered"


def test_a_folder_may_be_the_current_one_or_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("current", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path / "current")
    for path in (Path("."), tmp_path / "link"):
        with write_folder(path) as folder:
            (folder / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "link", "target"]
    assert (tmp_path / "current" / "file").exists() and (tmp_path / "link" / "file").exists()
    assert (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "current")
    for path in (Path("."), Path("")):
        with pytest.raises(CheckpointError, match="current: expected a new or empty folder"), write_folder(path):
            pass


def test_a_folder_that_cannot_be_replaced_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match=r"^/: expected a folder that can be replaced, got a mount point"):
        write_folder(Path("/")).__enter__()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(OutputError, match=r"got a mount point\. Choose one in it"):
        write_folder(tmp_path).__enter__()
    for path in ("", ".", "/"):
        with pytest.raises(OutputError, match="expected a path with a name, got a folder"):
            write_whole(Path(path), "text")


def test_errors_of_other_kinds_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"), write_folder(tmp_path / "folder"):
        (tmp_path / "missing").read_text()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a new or empty folder"), write_folder(tmp_path / "file"):
        pass
    assert refusal(RuntimeError("write failed: No space left on device [os_error_code='28']")) == 28
    assert refusal(RuntimeError("No space in this sentence")) is None


def test_the_command_says_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with room_for(300_000):
        assert aspd.main(["convert", "demo", "--output", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == f"aspd: {tmp_path / 'x'} cannot be written: File too large. Free some space.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_the_right_to_write_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        write_whole(tmp_path / "file", "text")
