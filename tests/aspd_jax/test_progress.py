"""Progress on standard error: what a wait shows on a terminal and in a log."""

from __future__ import annotations

import io
import re
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from aspd_jax import progress
from aspd_jax.progress import Bar, waiting
from tests.helpers.serving import wait_for


class Terminal(io.StringIO):
    """Text that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report after fractions of a second."""
    monkeypatch.setattr(progress, "SILENT", 0.05)
    monkeypatch.setattr(progress, "LINES", (0.05, 0.05))
    monkeypatch.setattr(progress, "EVERY", 0.05)


def test_a_short_wait_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        with waiting("loading"):
            pass
        with waiting("loading", show=False):
            time.sleep(0.2)
        assert stream.getvalue() == ""


def test_a_wait_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the lines, and that the programs that were compiled meanwhile are counted."""
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with waiting("answering"):
        jax.jit(lambda x: jnp.tanh(x) + 12345).lower(jnp.ones(3)).compile()
        assert wait_for(lambda: "compiled" in stream.getvalue(), 20)
    lines = stream.getvalue().splitlines()
    assert all(re.fullmatch(r"answering: \d+ s(, [1-9]\d* programs? compiled)?", line) for line in lines)


def test_a_wait_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that its line is erased, also after an error."""
    monkeypatch.setattr(sys, "stderr", stream := Terminal())

    def fail() -> None:
        with waiting("loading"):
            assert wait_for(stream.getvalue, 20)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert "loading: 0 s" in stream.getvalue() and "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a bar in a log is lines with the counts, the last one at the end."""
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    assert list(Bar(range(3), desc="tasks", unit="task")) == [0, 1, 2]
    first, *_, last = filter(None, stream.getvalue().splitlines())
    assert first.startswith("tasks: 0 of 3") and last.startswith("tasks: 3 of 3") and "\r" not in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    assert list(Bar(range(3), desc="tasks")) == [0, 1, 2]
    assert "\r" in stream.getvalue() and "3/3" in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    assert list(Bar(range(3), disable=True)) == [0, 1, 2] and not stream.getvalue()
