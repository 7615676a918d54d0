"""Fixtures of the conformance suites."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drive() -> Iterator[Path]:
    """An empty folder on the drive that holds the checkout: /tmp may be tmpfs, which is no drive."""
    scratch = ROOT / ".bench"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        yield Path(folder)
