"""Fixtures of the tests of the pipeline: files of conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.pipeline_data import write_source, write_two


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return write_two(tmp_path)
