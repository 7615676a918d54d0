"""The emulated device: an accelerator in software that is as treacherous as a real one.

- Compute is asynchronous, operation by operation (`compute`), and copies are, on one stream per direction (`stream`). The host
  runs ahead of them by as much as its waits allow.
- Memory is separate, with a hard budget; what was freed, was never written or is still on its way is poison (`tensor`).
- `run_backward` runs on a thread of its own, as autograd does for a GPU.
- A race detector checks every operation's accesses, by events alone, whatever the timing was (`races`).
- Lanes can be delayed at random, and link and compute slowed down.

Bits are those of the cpu device. An error on a stream is raised by the host's next call, and by every one after it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lohan.device.emulated.compute import Compute
from lohan.device.emulated.stream import CopyStream, Stream, Task, poison
from lohan.device.emulated.tensor import Arena, EmulatedTensor
from lohan.device.emulated.watch import Watch
from lohan.device.events import Event, Notice, block
from lohan.device.memory import aligned_bytes
from lohan.errors import ClosedError, OptionError, RaceError, StallError
from lohan.schedule.ops import Lane, Op, Schedule

UNWIND_S = 5.0
"""how long a thread that was told to give up may take to do so"""


class EmulatedDevice:
    """An accelerator in software."""

    name = "emulated"
    is_host = False
    optimizer_threads = 1
    overhead_bytes = 0

    def __init__(
        self,
        memory_bytes: int,
        *,
        link_gbps: float | None = None,
        compute_slowdown: float = 1.0,
        jitter_s: float = 0.0,
        seed: int = 0,
        stall_s: float = 25.0,
        stuck_copy: int | None = None,
    ) -> None:
        """`link_gbps`: GB/s of each direction. `jitter_s`: the most that an operation is delayed, on any lane, drawn from
        `seed`. `stall_s`: how long a copy may make no progress. `stuck_copy`: the copy of each direction that never ends."""
        if compute_slowdown < 1:
            raise OptionError("compute_slowdown", compute_slowdown, "compute cannot be made faster", "Set it to 1 or more")
        self.torch_device = torch.device("cpu")
        self.memory_bytes: int | None = memory_bytes
        self._notice = Notice()
        self._arena = Arena(memory_bytes)
        self._watch = Watch()
        self._compute = Compute(
            self._arena, self._notice, self._check, partial(self._watch.touch, Lane.COMPUTE), compute_slowdown
        )
        self._copies = {lane: CopyStream(lane.value, self._notice, link_gbps, stall_s) for lane in (Lane.UPLOAD, Lane.DOWNLOAD)}
        self._streams: dict[Lane, Stream] = {Lane.COMPUTE: self._compute.stream, **self._copies}
        self._autograd = Stream("autograd", self._notice)
        self._registered: list[tuple[int, int]] = []
        self._clocks = {lane: _Clock() for lane in self._streams}
        self._link_gbps, self._slowdown, self._stall_s, self._stuck_copy = link_gbps, compute_slowdown, stall_s, stuck_copy
        self._jitter_s, self._jitter = jitter_s, {lane: random.Random(f"{seed} {lane.value}") for lane in Lane}

    def allocate(self, nbytes: int, name: str) -> Tensor:
        self._check()
        self._arena.allocate(nbytes, f"slab {name!r}")
        slab = aligned_bytes(nbytes)
        poison(slab.data_ptr(), nbytes)
        return self._compute.adopt(slab)

    def register(self, host: Tensor) -> None:
        self._registered.append(_range_of(host))

    def unregister(self, host: Tensor) -> None:
        self._registered.remove(_range_of(host))

    def bind(self, schedule: Schedule, memory: Mapping[int, Tensor]) -> None:
        self._check()
        ranges = {slot: (_address(tensor), tensor.numel()) for slot, tensor in memory.items()}
        self._watch.bind(schedule, ranges)

    def event(self, lane: Lane) -> Event:
        return Event(lane)

    def wait(self, lane: Lane, event: Event) -> None:
        block(event.recorded, self._check)
        stream = self._streams.get(lane)
        if stream is None:
            block(event.complete, self._check)
        elif not event.is_complete:
            stream.put(partial(block, event.complete, self._notice.check))
        self._watch.wait(lane, event)

    def begin(self, lane: Lane, op: Op) -> None:
        self._check()
        if self._jitter_s:
            delay = partial(self._notice.sleep, self._jitter[lane].uniform(0, self._jitter_s))
            self._streams[lane].put(delay) if lane in self._streams else delay()
        self._watch.begin(lane, op)
        if lane in self._streams:
            self._clocks[lane] = clock = _Clock()
            self._streams[lane].put(clock.begin)

    def record(self, lane: Lane, event: Event) -> None:
        self._check()
        self._watch.record(lane, event)
        if lane in self._streams:
            self._streams[lane].put(partial(self._clocks[lane].end, event))
        else:
            event.complete.set()
        event.recorded.set()

    def synchronize(self, event: Event) -> None:
        block(event.recorded, self._check)
        block(event.complete, self._check)
        self._watch.synchronize(event)

    def copy(self, lane: Lane, destination: Tensor, source: Tensor) -> None:
        self._check()
        nbytes = destination.numel() * destination.element_size()
        host, slab = (source, destination) if lane is Lane.UPLOAD else (destination, source)
        if not (isinstance(slab, EmulatedTensor) and slab.owner.is_slab) or isinstance(host, EmulatedTensor):
            raise RaceError(f"a copy on {lane.value} moves bytes between host memory and a slab, not workspace")
        if nbytes != source.numel() * source.element_size() or not (host.is_contiguous() and slab.is_contiguous()):
            raise ValueError(f"a copy on {lane.value} needs contiguous tensors of the same number of bytes")
        if not any(start <= _address(host) and _address(host) + nbytes <= end for start, end in self._registered):
            raise ValueError(f"a copy on {lane.value} touches host memory that was not registered")
        self._watch.touch(lane, _address(source), nbytes, False, "a copy")
        self._watch.touch(lane, _address(destination), nbytes, True, "a copy")
        stream = self._copies[lane]
        stream.put(partial(stream.copy, _real(destination), _real(source), self._stuck_copy))

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self._compute.mode():
            yield

    def run_backward(self, backward: Callable[[], None]) -> None:
        def computing() -> None:
            with self.computing():
                backward()

        task = Task(computing, self._notice)
        self._autograd.put(task)
        try:
            block(task.done, self._check)
        except BaseException as error:
            self._notice.post(error)
            task.done.wait(UNWIND_S)  # its next call to the device raises, too
            raise
        if task.error is not None:
            raise task.error

    def put(self, host: Tensor) -> Tensor:
        self._check()
        return self._compute.put(host)

    def fetch(self, tensor: Tensor) -> Tensor:
        self._check()
        return self._compute.fetch(tensor)

    def seed(self, seed: int) -> None:
        self._check()
        self._compute.seed(seed)

    def abort(self, error: BaseException) -> None:
        self._notice.post(error)

    def expect_workspace(self, nbytes: int) -> None:
        """The arena gives everything back at once."""

    def reset_peak(self) -> None:
        self._arena.reset_peak()

    @property
    def peak_bytes(self) -> int:
        return self._arena.peak_bytes

    @property
    def num_fetches(self) -> int:
        return self._compute.num_fetches

    @property
    def num_syncs(self) -> int:
        """operations whose result the host had to wait for"""
        return self._compute.num_syncs

    def close(self) -> None:
        self._notice.post(ClosedError("the emulated device is closed"))
        for stream in (*self._streams.values(), self._autograd):
            stream.stop()
            if stream is not threading.current_thread():
                stream.join(UNWIND_S)

    def describe(self) -> Mapping[str, Any]:
        return {
            "device": self.name,
            "memory_bytes": self.memory_bytes,
            "link_gbps": self._link_gbps,
            "compute_slowdown": self._slowdown,
            "jitter_s": self._jitter_s,
            "threads": torch.get_num_threads(),
        }

    def _check(self) -> None:
        """Raise what went wrong on any thread of the device, or a StallError if a copy should have ended long ago."""
        self._notice.check()
        for lane, stream in self._copies.items():
            due_s = stream.due_s
            if due_s is not None and time.monotonic() > due_s:
                stall = f"copy {stream.num_copies} on {lane.value} made no progress for {self._stall_s} s"
                self._notice.post(StallError(stall))
                self._notice.check()


class _Clock:
    """When a stream came to an operation, and when it had done it."""

    def __init__(self) -> None:
        self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def end(self, event: Event) -> None:
        event.noted_s = self._began_s, time.perf_counter()
        event.complete.set()


def _range_of(host: Tensor) -> tuple[int, int]:
    return host.data_ptr(), host.data_ptr() + host.numel() * host.element_size()


def _real(tensor: Tensor) -> Tensor:
    """The memory behind a slab, which is there at once, or of the host."""
    return tensor.cell.value if isinstance(tensor, EmulatedTensor) else tensor


def _address(tensor: Tensor) -> int:
    return _real(tensor).data_ptr()
