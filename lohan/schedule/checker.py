"""Proves a Schedule right, knowing nothing of how it was built: capacity, order, content, and that it cannot deadlock.

1. Capacity: every access lies inside its slot; the slots of a tier fit its budget.
2. Progress: lane order and waits together have no cycle.
3. Order: conflicting accesses are ordered by lane order and waits, in the direction of the program.
4. Content: run as a program, every read finds what it expects, what is moved arrives as what it was, and the next schedule
   finds what it may begin with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from lohan.errors import BudgetError, ScheduleError
from lohan.schedule.ops import MOVING_LANES, OVERLAPPING_LANES, Access, Lane, Op, Schedule, Tier, What


def check(schedule: Schedule, budgets: Mapping[Tier, int] | None = None) -> None:
    """Raise ScheduleError (BudgetError) unless the schedule is right under any timing."""
    _check_capacity(schedule, budgets or {})
    _check_order(schedule, _clocks(schedule))
    _check_content(schedule)


def _check_capacity(schedule: Schedule, budgets: Mapping[Tier, int]) -> None:
    for tier, budget in budgets.items():
        if (needed := schedule.tier_bytes(tier)) > budget:
            raise BudgetError(f"{tier.value}_memory", budget, needed, f"the slots of {schedule.name!r} need {needed} bytes")
    for op in schedule.ops:
        for access in (*op.reads, *op.writes):
            if not 0 <= access.start < access.stop <= schedule.slots[access.slot].nbytes:
                raise ScheduleError(f"{op}: bytes {access.start} to {access.stop} are not inside {schedule.slots[access.slot]}")


Clock = dict[Lane, int]


def _clocks(schedule: Schedule) -> list[Clock]:
    """For each operation, of each lane how many operations are complete when it starts. Raises if there is a cycle."""
    edges: list[list[int]] = [[] for _ in range(2 * len(schedule.ops))]
    indegree = [0] * len(edges)
    number: list[int] = []
    counts: Clock = dict.fromkeys(Lane, 0)
    previous: dict[Lane, int] = {}

    def order(before: int, after: int) -> None:
        edges[before].append(after)
        indegree[after] += 1

    for op in schedule.ops:
        start, done = 2 * op.index, 2 * op.index + 1
        order(start, done)
        if op.lane in previous:
            order(2 * previous[op.lane] + (op.lane not in OVERLAPPING_LANES), start)
            order(2 * previous[op.lane] + 1, done)
        for wait in op.waits:
            order(2 * wait + 1, start)
        counts[op.lane] += 1
        number.append(counts[op.lane])
        previous[op.lane] = op.index

    clocks: list[Clock] = [dict.fromkeys(Lane, 0) for _ in edges]
    ready = deque(node for node, degree in enumerate(indegree) if not degree)
    seen = 0
    while ready:
        node = ready.popleft()
        seen += 1
        if node % 2:
            op = schedule.ops[node // 2]
            clocks[node][op.lane] = max(clocks[node][op.lane], number[op.index])
        for after in edges[node]:
            for lane, count in clocks[node].items():
                clocks[after][lane] = max(clocks[after][lane], count)
            indegree[after] -= 1
            if not indegree[after]:
                ready.append(after)
    if seen < len(edges):
        stuck = next(schedule.ops[node // 2] for node, degree in enumerate(indegree) if degree)
        raise ScheduleError(f"{schedule.name}: {stuck} waits for itself")
    return clocks[::2]


def _check_order(schedule: Schedule, clocks: list[Clock]) -> None:
    position: Clock = dict.fromkeys(Lane, 0)
    numbers: list[int] = []
    past: dict[int, list[tuple[Op, Access, bool]]] = {}
    for op in schedule.ops:
        position[op.lane] += 1
        numbers.append(position[op.lane])
        for access, writes in [(a, False) for a in op.reads] + [(a, True) for a in op.writes]:
            for earlier, other, wrote in past.get(access.slot, ()):
                if earlier is op or not (writes or wrote) or not access.overlaps(other):
                    continue
                if clocks[op.index][earlier.lane] < numbers[earlier.index]:
                    raise ScheduleError(f"{op} is not ordered after {earlier}; both touch {schedule.slots[access.slot].name}")
        for access in op.writes:
            inside = past.get(access.slot, [])
            past[access.slot] = [p for p in inside if not (access.start <= p[1].start and p[1].stop <= access.stop)]
        for access, writes in [(a, False) for a in op.reads] + [(a, True) for a in op.writes]:
            past.setdefault(access.slot, []).append((op, access, writes))


def _check_content(schedule: Schedule) -> None:
    held: dict[int, list[Access]] = {}
    for found in schedule.begins_with:
        held.setdefault(found.slot, []).append(found)
    for op in schedule.ops:
        for read in op.reads:
            _check_read(schedule, op, read, held.get(read.slot, []))
        if op.lane in MOVING_LANES:
            _check_move(op)
        for write in op.writes:
            if schedule.slots[write.slot].owner not in (-1, write.content.owner):
                raise ScheduleError(f"{op} writes {write.content} to {schedule.slots[write.slot].name}, which is not its place")
            held[write.slot] = [piece for other in held.get(write.slot, []) for piece in _outside(other, write)]
            held[write.slot].append(write)
    for left in schedule.ends_with:
        _check_read(schedule, "the schedule after it", left, held.get(left.slot, []))


def _check_read(schedule: Schedule, reader: Op | str, read: Access, held: list[Access]) -> None:
    slot = schedule.slots[read.slot]
    covered = 0
    for write in held:
        if write.overlaps(read):
            covered += min(write.stop, read.stop) - max(write.start, read.start)
            if What.SCRATCH in (write.content.what, read.content.what) or write.content != read.content:
                raise ScheduleError(f"{reader} expects {read.content} in {slot.name} and finds {write.content}")
    if covered < read.nbytes:
        raise ScheduleError(
            f"{reader} expects {read.content} in {slot.name}, of which {read.nbytes - covered} bytes hold nothing"
        )


def _check_move(op: Op) -> None:
    if [(read.content, read.nbytes) for read in op.reads] != [(write.content, write.nbytes) for write in op.writes]:
        raise ScheduleError(f"{op} makes of {op.reads} something else: {op.writes}")


def _outside(access: Access, write: Access) -> list[Access]:
    """What is left of `access` where `write` has not been."""
    spans = ((access.start, min(access.stop, write.start)), (max(access.start, write.stop), access.stop))
    return [Access(access.slot, start, stop, access.content) for start, stop in spans if start < stop]
