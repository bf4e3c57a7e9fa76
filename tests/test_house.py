"""The layers of ARCHITECTURE.md, and what ships with the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

OURS = ("aspd", "aspd_jax", "train", "infer", "tests")
MODULES = [file for folder in OURS[:-1] for file in sorted((ROOT / folder).rglob("*.py"))]
ALLOWED = {"aspd_jax": {"aspd_jax"}, "train": {"aspd_jax", "train"}, "infer": {"aspd_jax", "infer"}} | {
    "aspd": set(OURS[:-1])
}


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    names = {name for name in imported if name.split(".")[0] in OURS}
    assert {name.split(".")[0] for name in names} <= ALLOWED[file.relative_to(ROOT).parts[0]]
    if file.name in ("structure.py", "layout.py"):
        assert names <= {"aspd_jax.errors"}


def test_architecture_names_every_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [file.name for file in MODULES if file.name != "__init__.py" and file.name not in text]
    assert not missing
