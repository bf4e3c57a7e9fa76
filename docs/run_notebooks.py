"""Executes the notebooks in place: `python docs/run_notebooks.py [NAME …]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Execute a notebook from the root of the checkout; return it with its outputs."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # hides the note that torch is missing
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress"  # no widgets
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}, record_timing=False
    )
    client.execute()
    return notebook


def main(names: list[str]) -> None:
    """Execute all, or those whose name begins like one of these."""
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and not file.name.startswith(tuple(names)):
            continue
        began = time.monotonic()
        nbformat.write(execute(nbformat.read(file, as_version=4)), file)
        print(f"{file.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
