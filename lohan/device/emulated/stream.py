"""A stream of the emulated device: a thread that does its work in the order in which it was put there.

Work is any callable. What a callable raises goes to the device's notice, and from then on the stream throws its work away;
a `Task` is different: somebody waits for it, so its result and its exception go there.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from lohan.device.events import Notice
from lohan.errors import LohanError, WorkerError
from lohan.host.threads import Worker

POISON = 0xFF
"""in every byte: NaN in every floating-point format, -1 in every integer"""


def poison(address: int, nbytes: int) -> None:
    """Make memory worthless."""
    ctypes.memset(address, POISON, nbytes)


class Task:
    """Work that somebody waits for."""

    def __init__(self, function: Callable[[], Any], notice: Notice) -> None:
        self.function, self.notice = function, notice
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.notice.check()
            self.result = self.function()
        except BaseException as error:  # noqa: B036 (whatever it is, it belongs to the thread that waits)
            self.error = error
        finally:
            self.done.set()


class Stream(Worker):
    """A thread that works through a queue."""

    def __init__(self, name: str, notice: Notice) -> None:
        super().__init__(f"lohan-{name}")
        self.notice = notice
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.put = self._queue.put
        self.start()

    def run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self.notice.error is None or isinstance(work, Task):
                try:
                    work()
                except LohanError as error:
                    self.notice.post(error)
                except BaseException as error:  # noqa: B036 (raised where the user can see it)
                    failure = WorkerError(f"{work} failed on {self.name}: {error}")
                    failure.__cause__ = error
                    self.notice.post(failure)
            del work  # it holds tensors, and the next one may be long in coming

    def stop(self) -> None:
        """End the thread once it has come to the end of its queue."""
        self._queue.put(None)


class CopyStream(Stream):
    """One direction of the link between host and device."""

    def __init__(self, name: str, notice: Notice, link_gbps: float | None, stall_s: float) -> None:
        self._link_gbps, self._stall_s = link_gbps, stall_s
        self.due_s: float | None = None
        """by this time of the monotonic clock, the copy under way should have ended long ago"""
        self.num_copies = 0
        super().__init__(name, notice)

    def copy(self, destination: Tensor, source: Tensor, stuck_copy: int | None) -> None:
        """Copy the bytes of real tensors. The destination is poison until the end, and only then is the source read."""
        nbytes = source.numel() * source.element_size()
        poison(destination.data_ptr(), nbytes)
        duration_s = nbytes / (self._link_gbps * 1e9) if self._link_gbps else 0.0
        self.due_s = time.monotonic() + duration_s + self._stall_s
        while self.num_copies == stuck_copy:
            self.notice.sleep(duration_s + self._stall_s)
        if duration_s:
            self.notice.sleep(duration_s)
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), nbytes)
        self.due_s = None
        self.num_copies += 1
