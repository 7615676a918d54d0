"""A GPU through torch.cuda, and the only file that says so.

Streams are CUDA streams, one per stream lane. Slabs come from torch's allocator once and stay. Host memory is registered in
place (`cudaHostRegister`), in pieces, and so has its exact size: the caching pinned allocator would round it up to a power of
two. A copy never crosses from one registered piece into the next, as the runtime knows no range that spans two.

A host thread that waits for the GPU asks for the event again and again, so that `abort` reaches it. CUDA keeps an error for
the call that comes next, and so does this file: whatever the runtime raises is raised where it is met.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lohan.device.events import Event, Notice, block
from lohan.errors import ClosedError, DeviceMemoryError, LohanError, OptionError, StallError
from lohan.schedule.ops import STREAM_LANES, Lane, Op, Schedule

# Torch's allocator keeps what the operations of one unit free in pieces that fit the next one's badly: 8 of 38 GiB were lost to
# that. It looks at this once, at its first allocation.
if "PYTORCH_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

REGISTER_BYTES = 2**30
"""the most that is registered at once: larger calls fail on some drivers"""
MAX_OPTIMIZER_THREADS = 16
"""more of them wait for memory only"""
QUERY_S = 50e-6
"""between two questions whether an event is complete"""
_PORTABLE = 1
"""cudaHostRegisterPortable: for every context of the process"""


def is_available() -> bool:
    """Whether there is a GPU that torch can use."""
    return torch.cuda.is_available()


def num_gpus() -> int:
    """GPUs that torch can use."""
    return torch.cuda.device_count() if is_available() else 0


def pci_address(index: int) -> str | None:
    """Where a GPU sits on the bus, as /sys names it; None where torch is too old to tell."""
    properties: Any = torch.cuda.get_device_properties(index)
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


class CudaEvent(Event):
    """Recorded on a CUDA stream, or by a thread of the host."""

    __slots__ = ("cuda", "began", "clock")

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self.cuda: torch.cuda.Event | None = _timing_event() if lane in STREAM_LANES else None
        self.began: torch.cuda.Event | None = None
        self.clock: _Clock | None = None

    @property
    def is_complete(self) -> bool:
        return self.recorded.is_set() and (self.cuda is None or bool(self.cuda.query()))  # type: ignore[no-untyped-call]

    @property
    def times_s(self) -> tuple[float, float] | None:
        """Read off the GPU's own clock."""
        if self.cuda is None or self.began is None or self.clock is None:
            return None
        return self.clock.at(self.began), self.clock.at(self.cuda)


