"""The notebooks run from top to bottom, and show something; what they leave in the repository is as they left it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from aspd_jax.errors import CheckpointError
from aspd_jax.formats import find_model
from tests.conftest import ROOT

# Cells whose output is the same everywhere; others tell times, progress or small differences.
EXACT = {"1_the_idea": (0, 1, 2), "2_decode": (), "3_annotate": (1, 3), "4_fine_tune": (0, 3), "5_sharding": (1, 3)}
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
        data = output.get("data", {})
        return output.get("text") or ("picture" if "image/png" in data else data.get("text/plain", ""))

    return ["".join(map(text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_five() -> None:
    assert [file.name[:2] for file in NOTEBOOKS] == ["1_", "2_", "3_", "4_", "5_"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file: Path, runner: Any) -> None:
    kept = nbformat.read(file, as_version=4)
    if "smollm2" in "".join(cell.source for cell in kept.cells):
        try:
            find_model("smollm2")
        except CheckpointError as error:
            pytest.skip(str(error))
    nbformat.validate(kept)
    now = texts(runner.execute(file))
    assert [bool(text) for text in now] == [bool(text) for text in texts(kept)], "outputs are committed"
    for place in EXACT[file.stem]:
        assert now[place] == texts(kept)[place], "and are those of today"


def test_a_notebook_that_fails_is_noticed(runner: Any, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, tmp_path / "x.ipynb")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        runner.execute(tmp_path / "x.ipynb")
