"""Fixtures of the tests of faults, and the table of what was injected."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import FIRST_STEP, Kind, drives, make_small, on_a_drive
from tests.faults.processes import launch, nothing, train

Tally = Callable[..., None]
Begun = Callable[[Kind], list[Path]]
COLUMNS = ("injected", "fired", "mutants", "caught")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(name): the row of the table of faults that a test counts for")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture
def drive() -> Iterator[Path]:
    with on_a_drive() as folder:
        yield folder


@pytest.fixture(scope="session")
def originals() -> Iterator[Path]:
    """Where `begun` keeps a store of each kind."""
    with on_a_drive() as folder:
        yield folder


@pytest.fixture
def begun(drive: Path, originals: Path) -> Begun:
    """Gives the folders of a run that stands at FIRST_STEP, others each time."""
    numbers = count()

    def copy(kind: Kind) -> list[Path]:
        original = originals / str(kind)
        if not original.exists():
            child = launch(train, drives(original), kind, nothing, FIRST_STEP).go()
            assert child.finish() == 0, child.error
        into = drive / f"begun {next(numbers)}"
        shutil.copytree(original, into)
        return drives(into)

    return copy


@pytest.fixture
def tally(record_property: Callable[[str, Any], None], request: pytest.FixtureRequest) -> Tally:
    """Counts for the table, in the row that the test is marked with: `tally(injected=30, fired=30)`."""
    row = next(request.node.iter_markers("row")).args[0]

    def count(**counts: int) -> None:
        assert not set(counts) - set(COLUMNS)
        record_property("faults", (row, counts))

    return count


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A report knows its row, whether or not the test came to count anything."""
    for marker in item.iter_markers("row"):
        if ("row", marker.args[0]) not in item.user_properties:
            item.user_properties.append(("row", marker.args[0]))
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Row by row: how many faults were injected, how many were seen to happen, and how many tests failed."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys((*COLUMNS, "tests", "failed"), 0))
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = [value for name, value in getattr(report, "user_properties", ()) if name == "faults"]
            for row in [value for name, value in getattr(report, "user_properties", ()) if name == "row"]:
                rows[row]["tests"] += 1
                rows[row]["failed"] += outcome != "passed"
            for row, counts in properties:
                for column, number in counts.items():
                    rows[row][column] += number
    if rows:
        columns = (*COLUMNS, "tests", "failed")
        terminalreporter.section("faults: what was injected, and what of it was lost or not noticed is a failed test")
        terminalreporter.write_line("| row | " + " | ".join(columns) + " |")
        terminalreporter.write_line("|---|" + "---|" * len(columns))
        for row in sorted(rows, key=_number_of):
            terminalreporter.write_line(f"| {row} | " + " | ".join(str(rows[row][c]) for c in columns) + " |")


def _number_of(row: str) -> tuple[int, str]:
    digits = row.split()[0]
    return (int(digits) if digits.isdigit() else 99, row)
