"""fork() and other programs while O_DIRECT reads and writes are under way: not a byte changes.

A fork marks the pages of a process copy-on-write. A read under way would land in pages that are no longer the ones that the
process sees, so pools are not inherited.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.faults import limits
from tests.faults.conftest import Tally
from tests.faults.harness import KINDS, NUM_STEPS, Kind, drives, open_run, recover, scaled
from tests.faults.processes import Fault, Tell, launch, nothing
from tests.parity.harness import steps

pytestmark = [pytest.mark.faults, pytest.mark.row("forks during O_DIRECT traffic")]
Start = Callable[[], None]


def fork() -> None:
    """A child that ends at once, without a word to anybody."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def fork_and_write() -> None:
    """A child that touches all the memory that it can see of its parent's."""
    pid = os.fork()
    if pid == 0:
        _ = [bytes(1000) for _ in range(1000)]
        os._exit(0)
    os.waitpid(pid, 0)


def run_program() -> None:
    subprocess.run(["true"], check=True)


def run_process() -> None:
    process = get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()
    assert process.exitcode == 0


STARTS: list[Start] = [fork, fork_and_write, run_program, run_process]


def train_in_company(tell: Tell, folders: Sequence[Path], kind: Kind, start: Start, fault: Fault) -> None:
    """The run again and again, with children all the time; says how many there were, and what of its memory they inherited."""
    fault()
    num_started, is_done = 0, threading.Event()

    def beget() -> None:
        nonlocal num_started
        while not is_done.is_set():
            start()
            num_started += 1

    with open_run(folders, kind) as engine:
        thread = threading.Thread(target=beget)
        thread.start()
        try:
            for one in steps()[engine.num_steps : NUM_STEPS]:
                tell("committed", engine.step(one).committed_step)
            tell("inherited", inherited(engine))
        finally:
            is_done.set()
            thread.join()
    tell("committed", NUM_STEPS)
    tell("started", num_started)


def inherited(engine: object) -> int:
    """Pools that a child would have: their mappings are not marked as this process's own (`dc`)."""
    memory = engine._memory  # type: ignore[attr-defined]
    starts = [arena.data_ptr() for pool in [*memory._pools, memory._moving] if pool is not None for arena in pool.arenas]
    assert starts
    marks: dict[tuple[int, int], bool] = {}
    where = (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = first.split("-")
            where = int(low, 16), int(high, 16)
        elif first == "VmFlags:":
            marks[where] = "dc" in line.split()
    return sum(not kept for (low, high), kept in marks.items() if any(low <= start < high for start in starts))


def check(folders: list[Path], kind: Kind, start: Start, fault: Fault = nothing) -> int:
    child = launch(train_in_company, folders, kind, start, fault).go()
    assert child.finish() == 0, child.error
    assert recover(folders, kind, NUM_STEPS) == NUM_STEPS
    told = dict(child.told)
    assert told["inherited"] == 0
    return int(told["started"])


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_children_change_no_byte(start: Start, drive: Path, tally: Tally) -> None:
    number = 0
    for one in range(scaled(40)):
        number += check(drives(drive / str(one)), KINDS[one % len(KINDS)], start)
    assert number
    tally(injected=number, fired=number)


def test_children_find_a_mutant_out(drive: Path, tally: Tally) -> None:
    with pytest.raises(AssertionError):
        check(drives(drive / "run"), KINDS[0], fork, limits.share_with_children)
    tally(mutants=1, caught=1)
