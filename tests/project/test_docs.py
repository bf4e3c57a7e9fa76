"""Commands in README and docs/: `aspd` parses them, and they run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax.formats import find_model
from tests.conftest import ROOT
from tests.helpers.tasks import problem

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# Too long for a test, even in small; they are taken apart here, and run small by tests of their own.
ELSEWHERE = {
    "aspd data build answers.jsonl --config configs/smollm2": "test_pipeline.py",
    "aspd convert": "test_export.py",
    "aspd generate --model DIR --adapter": "test_peft_adapters.py",
    "aspd generate --model smollm2": "test_batch.py",
    "aspd generate --model smollm2-aspd --drafts": "test_speculation.py",
    "aspd generate --model DIR --mesh": "test_engine.py",
    "aspd ablate": "test_cli.py",
    "aspd bench": "test_benchmark.py",
    "aspd demo": "test_cli.py",
    "aspd eval": "test_evaluation.py",
    "aspd export": "test_cli.py",
    "aspd proxy": "test_proxy.py",
    "aspd serve": "test_server.py",
}
TINY = ["model.checkpoint=DIR", "data.train=train.jsonl", "steps=1", "data.rows=8", "data.length=256"]
TINY += ["optimiser.accumulate=1", "evaluate_batches=0", "model.dtype=float32"]
# What makes a command small enough, after its own words.
SMALLER = {
    "aspd train": TINY,
    "aspd generate": ["--model", "demo", "--max-new-tokens", "8", "--max-length", "1024", "--batch", "1"],
}
LIST = "Tea differs by how its leaves are treated.\n\n" + "\n".join(
    f"{number}. **{name}**: {text}"
    for number, (name, text) in enumerate(
        [
            (
                "Green tea",
                "The leaves are heated soon after picking, so the taste stays fresh and a little grassy. " * 3,
            ),
            (
                "Oolong",
                "Bruised leaves oxidise in part; flavours run from flowers to roasted nuts and stone fruit. " * 3,
            ),
            (
                "Black tea",
                "Full oxidation brings out malt and dried fruit, and it takes boiling water and some milk. " * 3,
            ),
        ],
        1,
    )
)


def commands_of(page: Path) -> Iterator[str]:
    """Commands in the indented blocks of a page; quotes may run over lines."""
    lines = iter(page.read_text().splitlines())
    for line in lines:
        if not line.startswith("    aspd "):
            continue
        while line.count('"') % 2:
            line += "\n" + next(lines)
        yield re.sub(r"\s+# .*$", "", line.strip())


COMMANDS = [(page.name, command) for page in PAGES for command in commands_of(page)]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 40 and {name for name, _ in COMMANDS} >= {"README.md", "data.md", "serving.md"}
    for start, file in ELSEWHERE.items():
        assert [*(ROOT / "tests").rglob(file)], file
        assert any(command.startswith(start) for _, command in COMMANDS) or start == "aspd demo"


def missing_links(page: Path, text: str) -> list[str]:
    """Return the relative links of a page that lead to no file."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    return [link for link in links if not (page.parent / link).exists()]


def missing_tests(text: str) -> list[str]:
    """Return the test files, by the end of their path, and the tests `file.py::name` of a page that do not exist."""
    sources = {f"/{file.relative_to(ROOT)}": file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    cited = re.findall(r"([\w/]*\btest_\w+\.py)(?:::(test_\w+))?", text)

    def exists(end: str, name: str) -> bool:
        defined = f"def {name}(" if name else "def "
        return any(path.endswith(f"/{end}") and defined in source for path, source in sources.items())

    return [f"{end}::{name}" for end, name in cited if not exists(end, name)]


@pytest.mark.default_cases(100)
@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CHANGELOG", "SECURITY"))],
    ids=lambda page: page.name,
)  # fmt: skip
def test_links_and_cited_tests_exist(page: Path) -> None:
    text = page.read_text()
    assert not missing_links(page, text) and not missing_tests(text)


def test_missing_links_and_tests_are_found() -> None:
    """Negative control, and every cell of the support matrix has a test to name."""
    assert missing_links(PAGES[0], "[a](none.md#part) [b](README.md#c) [d](https://example.org/x)") == ["none.md"]
    cited = "`test_docs.py::test_links`, `tests/test_none.py`, `test_docs.py`, `infer/test_docs.py::test_there`"
    assert missing_tests(cited) == [
        "test_docs.py::test_links", "tests/test_none.py::", "infer/test_docs.py::test_there",
    ]  # fmt: skip
    assert (ROOT / "docs" / "support.md").read_text().count("::test_") > 40


def uncited(files: Iterable[str], texts: str) -> list[str]:
    """Return the files that no text names, by themselves or by their folder, which ends with a slash."""
    return [file for file in files if file not in texts and f"{file.rpartition('/')[0]}/`" not in texts]


def test_every_result_is_cited() -> None:
    """Check that a page names each file of results/; negative control: a file that none names."""
    texts = "".join(page.read_text() for page in PAGES)
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [file for file in listed.stdout.split() if (ROOT / file).exists()]
    assert files and not uncited(files, texts)
    assert uncited(["results/none.jsonl"], texts) == ["results/none.jsonl"]


def test_smollm2_is_named_with_its_file() -> None:
    """Check that pages with figures of SmolLM2 say that they are of its Q4_1 file."""
    for page in PAGES:
        assert "SmolLM2-135M" not in (text := page.read_text()) or "Q4_1" in text, page.name


@pytest.mark.default_cases(100)
@pytest.mark.parametrize("command", sorted({command for _, command in COMMANDS}))
def test_commands_are_taken(command: str) -> None:
    options = aspd.build_parser().parse_args(shlex.split(command)[1:])
    assert callable(options.run)


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Path:
    """A folder with what the pages name: a checkpoint, answers, prompts, a trained run."""
    folder: Path = tmp_path_factory.mktemp("docs")
    (folder / "DIR").symlink_to(find_model("demo"))
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "model").symlink_to(find_model("demo"))
    record = {"question": "How do kinds of tea differ?", "answer": LIST}
    (folder / "FILE.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "Once upon"}\n')
    some = [problem(number, True) for number in range(16)]
    (folder / "train.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": one.question}], "answer": one.answer}) + "\n"
            for one in some
        )
    )
    return folder


@pytest.mark.further
def test_commands_work(place: Path, monkeypatch: Any, capsys: Any) -> None:
    """Run the commands in the order of the pages, each with its own output folder."""
    monkeypatch.chdir(place)
    ran: set[tuple[str, ...]] = set()
    for number, (page, command) in enumerate(COMMANDS):
        if any(command.startswith(start) for start in ELSEWHERE):
            continue
        words = shlex.split(command)[1:]
        more = next((more for start, more in SMALLER.items() if command.startswith(start)), [])
        if words[0] == "train" and "--plan" not in words:
            own = [word for word in words[2:] if "=" in word and not word.startswith(("model.", "data."))]
            words = [*words[:2], *own, *more]
        elif words[0] == "generate":
            words = [*words, *more]
        if tuple(words) in ran:  # also of commands that differ in what is made small
            continue
        ran.add(tuple(words))
        if words[0] == "train" and "--plan" not in words:
            words += ["--output", f"runs/{number}"]
        code = aspd.main([word.replace("answers.jsonl", f"answers{number}.jsonl") for word in words])
        said = capsys.readouterr()
        assert code == 0, f"{page}: {command}\n{said.err}"
    kinds = {" ".join(words[: 1 + (words[0] == "data")]) for words in ran}
    assert kinds == {"data build", "data show", "generate", "train"}, "what the pages run and `ELSEWHERE` does not"
