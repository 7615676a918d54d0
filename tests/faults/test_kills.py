"""Row 1: kill -9 at random times. The same command goes on, with the same bits, and nothing that was acknowledged is gone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lohan.errors import LohanError
from tests.faults import mutants
from tests.faults.conftest import Tally
from tests.faults.harness import KINDS, NUM_STEPS, Kind, drives, history, open_run, recover, scaled, seeded, state_of
from tests.faults.processes import launch, train
from tests.parity.harness import in_memory

pytestmark = [pytest.mark.faults, pytest.mark.row("1 kill -9 at random times")]
LONGEST_S = 0.08
"""more than a step takes"""


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kills_at_random_times(kind: Kind, drive: Path, tally: Tally) -> None:
    when, num_fired, num_run = seeded(f"kills {kind}"), 0, 0
    folders: list[Path] = []
    acknowledged = -1
    while num_fired < scaled(100):
        if not folders or acknowledged == NUM_STEPS:
            num_run += 1
            folders, acknowledged = drives(drive / f"{num_run}"), -1
        child = launch(train, folders, kind).go()
        child.let(when.randrange(4), when.uniform(0, LONGEST_S))
        child.send(signal.SIGKILL)
        is_killed = child.finish() == -9
        num_fired += is_killed
        acknowledged = max(acknowledged, child.acknowledged)
        if acknowledged >= 0:
            acknowledged = recover(folders, kind, acknowledged, go_on=num_fired % 20 == 0)
    tally(injected=num_fired, fired=num_fired)


def test_kills_find_mutants_out(drive: Path, tally: Tally) -> None:
    kind, when, folders = KINDS[2], seeded("kills and a mutant"), drives(drive / "run")
    with pytest.raises((AssertionError, LohanError)):
        for _ in range(20):
            child = launch(train, folders, kind, mutants.commit_before_updates).go()
            child.let(2, when.uniform(0, LONGEST_S))
            child.send(signal.SIGKILL)
            child.finish()
            recover(folders, kind, child.acknowledged)
    tally(mutants=1, caught=1)


def test_the_oracle_is_plain_memory(drive: Path) -> None:
    """What every recovered state is held to has the losses of the run without any store, and states that all differ."""
    assert history().losses == in_memory("llama", "bf16", clips=True).losses[:NUM_STEPS]
    assert len(set(history().states)) == NUM_STEPS + 1
    assert any(in_memory("llama", "bf16", clips=True).clipped[:NUM_STEPS])
    with open_run([drive / "a"], KINDS[2]) as engine:
        assert state_of(engine) == history().states[0]
