"""Fixtures: a server of the embedded model, for tests that send requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aspd_jax import load_model
from infer import Engine
from tests.conftest import with_whole_rows
from tests.helpers.serving import Running, serving


@pytest.fixture(scope="module")
def demo_engine() -> Engine:
    """An engine of the embedded model."""
    return with_whole_rows(Engine(load_model("demo"), max_length=1024, max_batch=2))


@pytest.fixture(scope="module")
def server(demo_engine: Engine) -> Iterator[Running]:
    """A server of `demo_engine`."""
    with serving(demo_engine) as running:
        yield running
