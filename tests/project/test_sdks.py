"""Client libraries against a server of the embedded model: all get the text that plain HTTP gets (`make test-sdks`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from aspd_jax import load_model
from infer import Engine
from tests.conftest import ROOT
from tests.helpers.serving import Running, serving

PYTHON = ROOT / ".venv-sdks" / "bin" / "python"
FOLDER = ROOT / "tests" / "sdks"
QUESTION = "Price each line.\n3 pens at $20"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(Engine(load_model("demo"), max_length=1024, max_batch=2)) as running:
        yield running


def texts(server: Running, command: list[str | Path]) -> list[str]:
    done = subprocess.run([*command, f"{server.url}/v1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def check(server: Running, found: list[str]) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    plain = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert found == [plain["choices"][0]["message"]["content"]] * len(found)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("openai", 4),
        ("langchain", 4),
        ("litellm", 2),
        ("instructor", 0),
        ("pydantic_ai", 2),
        ("agents", 2),
        ("llm", 2),
    ],
)
def test_python(server: Running, name: str, count: int) -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON.parent.parent.name} is not there; make test-sdks installs it")
    found = texts(server, [PYTHON, FOLDER / "clients.py", name])
    assert len(found) == count
    check(server, found)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("instructor", 1),
        ("pydantic_ai", 2),
        ("langchain", 2),
        ("litellm", 1),
        ("agents", 4),
        ("llm", 0),
    ],
)
def test_tools_of_python(server: Running, name: str, count: int) -> None:
    """Check tools in the default mode of each library; arguments follow their schema."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON.parent.parent.name} is not there; make test-sdks installs it")
    assert texts(server, [PYTHON, FOLDER / "clients.py", f"tools_of_{name}"]) == ["called"] * count


def test_tools_of_node(server: Running) -> None:
    if shutil.which("node") is None or not (FOLDER / "node_modules").exists():
        pytest.skip("node, or tests/sdks/node_modules, is not there; make test-sdks installs the packages")
    found = texts(server, ["node", FOLDER / "clients.mjs", "ai_tools"])
    assert found and set(found) == {"called"}


@pytest.mark.parametrize(("name", "count"), [("openai", 4), ("ai", 6)])
def test_node(server: Running, name: str, count: int) -> None:
    if shutil.which("node") is None or not (FOLDER / "node_modules").exists():
        pytest.skip("node, or tests/sdks/node_modules, is not there; make test-sdks installs the packages")
    found = texts(server, ["node", FOLDER / "clients.mjs", name])
    assert len(found) == count
    check(server, found)
