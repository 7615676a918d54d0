"""A race detector: vector clocks over lanes, and what every byte of every slot holds. No torch.

Time on a lane is the number of operations that it has begun. A *clock* says, for each lane, how many of its operations are
known to be complete. Clocks travel as the executor's events do, whatever the real timing was:

- `record` gives the clock of an operation's completion: what it started after, and itself.
- `wait` joins that clock into the lane that waits. Everything the lane begins from then on starts after it.
- `begin` checks the accesses that the operation declares, at its starting clock. An earlier conflicting access (either of
  the two writes, their bytes overlap) has to be complete according to that clock, else nothing orders the two: RaceError. A
  read has to find the content that the last write left, or that the slot began with: the right owner, version and chunk, else
  RaceError. What a lane moves has to arrive as what it was.
- `touch` checks what an operation really does: it may touch only what it declares.

As an operation that starts after another one begins after it in real time too, checking each access against those that began
before it finds every unordered pair, even when luck put the two in the right order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from lohan.errors import RaceError
from lohan.schedule.ops import MOVING_LANES, OVERLAPPING_LANES, Access, Content, Lane, Op, Schedule, What

Clock = tuple[int, ...]
"""per lane, in the order of `Lane`: how many of its operations are known to be complete"""

_INDEX = {lane: index for index, lane in enumerate(Lane)}
_START: Clock = (0,) * len(_INDEX)


@dataclass(slots=True)
class _Running:
    """An operation between its `begin` and its `record`."""

    op: Op
    number: int
    """its place among the operations of its lane, from 1"""
    start: Clock


@dataclass(slots=True)
class _LaneState:
    clock: Clock = _START
    """what is complete before whatever the lane begins next"""
    completion: Clock = _START
    """of the last operation that was recorded"""
    num_begun: int = 0
    running: deque[_Running] = field(default_factory=deque)


@dataclass(slots=True)
class _Segment:
    """A range of a slot whose bytes have the same history."""

    start: int
    stop: int
    content: Content | None = None
    writer: _Running | None = None
    readers: dict[Lane, _Running] = field(default_factory=dict)
    """since the last write, the latest of each lane (lanes complete in order)"""

    def cut(self, at: int) -> _Segment:
        """Give up everything from `at` on; the result is that part."""
        rest = _Segment(at, self.stop, self.content, self.writer, dict(self.readers))
        self.stop = at
        return rest


class RaceDetector:
    """Watches one run of one schedule. Its methods are called from the threads that drive the lanes."""

    def __init__(self, schedule: Schedule) -> None:
        self._slots = {slot.index: slot for slot in schedule.slots}
        self._lanes = {lane: _LaneState() for lane in Lane}
        self._history = {slot.index: [_Segment(0, slot.nbytes)] for slot in schedule.slots}
        self._ends_with = schedule.ends_with
        for found in schedule.begins_with:
            for segment in self._cut(found):
                segment.content = found.content
        self._lock = threading.Lock()

    def wait(self, lane: Lane, clock: Clock) -> None:
        """Whatever `lane` begins from now on starts after all that `clock` knows."""
        with self._lock:
            state = self._lanes[lane]
            state.clock = _join(state.clock, clock)

    def begin(self, lane: Lane, op: Op) -> None:
        """`op` starts on `lane`: check what it declares."""
        with self._lock:
            state = self._lanes[lane]
            if op.lane is not lane:
                raise RaceError(f"{op} begins on {lane.value}")
            if state.running and lane not in OVERLAPPING_LANES:
                raise RaceError(f"{op} begins before {state.running[-1].op} was recorded")
            state.num_begun += 1
            running = _Running(op, state.num_begun, state.clock)
            state.running.append(running)
            if lane in MOVING_LANES:
                _check_move(op)
            for access in op.reads:
                self._read(running, access)
            for access in op.writes:
                self._write(running, access)

    def record(self, lane: Lane) -> Clock:
        """The clock of the completion of the oldest operation that is running on `lane`."""
        with self._lock:
            state = self._lanes[lane]
            if not state.running:
                return state.completion
            done = state.running.popleft()
            own = tuple(done.number if index == _INDEX[lane] else 0 for index in range(len(_INDEX)))
            state.completion = _join(done.start, own)  # lanes complete in order, so the number says it of all before
            if lane not in OVERLAPPING_LANES:
                state.clock = _join(state.clock, state.completion)
            return state.completion

    def running(self) -> list[Op]:
        """What has begun and was not recorded."""
        with self._lock:
            return [running.op for state in self._lanes.values() for running in state.running]

    def check_end(self) -> None:
        """Now that the schedule is done: the next one has to find what it may begin with."""
        with self._lock:
            for access in self._ends_with:
                for segment in self._cut(access):
                    if segment.content != access.content:
                        raise RaceError(self._surprise("the schedule after it", access, segment))

    def touch(self, lane: Lane, slot: int, start: int, stop: int, *, write: bool, by: str) -> None:
        """`by` touches bytes [start, stop) of `slot` on behalf of what runs on `lane`, which must have declared it."""
        with self._lock:
            ops = [running.op for running in self._lanes[lane].running]
        access = f"{by} {'writes' if write else 'reads'} bytes {start}..{stop} of slot {self._slots[slot].name!r}"
        if not ops:
            raise RaceError(f"{access} while no operation runs on {lane.value}")
        if not any(_declares(op, slot, start, stop, write=write) for op in ops):
            raise RaceError(f"{access}, which {ops[-1]} does not declare")

    def _read(self, running: _Running, access: Access) -> None:
        scratch = access.content.what is What.SCRATCH
        for segment in self._cut(access):
            if segment.writer is not None:
                self._order(running, segment.writer, access, "reads", "writes")
            if not scratch and segment.content != access.content:
                raise RaceError(self._surprise(running.op, access, segment))
            segment.readers[running.op.lane] = running

    def _write(self, running: _Running, access: Access) -> None:
        slot = self._slots.get(access.slot)
        if slot is not None and slot.owner not in (-1, access.content.owner):
            raise RaceError(f"{running.op} writes {access.content} to slot {slot.name!r}, which is not its place")
        for segment in self._cut(access):
            if segment.writer is not None:
                self._order(running, segment.writer, access, "writes", "writes")
            for reader in segment.readers.values():
                self._order(running, reader, access, "writes", "reads")
            segment.content, segment.writer = access.content, running
            segment.readers.clear()
        self._merge(access)

    def _order(self, running: _Running, earlier: _Running, access: Access, does: str, did: str) -> None:
        """Refuse an access that does not start after `earlier` is complete."""
        if earlier is running or running.start[_INDEX[earlier.op.lane]] >= earlier.number:
            return
        where = f"bytes {access.start}..{access.stop} of slot {self._slots[access.slot].name!r}"
        raise RaceError(f"{running.op} {does} {where}, and no event orders it after {earlier.op}, which {did} there")

    def _surprise(self, op: Op | str, access: Access, segment: _Segment) -> str:
        found = "nothing that this schedule wrote" if segment.content is None else str(segment.content)
        if segment.writer is not None:
            found += f", left by {segment.writer.op}"
        where = f"bytes {segment.start}..{segment.stop} of slot {self._slots[access.slot].name!r}"
        return f"{op} expects {access.content} in {where} and finds {found}"

    def _cut(self, access: Access) -> Iterator[_Segment]:
        """The segments that make up the access, cut at its ends."""
        slot = self._slots.get(access.slot)
        if slot is None or not 0 <= access.start < access.stop <= slot.nbytes:
            raise RaceError(f"{access} is not within a slot of the schedule")
        segments = self._history[access.slot]
        for at in (access.start, access.stop):
            for index, segment in enumerate(segments):
                if segment.start < at < segment.stop:
                    segments.insert(index + 1, segment.cut(at))
                    break
        return iter([s for s in segments if access.start <= s.start and s.stop <= access.stop])

    def _merge(self, access: Access) -> None:
        """What was written at once has one history from here on."""
        segments = self._history[access.slot]
        first = next(i for i, s in enumerate(segments) if s.start == access.start)
        last = next(i for i, s in enumerate(segments) if s.stop == access.stop)
        segments[first].stop = access.stop
        del segments[first + 1 : last + 1]


def _check_move(op: Op) -> None:
    for source, target in zip(op.reads, op.writes, strict=False):
        if (source.content, source.nbytes) != (target.content, target.nbytes):
            raise RaceError(f"{op} makes of {source} something else: {target}")


def _join(a: Clock, b: Clock) -> Clock:
    return tuple(map(max, a, b))


def _declares(op: Op, slot: int, start: int, stop: int, *, write: bool) -> bool:
    """Whether what `op` declares covers [start, stop): its writes for a write, all its accesses for a read."""
    accesses = op.writes if write else op.reads + op.writes
    for access in sorted((a for a in accesses if a.slot == slot), key=lambda a: a.start):
        if access.start <= start < access.stop:
            start = access.stop
        if start >= stop:
            return True
    return False
