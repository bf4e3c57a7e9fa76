"""Releases: wheel and sdist contain the code, its data, and no other files."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import aspd_jax
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
        if (ROOT / name).is_symlink():
            (copy / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file() and not name.startswith(("tests/golden", "notebooks")):
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
    ):
        assert any(name.endswith(data) for name in names), data
    configs = [file.relative_to(ROOT).as_posix() for file in (ROOT / "configs").rglob("*") if file.is_file()]
    assert {f"aspd_jax/{name}" for name in configs if not name.endswith(".mk")} <= set(names)
    assert {f"{top}/py.typed" for top in ("aspd", "aspd_jax", "train", "infer")} <= set(names)
    assert "infer/server/page.html" in names and "infer/evaluation/field_texts.jsonl" in names


def test_the_sdist(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.split("/", 1)[-1] for name in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "infer/server/page.html"} <= names


def test_versions_whose_configurations_are_not_read_are_not_permitted() -> None:
    """Check `transformers` 4, without `rope_parameters`: layers of Gemma 3 with a window would get other angles."""
    listed = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    (of_transformers,) = (requirement for requirement in listed if requirement.name == "transformers")
    assert "5.0.0" in of_transformers.specifier and "4.57.6" not in of_transformers.specifier


@pytest.mark.further
def test_the_wheel_works_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    """Run the wheel in a separate folder with the libraries of this environment."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import aspd, infer, aspd_jax\n"
        f"assert all({str(tmp_path)!r} in of.__file__ for of in (aspd, infer, aspd_jax)), infer.__file__\n"
        "assert aspd.main(['train', 'configs/lora_7b.yaml', '--plan']) == 0\n"
        "sys.exit(aspd.main(['generate', '--prompt', 'Hi', '--max-new-tokens', '4', '--max-length', '64', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and '"finish_reason"' in done.stdout, done.stderr[-2000:]


def pins(file: str) -> dict[str, list[Requirement]]:
    """Return the lines of a requirements file by package, without those of the files that it includes."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and line[0] not in "#-"]
    found: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def test_every_dependency_is_pinned_within_its_bounds_and_tools_are_apart() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime, tools = pins("requirements-runtime.txt"), pins("requirements.txt")
    assert "-r requirements-runtime.txt\n" in (ROOT / "requirements.txt").read_text()
    assert not runtime.keys() & tools.keys()
    assert {"pytest", "mypy", "playwright", "schemathesis", "ipykernel", "ruff"} <= tools.keys()
    for dependency in map(Requirement, project["dependencies"]):
        assert any(one.operator == "<" for one in dependency.specifier), f"{dependency} has no upper bound"
        for pin in runtime[canonicalize_name(dependency.name)]:
            (version,) = (one.version for one in pin.specifier)
            assert dependency.specifier.contains(version), f"{pin} is outside {dependency}"


def test_what_the_project_says_of_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "The aspd-jax authors"}]
    assert "Copyright 2026 The aspd-jax authors" in (ROOT / "LICENSE").read_text()
    assert list(project["urls"].values()) == ["https://arxiv.org/abs/2508.08895"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == aspd_jax.__version__ and cited["license"] == project["license"]
    assert cited["references"][0]["url"] == project["urls"]["Paper"]
