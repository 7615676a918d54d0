"""How threads wait for each other on a device: events with two flags, and a notice that ends all waiting.

An `Event` goes through the states that `protocol` describes: created, recorded, complete. A thread that blocks does so in
slices of POLL_S, and looks at the device's `Notice` between them: an error that is posted there is raised by every thread
that waits, now or later. Waiting has no time limit of its own, because one operation may take minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from lohan.schedule.ops import Lane

POLL_S = 0.1
"""how long a blocked thread goes without looking at the notice"""


class Notice:
    """The error that ends all waiting on a device. The first one counts."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._traceback: TracebackType | None = None
        """where it came from; every thread that it is raised on would add its own frames"""
        self._posted = threading.Event()
        self._lock = threading.Lock()

    def post(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error, self._traceback = error, error.__traceback__
        self._posted.set()

    def check(self) -> None:
        """Raise the error that was posted, if any."""
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)

    def sleep(self, seconds: float) -> None:
        """Sleep, or raise the posted error as soon as there is one."""
        self._posted.wait(seconds)
        self.check()


def block(flag: threading.Event, check: Callable[[], None]) -> None:
    """Wait for `flag`; `check` raises what ends the wait early, and what was wrong before it."""
    check()
    while not flag.wait(POLL_S):
        check()


class Event:
    """The completion of one operation. Used once: recorded by one thread, waited for by any."""

    __slots__ = ("lane", "recorded", "complete", "stamp", "noted_s")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.recorded = threading.Event()
        self.complete = threading.Event()
        self.stamp: object = None
        """what the device knows of the moment: a clock, or an event of its runtime"""
        self.noted_s: tuple[float, float] | None = None
        """what a stream of the host noted as its beginning and end"""

    @property
    def is_complete(self) -> bool:
        return self.complete.is_set()

    @property
    def times_s(self) -> tuple[float, float] | None:
        """Of a complete operation of a stream: when it began and ended, as `time.perf_counter` would have said. None on lanes
        of the host, whose threads look at the clock themselves."""
        return self.noted_s
