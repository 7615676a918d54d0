"""Rows 1 and 3, for what `lohan train` keeps beside its store: the log has every step that the store has, once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import limits
from tests.faults.conftest import Tally
from tests.faults.harness import scaled, seeded
from tests.faults.linux import Disk, disk, needs_root
from tests.faults.processes import Child, Fault, nothing
from tests.faults.runs import Curve, TrainRun, make_place
from tests.faults.test_signals import HOST_MEMORY, NUM_STEPS, STEP_S

pytestmark = [pytest.mark.faults, needs_root]
DISK_BYTES = 64 * 2**20
Cut = Callable[[Disk, Child], None]


@pytest.fixture
def clean(drive: Path) -> Curve:
    run = new_run(drive / "clean", make_place(drive / "place"))
    assert run.start().finish() == 0, run.told
    return run.curve


def new_run(folder: Path, place: Path, store: str = "double") -> TrainRun:
    run = TrainRun(folder, place, max_steps=NUM_STEPS, host_memory=HOST_MEMORY, store=store)
    run.screen = place / "screen"
    return run


def cut_power(device: Disk, child: Child) -> None:
    device.cut_power()
    child.send(signal.SIGKILL)
    child.finish()
    device.mount_again()


def kill(device: Disk, child: Child) -> None:
    child.send(signal.SIGKILL)
    child.finish()


@pytest.fixture
def device(drive: Path) -> Iterator[Disk]:
    with disk(drive, DISK_BYTES) as made:
        yield made


def check(device: Disk, cut: Cut, run: TrainRun, clean: Curve, name: str, number: int, mutant: Fault = nothing) -> int:
    """A run that ends early so many times has its whole log in the end."""
    chance, num_fired = seeded(f"logs {name}"), 0
    for _ in range(number):
        child = run.start(mutant)
        run.wait_for_steps(min(NUM_STEPS - 1, run.num_steps + chance.randrange(2, 8)), child)
        child.process.join(chance.uniform(0, STEP_S))
        num_fired += child.process.is_alive()
        cut(device, child)
        if num_fired == number or run.num_steps == NUM_STEPS:
            break
    assert run.start().finish() == 0, run.told
    assert [step for step, *_ in run.curve] == list(range(1, NUM_STEPS + 1))
    assert run.curve == clean
    return num_fired


CUTS = [
    pytest.param(kill, marks=pytest.mark.row("1 kill -9 at random times")),
    pytest.param(cut_power, marks=pytest.mark.row("3 power cut")),
]


@pytest.mark.parametrize("store", ["double", "log"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_the_log_has_every_step(cut: Cut, store: str, device: Disk, clean: Curve, drive: Path, tally: Tally) -> None:
    num_fired = 0
    for one in range(scaled(20)):
        run = new_run(device.at / f"{cut.__name__} {one}", drive / "place", store)
        num_fired += check(device, cut, run, clean, f"{cut.__name__} {store} {one}", 4)
    tally(injected=num_fired, fired=num_fired)


@pytest.mark.row("3 power cut")
def test_power_cuts_find_a_mutant_out(device: Disk, clean: Curve, drive: Path, tally: Tally) -> None:
    with pytest.raises(AssertionError):
        run = new_run(device.at / "mutant", drive / "place")
        check(device, cut_power, run, clean, "mutant", 4, limits.leave_log_unflushed)
    tally(mutants=1, caught=1)
