"""Every test that reads `../shared` has a counterpart that needs only the repository."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import COUNTERPARTS, ROOT

TESTS = ROOT / "tests"


def names_shared(node: ast.AST) -> bool:
    """Return whether code calls `shared` or mentions `SHARED`."""
    called = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == "SHARED"]
    return bool(names) or any(isinstance(name, ast.Name) and name.id == "shared" for name in called)


def statements(file: Path) -> dict[str, ast.stmt]:
    """Return the top-level statements of a module but its imports; functions by name, others by line."""
    module = ast.parse(file.read_text()).body
    kept = [node for node in module if not isinstance(node, ast.Import | ast.ImportFrom)]
    return {getattr(node, "name", f"line {node.lineno}"): node for node in kept}


def test_each_use_of_shared_has_a_counterpart() -> None:
    functions = {
        f"{file.relative_to(TESTS).as_posix()}::{name}": node
        for file in sorted(TESTS.rglob("test_*.py"))
        if file != Path(__file__)
        for name, node in statements(file).items()
    }
    assert {name for name, node in functions.items() if names_shared(node)} == set(COUNTERPARTS)
    for counterparts in COUNTERPARTS.values():
        for name in counterparts:
            assert name.split("::")[1].startswith("test_") and not names_shared(functions[name]), name
    assert names_shared(ast.parse("x = shared('a')")) and not names_shared(ast.parse("x = y(shared)"))
