"""Row 3: the power goes. ext4 is shut down without its journal while a run writes, and mounted again."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from lohan.errors import LohanError
from tests.faults import mutants
from tests.faults.conftest import Tally
from tests.faults.harness import KINDS, NUM_STEPS, Kind, drives, recover, scaled, seeded
from tests.faults.linux import Disk, disk, needs_root
from tests.faults.processes import Fault, launch, nothing, train

pytestmark = [pytest.mark.faults, pytest.mark.row("3 power cut"), needs_root]
DISK_BYTES = 64 * 2**20
LONGEST_S = 0.08
"""more than a step takes"""


class Machine:
    """A run on a disk that loses power again and again."""

    def __init__(self, device: Disk, kind: Kind, name: str) -> None:
        self.device, self.kind = device, kind
        self._chance = seeded(f"power {name}")
        self._number = 0
        self._start()

    def _start(self) -> None:
        self._number += 1
        self.folders, self.acknowledged = drives(self.device.at / str(self._number)), -1

    def lose_power(self, fault: Fault = nothing) -> bool:
        """Cut the power of a run at a random time, and see what is left. False if it had ended by then."""
        child = launch(train, self.folders, self.kind, fault).go()
        was_running = child.let(self._chance.randrange(4), self._chance.uniform(0, LONGEST_S))
        self.device.cut_power()
        child.send(signal.SIGKILL)
        child.finish()
        self.device.mount_again()
        acknowledged = max(self.acknowledged, child.acknowledged)
        self.acknowledged = recover(self.folders, self.kind, acknowledged) if acknowledged >= 0 else -1
        if self.acknowledged == NUM_STEPS:
            self._start()
        return was_running


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_power_cuts_at_random_times(kind: Kind, drive: Path, tally: Tally) -> None:
    with disk(drive, DISK_BYTES) as device:
        machine, num_fired = Machine(device, kind, str(kind)), 0
        while num_fired < scaled(60 // len(KINDS)):
            num_fired += machine.lose_power()
    tally(injected=num_fired, fired=num_fired)


@pytest.mark.parametrize(
    "mutant", [mutants.leave_records_unflushed, mutants.buffer_and_flush_no_data], ids=lambda m: m.__name__
)
def test_power_cuts_find_mutants_out(mutant: Fault, drive: Path, tally: Tally) -> None:
    with disk(drive, DISK_BYTES) as device:
        machine = Machine(device, KINDS[0], mutant.__name__)
        with pytest.raises((AssertionError, LohanError, OSError)):
            for _ in range(20):
                machine.lose_power(partial(mutant))
    tally(mutants=1, caught=1)
