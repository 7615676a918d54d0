"""Every wait matters: each schedule of a run with one mistake in it is caught by the emulated device, as a race.

The run makes four schedules: the first step, a step with pending updates, the drain, an evaluation. Mutants reach the executor
unchecked; the static checker has to refuse each of them as well.

By default one mutant of each kind runs; the slow tests run all of them, at three timings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from lohan.device.emulated import EmulatedDevice
from lohan.errors import RaceError, ScheduleError
from lohan.run.training import Prepared
from lohan.schedule.builder import Call
from lohan.schedule.checker import check
from lohan.schedule.ops import Kind, Schedule
from tests.parity.harness import open_engine, steps, tiny_model
from tests.parity.mutants import WAYS, Mutant
from tests.parity.tight import MODEL, PLAN

DEVICE_BYTES = 16 * 2**20
SCHEDULES = ("first step", "steady step", "drain", "evaluation")
Change = Callable[[int, Schedule], Schedule]
"""number and schedule as it was built -> what is run"""


def run(change: Change, **timing: Any) -> None:
    """Two steps and an evaluation, with schedules changed behind the checker's back."""
    built = Prepared.schedule
    numbers = iter(range(len(SCHEDULES)))

    def schedule(self: Prepared, call: Call) -> Schedule:
        return change(next(numbers), built(self, call))

    device = EmulatedDevice(DEVICE_BYTES, **timing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "schedule", schedule)
        with open_engine(tiny_model(MODEL), device=device, placement=PLAN, max_grad_norm=1e9) as engine:
            for batches in steps()[:2]:
                engine.step(batches)
            engine.evaluate(steps()[2])


@cache
def schedules() -> list[Schedule]:
    """The four schedules, as they are built."""
    kept: dict[int, Schedule] = {}
    run(lambda number, schedule: kept.setdefault(number, schedule))
    return list(kept.values())


@cache
def mutants(way: str, which: int) -> list[Mutant]:
    return list(WAYS[way](schedules()[which]))


def representatives(way: str, which: int) -> list[Mutant]:
    """The first mutant of each kind, unless an earlier schedule has one."""
    known = {mutant.kind for earlier in range(which) for mutant in mutants(way, earlier)}
    return list({mutant.kind: mutant for mutant in reversed(mutants(way, which)) if mutant.kind not in known}.values())


def assert_caught(mutant: Mutant, which: int, **timing: Any) -> None:
    with pytest.raises(ScheduleError):
        check(mutant.schedule)
    caught = False
    try:
        run(lambda number, schedule: mutant.schedule if number == which else schedule, **timing)
    except RaceError:
        caught = True
    assert caught, f"{SCHEDULES[which]}: {mutant.mistake}, and the emulated device did not see it"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("lohan")]
    assert not left, "threads that outlive their engine"


def test_the_schedules_have_every_kind_of_operation_and_pass() -> None:
    for schedule in schedules():
        check(schedule)
    assert {op.kind for schedule in schedules() for op in schedule.ops} == set(Kind)


@pytest.mark.parametrize("seed", range(3))
def test_right_schedules_pass_at_any_timing(seed: int) -> None:
    run(lambda _, schedule: schedule, jitter_s=0.002, seed=seed)


def test_lanes_are_measured_alone_without_a_race_and_steps_are_watched_again() -> None:
    losses = []
    for measures in (False, True):
        with open_engine(tiny_model(MODEL), device=EmulatedDevice(DEVICE_BYTES), placement=PLAN) as engine:
            engine.step(steps()[0])
            if measures:
                assert engine.measure_lanes(steps()[0]).seconds
            losses.append(engine.step(steps()[1]).loss)
            assert engine.device._watch._races is not None  # type: ignore[attr-defined]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", range(len(SCHEDULES)), ids=SCHEDULES)
def test_a_mistake_of_each_kind_is_caught(way: str, which: int) -> None:
    for mutant in representatives(way, which):
        assert_caught(mutant, which)


@pytest.mark.slow
@pytest.mark.parametrize("timing", [{}, {"jitter_s": 0.001, "seed": 1}, {"jitter_s": 0.004, "seed": 2}], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", range(len(SCHEDULES)), ids=SCHEDULES)
def test_every_mistake_is_caught(way: str, which: int, timing: dict[str, Any]) -> None:
    for mutant in mutants(way, which):
        assert_caught(mutant, which, **timing)
