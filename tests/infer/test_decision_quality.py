"""Figures of decisions on JevBench: computed by hand, and those on the page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.helpers.decision_quality import calibration_error, read, rows, table

pytestmark = pytest.mark.further
RESULTS = sorted((ROOT / "results" / "decisions").glob("*.jsonl"))


def record(right: int, *orders: list[float], prior: list[float]) -> dict[str, Any]:
    """A predicate with these probabilities of true and false in each order."""
    main, neutral = np.log(orders).tolist(), np.log([prior] * len(orders)).tolist()
    return {"id": "x", "name": "q", "asked": {"type": "noul"}, "right": right, "main": main, "prior": neutral}


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.decision_quality.LEAST", 1)
    records = [
        record(0, [0.8, 0.2], [0.3, 0.7], prior=[0.5, 0.5]),
        record(1, [0.6, 0.4], [0.1, 0.9], prior=[0.5, 0.5]),
    ]
    given, turned, orders, prior = rows(records)
    assert [cell.split(" ")[0] for cell in (given[2], turned[2], orders[2])] == ["50", "50", "100"]
    assert (
        given[0] == "2 predicates (chance 50 %)" and turned[3] == "100 %" and given[3] == "" and prior[2:] == orders[2:]
    )
    assert given[4] == "1.00" and given[5] == f"{-(np.log(0.8) + np.log(0.4)) / 2:.2f}"
    assert given[6] == f"{(0.2 + 0.6) / 2:.2f}"
    biased = [record(0, [0.4, 0.6], [0.4, 0.6], prior=[0.2, 0.8])]
    assert [row[2].split(" ")[0] for row in rows(biased)] == ["0", "0", "0", "100"], "the prior is divided out"


def test_calibration_error() -> None:
    hits, confidence = np.asarray([True, False] * 50), np.full(100, 0.5)
    assert calibration_error(confidence, hits) == pytest.approx(0)
    assert calibration_error(confidence + 0.3, hits) == pytest.approx(0.3), "negative control"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_page_has_the_figures_of_the_results(file: Any) -> None:
    page = (ROOT / "docs" / "decisions.md").read_text()
    assert table(read(file)) in page
    predicates, choices = (row[2].partition(" (")[0] for row in rows(read(file)) if row[1] == "`orders`")
    readme = " ".join((ROOT / "README.md").read_text().split())
    shown = f"{choices} of 33 choices and {predicates} of 128" if "1.5b" in file.stem else f"{choices} and {predicates}"
    assert shown in readme
