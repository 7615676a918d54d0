"""The race detector on random programs, against the definition of a race."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.device.emulated.races import Clock, RaceDetector
from lohan.errors import RaceError
from lohan.schedule.ops import OVERLAPPING_LANES, Access, Content, Kind, Lane, Op, Schedule, Slot, Tier, What

SLOTS = (Slot(0, "host", Tier.HOST, 100), Slot(1, "device", Tier.DEVICE, 100))


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """Operations that touch two slots at random, with waits that may or may not suffice."""
    ops: list[Op] = []
    scratch = Content(What.SCRATCH, 0)
    for index in range(draw(st.integers(2, 9))):
        lane = draw(st.sampled_from([Lane.COMPUTE, Lane.UPLOAD, Lane.SSD_READ]))
        start, stop = draw(st.sampled_from([(0, 60), (40, 100), (70, 100)]))
        access = [Access(draw(st.sampled_from([0, 1])), start, stop, scratch)]
        reads, writes = (access, []) if draw(st.booleans()) else ([], access)
        waits = draw(st.sets(st.sampled_from(range(index)))) if index else set()
        ops.append(Op(index, Kind.FORWARD, lane, 0, 0, -1, tuple(reads), tuple(writes), tuple(sorted(waits)), 0))
    return ops


def has_race(ops: Sequence[Op]) -> bool:
    """The same question, answered from the definition: `before[b]` is what is complete when b starts."""
    before: list[set[int]] = []
    for op in ops:
        earlier = [other.index for other in ops[: op.index] if other.lane is op.lane]
        known = {done for wait in op.waits for done in ({wait} | before[wait] | lane_before(ops, wait))}
        if earlier:
            known |= before[earlier[-1]] | (set(earlier) if op.lane not in OVERLAPPING_LANES else set())
        while (more := known | {d for k in known for d in before[k] | lane_before(ops, k)}) != known:
            known = more
        before.append(known)
    pairs = [(a, b) for b in ops for a in ops[: b.index] if a.index not in before[b.index]]
    return any(
        x.overlaps(y) for a, b in pairs for x, y in [*product(a.writes, b.writes + b.reads), *product(a.reads, b.writes)]
    )


def lane_before(ops: Sequence[Op], index: int) -> set[int]:
    """A lane completes in order."""
    return {other.index for other in ops[:index] if other.lane is ops[index].lane}


@settings(max_examples=300, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_it_finds_a_race_exactly_where_there_is_one_in_any_real_order(ops: list[Op], chance: random.Random) -> None:
    races = RaceDetector(Schedule("random", SLOTS, tuple(ops)))
    clocks: dict[int, Clock] = {}
    left = list(ops)
    found = False
    while left and not found:
        free = [
            op for op in left if set(op.waits) <= set(clocks) and not any(o.lane is op.lane for o in left[: left.index(op)])
        ]
        op = chance.choice(free)
        left.remove(op)
        for wait in op.waits:
            races.wait(op.lane, clocks[wait])
        try:
            races.begin(op.lane, op)
        except RaceError as error:
            assert "no event orders" in str(error)
            found = True
        clocks[op.index] = races.record(op.lane)
    assert found == has_race(ops)
