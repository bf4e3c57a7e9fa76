"""The commands of `aspd data`, their figures, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax.blocks.measures import estimate_tokens, measure
from aspd_jax.blocks.spans import spans_of
from aspd_jax.pipeline.data_report import Report
from aspd_jax.structure import Branch, Parallel, Serial, plain_text
from tests.conftest import ROOT
from tests.helpers.pipeline_data import write_two


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    write_two(folder)
    assert (
        aspd.main(["data", "build", str(folder / "in.jsonl"), "select.min_tokens=20", "--output", str(folder / "out")])
        == 0
    )
    return folder


def test_show(built: Path, capsys: Any) -> None:
    file = str(built / "out" / "structured.jsonl")
    assert aspd.main(["data", "show", file]) == 0
    assert "left out at check: shared result: branch 2 uses 60" in " ".join(capsys.readouterr().out.split())
    page = built / "page.html"
    assert aspd.main(["data", "show", file, "--html", str(page)]) == 0
    text = page.read_text()
    assert "&lt;a&gt;" in text and "<a>" not in text and text.count('class="branch"') == 3 and "shared result" in text
    with (built / "out" / "structured.jsonl").open("ab") as lines:
        lines.write(b'{"messages": NaN}\n\xff\n')
    capsys.readouterr()
    assert aspd.main(["data", "show", file]) == 0
    told = capsys.readouterr()
    assert "left out at check" in told.out and told.err.count("left out: ") == 2
    assert re.search(rf"left out: {re.escape(file)}, line \d+: not UTF-8: byte 0", told.err)


def test_the_report_counts_every_stage_at_which_a_block_fails() -> None:
    code = "".join(file.read_text() for file in (ROOT / "aspd_jax/pipeline").glob("*.py"))
    stages = set(re.findall(r'"stage": "(\w+)"', code)) - {"read"}  # this one drops messages
    report = Report()
    for number, stage in enumerate(sorted(stages), 101):
        report.add([{"stage": stage, "reason": f"of {stage}: x"}] * number, 0)
    text = report.markdown()
    assert {"short", "defect", "select"} <= stages and "| … of defect | 102 |" in text and "of select" not in text
    counts = re.findall(r"\| left out: [^|]+ \| (\d+) \|", text)
    assert sorted(map(int, counts)) == list(range(101, 101 + len(stages)))


@pytest.mark.parametrize(
    ("begin", "efficiency", "speedup"),
    [
        # Names: 2 serial tokens, 4 in the branches and 2 in the titles; 1 + 2 + 2 + 2 x 2 + 1 + 2 + 1 steps.
        ("", 2 / 4, 6 / 13),
        # Leads are part of the branches: 8 tokens, of which 4 are leads; 1 + 2 + 2 + 1 + 4 + 2 + 2 + 1 steps.
        ("{}: ", 4 / 8, 10 / 15),
    ],
)
def test_statistics_of_names_and_leads(begin: str, efficiency: float, speedup: float) -> None:
    named = [("Alpha", "one."), ("Beta", "two.")]
    branches = [Branch(begin.format(name).strip() or name, begin.format(name) + text) for name, text in named]
    structure = (Serial("Two:\n"), Parallel(branches))
    spans = spans_of(structure, "leads" if begin else "names")
    found = Report(answers=[measure(plain_text(structure), spans, estimate_tokens)]).statistics()
    assert (found["PE"], found["ideal_speedup"]) == (efficiency, speedup)


@pytest.mark.parametrize(
    "override, message",
    [
        ("select.max_branches=1", "max_branches"),
        ("select.serial_ratio=-1", "select.serial_ratio: expected at least 0, got -1.0"),
        ("select.max_repetition=.nan", "select.max_repetition: expected at least 0, got nan"),
        ("select.min_token=1", "did you mean 'select.min_tokens'"),
        ("select.tokenizer=none", "none"),
        ("select.tokenizer=tests", "tests: expected a tokenizer"),
    ],
)
def test_mistakes_are_named(built: Path, override: str, message: str, capsys: Any, tmp_path: Path) -> None:
    assert aspd.main(["data", "build", str(built / "in.jsonl"), override, "--output", str(tmp_path / "o")]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("command", ["build", "show"])
def test_a_file_without_a_usable_record_is_an_error(command: str, capsys: Any, tmp_path: Path) -> None:
    file, output = tmp_path / "bad.jsonl", tmp_path / "out"
    file.write_bytes(b"x\n\xff\n")
    arguments = {"build": [str(file), "--output", str(output)], "show": [str(file)]}[command]
    assert aspd.main(["data", command, *arguments]) == 2
    assert "no record can be used; the first: " in (said := capsys.readouterr().err) and "line 1: not JSON" in said


def test_build_names_the_lines_that_it_leaves_out(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"question": "q", "answer": "a"}\nx\n')
    assert not aspd.main(["data", "build", str(file), "--output", str(tmp_path / "out")])
    assert f"{file}, line 2: not JSON" in capsys.readouterr().err
