"""Derives what each operation must wait for, from what it touches. The result is minimal: no wait is implied by another.

Operations arrive in program order. Two of them conflict when their byte ranges of a slot overlap and one of them writes; the
later one must then start after the earlier one is complete. For every operation two clocks are kept, one entry a lane, saying
up to which operation of that lane everything is known to be complete: when the operation *starts*, and when it is *done*.

1. Candidates: of each lane, the last operation that conflicts (lane order covers the ones before it).
2. Drop those that the lane's own order already covers.
3. Drop those that another candidate's completion covers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lohan.schedule.ops import OVERLAPPING_LANES, Access, Lane

LANES = tuple(Lane)
LANE_NUMBER = {lane: number for number, lane in enumerate(LANES)}
Clock = tuple[int, ...]
NOTHING: Clock = (-1,) * len(LANES)


def join(clocks: Iterable[Clock]) -> Clock:
    """What is complete when all of these are."""
    return tuple(max(entries) for entries in zip(*clocks, strict=True))


@dataclass(slots=True)
class _Past:
    """An access that a later one may conflict with."""

    op: int
    access: Access
    is_write: bool


class WaitDeriver:
    """Takes operations in program order, returns the waits of each."""

    def __init__(self) -> None:
        self._past: dict[int, list[_Past]] = {}
        self._lane_of: list[int] = []
        self._done: list[Clock] = []
        self._lane_start = [NOTHING] * len(LANES)
        self._lane_done = [NOTHING] * len(LANES)

    def add(self, lane: Lane, reads: Sequence[Access], writes: Sequence[Access]) -> tuple[int, ...]:
        """The waits of the next operation."""
        index, number = len(self._done), LANE_NUMBER[lane]
        overlapping = lane in OVERLAPPING_LANES
        start = self._lane_start[number] if overlapping else self._lane_done[number]
        candidates = {LANES[n]: op for n, op in enumerate(self._conflicts(reads, writes)) if op > start[n]}
        waits = tuple(sorted(op for op in candidates.values() if not self._implied(op, candidates.values())))
        start = join([start, *(self._done[op] for op in waits)])
        done = join([start, self._lane_done[number]])
        done = (*done[:number], index, *done[number + 1 :])
        self._lane_of.append(number)
        self._done.append(done)
        self._lane_start[number], self._lane_done[number] = start, done
        self._remember(index, reads, writes)
        return waits

    def _conflicts(self, reads: Sequence[Access], writes: Sequence[Access]) -> list[int]:
        """Of each lane, the last operation so far that conflicts with these accesses; -1 for none."""
        last = [-1] * len(LANES)
        for accesses, is_write in ((reads, False), (writes, True)):
            for access in accesses:
                for past in self._past.get(access.slot, ()):
                    if (is_write or past.is_write) and past.access.overlaps(access):
                        lane = self._lane_of[past.op]
                        last[lane] = max(last[lane], past.op)
        return last

    def _implied(self, op: int, others: Iterable[int]) -> bool:
        """Whether one of the other candidates completes only after `op` has."""
        return any(other != op and self._done[other][self._lane_of[op]] >= op for other in others)

    def _remember(self, index: int, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """Later operations meet these accesses; those that a write covers are ordered by it from now on."""
        for write in writes:
            past = self._past.get(write.slot, ())
            kept = [p for p in past if p.access.start < write.start or write.stop < p.access.stop]
            self._past[write.slot] = [*kept, _Past(index, write, True)]
        for read in reads:
            self._past.setdefault(read.slot, []).append(_Past(index, read, False))
