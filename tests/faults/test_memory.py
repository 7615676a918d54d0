"""Rows 6 and 7: too little memory. A run stays within its budget; without that much it is refused, or killed and goes on."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults import limits
from tests.faults.conftest import Begun, Tally
from tests.faults.harness import FIRST_STEP, KINDS, NUM_STEPS, Kind, drives, recover, scaled, seeded
from tests.faults.injection import both
from tests.faults.linux import cgroup, move, needs_root, num_oom_kills, oom_kill
from tests.faults.processes import Child, Fault, launch, nothing, train
from tests.parity.harness import tiny_model

pytestmark = pytest.mark.faults
ROW_6 = pytest.mark.row("6 OOM kill")
ROW_7 = pytest.mark.row("7 allocation or mlock fails")
MIB = 2**20
BUDGETS = (16 * MIB, 48 * MIB)
NOISE_BYTES = 8 * MIB
"""between two runs, beside the budget: what malloc has free (5 to 9 MB of its heap), and oneDNN's code for each shape of a
product; 2.5 to 6.2 MB were seen"""
LAST_STEP = FIRST_STEP + 2
LONGEST_S = 0.05
Target = Callable[..., None]


class Limited:
    """A run in a memory control group, and what it came to."""

    def __init__(self, name: str, limit_bytes: int, target: Target, *args: Any) -> None:
        with cgroup("memory", name) as group:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            child = launch(target, *args)
            move(group, child.pid)
            self.code = child.go().finish()
            self.child, self.num_kills = child, num_oom_kills(group)
            # Pages of files count for the group that reads them first, be they of libraries: 2 to 11 MB, which the kernel can
            # take back at any time.
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            self.peak_bytes = int((group / "memory.max_usage_in_bytes").read_text()) - int(stat["cache"])

    @property
    def declared_bytes(self) -> int:
        """What the steps said that they took."""
        return max(value for what, value in self.child.told if what == "peak")


def beside_budget(drive: Path) -> int:
    """What a process takes on top of its budget: code, Python's objects, threads."""
    tiny = Limited("tiny", -1, limits.train_foreseen, drives(drive / "tiny"), KINDS[0], 3)
    assert tiny.code == 0, tiny.child.error
    return tiny.peak_bytes - tiny.declared_bytes


@pytest.fixture
def large(drive: Path) -> Path:
    tiny_model("llama", **limits.LARGE).save_pretrained(drive / "large")
    return drive / "large"


def check_budget(drive: Path, large: Path, budget: int, beside: int, mutant: Fault = nothing) -> None:
    folder = drives(drive / f"large {budget} {mutant}")
    run = Limited("budget", -1, limits.train_large, folder, large, budget, mutant)
    assert run.code == 0, run.child.error
    assert run.declared_bytes <= budget
    # Most of the budget is used, so that the other limit means something.
    assert run.declared_bytes > budget / 2
    assert run.peak_bytes <= beside + budget + NOISE_BYTES


@ROW_6
@needs_root
def test_the_peak_is_the_declared_budget(drive: Path, large: Path, tally: Tally) -> None:
    beside = beside_budget(drive)
    for budget in BUDGETS:
        check_budget(drive, large, budget, beside)
    tally(injected=len(BUDGETS), fired=len(BUDGETS))


@ROW_6
@needs_root
def test_the_peak_finds_a_mutant_out(drive: Path, large: Path, tally: Tally) -> None:
    with pytest.raises(AssertionError):
        check_budget(drive, large, BUDGETS[1], beside_budget(drive), limits.take_twice)
    tally(mutants=1, caught=1)


@ROW_6
@needs_root
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_limits_from_too_low_to_enough(kind: Kind, drive: Path, tally: Tally) -> None:
    free = Limited("free", -1, limits.train_foreseen, drives(drive / "free"), kind, LAST_STEP)
    chance, num_fired, number = seeded(f"limits {kind}"), 0, scaled(50)
    for one in range(number):
        # Most of them where it gets as far as steps.
        share = chance.uniform(0.1, 0.8) if one % 4 == 0 else chance.uniform(0.8, 1.0)
        folders = drives(drive / str(one))
        run = Limited("low", int(free.peak_bytes * share), limits.train_foreseen, folders, kind, LAST_STEP)
        if run.code == 0:  # what can be reclaimed was
            assert run.num_kills == 0
        elif run.code == 1:
            assert re.match(r"OptionError: host_memory=|MemoryError: .", run.child.error), run.child.error
        else:
            assert run.code == -9 and run.num_kills == 1
        num_fired += run.code != 0
        if run.child.acknowledged >= 0:
            recover(folders, kind, run.child.acknowledged, go_on=one % 5 == 0)
    assert num_fired
    enough = Limited("enough", free.peak_bytes + NOISE_BYTES, limits.train_foreseen, drives(drive / "all"), kind, LAST_STEP)
    assert enough.code == 0 and enough.num_kills == 0
    assert recover(drives(drive / "all"), kind, LAST_STEP) == LAST_STEP
    tally(injected=number, fired=num_fired)


