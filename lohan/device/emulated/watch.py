"""What the race detector gets to know of the emulated device: addresses become slots, events become clocks.

Before the first `bind` there is no schedule, and nothing to watch; in a rehearsal neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lohan.device.emulated.races import Clock, RaceDetector
from lohan.device.events import Event
from lohan.errors import RaceError
from lohan.schedule.ops import Lane, Op, Schedule


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What an event knows of the operation whose completion it is."""

    races: RaceDetector
    """of the schedule that the operation belongs to: later schedules begin when it is complete"""
    clock: Clock


class MemoryMap:
    """Which slot an address belongs to."""

    def __init__(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """`ranges`: slot -> (address, bytes)."""
        self._ranges = sorted((address, address + nbytes, slot) for slot, (address, nbytes) in ranges.items())

    def find(self, address: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """`(slot, start, stop)` for each slot that the bytes at `address` touch."""
        for first, end, slot in self._ranges:
            if first < address + nbytes and address < end:
                yield slot, max(address - first, 0), min(address + nbytes, end) - first


class Watch:
    """Stands between the device and the race detector of the schedule that is running."""

    def __init__(self) -> None:
        self._races: RaceDetector | None = None
        self._map = MemoryMap({})
        self._touched: set[tuple[int, int, bool]] = set()
        """what the running compute operation was found to touch rightly: kernels touch the same weights again and again"""
        self._last: dict[Lane, Event] = {}
        """the last event that was recorded on each lane"""
        self._drivers: dict[Lane, int] = {}
        """the thread that last began an operation of each lane"""

    def bind(self, schedule: Schedule, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Watch `schedule` from now on. What ran before has to be over: no event would order the two."""
        unfinished = [] if self._races is None else self._races.running()
        if unfinished:
            raise RaceError(f"{schedule.name} is bound while {unfinished[0]} was not recorded")
        busy = [lane.value for lane, event in self._last.items() if not event.is_complete]
        if busy:
            raise RaceError(f"{schedule.name} is bound while {', '.join(busy)} still works")
        if self._races is not None:
            self._races.check_end()
        self._races = None if schedule.is_rehearsal else RaceDetector(schedule)
        self._map = MemoryMap(ranges)
        self._touched.clear()

    def begin(self, lane: Lane, op: Op) -> None:
        self._drivers[lane] = threading.get_ident()
        if lane is Lane.COMPUTE:
            self._touched.clear()
        if self._races is not None:
            self._races.begin(lane, op)

    def record(self, lane: Lane, event: Event) -> None:
        self._last[lane] = event
        if self._races is not None:
            if lane is Lane.COMPUTE:
                self._touched.clear()
            event.stamp = _Stamp(self._races, self._races.record(lane))

    def wait(self, lane: Lane, event: Event) -> None:
        if self._races is not None and isinstance(event.stamp, _Stamp) and event.stamp.races is self._races:
            self._races.wait(lane, event.stamp.clock)

    def synchronize(self, event: Event) -> None:
        """The calling thread has seen `event` complete: so the lanes that it drives go on after it."""
        this = threading.get_ident()
        for lane in [lane for lane, driver in self._drivers.items() if driver == this]:
            self.wait(lane, event)

    def touch(self, lane: Lane, address: int, nbytes: int, write: bool, by: str) -> None:
        """Check what is really touched. Memory outside the schedule's slots is nobody's business."""
        key = (address, nbytes, write)
        if self._races is None or (lane is Lane.COMPUTE and key in self._touched):
            return
        for slot, start, stop in self._map.find(address, nbytes):
            self._races.touch(lane, slot, start, stop, write=write, by=by)
        if lane is Lane.COMPUTE:
            self._touched.add(key)