class _Clock:
    """Moments of a GPU on the clock of the host: fp32 milliseconds since an event, so it is set anew for each schedule."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._began = _timing_event()
        self._began.record(stream)
        self._began.synchronize()
        self._began_s = time.perf_counter()

    def at(self, event: torch.cuda.Event) -> float:
        return self._began_s + float(self._began.elapsed_time(event)) / 1e3


class CudaDevice:
    """One GPU."""

    is_host = False

    def __init__(self, name: str, memory_bytes: int | None, *, stall_s: float = 600.0) -> None:
        """`stall_s`: how long the host waits for one event before it takes the GPU for dead."""
        if not is_available():
            raise OptionError("device", name, "torch finds no CUDA device", "Choose 'cpu', or install a CUDA build of torch")
        self.name = name
        self.torch_device = torch.device("cuda", int(name[5:]) if name.startswith("cuda:") else torch.cuda.current_device())
        if self.torch_device.index >= torch.cuda.device_count():
            raise OptionError("device", name, f"there are {torch.cuda.device_count()} CUDA devices", "Choose one of them")
        total_bytes = torch.cuda.get_device_properties(self.torch_device).total_memory
        if memory_bytes is not None and memory_bytes > total_bytes:
            raise OptionError("device_memory", memory_bytes, f"{name} has {total_bytes} bytes", "Set it below, or leave it out")
        self.memory_bytes: int | None = memory_bytes if memory_bytes is not None else total_bytes
        if memory_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(memory_bytes / total_bytes, self.torch_device)
        self.optimizer_threads = max(1, min(MAX_OPTIMIZER_THREADS, len(os.sched_getaffinity(0)) - 2))
        self.num_fetches = 0
        self._streams = _streams_of(self.torch_device)
        self._clock = _Clock(self._streams[Lane.COMPUTE])
        self._began: dict[Lane, torch.cuda.Event] = {}
        self._slabs: list[Tensor] = []
        self._registered: list[tuple[int, int]] = []
        self._notice, self._stall_s = Notice(), stall_s
        self.overhead_bytes = self._warm_up()

    def allocate(self, nbytes: int, name: str) -> Tensor:
        self._notice.check()
        try:
            slab = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"slab {name!r} of {nbytes} bytes: {error}") from error
        # With deterministic algorithms torch fills new memory, on a stream that no lane's stream waits for.
        torch.cuda.synchronize(self.torch_device)
        self._slabs.append(slab)
        return slab

    def register(self, host: Tensor) -> None:
        address, nbytes = host.data_ptr(), host.numel()
        for start in range(address, address + nbytes, REGISTER_BYTES):
            piece_bytes = min(REGISTER_BYTES, address + nbytes - start)
            code = int(_runtime().cudaHostRegister(start, piece_bytes, _PORTABLE))
            if code:
                raise LohanError(f"cudaHostRegister of {piece_bytes} bytes at {start:#x} failed with CUDA error {code}")
            self._registered.append((start, start + piece_bytes))

    def unregister(self, host: Tensor) -> None:
        start, stop = host.data_ptr(), host.data_ptr() + host.numel()
        for piece in [piece for piece in self._registered if start <= piece[0] < stop]:
            _runtime().cudaHostUnregister(piece[0])
            self._registered.remove(piece)

    def bind(self, schedule: Schedule, memory: Mapping[int, Tensor]) -> None:
        """Nothing watches for races here: the emulated device runs the same schedules."""
        self._clock = _Clock(self._streams[Lane.COMPUTE])

    def event(self, lane: Lane) -> Event:
        return CudaEvent(lane)

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        block(event.recorded, self._notice.check)
        stream = self._streams.get(lane)
        if stream is None:
            self._block(event)
        elif event.cuda is not None:
            stream.wait_event(event.cuda)

    def begin(self, lane: Lane, op: Op) -> None:
        self._notice.check()
        if lane in self._streams:
            self._began[lane] = _timing_event()
            self._began[lane].record(self._streams[lane])

    def record(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._notice.check()
        if event.cuda is not None:
            event.cuda.record(self._streams[lane])
            event.began, event.clock = self._began.get(lane), self._clock
        event.recorded.set()

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        block(event.recorded, self._notice.check)
        self._block(event)

    def copy(self, lane: Lane, destination: Tensor, source: Tensor) -> None:
        self._notice.check()
        to, of = destination.view(torch.uint8).flatten(), source.view(torch.uint8).flatten()
        host = of if lane is Lane.UPLOAD else to
        with torch.cuda.stream(self._streams[lane]):
            for start, stop in pieces(self._registered, host.data_ptr(), host.numel()):
                to[start:stop].copy_(of[start:stop], non_blocking=True)

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            with torch.cuda.stream(self._streams[Lane.COMPUTE]):
                yield
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(str(error)) from error

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Autograd runs nodes of a GPU on its own thread, and each of them on the stream that its forward ran on."""
        self._notice.check()
        with self.computing():
            backward()

    def put(self, host: Tensor) -> Tensor:
        self._notice.check()
        with self.computing():
            return host.detach().to(self.torch_device)

    def fetch(self, tensor: Tensor) -> Tensor:
        self._notice.check()
        self.num_fetches += 1
        with self.computing():
            return tensor.detach().cpu()

    def seed(self, seed: int) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(seed)

    def abort(self, error: BaseException) -> None:
        self._notice.post(error)

    def expect_workspace(self, nbytes: int) -> None:
        """Torch's allocator keeps what it has, up to the budget."""

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        for start, _ in self._registered:
            _runtime().cudaHostUnregister(start)
        self._registered.clear()
        self._slabs.clear()
        torch.cuda.empty_cache()
        self._notice.post(ClosedError(f"the device {self.name} is closed"))

    def describe(self) -> Mapping[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {"device": self.name, "gpu": properties.name, "memory_bytes": self.memory_bytes, "cuda": torch.version.cuda}

    def _warm_up(self) -> int:
        """A first matrix product, forward and backward: cuBLAS takes its workspace for both threads; returns what that is."""
        with self.computing():
            ones = torch.ones(16, 16, device=self.torch_device, dtype=torch.bfloat16, requires_grad=True)
            # autograd's thread gets its context before cuBLAS asks for one
            (ones * 2).backward(ones.detach())  # type: ignore[no-untyped-call]
            (ones @ ones).backward(ones.detach())  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.memory_allocated(self.torch_device)

    def _block(self, event: CudaEvent) -> None:
        """Wait until the event is complete; unlike cudaEventSynchronize this ends when another thread has failed."""
        due_s = time.monotonic() + self._stall_s
        while not event.is_complete:
            self._notice.check()
            if time.monotonic() > due_s:
                self._notice.post(StallError(f"{self.name} completed nothing on {event.lane.value} for {self._stall_s} s"))
            time.sleep(QUERY_S)


def pieces(registered: list[tuple[int, int]], address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Offsets `(start, stop)` of the parts of host memory at `address` that lie in one registered `(start, end)` each."""
    done = 0
    for start, end in sorted(registered):
        if start <= address + done < end and done < nbytes:
            stop = min(nbytes, end - address)
            yield done, stop
            done = stop
    if done < nbytes:
        raise ValueError(f"a copy of {nbytes} bytes touches host memory that was not registered")


@cache
def _streams_of(device: torch.device) -> dict[Lane, torch.cuda.Stream]:
    """The streams of a GPU, the same for every engine of the process: cuBLAS keeps a workspace for each that it ever saw."""
    return {lane: torch.cuda.Stream(device) for lane in Lane if lane in STREAM_LANES}  # type: ignore[no-untyped-call]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