@ROW_6
@needs_root
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kills_in_the_middle_of_steps(kind: Kind, drive: Path, tally: Tally) -> None:
    """Another program takes the memory."""
    chance, num_fired, folders, acknowledged = seeded(f"hog {kind}"), 0, drives(drive / "0"), -1
    while num_fired < scaled(30):
        with cgroup("memory", "hog") as group:
            child = launch(train_slowly, folders, kind)
            move(group, child.pid)
            child.go()
            if child.let(chance.randrange(4), chance.uniform(0, LONGEST_S)):
                oom_kill(group, child.pid)
            code = child.finish()
            assert code == 0 or (code == -9 and num_oom_kills(group) >= 1), child.error
        num_fired += code == -9
        acknowledged = recover(folders, kind, max(acknowledged, child.acknowledged), go_on=num_fired % 10 == 0)
        if acknowledged == NUM_STEPS or num_fired % 10 == 0:
            folders, acknowledged = drives(drive / f"{num_fired} {code}"), -1
    tally(injected=num_fired, fired=num_fired)


def train_slowly(tell: Any, folders: list[Path], kind: Kind) -> None:
    """With a pause after each step, so that there is a middle to be killed in."""
    limits.take_time(0.05)
    train(tell, folders, kind)


# ---------------------------------------------------------------- what the system refuses

WORDS = r"OptionError: host_memory=.*the system has no memory for .* \(Cannot allocate memory\)\. Lower it, or free memory"
WORDS += r"|MemoryError: the system has no memory for a block"


def refused(child: Child) -> None:
    assert child.finish() == 1
    assert re.match(WORDS, child.error), child.error


def check_refusal(folders: list[Path], kind: Kind, number: int, mutant: Fault = nothing) -> bool:
    """Whether there was such a number to refuse."""
    fault = limits.NoMemory(number, folders[0] / "fired")
    child = launch(train, folders, kind, partial(both, mutant, fault), LAST_STEP).go()
    child.process.join(60)
    if not fault.has_fired:
        assert child.finish() == 0, child.error
        return False
    refused(child)
    fault.mark.rmdir()
    recover(folders, kind, max(FIRST_STEP, child.acknowledged))
    return True


@ROW_7
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_mapping_refused(kind: Kind, begun: Begun, tally: Tally) -> None:
    number = 0
    while check_refusal(begun(kind), kind, number):
        number += 1
    assert number > 5
    tally(injected=number, fired=number)


@ROW_7
def test_refusals_find_a_mutant_out(begun: Begun, tally: Tally) -> None:
    with pytest.raises(AssertionError):
        for number in range(20):
            check_refusal(begun(KINDS[0]), KINDS[0], number, limits.ignore_madvise)
    tally(mutants=1, caught=1)


@ROW_7
@pytest.mark.parametrize("part", range(2))
def test_address_space_that_ends(part: int, begun: Begun, tally: Tally) -> None:
    """From some size on everything is refused, to Python and to its libraries as well: an error in words, and no harm done."""
    kind, chance, number, num_fired = KINDS[part], seeded(f"space {part}"), scaled(50), 0
    for _ in range(number):
        folders = begun(kind)
        fault = partial(limits.end_address_space, chance.randrange(0, 200 * MIB))
        child = launch(train, folders, kind, fault, LAST_STEP).go()
        code = child.finish()
        assert code in (0, 1), f"{code}: {child.error}"
        assert code == 0 or re.match(r"\w+Error: \S", child.error), child.error
        num_fired += code == 1
        recover(folders, kind, max(FIRST_STEP, child.acknowledged))
    assert num_fired
    tally(injected=number, fired=num_fired)


@ROW_7
def test_no_locked_memory(begun: Begun, tally: Tally) -> None:
    """Nothing here depends on it."""
    folders = begun(KINDS[0])
    child = launch(train, folders, KINDS[0], partial(limits.limit, resource.RLIMIT_MEMLOCK, 0), LAST_STEP).go()
    assert child.finish() == 0, child.error
    assert recover(folders, KINDS[0], LAST_STEP) == LAST_STEP
    tally(injected=1, fired=1)
