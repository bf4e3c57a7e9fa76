"""Import rules of the packages (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

OURS = ("aspd", "aspd_jax", "train", "infer", "tests")
MODULES = [file for folder in OURS[:-1] for file in sorted((ROOT / folder).rglob("*.py"))]
ALLOWED = {"aspd_jax": {"aspd_jax"}, "train": {"aspd_jax", "train"}, "infer": {"aspd_jax", "infer"}} | {
    "aspd": set(OURS[:-1])
}


def own_imports(text: str) -> set[str]:
    """Modules of the project that a module imports anywhere; `from a import b` is both `a` and `a.b`."""
    imported = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    return {name for name in imported if name.split(".")[0] in OURS}


def below(names: set[str], package: str) -> set[str]:
    """Names of a package or of its modules."""
    return {name for name in names if f"{name}.".startswith(f"{package}.")}


@pytest.mark.default_cases(1000)
@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    names, path = own_imports(file.read_text()), file.relative_to(ROOT)
    assert {name.split(".")[0] for name in names} <= ALLOWED[path.parts[0]]
    if file.name in ("structure.py", "layout.py"):
        assert all(name.startswith("aspd_jax.errors") for name in names - {"aspd_jax"})
    if path.parts[0] != "aspd" and path.parts[:2] != ("aspd_jax", "pipeline"):
        assert not below(names, "aspd_jax.pipeline"), "an application"
    if path.parts[:2] == ("aspd_jax", "model"):
        assert not below(names, "aspd_jax.formats") | below(names, "aspd_jax.blocks")


def test_forbidden_imports_are_seen() -> None:
    """Negative control."""
    for text in (
        "from aspd_jax.pipeline.build import B",
        "from aspd_jax import pipeline",
        "import aspd_jax.pipeline",
    ):
        assert below(own_imports(text), "aspd_jax.pipeline")
    assert not below(own_imports("from aspd_jax.pipelines import x"), "aspd_jax.pipeline")


def test_only_notebooks_import_matplotlib() -> None:
    """No module of the packages imports matplotlib, which is no dependency of theirs."""
    assert not [file for file in MODULES if "matplotlib" in imports_of(file.read_text())]
    assert "matplotlib" in imports_of((ROOT / "notebooks" / "figures.py").read_text()), "negative control"


def imports_of(text: str) -> set[str]:
    """Top-level packages that a module imports anywhere."""
    packages = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            packages.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
    return packages


def test_architecture_names_every_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listed = Counter(re.findall(r"[\w-]+\.py", text))
    modules = Counter(file.name for file in MODULES if file.name != "__init__.py")
    assert not modules - listed


CORE = {"answers", "control", "decisions", "decode", "engine", "request", "scheduling"}
# What each package and module of `infer` may import from the others.
MAY_IMPORT: dict[str, set[str]] = {
    "request": set(),
    "decode": {"request"},
    "answers": {"decode", "request"},
    "control": {"answers", "decode", "request"},
    "scheduling": {"answers", "control", "decode", "request"},
    "decisions": {"request"},
    "engine": {"answers", "control", "decisions", "decode", "request", "scheduling"},
    "lockstep": CORE,
    "bench": CORE,
    "offline": CORE | {"bench"},
    "server": CORE | {"lockstep"},
    "proxy": {"answers", "control", "request", "server"},
    "evaluation": CORE | {"bench", "server"},
}
PACKAGES = {"decode", "control", "scheduling", "answers", "bench", "offline", "server", "proxy", "evaluation", "launch"}
MAX_LEVELS = 8


def package_of(module: str) -> str:
    """Return the package or module of `infer`: `infer.decode.state` -> `decode`; `infer.engine` -> `engine`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "infer"


def import_graph(key: Callable[[str], str]) -> dict[str, set[str]]:
    """Return the imports within `infer`, with every module name mapped by `key`."""
    graph: dict[str, set[str]] = {}
    for file in sorted((ROOT / "infer").rglob("*.py")):
        if file == ROOT / "infer" / "__init__.py":
            continue
        name = key(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infer."):
                graph.setdefault(name, set()).add(key(node.module or ""))
        graph.setdefault(name, set()).discard(name)
    return graph


def levels(graph: dict[str, set[str]]) -> int:
    """Return the number of nodes on the longest path.

    Raises:
        AssertionError: the graph has a cycle.
    """
    heights: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"a cycle: {' -> '.join((*above, name))}"
        if name not in heights:
            heights[name] = 1 + max((height(other, (*above, name)) for other in graph.get(name, ())), default=0)
        return heights[name]

    return max(map(height, graph))


def test_packages_of_infer() -> None:
    """Imports within `infer` follow `MAY_IMPORT`, have no cycles and few levels."""
    folders = {folder.name for folder in (ROOT / "infer").iterdir() if folder.is_dir()} - {"__pycache__"}
    assert folders == PACKAGES
    for name, imported in import_graph(package_of).items():
        assert imported <= MAY_IMPORT[name], name
    assert levels(import_graph(package_of)) <= MAX_LEVELS
    levels(import_graph(str))
    with pytest.raises(AssertionError, match="a cycle: a -> b -> a"):  # negative control
        levels({"a": {"b"}, "b": {"a"}})
