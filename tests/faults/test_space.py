"""Row 8: a full disk. What does not fit is refused before anything is made; what fits never meets a full disk in a step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import limits
from tests.faults.conftest import Tally
from tests.faults.harness import FIRST_STEP, KINDS, Kind, drives, recover, scaled
from tests.faults.linux import Disk, disk, needs_root
from tests.faults.processes import Fault, launch, nothing

pytestmark = [pytest.mark.faults, pytest.mark.row("8 disk full"), needs_root]
DISK_BYTES = 32 * 2**20
LAST_STEP = FIRST_STEP + 2
REFUSED = r"OptionError: ssd='/.*': \d+ bytes are needed( on its drive)?, \d+ are free.*\. Free space there"
SINGLE = Kind("defer", "single")
MODES = [*KINDS[:1], *KINDS[-1:], SINGLE]
GRAIN_BYTES = 2**16


@contextmanager
def left_free(device: Disk, nbytes: int) -> Iterator[None]:
    """Others have taken all but so much of the disk."""
    filler = device.at / "filler"
    with filler.open("wb") as file:
        if (taken := device.free_bytes - nbytes) > 0:
            os.posix_fallocate(file.fileno(), 0, taken)
    try:
        yield
    finally:
        filler.unlink()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []


def check(device: Disk, kind: Kind, free_bytes: int, mutant: Fault = nothing, store: str | None = None) -> str | None:
    """Whether a run begins with so much free, and in which mode: it goes through then; otherwise nothing is left of it."""
    folder = device.at / "run"
    with left_free(device, free_bytes):
        child = launch(limits.train_foreseen, drives(folder), kind, LAST_STEP, mutant, store).go()
        code, error = child.finish(), child.error
        if code == 0:
            mode: str = next(value for what, value in child.told if what == "mode")
        else:
            assert code == 1 and re.match(REFUSED, error), error
            assert not [what for what, _ in child.told if what == "committed"], "it began"
            assert not files_in(folder)
    if code == 0:
        assert recover(drives(folder), Kind(kind.update, mode), LAST_STEP) == LAST_STEP
        for path in files_in(folder):
            path.unlink()
    return mode if code == 0 else None


def needed_bytes(device: Disk, kind: Kind, store: str | None = None) -> int:
    """The least that is enough, to a grain: halved and halved again."""
    too_little, enough = GRAIN_BYTES, DISK_BYTES // 2
    while enough - too_little > GRAIN_BYTES:
        middle = (enough + too_little) // 2
        if check(device, kind, middle, store=store) is None:
            too_little = middle
        else:
            enough = middle
    return enough


@pytest.mark.parametrize("kind", MODES, ids=str)
def test_what_does_not_fit_is_refused_and_what_fits_goes_through(kind: Kind, drive: Path, tally: Tally) -> None:
    number = scaled(100)
    with disk(drive, DISK_BYTES) as device:
        needed = needed_bytes(device, kind)
        assert needed < DISK_BYTES // 2
        swept = [needed * one // number for one in range(1, number)]
        # Around the least that is enough, where what filesystems keep for themselves matters.
        swept += [needed + one * 4096 for one in range(-number, number)]
        outcomes = [check(device, kind, free_bytes) for free_bytes in swept]
    begun = sum(outcome is not None for outcome in outcomes)
    assert 0 < begun < len(swept)
    tally(injected=len(swept), fired=len(swept) - begun)


def test_auto_takes_the_log_where_two_places_do_not_fit(drive: Path, tally: Tally) -> None:
    kind = KINDS[-1]  # its plan suits both modes
    with disk(drive, DISK_BYTES) as device:
        log, double = needed_bytes(device, kind, "log"), needed_bytes(device, kind, "double")
        assert log + 4 * GRAIN_BYTES < double
        assert check(device, kind, log - 2 * GRAIN_BYTES, store="auto") is None
        assert check(device, kind, log + 2 * GRAIN_BYTES, store="auto") == "log"
        assert check(device, kind, double - 2 * GRAIN_BYTES, store="auto") == "log"
        assert check(device, kind, double + 2 * GRAIN_BYTES, store="auto") == "double"
    tally(injected=3, fired=3)


@pytest.mark.parametrize("mutant", [limits.reserve_nothing, limits.leave_files], ids=lambda mutant: mutant.__name__)
def test_full_disks_find_mutants_out(mutant: Fault, drive: Path, tally: Tally) -> None:
    kind = KINDS[0]
    with disk(drive, DISK_BYTES) as device:
        needed = needed_bytes(device, kind)
        for share in (0.5, 0.8, 0.9):
            try:
                check(device, kind, int(needed * share), mutant)
            except (AssertionError, OSError):
                tally(mutants=1, caught=1)
                return
    raise AssertionError("no full disk finds this mutant out")
