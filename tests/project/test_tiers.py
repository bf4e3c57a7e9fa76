"""`make test` has a test of every guarantee of README.md: the table in CONTRIBUTING.md names it."""

from __future__ import annotations

import re

import pytest

from tests.conftest import CASES, ROOT

PLAIN = ("-n0", "-p", "no:cacheprovider", "-p", "no:terminal", "--collect-only")


class Collected:
    """Plugin of pytest that keeps the tests that would run."""

    ids: tuple[str, ...] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = tuple(item.nodeid for item in session.items)


def collected(*arguments: str) -> tuple[str, ...]:
    """Return the tests that pytest would run with the options of `make test` and these arguments."""
    plugin = Collected()
    assert pytest.main([*PLAIN, f"--rootdir={ROOT}", *arguments], plugins=[plugin]) in (0, 5)
    return plugin.ids


def guarantees(text: str) -> list[str]:
    """Return the items of the section on guarantees in README.md."""
    section = text.partition("## Tested guarantees\n")[2].partition("\n## ")[0]
    return [" ".join(item.split()) for item in section.split("\n* ")[1:]]


def rows(text: str) -> dict[str, list[str]]:
    """Return the tests that CONTRIBUTING.md names for each guarantee."""
    table = text.partition("| guarantee of README.md |")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {words: re.findall(r"`([\w/]+\.py::\w+)`", tests) for words, tests in cells}


def missing(named: dict[str, list[str]], listed: list[str]) -> list[str]:
    """Return guarantees without a row, and tests that `make test` does not run."""
    tests = [test for each in named.values() for test in each]
    files = sorted({str(ROOT / "tests" / test.partition("::")[0]) for test in tests})
    default = {test.partition("[")[0].removeprefix("tests/") for test in collected(*files)}
    without = [each for each in listed if not any(each.startswith(words) and named[words] for words in named)]
    return without + [test for test in tests if test not in default]


def test_every_guarantee_has_a_test() -> None:
    named, listed = rows((ROOT / "CONTRIBUTING.md").read_text()), guarantees((ROOT / "README.md").read_text())
    assert len(listed) >= 6
    assert not missing(named, listed)


def test_what_is_missing_is_found() -> None:
    """Negative control: a guarantee without a row, and tests that are further, slow or no tests."""
    further = "project/test_notebooks.py::test_it_runs_in_small"
    assert missing({"Any": [further, "project/test_notebooks.py::test_none"]}, ["Any weather.", "Other"]) == [
        "Other", further, "project/test_notebooks.py::test_none",
    ]  # fmt: skip


def test_cases_of_a_test() -> None:
    """The first cases are in `make test`, the others are further tests."""
    file = str(ROOT / "tests" / "infer" / "scheduling" / "test_buckets.py")
    first, others = (collected(file, *more) for more in ((), ("-m", "further")))
    name = "tests/infer/scheduling/test_buckets.py::test_powers_of_two["
    assert sum(test.startswith(name) for test in first) == CASES
    assert sum(test.startswith(name) for test in others) > 0
    assert not set(first) & set(others)
