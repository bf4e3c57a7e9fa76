"""Releases: wheel and sdist contain the code, its data, and no other files."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.project.test_embedded import MOST, WEIGHTS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, made from a clean copy of what is tracked."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"
    copy.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/golden", "notebooks")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_the_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    sizes = {file.filename: file.file_size for file in zipfile.ZipFile(wheel).infolist()}
    names = list(sizes)
    assert 0 < sum(size for name, size in sizes.items() if name.endswith(WEIGHTS)) <= MOST
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"aspd", "aspd_jax", "train", "infer"}
    sources = [file.relative_to(ROOT).as_posix() for top in ("aspd", "aspd_jax", "train", "infer")
               for file in (ROOT / top).rglob("*.py")]  # fmt: skip
    assert set(sources) <= set(names)
    for data in (
        "embedded/aspd/model.safetensors",
        "embedded/aspd/tokenizer.json",
        "aot/h100.txtpb",
        "pipeline/prompts/annotate.md",
    ):
        assert any(name.endswith(data) for name in names), data
    assert "infer/server/page.html" in names and "infer/evaluation/judge_prompts.jsonl" in names


def test_the_sdist(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.split("/", 1)[-1] for name in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "infer/server/page.html"} <= names


def test_the_wheel_works_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    """Run the wheel in a separate folder with the libraries of this environment."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import aspd, infer, aspd_jax\n"
        f"assert all({str(tmp_path)!r} in of.__file__ for of in (aspd, infer, aspd_jax)), infer.__file__\n"
        "sys.exit(aspd.main(['generate', '--prompt', 'Hi', '--max-new-tokens', '4', '--max-length', '64', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and '"finish_reason"' in done.stdout, done.stderr[-2000:]
