from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aspd_jax.files import replacing, write_whole
from tests.conftest import ROOT

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
