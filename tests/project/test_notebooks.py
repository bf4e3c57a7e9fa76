"""Notebooks run from top to bottom, have output, and leave the repository unchanged."""

from __future__ import annotations

import importlib.util
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from aspd_jax.errors import CheckpointError
from aspd_jax.formats import find_model
from tests.conftest import ROOT

# Cells whose output is the same everywhere; others tell times, progress or small differences.
EXACT = {
    "1_the_idea": (0, 1, 2), "2_decode": (0, 1, 3, 4, 5), "3_annotate": (1, 2, 3), "4_fine_tune": (0, 1, 3),
    "5_sharding": (0, 1, 3, 4),
}  # fmt: skip
# What makes those small that take a minute and more; their outputs are others then.
SMALLER = {"2_decode": ('"smollm2-aspd"', '"demo"'), "4_fine_tune": ("steps=80", "steps=4")}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def runner() -> Any:
    """docs/run_notebooks.py."""
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "docs" / "run_notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(notebook: Any) -> list[str]:
    """What each cell of code printed or evaluated to; of pictures only that they are there."""

    def text(output: Any) -> str:
        data = output.get("data", {"text/plain": ""})
        return output.get("text") or ("picture" if "image/png" in data else data.get("text/html") or data["text/plain"])

    return ["".join(map(text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_five() -> None:
    assert [file.name[:2] for file in NOTEBOOKS] == ["1_", "2_", "3_", "4_", "5_"]


def whole() -> Any:
    """The notebooks, those that are long marked as slow."""
    slow = [[pytest.mark.slow] if file.stem in SMALLER else [] for file in NOTEBOOKS]
    return [pytest.param(file, id=file.stem, marks=marks) for file, marks in zip(NOTEBOOKS, slow, strict=True)]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("file", whole())
def test_it_runs(file: Path, runner: Any) -> None:
    kept = nbformat.read(file, as_version=4)
    if "smollm2" in "".join(cell.source for cell in kept.cells):
        try:
            find_model("smollm2")
        except CheckpointError as error:
            pytest.skip(str(error))
    nbformat.validate(kept)
    now = texts(runner.execute(deepcopy(kept)))
    assert [bool(text) for text in now] == [bool(text) for text in texts(kept)], "outputs are committed"
    for place in EXACT[file.stem]:
        assert now[place] == texts(kept)[place], "and are those of today"


@pytest.mark.further
@pytest.mark.parametrize("name", SMALLER)
def test_it_runs_in_small(name: str, runner: Any) -> None:
    kept = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    small = deepcopy(kept)
    for cell in small.cells:
        cell.source = cell.source.replace(*SMALLER[name])
    assert small != kept
    assert [bool(text) for text in texts(runner.execute(small))] == [bool(text) for text in texts(kept)]


def test_a_notebook_that_fails_is_noticed(runner: Any) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        runner.execute(notebook)
