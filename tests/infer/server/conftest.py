"""Fixtures: tests of the server ask the engine behind it."""

from __future__ import annotations

import pytest

from infer import Engine


@pytest.fixture(scope="module")
def engine(demo_engine: Engine) -> Engine:
    """The engine of `server`."""
    return demo_engine
