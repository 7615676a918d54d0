"""Row 13: the SSD becomes slow in the middle of a run, or hardly moves for a while. It takes longer, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults import limits
from tests.faults.conftest import Tally
from tests.faults.harness import KINDS, NUM_STEPS, Kind, drives, recover, scaled, seeded
from tests.faults.linux import Disk, cgroup, disk, move, needs_root, throttle
from tests.faults.processes import Fault, launch, nothing, train

pytestmark = [pytest.mark.faults, pytest.mark.row("13 SSD slow, stalled"), needs_root]
DISK_BYTES = 32 * 2**20
SLOW, SLOWER, STALLED = 20 * 10**6, 3 * 10**6, 32 * 2**10
"""bytes per second, each way"""
STALLED_S = 1.5


def check(device: Disk, kind: Kind, name: str, wait: tuple[int, float], rate: int, mutant: Fault = nothing) -> float:
    """How long the rest of the run takes, from the moment on at which its drive is slow."""
    folders = drives(device.at / name)
    with cgroup("blkio", "slow") as group:
        child = launch(train, folders, kind, mutant)
        move(group, child.pid)
        is_running = child.go().let(*wait)
        assert is_running, child.error
        began_s = time.monotonic()
        throttle(group, device.number, rate)
        if rate == STALLED:
            time.sleep(STALLED_S)
            throttle(group, device.number, SLOW)
        assert child.finish() == 0, child.error
        took_s = time.monotonic() - began_s
    assert recover(folders, kind, NUM_STEPS) == NUM_STEPS
    for path in device.at.rglob("store*"):
        path.unlink()
    return took_s


@pytest.mark.parametrize("rate", [SLOW, SLOWER, STALLED])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_slow_drive_costs_time_only(kind: Kind, rate: int, drive: Path, tally: Tally) -> None:
    chance, number, slowed = seeded(f"slow {kind} {rate}"), scaled(10), 0
    with disk(drive, DISK_BYTES) as device:
        usual_s = check(device, kind, "usual", (2, 0.0), 10**12)
        for one in range(number):
            slowed += check(device, kind, str(one), (chance.randrange(2, 4), chance.uniform(0, 0.03)), rate) > usual_s
    if rate != SLOW:  # so small a run may not move enough to feel it
        assert slowed == number
    tally(injected=number, fired=slowed)


def test_a_slow_drive_finds_a_mutant_out(drive: Path, tally: Tally) -> None:
    with disk(drive, DISK_BYTES) as device, pytest.raises(AssertionError, match="StallError"):
        check(device, KINDS[0], "mutant", (2, 0.0), STALLED, limits.lose_patience)
    tally(mutants=1, caught=1)
