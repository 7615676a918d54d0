"""Bits that flip on the drive in the middle of a run are met by the step that reads them, in every plane of a unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lohan import Engine
from lohan.run.ssd_map import Expected
from lohan.ssd.checked import CheckedStore, ChecksumError
from tests.parity.harness import steps
from tests.parity.test_resume import open_run

PLANES = ["weights", "plane 1 of the state", "plane 2 of the state", "plane 3 of the state"]


def flip(engine: Engine, folder: Path, plane: int) -> None:
    """One bit of the last grain of a plane that the next step reads from the drive."""
    storage: Any = engine._storage
    preparer = engine._ready().preparer
    plan = preparer.adopt().plan
    unit = next(
        u
        for u, one in enumerate(plan.units)
        if preparer.shape.units[u].trainable_elements and one.weights.value == one.state.value == "ssd"
    )
    extent = list(storage.places.extents(storage.places.now[unit]))[plane]
    with (folder / "store").open("r+b") as file:
        file.seek(extent.address + extent.nbytes - 1)
        byte = file.read(1)[0]
        file.seek(extent.address + extent.nbytes - 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("plane", range(len(PLANES)), ids=PLANES)
@pytest.mark.parametrize("update", ["speculate", "defer"])
def test_a_flipped_bit_ends_the_step_that_reads_it(update: str, plane: int, tmp_path: Path) -> None:
    with pytest.raises(ChecksumError, match=PLANES[plane]), open_run([tmp_path], update) as engine:
        engine.step(steps()[0])
        engine.drain()
        flip(engine, tmp_path, plane)
        for one in steps()[1:3]:
            engine.step(one)


@pytest.mark.parametrize("plane", range(len(PLANES)), ids=PLANES)
def test_without_the_comparison_nobody_would_notice(plane: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is compared by its update, weights by the store: each mutant misses what only it looks at."""
    if plane:
        monkeypatch.setattr(Expected, "compare", lambda *_: None)
    else:
        monkeypatch.setattr(CheckedStore, "verify", lambda *_: None)
    with open_run([tmp_path], "defer") as engine:
        engine.step(steps()[0])
        engine.drain()
        flip(engine, tmp_path, plane)
        for one in steps()[1:3]:
            engine.step(one)
