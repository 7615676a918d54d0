"""The host as a device: compute reads and writes host slots directly, and returned means done.

COMPUTE is a lane of the host like the others. There is nothing to copy, so UPLOAD and DOWNLOAD do not exist; an event is
recorded and complete at once. The memory budget is the host's (`host_memory`), not this device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lohan.device.events import Event, Notice, block
from lohan.device.memory import aligned_bytes
from lohan.device.products import products
from lohan.errors import ClosedError
from lohan.host.heap import Heap
from lohan.schedule.ops import Lane, Op, Schedule


class CpuDevice:
    """Computes on the host, from the host's buffers."""

    name = "cpu"
    is_host = True
    memory_bytes: int | None = None
    optimizer_threads = 1
    overhead_bytes = 0

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.num_fetches = 0
        self._slab_bytes = 0
        self._notice = Notice()
        self._heap = Heap()

    def allocate(self, nbytes: int, name: str) -> Tensor:
        self._notice.check()
        self._slab_bytes += nbytes
        return aligned_bytes(nbytes)

    def register(self, host: Tensor) -> None:
        """All host memory is within reach."""

    def unregister(self, host: Tensor) -> None:
        """It stays within reach."""

    def bind(self, schedule: Schedule, memory: Mapping[int, Tensor]) -> None:
        """Nothing watches for races here: the emulated device runs the same schedules."""

    def event(self, lane: Lane) -> Event:
        return Event(lane)

    def wait(self, lane: Lane, event: Event) -> None:
        block(event.complete, self._notice.check)

    def begin(self, lane: Lane, op: Op) -> None:
        self._notice.check()

    def record(self, lane: Lane, event: Event) -> None:
        self._notice.check()
        if lane is Lane.COMPUTE:
            self._heap.release()
        event.recorded.set()
        event.complete.set()

    def synchronize(self, event: Event) -> None:
        block(event.complete, self._notice.check)

    def copy(self, lane: Lane, destination: Tensor, source: Tensor) -> None:
        raise NotImplementedError(f"the cpu device has no {lane.value} lane: it computes from host memory")

    @contextmanager
    def computing(self) -> Iterator[None]:
        with products():
            yield

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Autograd runs nodes of the CPU on the thread that asks for them: this one."""
        self._notice.check()
        with self.computing():
            backward()

    def put(self, host: Tensor) -> Tensor:
        self._notice.check()
        return host

    def fetch(self, tensor: Tensor) -> Tensor:
        self._notice.check()
        self.num_fetches += 1
        return tensor.detach().clone()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for devices of every kind, for 0.3 ms

    def abort(self, error: BaseException) -> None:
        self._notice.post(error)

    def expect_workspace(self, nbytes: int) -> None:
        self._heap.keep_for(nbytes)

    def reset_peak(self) -> None:
        """The peak of the slabs never falls; the workspace is the host's (`live.LiveBytes` measures it)."""

    @property
    def peak_bytes(self) -> int:
        return self._slab_bytes

    def close(self) -> None:
        self._notice.post(ClosedError("the cpu device is closed"))

    def describe(self) -> Mapping[str, Any]:
        return {"device": self.name, "threads": torch.get_num_threads()}
