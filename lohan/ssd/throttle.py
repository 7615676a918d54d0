"""A drive slower than the one that is there, for emulated machines."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Throttle:
    """Rates that a store as a whole does not exceed."""

    read_gbps: float | None = None
    """gigabytes (1e9) per second; None: as fast as it goes"""
    write_gbps: float | None = None


class Pacer:
    """Hands out turns on a link of a given rate: each turn ends when the bytes before it and its own have passed."""

    def __init__(self, gbps: float | None) -> None:
        self._s_per_byte = 0.0 if gbps is None else 1e-9 / gbps
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """The time (perf_counter) before which a transfer of `nbytes` that starts now must not be reported as done."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.perf_counter()) + nbytes * self._s_per_byte
            return self._free_at_s


def sleep_until(time_s: float) -> None:
    """Sleep until `time_s` on the clock of `time.perf_counter`."""
    if (left_s := time_s - time.perf_counter()) > 0:
        time.sleep(left_s)
