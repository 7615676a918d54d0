"""What lohan asks of a device. The executor knows nothing else about it.

Time on a device is not time on the host. A device works through the operations of its *streams* (COMPUTE, UPLOAD, DOWNLOAD) in
order, some time after they were enqueued; the other lanes are threads of the host. An `Event` belongs to one operation of
one lane and goes through three states, in this order:

    created      nothing is known yet
    recorded     the operation, and all before it on its lane, are enqueued (host lanes: are done)
    complete     they are done

`wait(lane, event)` blocks the calling thread until the event is *recorded*; what the lane does from then on happens after
the event is *complete*: a stream is told to wait for it, a host lane blocks. Waiting on an event of the host from a stream
blocks the thread that enqueues. `wait` has no time limit, as an operation may take minutes: a thread that fails tells the
device (`abort`), which ends all waiting.

One thread drives one lane at a time. A lane is driven like this, for every operation:

    device.wait(lane, event) for all that it waits for
    device.begin(lane, op)                       # from here on it may touch its slots
    ... copy(), torch operations within computing(), or work on host memory ...
    device.record(lane, event)                   # of this operation

On a lane in OVERLAPPING_LANES operations may begin before earlier ones are recorded; they are recorded in the same order. An
event is recorded once.

Memory: `allocate` gives slabs that live as long as the device; everything else that torch operations make within `computing()`
is the workspace. Both count against the budget. Host memory that a copy touches is registered first.

`begin` exists for devices that watch for races (`device.emulated`); others ignore it. On a device with `is_host` the
compute lane works on host slots directly; it has no UPLOAD and DOWNLOAD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from lohan.device.events import Event
from lohan.schedule.ops import Lane, Op, Schedule

__all__ = ["Device", "Event"]


class Device(Protocol):
    """One accelerator, or the host as one."""

    name: str
    is_host: bool
    """whether it computes straight from host memory"""
    torch_device: torch.device
    memory_bytes: int | None
    """the budget; None where the host's budget covers it"""
    overhead_bytes: int
    """of the budget, what the runtime keeps for itself: known once the device is open"""
    optimizer_threads: int
    """threads that updates may run on: the cores that computing leaves free"""

    def allocate(self, nbytes: int, name: str) -> Tensor:
        """A slab: uint8, one dimension, aligned to 256 bytes, its content undefined. DeviceMemoryError beyond the budget."""
        ...

    def register(self, host: Tensor) -> None:
        """Make host memory (uint8, contiguous) fit for `copy`; before its first copy."""
        ...

    def unregister(self, host: Tensor) -> None:
        """The end of what `register` began; before the memory is given back. Nothing copies any more."""
        ...

    def bind(self, schedule: Schedule, memory: Mapping[int, Tensor]) -> None:
        """Announce the next schedule and where its slots lie (device and host slots; uint8). All lanes are idle."""
        ...

    def event(self, lane: Lane) -> Event:
        """An event for one operation of `lane`."""
        ...

    def wait(self, lane: Lane, event: Event) -> None:
        """Whatever `lane` begins from now on happens after `event`. StallError if a copy of the device never ends."""
        ...

    def begin(self, lane: Lane, op: Op) -> None:
        """`op` starts on `lane` now and may touch its slots until its event is recorded."""
        ...

    def record(self, lane: Lane, event: Event) -> None:
        """`event` completes when all that was enqueued on `lane` so far is done."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block until `event` is complete; what the caller does afterwards happens after it."""
        ...

    def copy(self, lane: Lane, destination: Tensor, source: Tensor) -> None:
        """Enqueue a copy of bytes on UPLOAD (host to slab) or DOWNLOAD (slab to host)."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Torch operations of this thread go to the compute lane: device tensors in, device tensors out."""
        ...

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Call `backward` on the thread on which this device runs autograd nodes; its exception is raised here."""
        ...

    def put(self, host: Tensor) -> Tensor:
        """A small host tensor (batch, buffer) as a device tensor, ordered before all later work of the compute lane."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """The host copy of a small device tensor; blocks until it is computed. Counted: `num_fetches`."""
        ...

    def seed(self, seed: int) -> None:
        """Random operations enqueued from now on draw from this seed."""
        ...

    def abort(self, error: BaseException) -> None:
        """Make every thread that blocks in this device, now or later, raise `error` instead."""
        ...

    def expect_workspace(self, nbytes: int) -> None:
        """What the operations of one unit hold at most from now on: how much free memory is worth keeping for the next one."""
        ...

    def reset_peak(self) -> None: ...

    @property
    def peak_bytes(self) -> int:
        """The most that slabs and workspace held together since `reset_peak`."""
        ...

    def close(self) -> None: ...

    def describe(self) -> Mapping[str, Any]:
        """What it is, for reports."""
        ...
