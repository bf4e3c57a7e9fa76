"""The layers of ARCHITECTURE.md, and what ships with the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
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


def test_only_plots_import_matplotlib() -> None:
    """The figures are in one module, which nothing imports before it draws."""
    sources = {file.relative_to(ROOT).as_posix(): file.read_text() for file in MODULES}
    assert [name for name, text in sources.items() if "matplotlib" in imports_of(text)] == ["infer/plots.py"]
    code = "import sys, aspd, aspd_jax, infer, train.loop, infer.evaluation.eval_report\n"
    code += "import infer.bench.load, aspd.benchmarks\n"
    code += "assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def imports_of(text: str) -> set[str]:
    """Top-level packages that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found


def test_architecture_names_every_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [file.name for file in MODULES if file.name != "__init__.py" and file.name not in text]
    assert not missing


ROOMS = ("decode", "scheduling", "answers", "bench", "offline", "server", "proxy", "evaluation", "launch")
MAX_FLOORS = 7


def room_of(module: str) -> str:
    """`infer.decode.state` -> `decode`; `infer.engine` -> `engine`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "infer"


def arrows(of: Callable[[str], str]) -> dict[str, set[str]]:
    """Who imports whom inside `infer`, by module or by room."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "infer").rglob("*.py")):
        if file == ROOT / "infer" / "__init__.py":
            continue
        name = of(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infer."):
                found.setdefault(name, set()).add(of(node.module or ""))
        found.setdefault(name, set()).discard(name)
    return found


def floors(graph: dict[str, set[str]]) -> int:
    """Length of the longest way through it.

    Raises:
        AssertionError: it goes in a circle.
    """
    heights: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"a circle: {' -> '.join((*above, name))}"
        if name not in heights:
            heights[name] = 1 + max((height(other, (*above, name)) for other in graph.get(name, ())), default=0)
        return heights[name]

    return max(map(height, graph))


def test_rooms_of_infer() -> None:
    """At most ten rooms, each of which says what is its own; imports form no circles, and few floors."""
    rooms = {folder.name for folder in (ROOT / "infer").iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    assert rooms == set(ROOMS) and len(rooms) <= 10
    for room in rooms - {"launch"}:
        says = ast.get_docstring(ast.parse((ROOT / "infer" / room / "__init__.py").read_text())) or ""
        assert "Its own:" in says and "may touch" in says, room
    assert floors(arrows(room_of)) <= MAX_FLOORS
    floors(arrows(str))
    with pytest.raises(AssertionError, match="a circle: a -> b -> a"):  # negative control
        floors({"a": {"b"}, "b": {"a"}})


def test_file_names_are_distinct() -> None:
    """Opening a file by its name is not ambiguous."""
    names = [file.name for file in MODULES if file.name not in ("__init__.py", "__main__.py")]
    assert sorted(names) == sorted(set(names))


def test_functions_of_the_decoding_step_are_short() -> None:
    """No function of `infer.decode` is longer than 50 lines, docstring included."""
    functions = [
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for file in sorted((ROOT / "infer" / "decode").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 60 and not [name for name, lines in functions if lines > 50]
