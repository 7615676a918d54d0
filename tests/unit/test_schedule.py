"""Every schedule that the builder makes passes the checker, and every mutant of one fails it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.errors import BudgetError, ScheduleError
from lohan.schedule.builder import Mode
from lohan.schedule.checker import check
from lohan.schedule.ops import MOVING_LANES, Access, Content, Kind, Lane, Op, Schedule, Tier

from .schedules import draw

SEEDS = range(150)


def with_op(schedule: Schedule, op: Op) -> Schedule:
    ops = list(schedule.ops)
    ops[op.index] = op
    return replace(schedule, ops=tuple(ops))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule_passes(seed: int) -> None:
    check(draw(seed).schedule)


@pytest.mark.parametrize("seed", range(40))
def test_every_single_wait_matters(seed: int) -> None:
    schedule = draw(seed).schedule
    for op in schedule.ops:
        for wait in op.waits:
            mutant = with_op(schedule, replace(op, waits=tuple(w for w in op.waits if w != wait)))
            with pytest.raises(ScheduleError, match="not ordered"):
                check(mutant)


@pytest.mark.parametrize("seed", range(40))
def test_waiting_for_the_operation_before_is_not_enough(seed: int) -> None:
    schedule = draw(seed).schedule
    for op in schedule.ops:
        for wait in op.waits:
            lane = schedule.lane(schedule.ops[wait].lane)
            place = next(i for i, other in enumerate(lane) if other.index == wait)
            earlier = (lane[place - 1].index,) if place else ()
            mutant = with_op(schedule, replace(op, waits=tuple(w for w in op.waits if w != wait) + earlier))
            with pytest.raises(ScheduleError, match="not ordered"):
                check(mutant)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_ram_keeps_is_written_between_forward_and_backward(seed: int) -> None:
    """Pending updates: not while the forward wants the drive, and before anything that may wait for the step to be whole."""
    drawn = draw(seed)
    if drawn.call.mode is not Mode.TRAIN:
        return
    kept = {u for u, plan in enumerate(drawn.plan.units) if plan.weights is plan.state is Tier.HOST} & drawn.call.pending
    writes = [op for op in drawn.schedule.lane(Lane.SSD_WRITE) if op.kind in (Kind.WRITE_UPDATE, Kind.WRITE_GRADIENT)]
    pending = [op for op in writes if op.kind is Kind.WRITE_UPDATE and op.writes[0].content.version == 1]
    put_off = [op for op in pending if op.unit in kept]
    forwards = [op.index for op in drawn.schedule.ops if op.kind is Kind.FORWARD]
    assert all(op.index > forwards[-1] for op in put_off)
    others = [op.index for op in writes if op.kind is Kind.WRITE_GRADIENT or op.unit not in drawn.call.pending]
    assert not others or all(op.index < others[0] for op in put_off)


def test_a_cycle_is_found() -> None:
    schedule = draw(0).schedule
    late = next(op for op in reversed(schedule.ops) if op.waits)
    early = schedule.ops[late.waits[0]]
    with pytest.raises(ScheduleError, match="waits for itself"):
        check(with_op(schedule, replace(early, waits=(*early.waits, late.index))))


@pytest.mark.parametrize("seed", range(40))
def test_content_of_another_unit_or_version_is_found(seed: int) -> None:
    schedule = draw(seed).schedule
    for op in (op for op in schedule.ops if op.reads):
        content = op.reads[0].content
        for wrong in (replace(content, owner=content.owner + 1), replace(content, version=content.version + 1)):
            mutant = with_op(schedule, replace(op, reads=(with_content(op.reads[0], wrong), *op.reads[1:])))
            with pytest.raises(ScheduleError, match="expects"):
                check(mutant)


@pytest.mark.parametrize("seed", range(40))
def test_a_move_that_changes_what_it_moves_is_found(seed: int) -> None:
    schedule = draw(seed).schedule
    moves = [op for op in schedule.ops if op.lane in MOVING_LANES]
    for one, other in zip(moves, moves[1:], strict=False):
        if one.reads[0].content != other.reads[0].content:
            with pytest.raises(ScheduleError, match="something else|expects|not ordered"):
                check(with_op(schedule, replace(one, reads=other.reads)))


@pytest.mark.parametrize("seed", range(40))
def test_the_other_side_holds_nothing_to_begin_with(seed: int) -> None:
    schedule = draw(seed).schedule
    names = {slot.name: slot.index for slot in schedule.slots}
    for found in schedule.begins_with:
        other = names.get(schedule.slots[found.slot].name.replace("side 0", "side 1"))
        reader = next((op for op in schedule.ops if found in op.reads), None)
        if reader is not None and other != found.slot:
            mutant = with_op(schedule, replace(reader, reads=(replace(found, slot=other), *reader.reads[1:])))
            with pytest.raises(ScheduleError, match="hold nothing|expects|not ordered"):
                check(mutant)


def with_content(access: Access, content: Content) -> Access:
    return replace(access, content=content)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_one_byte_below_the_slots_is_refused(tier: Tier) -> None:
    schedule = draw(3).schedule
    needed = schedule.tier_bytes(tier)
    check(schedule, {tier: needed})
    with pytest.raises(BudgetError, match=str(needed)):
        check(schedule, {tier: needed - 1})
