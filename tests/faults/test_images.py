"""Rows 4 and 5: writes that a power cut tears and reorders. Whatever arrived, the store opens at a step that is whole.

A recorded run, from the first file on, is cut at random ticks; the drives keep a random part of what was not flushed.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from lohan.errors import LohanError
from tests.faults import mutants
from tests.faults.conftest import Tally
from tests.faults.harness import KINDS, NUM_STEPS, Kind, drives, recover, scaled, seeded
from tests.faults.processes import Fault, nothing
from tests.faults.recording import Recording, record, write_image

pytestmark = pytest.mark.faults
LAST_STEP = 6
NUM_FOR_MUTANTS = 60
"""images after which a mutant that was not caught is not going to be"""
NUM_PARTS = 2


def check_image(recording: Recording, chance: random.Random, was: Path, kind: Kind, folder: Path) -> bool:
    """Whether the image had a state to lose; it is there."""
    tick = recording.tick(chance)
    acknowledged = recording.acknowledged(tick)
    write_image(recording.image(tick, chance), was, folder)
    recover(drives(folder), kind, acknowledged)
    shutil.rmtree(folder)
    return acknowledged >= 0


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.row("4 reordered and torn writes")
def test_torn_and_reordered_writes(kind: Kind, part: int, drive: Path, tally: Tally) -> None:
    recording = record(drives(drive / "run"), kind, LAST_STEP, drive / "recording")
    chance, number = seeded(f"images {kind} {part}"), scaled(1800 // len(KINDS) // NUM_PARTS)
    num_fired = sum([check_image(recording, chance, drive / "run", kind, drive / "image") for _ in range(number)])
    assert num_fired > number // 2
    tally(injected=number, fired=num_fired)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.row("5 crash during recovery")
def test_a_second_power_cut_while_resuming(kind: Kind, drive: Path, tally: Tally) -> None:
    """The run goes on from an image, and is cut again."""
    chance, num_images = seeded(f"second {kind}"), 5
    first = record(drives(drive / "run"), kind, LAST_STEP, drive / "recording")
    for number in range(scaled(200) // num_images + 1):
        tick = chance.randrange(first.num_ticks // 2, first.num_ticks)
        again = drive / f"again {number}"
        write_image(first.image(tick, chance), drive / "run", again)
        second = record(drives(again), kind, NUM_STEPS, drive / "recording")
        for _ in range(num_images):
            check_image(second, chance, again, kind, drive / "image")
        tally(injected=num_images, fired=num_images)


@pytest.mark.parametrize("mutant", mutants.OF_ORDER, ids=lambda mutant: mutant.__name__)
@pytest.mark.row("4 reordered and torn writes")
def test_images_find_mutants_out(mutant: Fault, drive: Path, tally: Tally) -> None:
    kind, chance = KINDS[0], seeded(mutant.__name__)
    recording = record(drives(drive / "run"), kind, LAST_STEP, drive / "recording", mutant)
    num_bad = 0
    for _ in range(NUM_FOR_MUTANTS):
        try:
            check_image(recording, chance, drive / "run", kind, drive / "image")
        except (AssertionError, LohanError):
            num_bad += 1
            shutil.rmtree(drive / "image")
    assert num_bad, "no image finds this mutant out"
    tally(mutants=1, caught=1)


def test_images_of_a_run_that_ended_are_its_files(drive: Path) -> None:
    """After the last flush nothing can be torn: the model of a disk agrees with the disk."""
    recording = record(drives(drive / "run"), KINDS[0], LAST_STEP, drive / "recording", nothing)
    image = recording.image(recording.num_ticks, seeded("end"))
    on_disk = {str(path): path.read_bytes() for folder in drives(drive / "run") for path in folder.iterdir()}
    assert image == on_disk
