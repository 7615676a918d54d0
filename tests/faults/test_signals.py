"""Row 14: signals at random times, to `lohan train`. A step is finished or was never made, and the same command goes on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lohan.ssd.durable import find_run
from tests.faults import limits
from tests.faults.conftest import Tally
from tests.faults.harness import on_a_drive, scaled, seeded
from tests.faults.processes import Child, Fault
from tests.faults.runs import Curve, TrainRun, eventually, make_place

pytestmark = [pytest.mark.faults, pytest.mark.row("14 signals at random times")]
NUM_STEPS = 60
LEAVES_S = 5.0
"""within which the second signal ends a run, whatever it does"""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HOST_MEMORY = "2MiB"
"""too little to keep the model: steps read and write"""
STEP_S = 0.03


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with on_a_drive() as folder:
        yield make_place(folder)


@pytest.fixture(scope="module")
def clean(place: Path) -> Curve:
    """Without a signal."""
    run = new_run(place, "clean")
    assert run.start().finish() == 0, run.told
    assert run.num_steps == NUM_STEPS
    return run.curve


def new_run(place: Path, name: str, store: str = "double") -> TrainRun:
    return TrainRun(place / name, place, max_steps=NUM_STEPS, host_memory=HOST_MEMORY, store=store)


def durable_step(run: TrainRun) -> int:
    """What the store would come back to, without an update to be made again."""
    commit = find_run([run.folder / "store"])
    return -1 if commit is None or commit.redo is not None or not commit.whole else commit.step


def check_ended(run: TrainRun, code: int) -> bool:
    """Whether it was interrupted; what it says is on disk is on disk."""
    if code != 130:
        # The last thing that it says: from then on nobody waits for signals any more.
        assert code == 0 or "look back" in run.told, f"{code}: {run.told}"
        return False
    if match := re.search(r"interrupted: (\d+) of", run.told):
        assert durable_step(run) == run.num_steps == int(match[1])
    else:
        assert "lohan train: interrupted" in run.told
    return True


@pytest.mark.parametrize("store", ["double", "log"])
@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_one_signal(number: signal.Signals, store: str, place: Path, clean: Curve, tally: Tally) -> None:
    chance, num_fired, runs = seeded(f"{number} {store}"), 0, 0
    run: TrainRun | None = None
    while num_fired < scaled(50):
        if run is None or run.num_steps == NUM_STEPS:
            runs += 1
            run = new_run(place, f"{number.name} {store} {runs}", store)
        child = run.start()
        if chance.random() < 0.8:
            run.wait_for_steps(run.num_steps + chance.randrange(1, 12), child)
        time.sleep(chance.uniform(0, STEP_S))
        child.send(number)
        num_fired += check_ended(run, child.finish())
    assert run is not None and run.start().finish() == 0, run and run.told
    assert run.curve == clean
    tally(injected=num_fired, fired=num_fired)


def leave_at_once(child: Child, pause_s: float) -> float:
    """Two signals; how long the second took to end it."""
    child.send(signal.SIGINT)
    time.sleep(pause_s)
    began_s = time.monotonic()
    child.send(signal.SIGTERM)
    child.process.join(2 * LEAVES_S)
    return time.monotonic() - began_s


@pytest.mark.parametrize("store", ["double", "log"])
def test_two_signals_leave_at_once(store: str, place: Path, clean: Curve, tally: Tally) -> None:
    chance, number, run = seeded(f"twice {store}"), scaled(50), new_run(place, f"twice {store}", store)
    num_fired = 0
    for _ in range(number):
        if run.num_steps == NUM_STEPS:
            run = new_run(place, f"twice {store} {num_fired}", store)
        child = run.start()
        run.wait_for_steps(run.num_steps + chance.randrange(6), child)
        took_s = leave_at_once(child, chance.uniform(0, STEP_S / 2))
        assert took_s < LEAVES_S
        assert child.finish() in (130, 0)
        num_fired += "left at once" in run.told
    assert run.start().finish() == 0, run.told
    assert run.curve == clean
    tally(injected=number, fired=num_fired)


def check_long_step(run: TrainRun, fault: Fault) -> None:
    child = run.start(fault)
    eventually(lambda: "step 1/" in run.told, "begin a step")
    try:
        assert leave_at_once(child, 0.5) < LEAVES_S
        assert child.finish() == 130 and "left at once" in run.told
    finally:
        child.process.kill()


def test_two_signals_leave_a_long_step(place: Path, clean: Curve, tally: Tally) -> None:
    run = new_run(place, "long")
    check_long_step(run, limits.drag)
    assert run.start().finish() == 0, run.told
    assert run.curve == clean
    tally(injected=1, fired=1)


def test_long_steps_find_a_mutant_out(place: Path, tally: Tally) -> None:
    with pytest.raises(AssertionError):
        check_long_step(new_run(place, "mutant"), limits.never_leave)
    tally(mutants=1, caught=1)


@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGKILL], ids=lambda end: end.name if end else "go on")
def test_a_pause(end: signal.Signals | None, place: Path, clean: Curve, tally: Tally) -> None:
    """All is on disk in it, nothing is done, and it ends as one likes."""
    name = end.name if end else "on"
    chance, run = seeded(f"pause {name}"), new_run(place, f"pause {name}")
    child, num_fired = run.start(), 0
    for _ in range(scaled(30)):
        run.wait_for_steps(min(NUM_STEPS - 5, run.num_steps + chance.randrange(1, 4)), child)
        before = run.told.count("paused after step")
        child.send(signal.SIGUSR1)
        eventually(lambda: run.told.count("paused after step") > before, "pause")  # noqa: B023
        paused_at = run.num_steps
        time.sleep(0.2)
        assert run.num_steps == paused_at == durable_step(run)
        assert f"paused after step {paused_at}: kill -USR1 {child.pid} goes on" in run.told
        num_fired += 1
        if end is not None:
            child.send(end)
            assert child.finish() == (130 if end is signal.SIGINT else -end)
            assert run.num_steps == paused_at
            child = run.start()
            continue
        child.send(signal.SIGUSR1)
        eventually(lambda: run.num_steps > paused_at, "go on")  # noqa: B023
        if paused_at >= NUM_STEPS - 5:
            break
    assert child.finish() == 0, run.told
    assert run.curve == clean
    tally(injected=num_fired, fired=num_fired)


def test_a_process_that_is_stopped_and_goes_on(place: Path, clean: Curve, tally: Tally) -> None:
    chance, run, num_fired = seeded("stop"), new_run(place, "stopped"), 0
    child = run.start()
    while child.process.is_alive() and num_fired < scaled(100):
        time.sleep(chance.uniform(0, STEP_S))
        child.send(signal.SIGSTOP)
        time.sleep(chance.uniform(0, 0.2))
        child.send(signal.SIGCONT)
        num_fired += 1
    assert child.finish() == 0, run.told
    assert run.curve == clean
    tally(injected=num_fired, fired=num_fired)


def test_the_program_itself(place: Path, clean: Curve, tally: Tally) -> None:
    """Started as users start it; the others are forks of a process that has imported everything."""
    run = new_run(place, "itself")
    process = subprocess.Popen([sys.executable, "-m", "lohan.cli", *run.arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGHUP)
                break
        told = process.communicate(timeout=60)[0]
        assert f"interrupted: {run.num_steps} of" in told
        assert process.returncode == 130 and durable_step(run) == run.num_steps
    finally:
        process.kill()
        process.wait()
    assert run.start().finish() == 0, run.told
    assert run.curve == clean
    tally(injected=1, fired=1)
